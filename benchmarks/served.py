"""Long-lived processes of a benchmark that work on request.

So several ways to do the same can take turns.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Self

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from paceline.cluster.emulate import EmulatedHost
from paceline.elastic.place import on_hosts, on_this_machine

_END_S = 20.0  # for the processes to end when nothing more is asked


class Ranks:
    """The ranks of a Python script, found by each other as under torchrun.

    Each answers a line of JSON with a line of JSON.

    Args:
        command: the script and its arguments.
        environment: variables of the ranks, over those of this process; None removes one.
        deadline_s: the longest that an answer may take.
        hosts: the emulated one of each rank; none where they are on this machine as it is.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        ranks: int,
        environment: Mapping[str, str | None] | None = None,
        deadline_s: float = 180.0,
        hosts: Sequence[EmulatedHost] = (),
    ) -> None:
        self.command, self.size, self.deadline_s = command, ranks, deadline_s
        self.environment = environment or {}
        self.hosts, self.places = hosts, on_hosts(hosts, [1] * ranks) if hosts else on_this_machine(ranks)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._store: TCPStore | None = None
        self._made = ExitStack()

    def __enter__(self) -> Self:
        with self._made:  # undone here if a start fails half-way
            listener = self._made.enter_context(self.places[0].listen(None, 2 * self.size))
            address, port = listener.getsockname()
            self._made.callback(self._end)
            if self.hosts:
                listener.close()  # the first rank serves the rendezvous there
            else:
                self._store = TCPStore(
                    address,
                    port,
                    None,
                    True,
                    timedelta(seconds=self.deadline_s),
                    wait_for_workers=False,
                    master_listen_fd=listener.detach(),
                )
            for rank in range(self.size):
                self.processes.append(self._start(rank, port))
            self._made = self._made.pop_all()
        return self

    def _start(self, rank: int, port: int) -> subprocess.Popen[bytes]:
        """A rank, on its host where there are any.

        The first one serves the rendezvous there, which this process cannot reach.
        """
        variables, command = self._variables(rank, port), [sys.executable, *self.command]
        if self.hosts:
            variables["CUDA_VISIBLE_DEVICES"] = ""  # an emulated host has no GPU
            command = ["nsenter", f"--net={self.hosts[rank].namespace}", *command]
            del variables["TORCHELASTIC_USE_AGENT_STORE"]
        return subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __exit__(self, *error: object) -> None:
        self._made.close()

    @property
    def pids(self) -> list[int]:
        """The process of each rank."""
        return [process.pid for process in self.processes]

    def ask(self, question: Any) -> list[Any]:
        """Have all ranks work at the same time; their answers in rank order.

        Raises:
            SystemExit: a rank ended, or did not answer within the deadline.
        """
        line = json.dumps(question).encode() + b"\n"
        for process in self.processes:
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except BrokenPipeError:
                raise SystemExit(self._failed(process, question, "ended")) from None
        return self._answers(question)

    def _answers(self, question: Any) -> list[Any]:
        """One line of each rank."""
        until = time.monotonic() + self.deadline_s
        lines = [b""] * self.size
        with selectors.DefaultSelector() as waiting:
            for rank, process in enumerate(self.processes):
                assert process.stdout is not None
                waiting.register(process.stdout, selectors.EVENT_READ, rank)
            while waiting.get_map():
                ready = waiting.select(max(0.0, until - time.monotonic()))
                if not ready:
                    late = [self.processes[key.data] for key in waiting.get_map().values()]
                    raise SystemExit(self._failed(late[0], question, f"did not answer within {self.deadline_s:g} s"))
                for key, _ in ready:
                    piece = os.read(key.fd, 2**16)  # past Python's buffer, which the selector does not see
                    if not piece:
                        raise SystemExit(self._failed(self.processes[key.data], question, "ended; its error is above"))
                    lines[key.data] += piece
                    if piece.endswith(b"\n"):
                        waiting.unregister(key.fileobj)
        return [json.loads(line) for line in lines]

    def _failed(self, process: subprocess.Popen[bytes], question: Any, what: str) -> str:
        for each in self.processes:
            each.kill()
        return f"rank {self.processes.index(process)} of {' '.join(self.command)}, asked for {question}, {what}"

    def _variables(self, rank: int, port: int) -> dict[str, str]:
        """The environment of a rank in its place, with torchrun's store where that is on loopback."""
        variables = {
            **os.environ,
            **self.places[rank].environment(rank, self.size, self.places[0], port).to_env(),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
            **self.environment,
        }
        return {name: value for name, value in variables.items() if value is not None}

    def _end(self) -> None:
        """An end of questions ends the ranks; those that stay are killed."""
        for process in self.processes:
            assert process.stdin is not None
            try:
                process.stdin.close()
            except BrokenPipeError:  # it has ended already
                continue
        until = time.monotonic() + _END_S
        for process in self.processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._store = None
