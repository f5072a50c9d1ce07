"""Lease on a URL: one training at a time, as far as stores tell.

The holder is an object that only one of several can create. A store does not know whether a holder lives, so the
holder writes it again every few seconds; who finds one waits for a change. Two that take over one dead holder in the
same second can both succeed for a moment: the one that finds the other's name there ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from paceline.elastic.run_lock import Holder
from paceline.errors import RunError, StorageError
from paceline.files import open_to_append
from paceline.storage.store import Store

LEASE = "lock"
BEAT_S = 10.0
STALE_S = 60.0  # a holder that wrote nothing for so long is taken for dead
_LOOK_S = 2.0
_MOST_BYTES = 4096


class Lease:
    """Exclusive right of this process to write to a run's URL.

    Args:
        own_file: a file of this user's on this host, whose lock tells two trainings on one host apart at once.
        say: told, in words, when a holder is waited for or replaced.

    Attributes:
        lost: the error of a run that another process has taken over; None while it is held.

    Raises:
        RunError: somebody else trains there; names who.
        StorageError: the store cannot be used.
    """

    def __init__(self, store: Store, own_file: Path, say: Callable[[str], object]) -> None:
        self.store, self.say = store, say
        self.own = Holder.this_process()
        self.lost: RunError | None = None
        self._beats = 0
        self._ended = threading.Event()
        self._fd = open_to_append(own_file)
        try:
            self._acquire()
        except BaseException:
            os.close(self._fd)
            raise
        self._thread = threading.Thread(target=self._keep, name="run-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise RunError where the run was taken over."""
        if self.lost is not None:
            raise self.lost

    def release(self) -> None:
        """Give the run back."""
        self._ended.set()
        self._thread.join(BEAT_S)  # longer only where the store does not answer: it is a daemon
        with suppress(StorageError):  # it goes stale
            if not self._thread.is_alive() and self._is_ours(self._holder()):
                self.store.delete([LEASE])
        os.close(self._fd)

    def _acquire(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"{self.store.url} is being trained on this host by {Holder.parse(self._last_here()) or 'a process'}. "
                "Wait for its end, stop it there, or name another run."
            ) from None
        before = Holder.parse(self._last_here())
        if not self.store.create(LEASE, self._content()):
            holder = self._holder()
            # The file's lock has told that the one before on this host is dead.
            if holder is not None and (before is None or before.token != holder.token):
                self._await_sign_of_life(holder)
            self.store.delete([LEASE])
            if not self.store.create(LEASE, self._content()):
                raise self._refused(self._holder())
            if holder is not None:
                self.say(f"the run was held by {holder}, which is no more: it is taken over")
        os.ftruncate(self._fd, 0)
        os.write(self._fd, self._content())

    def _await_sign_of_life(self, holder: Holder) -> None:
        self.say(f"the run is held by {holder}; waiting up to {STALE_S:g} s for a sign of life from there")
        before, until = self.store.read(LEASE, _MOST_BYTES), time.monotonic() + STALE_S
        while time.monotonic() < until:
            time.sleep(_LOOK_S)
            now = self.store.read(LEASE, _MOST_BYTES)
            if now is None:
                return
            if now != before:
                raise self._refused(Holder.parse(now) or holder)

    def _refused(self, holder: Holder | None) -> RunError:
        who = str(holder) if holder is not None else "a process that is just starting"
        return RunError(
            f"{self.store.url} is being trained by {who}. Wait for its end, stop it there, or name another run."
        )

    def _keep(self) -> None:
        while not self._ended.wait(BEAT_S):
            with suppress(StorageError):  # the upload tells of a lost connection
                holder = self._holder()
                if holder is not None and not self._is_ours(holder):
                    self.lost = RunError(
                        f"{self.store.url} was taken over by {holder}, as nothing was heard of this process for "
                        f"{STALE_S:g} s; it ends here, and what it saved stays"
                    )
                    return
                self._beats += 1
                self.store.write(LEASE, self._content())

    def _holder(self) -> Holder | None:
        """The holder by the store's object; None where there is none."""
        content = self.store.read(LEASE, _MOST_BYTES)
        return Holder.parse(content) if content is not None else None

    def _is_ours(self, holder: Holder | None) -> bool:
        return holder is not None and holder.token == self.own.token

    def _content(self) -> bytes:
        return json.dumps(asdict(self.own)).encode() + b"\n" * (1 + self._beats % 1000)

    def _last_here(self) -> bytes:
        return os.pread(self._fd, _MOST_BYTES, 0)
