"""Who is missing after a failed wait is found without waiting for the dead."""

from __future__ import annotations

import os
import threading

from torch.distributed import HashStore  # type: ignore[attr-defined]

from paceline.comm import rendezvous as deadline


def test_a_rank_that_has_died_is_missing_at_once() -> None:
    """A patience of an hour would not end before the test's deadline."""
    store = HashStore()
    child = os.fork()
    if child == 0:
        os._exit(0)
    store.set("process/1", f"{deadline._processes()} {child}")
    store.set("waiting/1/2", "here")
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert deadline.missing_ranks(store, 0, 3, 1, patience_s=3600) == [1], "dead, and not yet seen by its parent"
    os.waitpid(child, 0)
    assert deadline.missing_ranks(store, 0, 3, 1, patience_s=3600) == [1], "dead and forgotten"


def test_a_rank_that_lives_or_is_on_another_host_is_given_time() -> None:
    store = HashStore()
    deadline.register(store, 1)
    store.set("process/2", "another host 1")
    store.set("waiting/1/2", "here")
    assert deadline.missing_ranks(store, 0, 3, 1, patience_s=0.1) == [1]
    store.set("waiting/2/1", "here")
    assert deadline.missing_ranks(store, 0, 3, 2, patience_s=0.1) == [2]


class Silent:
    """A store whose host is behind a cut link: its calls return when the test ends."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.ended.wait(60)
        raise RuntimeError("the link is cut")


def test_a_store_that_does_not_answer_holds_nobody_up() -> None:
    store = Silent()
    try:
        assert deadline.missing_ranks(store, 1, 2, 1, patience_s=-0.95) is None  # type: ignore[arg-type]
    finally:
        store.ended.set()
