"""The folder of code that torch.compile generates: readable and writable by this user alone."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from paceline.errors import PlanError
from paceline.files import made_cache_folder, must_not_be_anothers, private_folder

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def keep_compiled_code_private() -> None:
    """Have torch.compile keep its code in a private cache folder, mode 0700.

    TORCHINDUCTOR_CACHE_DIR can name another folder.

    Its own default is a folder with a known name where temporary files are: whoever makes it first decides what code
    runs.

    Raises:
        PlanError: the folder belongs to another user.
    """
    named = os.environ.get(_VARIABLE)
    try:
        folder = Path(named) if named else made_cache_folder("torchinductor")
        if named:
            must_not_be_anothers(folder)
    except OSError as error:
        if named or error.errno == errno.EPERM:
            raise PlanError(
                f"compile= would run code from {named or error.filename}: {error.strerror}. Set {_VARIABLE} to a "
                "folder of your own, or leave compile out."
            ) from error
        return _guard_the_default(error)  # a user without a home
    os.environ[_VARIABLE] = str(folder)
    return None


def _guard_the_default(error: OSError) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # heavy

    try:
        private_folder(Path(default_cache_dir()))
    except OSError as second:
        raise PlanError(
            f"compile= has no folder for its code: {error.strerror} ({error.filename}), and {second.strerror} "
            f"({second.filename}). Set {_VARIABLE} to a folder of your own, or leave compile out."
        ) from second
