"""Start the ranks of a run on this machine, watch them, and end them together. Does without torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.elastic.adopted import AdoptedAttempt
from paceline.elastic.attempt import Attempt, Setting
from paceline.elastic.hosts.hosts import Hosts
from paceline.elastic.hosts.remote import RunFolder
from paceline.elastic.membership import noted
from paceline.elastic.place import RankPlace, on_this_machine
from paceline.elastic.signals import StopSignals
from paceline.errors import LaunchError

COLLECT_S = 0.5  # after the first failure, for the others to say what they saw


@dataclass(frozen=True)
class Launched:
    """End of a launch that did not fail. `stopped_by`: the signal that made it end early, or None."""

    attempts: int
    stopped_by: str | None


def launch(
    module_args: list[str],
    *,
    ranks: int,
    threads: int,
    pin_cores: list[list[int]] | None,
    deadline_s: float,
    places: Sequence[RankPlace] | None = None,
    start_deadline_s: float = 300,
    collect_s: float = COLLECT_S,
    port: int | None = None,
    restarts: int = 0,
    saves: bool = True,
    on_tick: Callable[[], None] | None = None,
    on_event: Callable[[str, dict[str, Any]], None] | None = None,
    env: Mapping[str, str] = {},
    inherited: Sequence[int] = (),
    folder: RunFolder | None = None,
    recovers: bool = False,
    follows_steps: bool = False,
    replica_ranks: int = 1,
    workers: int | None = None,
    server_copies: int = 1,
    adopts: Hosts | None = None,
) -> Launched:
    """Call a function on every rank, in its place, and wait until all have ended.

    SIGINT and SIGTERM are forwarded once, for the ranks to save and end; a second SIGINT kills them. A rank that is
    still starting gets SIGTERM for either.

    Args:
        module_args: the import path of the function that every rank calls (`pkg.mod:name`), then its arguments.
        threads: of each rank's torch operations.
        pin_cores: the cores of each rank, or None to leave that to the kernel.
        deadline_s: the longest that a rank may stay in one phase of one step while it is not waiting for others.
        places: of the ranks, on emulated hosts; None is this machine as it is.
        start_deadline_s: the same for the start-up.
        collect_s: after the first failure, for the other ranks to end by themselves before they are stopped.
        port: of the rendezvous between hosts, at rank 0's address; on one machine, of torch's own store, where
            accelerators need that. None takes a free one.
        restarts: how often in an hour to start again after failures that another attempt may survive.
        saves: whether ranks that are told to stop save a checkpoint first, for the message then.
        on_tick: called at least five times a second, in this thread.
        on_event: called with ("stop", {signal}), ("restart", {attempt, rank, reason}) and, where ranks recover,
            ("lost", {rank, waiting, reason, stack, generation, again, waits}),
            ("host_lost", {host, number, ranks, reason, generation, again, waits_s, revived}),
            ("host_back", {host, number, ranks, generation}), ("joins", {ranks, generation}) and
            ("scaled", {by, ranks, host, generation}).
        env: variables for the ranks, over those of this process.
        inherited: descriptors that every rank holds open until it ends; not the processes that it starts.
        folder: that the ranks read and write, on whichever host they are; it is named among `module_args`.
        recovers: the function takes part in generations (`run/recovery/`): a rank that is killed or hangs is left
            out and started again, while the others go on.
        follows_steps: where ranks recover, the limit of one that computes, and that others wait for, follows from the
            steps that the run has taken (`watchdog.py`); `deadline_s` stays the longest.
        replica_ranks: ranks of a replica, which go on together or not at all.
        workers: where no group joins the ranks, how many of the first ones end by themselves; the others serve them.
            Each that is killed or hangs is started again, while the others go on.
        server_copies: processes of each server, any of which may be lost while another is there.
        adopts: hosts whose ranks go on, instead of a start.

    Raises:
        LaunchError: the ranks could not be started, or one raised, hung or was killed; the text tells which, and shows
            its traceback.
        SystemExit: 130, after a second SIGINT.
    """
    if pin_cores is not None and len(pin_cores) != ranks:
        raise LaunchError(f"pin_cores names the cores of {len(pin_cores)} ranks, but {ranks} are to be started")
    setting = Setting(
        module_args=module_args,
        places=on_this_machine(ranks) if places is None else places,
        threads=threads,
        pin_cores=pin_cores,
        deadline_s=deadline_s,
        start_deadline_s=start_deadline_s,
        collect_s=collect_s,
        port=port,
        saves=saves,
        env=env,
        inherited=tuple(inherited),
        folder=folder,
        recovers=recovers,
        follows_steps=follows_steps,
        replica_ranks=replica_ranks,
        workers=workers,
        server_copies=server_copies,
    )
    failed_at_s: list[float] = []
    with StopSignals() as signals, _CursorShown():
        while True:
            made = AdoptedAttempt(setting, signals, on_tick, on_event, adopts) if adopts else None
            with made or Attempt(setting, signals, on_tick, on_event) as attempt:
                failure = attempt.watch()
            if failure is None:
                return Launched(setting.number + 1, signals.first)
            too_often = noted(failed_at_s, time.monotonic()) > restarts
            if failure.final or signals.first or adopts or too_often:
                raise failure.as_error()
            setting = replace(setting, number=setting.number + 1)
            if on_event:
                reason = failure.text.splitlines()[0]
                on_event("restart", {"attempt": setting.number, "rank": failure.rank, "reason": reason})


class _CursorShown:
    """Show the terminal's cursor again, which a progress display that was cut off leaves hidden."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        # rich puts an object of its own, which shows control codes as text, in the place of sys.stderr
        terminal = sys.__stderr__
        if terminal is not None and terminal.isatty():
            terminal.write("\x1b[?25h")
            terminal.flush()
