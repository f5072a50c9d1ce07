"""Calls that run once and in order, however often a client repeats them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from paceline.errors import RemoteError

MOST_AHEAD = 4096  # calls of one lane that wait or whose answers are kept


class Lane:
    """Calls of one client on one object: each runs once, after the one before it.

    They are numbered from 0. A client whose connection was lost repeats what it has no answer to; a call that has run
    gives the same answer.
    """

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._next = 0
        self._answers: dict[int, Future[Any]] = {}
        self._skipped: set[int] = set()
        self._ended = False

    def run(self, number: int, floor: int, work: Callable[[], Any]) -> Any:
        """The result of call `number`, by `work` if it has not run.

        Args:
            floor: the client has the answers to all calls below.

        Raises:
            RemoteError: the number is none that a client would send, or the client has gone.
        """
        with self._turn:
            for known in [known for known in self._answers if known < floor]:
                del self._answers[known]
            answer = self._answers.get(number)
            if answer is None:
                if not self._next <= number < self._next + MOST_AHEAD or len(self._answers) >= MOST_AHEAD:
                    raise RemoteError(f"call {number} came where call {self._next} was next; it was not run")
                mine = self._answers[number] = Future()
        if answer is not None:
            return answer.result()
        self._await_turn(number, mine)
        try:
            mine.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whoever repeats the call gets it, too
            mine.set_exception(error)
        with self._turn:
            self._advance()
        return mine.result()

    def skip(self, numbers: list[int]) -> None:
        """Wait for these calls no more: their client has given them up."""
        with self._turn:
            self._skipped |= {n for n in numbers if self._next <= n < self._next + MOST_AHEAD}
            if self._next in self._skipped and self._next not in self._answers:
                self._next -= 1
                self._advance()

    def end(self) -> None:
        """Let nothing run any more: the client has gone."""
        with self._turn:
            self._ended = True
            self._turn.notify_all()

    def _await_turn(self, number: int, mine: Future[Any]) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._ended or self._next == number)
            if self._ended:
                error = RemoteError("the client of this call has gone; it was not run")
                mine.set_exception(error)
                raise error

    def _advance(self) -> None:
        """Let the next call run; those that were given up before they came are none."""
        self._next += 1
        while self._next in self._skipped and self._next not in self._answers:
            self._next += 1
        self._skipped = {number for number in self._skipped if number >= self._next}
        self._turn.notify_all()
