"""The process that takes an emulation down when its launcher has died: `python -m paceline.cluster.emulate.keeper`.

It has a session of its own, where neither Ctrl-C nor what ends the launcher's processes reaches it, and where delay is
wanted it is what carries the packets: ranks still need their network while they save after the launcher's death. It is
told what to do by lines on its input.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.cluster.emulate.network import wires
from paceline.cluster.emulate.record import Record
from paceline.cluster.emulate.relay import Relay
from paceline.errors import ClusterError

_GRACE_S = 35.0  # a rank that saves a checkpoint after its launcher's death ends itself after 30 s
_ANSWER_S = 30.0  # the start of Python on a busy machine
_END_S = 10.0


class Keeper:
    """The launcher's end of it."""

    def __init__(self) -> None:
        """Start the process; it then waits for its first order."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "paceline.cluster.emulate.keeper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # whoever reads the launcher's must not wait for the keeper
            start_new_session=True,
        )
        self.pid = self._process.pid

    def watch(self, record: Record) -> None:
        """Have it take down, after this process's death, what a record tells."""
        self._order("watch", file=str(record.file))

    def relay(self, delay_s: float) -> None:
        """Have it carry the packets between the hosts, each after so many seconds.

        Raises:
            ClusterError: it does not; with the reason.
        """
        self._order("relay", delay_s=delay_s)
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _ANSWER_S)
        answer = self._process.stdout.readline().decode().strip() if ready else f"no answer within {_ANSWER_S:g} s"
        if answer != "carrying":
            raise ClusterError(
                f"the packets between emulated hosts cannot be delayed: {answer or 'the relay died'}. Leave "
                "`delay_ms` out."
            )

    def cut(self, host: int) -> None:
        """Have it drop the packets from and to a host."""
        self._order("cut", host=host)

    def mend(self, host: int) -> None:
        """Have it carry them again."""
        self._order("mend", host=host)

    def dismiss(self) -> None:
        """All is taken down, or cannot be: it looks once more, and ends."""
        self._process.communicate(timeout=_END_S)

    def _order(self, verb: str, **details: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"verb": verb, **details}).encode() + b"\n")
        self._process.stdin.flush()


def main() -> None:
    """Follow the launcher's orders until its end, then take down what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # for as long as there is something to take down, which ends with the launcher
        signal.signal(number, signal.SIG_IGN)
    orders = _Orders()
    orders.follow()
    if orders.record is not None and orders.record.file.exists():
        orders.record.take_down(grace_s=_GRACE_S)


@dataclass
class _Orders:
    """The launcher's orders so far."""

    record: Record | None = None
    relay: Relay | None = None
    _unread: bytes = field(default=b"")

    def follow(self) -> None:
        """Obey line by line until the launcher closes the pipe or dies."""
        launcher: int | None = None
        while True:
            ready, _, _ = select.select([0] if launcher is None else [0, launcher], [], [])
            if launcher in ready:
                return
            self._unread += (more := os.read(0, 4096))
            if not more:
                return
            *lines, self._unread = self._unread.split(b"\n")
            for line in lines:
                self._obey(**json.loads(line))
            if self.record is not None and launcher is None:
                try:
                    launcher = os.pidfd_open(self.record.launcher.pid)
                except ProcessLookupError:
                    return
                if not self.record.launcher.alive:  # and so it was another process that was opened
                    return

    def _obey(self, verb: str, file: str = "", delay_s: float = 0.0, host: int = 0) -> None:
        if verb == "watch":
            self.record = Record.read(Path(file))
        elif verb == "relay" and self.record is not None:
            bridge, *namespaces = self.record.namespaces
            try:
                self.relay = Relay(bridge, wires(namespaces, [None] * len(namespaces)), delay_s)
                self.relay.start()
                print("carrying", flush=True)
            except (OSError, ClusterError) as error:
                print(error, flush=True)
        elif self.relay is not None:
            (self.relay.cut.add if verb == "cut" else self.relay.cut.discard)(host)


if __name__ == "__main__":
    main()
