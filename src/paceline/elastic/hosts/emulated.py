"""Host processes of emulated hosts, one in each host but the first.

They are forked from the forkserver, and are the forkservers of their own ranks. They meet at host 0 and serve it as
those of real hosts do. Host 0 is coordinated by the process that was started as a command: its ranks and its sockets
are in the emulated host, and it is outside, where files in object stores are reached.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

from paceline.cluster.cluster import Cluster
from paceline.cluster.emulate import EmulatedHost
from paceline.cluster.launch_engines import HostPlace
from paceline.cluster.network import inside
from paceline.elastic.failure import ErrorRecord
from paceline.elastic.forkserver import warm_up, why_not
from paceline.elastic.hosts.agent import run_agent
from paceline.elastic.hosts.gather import joined, links_of
from paceline.elastic.hosts.hosts import Hosts, coordinating
from paceline.elastic.hosts.link import Meeting
from paceline.elastic.hosts.messages import Welcome
from paceline.elastic.hosts.returns import Returns
from paceline.elastic.started import StartedRank, Starter
from paceline.errors import LaunchError
from paceline.files import scratch_folder
from paceline.rank_environment import RankEnvironment
from paceline.wire.key import RunKey, key_descriptor, own_key

_ENGINE = "emulate"
_TICK_S = 0.02
_START_S = 300.0  # for the forkserver to import torch
_DISMISSED_S = 10.0  # for a host process to end that was dismissed
_HANG_UP_S = 5.0  # from SIGHUP to SIGKILL, for one that does not hear this process


@contextmanager
def host_processes(cluster: Cluster, emulated: Sequence[EmulatedHost]) -> Iterator[None]:
    """Within it, this process coordinates the host processes of emulated hosts.

    A single host needs none.

    Raises:
        LaunchError: one cannot be started, or does not come.
    """
    if len(emulated) == 1:
        yield
        return
    warm_up(__name__)  # which the host processes share then
    first, key = emulated[0], RunKey.make()
    meeting = inside(first.namespace, lambda: Meeting(first.address, 0, key))
    place = HostPlace(0, len(emulated), *meeting.address, first.name, _ENGINE)
    with closing(meeting), _started(place, emulated, key) as (processes, start):
        links = links_of(place, key, meeting, lambda: _check(processes))
        for link in links:
            link.send(Welcome([host.name for host in emulated]))
        hosts = Hosts(cluster, first.address, links, key, first.namespace)
        code = 1
        try:
            with Returns(hosts, place, meeting, start), coordinating(hosts):
                yield
            code = 0
        finally:
            hosts.dismiss(code)
            if all(link.lost is None for link in hosts.links):
                _wait(processes, _DISMISSED_S)


def be_host_process(_: list[str]) -> None:
    """Serve host 0, as the emulated host that this process is in."""
    environment, key = RankEnvironment.from_env(), own_key()
    assert environment.host is not None
    assert key is not None
    if why_not() is None:
        from paceline.elastic.forkserver_process import split_off

        split_off()  # before anything here starts a thread
    signal.signal(signal.SIGHUP, lambda *_: sys.exit())  # from the coordinator, where the link to it is cut
    name, number = environment.host.name, environment.rank
    where = environment.master_address, environment.master_port
    coordinator = joined(HostPlace(number, environment.world_size, *where, name, _ENGINE), key)
    run_agent(coordinator, f"host {name} (number {number})")
    coordinator.connection.close()


@contextmanager
def _started(
    place: HostPlace, emulated: Sequence[EmulatedHost], key: RunKey
) -> Iterator[tuple[list[StartedRank], Callable[[int], None]]]:
    """The host processes, each in its host, and a function that starts another.

    None is left at the end.
    """
    processes: list[StartedRank] = []
    with scratch_folder() as folder:
        descriptor = key_descriptor(key)
        try:
            starter = Starter([f"{__name__}:{be_host_process.__name__}"], {})
            starter.prepare(_START_S, lambda: False)

            def start(number: int) -> None:
                _forget_ended(processes)
                environment = RankEnvironment(
                    number,
                    place.count,
                    place.coordinator,
                    place.port,
                    host=emulated[number].entry,
                    error_file=folder / f"host-{number}.error",
                    launcher=os.getpid(),
                    key_fd=descriptor,
                )
                processes.append(starter.start(environment, None))

            for number in range(1, len(emulated)):
                start(number)
            yield processes, start
        finally:
            os.close(descriptor)
            _end(processes)


def _check(processes: Sequence[StartedRank]) -> None:
    """Raise LaunchError if a host process has ended."""
    for process in processes:
        if _has_ended(process):
            record = ErrorRecord.read(process.record)
            why = record.message if record else "it was killed"
            raise LaunchError(f"the host process of emulated host {process.number} has ended: {why}")


def _forget_ended(processes: list[StartedRank]) -> None:
    """Forget host processes that have ended, so that neither zombies nor descriptors add up."""
    for process in [process for process in processes if _has_ended(process)]:
        process.note_end()
        processes.remove(process)


def _end(processes: Sequence[StartedRank]) -> None:
    """End what was not dismissed."""
    for process in processes:
        if not _has_ended(process):
            process.signal(signal.SIGHUP)
    _wait(processes, _HANG_UP_S)
    for process in processes:
        process.note_end()


def _wait(processes: Sequence[StartedRank], wait_s: float) -> None:
    until = time.monotonic() + wait_s
    while not all(map(_has_ended, processes)) and time.monotonic() < until:
        time.sleep(_TICK_S)


def _has_ended(process: StartedRank) -> bool:
    return bool(select.select([process.pidfd], [], [], 0)[0])
