"""Environments of the systems, made once from pinned packages with hashes.

They are kept in the user's cache. An environment sees paceline's own packages, torch among them, behind its own; so all
systems train with one torch. That of TensorFlow sees none of them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from paceline.errors import RunError
from paceline.files import made_cache_folder, write_whole
from paceline_lab.systems.system import System

REQUIREMENTS = Path(__file__).with_name("requirements")
_DONE = "made"
_LEAST_ROOM = 3 * 2**30  # bytes on the disk
_INSTALL_S = 1800.0


def python_of(system: System, say: Callable[[str], None]) -> Path:
    """The interpreter of a system's environment, which is made where it is not there yet.

    Raises:
        RunError: it cannot be made; says why, with the end of what pip said.
    """
    if not system.requirements:
        return Path(sys.executable)
    files = [REQUIREMENTS / name for name in system.requirements]
    try:
        cache = made_cache_folder("systems")
    except OSError as error:
        raise RunError(
            f"{system.title} is not installed: its environment has no place, as {error.filename} cannot be used "
            f"({error.strerror}). Set XDG_CACHE_HOME to a folder of yours."
        ) from error
    folder = cache / f"{files[-1].stem}-{_key(files, apart=system.apart)}"
    python = folder / "bin" / "python"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two benchmarks at once make it once
        if not (folder / _DONE).exists():
            say(f"{system.title}: its environment is made in {folder}, once …")
            shutil.rmtree(folder, ignore_errors=True)
            _make(system, folder, files)
            write_whole(folder / _DONE, "")
    return python


def _key(files: list[Path], *, apart: bool) -> str:
    """Changes with the pinned packages, and with the Python and torch that the environment sees."""
    seen = [sys.version, sys.prefix, "" if apart else version("torch"), *(file.read_text() for file in files)]
    return hashlib.sha256("\0".join(seen).encode()).hexdigest()[:12]


def _make(system: System, folder: Path, files: list[Path]) -> None:
    if shutil.disk_usage(folder.parent).free < _LEAST_ROOM:
        raise RunError(f"{system.title} is not installed: less than 3 GiB are free at {folder.parent}")
    try:
        venv.EnvBuilder(with_pip=True, symlinks=True).create(folder)
    except (OSError, subprocess.CalledProcessError) as error:
        raise RunError(
            f"{system.title} is not installed: python cannot make a virtual environment ({error}). On Debian and "
            "Ubuntu: apt install python3-venv"
        ) from error
    if not system.apart:
        inside = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
        ours = [path for path in sys.path if path.endswith("site-packages")]
        source = str(Path(__file__).parents[2])  # paceline, where it is not installed into them
        write_whole(Path(inside) / "paceline-and-torch.pth", "\n".join([*ours, source]) + "\n")
    for file in files:
        _install(system, folder, file)


def _install(system: System, folder: Path, file: Path) -> None:
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    options = ["--quiet", "--require-hashes", "--no-deps", "--no-build-isolation", "-r", str(file)]
    environment = {**os.environ, **system.build_environment, "PIP_ROOT_USER_ACTION": "ignore"}
    try:
        done = subprocess.run([*pip, *options], env=environment, capture_output=True, text=True, timeout=_INSTALL_S)
    except subprocess.TimeoutExpired:
        raise RunError(f"{system.title} is not installed: pip took more than {_INSTALL_S:.0f} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        told = next(
            (line for line in reversed(lines) if "ERROR" in line or "error" in line), lines[-1] if lines else ""
        )
        write_whole(Path(f"{folder}.log"), done.stdout + done.stderr)
        raise RunError(f"{system.title} is not installed: {told.strip()} (all of it: {folder}.log)")
