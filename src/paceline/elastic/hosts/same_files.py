"""Comparison of the code and data that a job names between hosts, before ranks start."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from paceline.elastic.hosts.hosts import Hosts, current_hosts
from paceline.elastic.hosts.link import Link
from paceline.elastic.hosts.messages import Look, Looked
from paceline.errors import LaunchError
from paceline.job.job import Job
from paceline.storage.url import is_url

_ANSWER_S = 120.0  # for a host to look at its files
_NOT_DATA = {"__pycache__", "site-packages", "dist-packages"}
_END_BYTES = 2**20  # read of either end of a file
_FILES_READ = 64  # of a folder; of the others the names are compared
_NAMED = 5  # differences in an error
_IMPORT_PATH = re.compile(r"(?P<module>[^\n]+\.py|[A-Za-z_][\w.]*):[A-Za-z_][\w.]*")


def must_agree(job: Job) -> None:
    """Refuse hosts whose code or data is not that of host 0. Nothing to do on one host.

    Raises:
        LaunchError: they differ, or a host does not answer; names the hosts and files.
    """
    hosts = current_hosts()
    if hosts is None:
        return
    look = _what_to_look_at(job)
    if look in hosts.agreed or not look.modules + look.files:
        return
    if hosts.takeover is not None:  # they have agreed with the coordinator before
        hosts.agreed.append(look)
        return
    answers = hosts.ask(look, Looked, _ANSWER_S)
    found = [text for link, answer in answers for text in differences(look, link, answer)]
    if found:
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        raise LaunchError(
            f"{'; '.join(found[:_NAMED])}{more}. Ranks of all hosts need the code and data of {_first(hosts)}: copy "
            "them there."
        )
    hosts.agreed.append(look)


def differences(look: Look, link: Link, answer: Looked) -> list[str]:
    """Modules and files of a host that differ from those of this one, in words."""
    found = []
    for name, digest in digests(look).items():
        if digest and digest != (theirs := answer.digests.get(name, "")):
            found.append(f"{link.who} has {'another' if theirs else 'no'} {name}")
    return found


def digests(look: Look) -> dict[str, str]:
    """Digest of each module and file as it is on this host.

    "" is what is not there.
    """
    found = {}
    for name in [*look.modules, *look.files]:
        try:
            file = Path(name) if name in look.files or name.endswith(".py") else _file_of(name)
            found[name] = "" if file is None else _digest(file, tuple(look.suffixes))
        except OSError:
            found[name] = ""
    return found


def _what_to_look_at(job: Job) -> Look:
    """Modules and files that every host has to have for itself."""
    texts = set(_texts(job.model_dump(mode="json", exclude_defaults=True)))
    modules = {match["module"] for text in texts if (match := _IMPORT_PATH.fullmatch(text))}
    files = [job.model.hf, job.model.weights]
    if not job.partition.host_files:
        for path in (getattr(job.data, "path", None), getattr(job.data, "held_out_path", None)):
            files += path if isinstance(path, tuple) else [path]
    local = sorted({str(file) for file in files if file is not None and not is_url(file)})
    return Look(sorted(modules), local, list(getattr(job.data, "suffixes", ())))


def _texts(value: Any) -> Iterator[str]:
    """Text in the values of a job, but for what goes to functions as arguments."""
    if isinstance(value, dict):
        for key, entry in value.items():
            if key != "args":
                yield from _texts(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from _texts(entry)
    elif isinstance(value, str):
        yield value


def _file_of(module: str) -> Path | None:
    """Source of a module, which is not imported for that."""
    first, *rest = module.split(".")
    spec = PathFinder.find_spec(first, [str(Path.cwd()), *sys.path])
    if spec is None:
        return None
    below = [Path(folder, *rest) for folder in spec.submodule_search_locations or ()]
    files = [file for path in below for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
    return files[0] if files else Path(spec.origin) if spec.origin and not rest else None


def _digest(path: Path, suffixes: tuple[str, ...]) -> str:
    """Digest of a file's size and ends, or of a folder's names and some files."""
    if not path.is_dir():
        return _of_file(path)
    names = sorted(_below(path, suffixes))
    every = max(1, len(names) // _FILES_READ)
    digest = hashlib.sha256("\0".join(names).encode(errors="surrogateescape"))
    for name in names[::every]:
        digest.update(_of_file(path / name).encode())
    return digest.hexdigest()


def _below(folder: Path, suffixes: tuple[str, ...]) -> Iterator[str]:
    """Names of visible files below a folder, relative to it."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _NOT_DATA]
        for name in names:
            if not name.startswith(".") and name.lower().endswith(suffixes or ("",)):
                yield os.path.relpath(os.path.join(place, name), folder)


def _of_file(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest = hashlib.sha256(str(size).encode())
        for start in {0, max(0, size - _END_BYTES)}:
            file.seek(start)
            digest.update(file.read(_END_BYTES))
    return digest.hexdigest()


def _first(hosts: Hosts) -> str:
    return f"host 0 ({hosts.cluster.hosts[0].name})"
