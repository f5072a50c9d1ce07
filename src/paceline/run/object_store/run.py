"""A run at a URL: its working directory on this machine, and its upload."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from paceline.errors import RunError
from paceline.files import made_cache_folder
from paceline.run.object_store.fetch import fetch_run, goes_on_from
from paceline.run.object_store.lease import Lease
from paceline.run.object_store.upload import JOB, RUN, Kind, Uploader
from paceline.storage.store import Store
from paceline.storage.url import cache_name

PATIENCE_S = 60.0  # at the end, without a byte that moves
HURRIED_S = 3.0  # the same after a second Ctrl-C


class RemoteRun:
    """Right to train a run at a URL, and its upload, while the block runs.

    Training writes to `path`, a private directory in the user's cache, as to any other; no rank waits for the store.

    Args:
        resume: go on with the run at the URL, which is fetched where this machine does not have all of it.
        say: told what a person should know, in words.
        kind: of what is kept there.

    Attributes:
        path: the working directory.

    Raises:
        RunError: there is a run already, somebody else trains it, or, at the end, not all could be uploaded.
        StorageError: the store cannot be used: no such bucket, no credentials, no right, no connection.
    """

    def __init__(self, url: str, say: Callable[[str], object], *, resume: bool, kind: Kind = RUN) -> None:
        self.store, self.say, self.resume, self.kind = Store(url), say, resume, kind
        self.url = self.store.url
        try:
            self.path = made_cache_folder("runs") / cache_name(self.url)
        except OSError as error:
            raise RunError(
                f"{self.url} needs a working directory on this machine, and {error.filename} cannot be made: "
                f"{error.strerror}. Name a place with XDG_CACHE_HOME."
            ) from error

    def __enter__(self) -> Self:
        self.store.make()
        self.lease = Lease(self.store, self.path.with_name(f"{self.path.name}.lease"), self.say)
        try:
            self._prepare()
            self.uploader = Uploader(self.path, self.store, self.say, self.lease.check, self.kind)
            self.uploader.start()
        except BaseException:
            self.lease.release()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            hurried = isinstance(error, (SystemExit, KeyboardInterrupt))
            unsent = self.uploader.finish(HURRIED_S if hurried else PATIENCE_S, self.say)
        finally:
            self.lease.release()
        if error is None and not unsent.files and self.lease.lost is None:
            shutil.rmtree(self._old, ignore_errors=True)
        if not unsent.files or self.lease.lost is not None or not (self.path / self.kind.mark).exists():
            return
        again = "the same command again uploads them"
        if self.kind == RUN:
            job, url = shlex.quote(str(self.path / JOB)), shlex.quote(self.url)
            again = f"this uploads them: paceline train {job} --run {url} --resume"
        text = (
            f"{unsent.files} files ({unsent.size / 1e6:,.1f} MB) of the {self.kind.name} could not be uploaded to "
            f"{self.url}. They are in {self.path}; {again}"
        )
        if error is None:
            raise RunError(text)
        self.say(text)

    def check(self) -> None:
        """Raise RunError where another process has taken the run over."""
        self.lease.check()

    def _prepare(self) -> None:
        """Have in `path` what the run continues from, or nothing."""
        listed = self.store.list()
        here = (self.path / self.kind.mark).is_file()
        if self.kind != RUN and JOB in listed:
            raise RunError(f"{self.url} holds a run, not a {self.kind.name}. Name another URL.")
        if self.kind.mark in listed:
            if not self.resume:
                raise RunError(f"{self.url} holds a run already. Continue it with --resume, or name another URL.")
            if here and goes_on_from(self.store, self.path, self.kind.lines):
                return
            self._set_aside()
            self.say(f"fetching the {self.kind.name} from {self.url}")
            fetch_run(self.store, listed, self.path, self.say, checkpoint=True)
        elif here and not self.resume:
            raise RunError(
                f"a run that was to be kept at {self.url} is in {self.path}, and is not there: it could not be "
                "uploaded, or was removed there. Go on with it with --resume, or remove that directory."
            )
        elif not here:
            self._set_aside()

    def _set_aside(self) -> None:
        """Move away what an older attempt has left here."""
        try:
            if self.path.exists():
                shutil.rmtree(self._old, ignore_errors=True)
                self.path.rename(self._old)
        except OSError as error:
            raise RunError(f"{self.path} cannot be moved to {self._old}: {error.strerror}") from error

    @property
    def _old(self) -> Path:
        return self.path.with_name(f"{self.path.name}.old")
