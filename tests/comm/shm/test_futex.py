"""A sleeper wakes when the word has changed or when it is woken, in whatever process it sleeps."""

from __future__ import annotations

import os
import threading

from paceline.comm.shm.progress import fence, futex_wait, futex_wake
from paceline.comm.shm.segment import create


def test_a_word_that_has_changed_already_is_not_waited_for() -> None:
    own = create(64, "test")
    try:
        own.segment.words()[0] = 7
        futex_wait(own.segment.address, 6, timeout_s=60)  # else pytest's own deadline ends it
    finally:
        own.close_descriptor()


def test_a_sleep_ends_with_its_time() -> None:
    own = create(64, "test")
    try:
        futex_wait(own.segment.address, 0, timeout_s=0.01)
    finally:
        own.close_descriptor()


def test_another_process_wakes_a_sleeper() -> None:
    own = create(64, "test")
    try:
        words = own.segment.words()
        child = os.fork()
        if child == 0:  # a bare process: no Python cleanup, no test
            while words[1] == 0:
                os.sched_yield()
            words[0] = 1
            fence()
            futex_wake(own.segment.address)
            os._exit(0)
        sleeper = threading.Thread(target=futex_wait, args=(own.segment.address, 0, 60.0))
        sleeper.start()
        words[1] = 1
        sleeper.join(30)
        woken = not sleeper.is_alive()
        os.waitpid(child, 0)
        assert woken
    finally:
        own.close_descriptor()
