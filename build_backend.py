"""setuptools' build backend, except that its intermediate files lie in a temporary folder and not in the checkout."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from setuptools import build_meta


def _elsewhere(hook: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(hook)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        with tempfile.TemporaryDirectory(prefix="paceline-build-") as folder:
            settings = Path(folder, "setup.cfg")
            settings.write_text(f"[build]\nbuild_base = {folder}\n[egg_info]\negg_base = {folder}\n")
            before = os.environ.get("DIST_EXTRA_CONFIG")
            os.environ["DIST_EXTRA_CONFIG"] = str(settings)
            try:
                return hook(*arguments, **named)
            finally:
                os.environ.pop("DIST_EXTRA_CONFIG")
                if before is not None:
                    os.environ["DIST_EXTRA_CONFIG"] = before

    return wrapped


build_sdist = _elsewhere(build_meta.build_sdist)
build_wheel = _elsewhere(build_meta.build_wheel)
build_editable = _elsewhere(build_meta.build_editable)
prepare_metadata_for_build_wheel = _elsewhere(build_meta.prepare_metadata_for_build_wheel)
prepare_metadata_for_build_editable = _elsewhere(build_meta.prepare_metadata_for_build_editable)
get_requires_for_build_sdist = _elsewhere(build_meta.get_requires_for_build_sdist)
get_requires_for_build_wheel = _elsewhere(build_meta.get_requires_for_build_wheel)
get_requires_for_build_editable = _elsewhere(build_meta.get_requires_for_build_editable)
