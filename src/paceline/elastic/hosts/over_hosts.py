"""Commands over several hosts, real or emulated.

Every emulated host except the first has a host process. This process is forked from the forkserver, and its own fork
becomes the forkserver of its ranks. Host processes connect to host 0 and are its agents, as on real hosts. The command
itself is the coordinator on host 0. The ranks and sockets of host 0 are inside the emulated host, but the command stays
outside, where object stores can be reached.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

from paceline.cluster.cluster import Cluster
from paceline.cluster.emulate import EmulatedHost
from paceline.cluster.launch_engines import HostPlace, own_engine
from paceline.cluster.network import inside
from paceline.elastic.failure import ErrorRecord, StopSignals, exit_code_of, sigterm_as_exit
from paceline.elastic.forkserver import StartedRank, Starter, warm_up, why_not
from paceline.elastic.hosts.agent import Coordinator, run_agent
from paceline.elastic.hosts.files import differences
from paceline.elastic.hosts.gather import EMULATED, GoesOnElsewhere, gathered, joined, links_of
from paceline.elastic.hosts.hosts import Hosts, coordinating, current_hosts
from paceline.elastic.hosts.link import Meeting
from paceline.elastic.hosts.messages import Look, Looked, Welcome
from paceline.elastic.hosts.takeover import Readmission, met_again
from paceline.elastic.preemption import preemption_notices
from paceline.errors import LaunchError
from paceline.files import scratch_folder
from paceline.job.data import FileSpec, Mixture
from paceline.job.job import Job
from paceline.job.model import DCP
from paceline.rank_environment import KEY_FILE, RankEnvironment
from paceline.storage.url import is_url
from paceline.text import printable
from paceline.wire.key import RunKey, default_key_file, key_descriptor, own_key, read_key

_ANSWER_S = 120.0  # longest time for a host to compute digests of its files
_NAMED = 5  # number of differences shown in an error
_FACTORIES = ("dataset", "iterable")  # kinds of data whose sources are import paths
_IMPORT_PATH = re.compile(r"(?P<module>[^\n]+\.py|[A-Za-z_][\w.]*):[A-Za-z_][\w.]*")


@contextmanager
def over_hosts() -> Iterator[None]:
    """Connect all hosts of this run, so that ranks can be started on them.

    On host 0, the body of the context is the command. On any other host, this process is an agent until the command has
    ended on host 0. If host 0 is lost and the run can continue without it, the body runs on the next coordinator, and
    `Hosts.takeover` is set.

    Raises:
        LaunchError: a host does not connect, or cannot take part.
        SystemExit: with the exit code of host 0, on any other host.
    """
    if current_hosts():
        yield
        return
    place = own_engine().hosts()
    with preemption_notices():
        if place is None or place.count < 2:
            yield
            return
        key = _key(place)
        with sigterm_as_exit():
            warm_up()  # the forkserver imports torch while the hosts connect
            yield from _met(place, key)


def must_agree(job: Job) -> None:
    """Check that all hosts have the code and data of host 0. Do nothing on a single host.

    Raises:
        LaunchError: code or data differs, or a host does not answer. The text names hosts and files.
    """
    hosts = current_hosts()
    if hosts is None:
        return
    look = what_to_look_at(job)
    if look in hosts.compared or not look.modules + look.files:
        return
    if hosts.takeover is not None:  # the hosts were already compared with the previous coordinator
        hosts.compared.append(look)
        return
    answers = hosts.ask(look, Looked, _ANSWER_S)
    found = [text for link, answer in answers for text in differences(look, link, answer)]
    if found:
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        raise LaunchError(
            "hosts.code_differs",
            "{found}{more}. All hosts need the same code and data as host 0 ({host}). Copy them to every host.",
            found="; ".join(found[:_NAMED]),
            more=more,
            host=hosts.cluster.hosts[0].name,
        )
    hosts.compared.append(look)


def what_to_look_at(job: Job) -> Look:
    """Return the modules and files of which every host needs a copy."""
    texts = set(_texts(job.model_dump(mode="json", exclude_defaults=True)))
    modules = {match["module"] for text in texts if (match := _IMPORT_PATH.fullmatch(text))}
    files = [job.model.hf, job.model.weights]
    # the ranks compare the files of a corpus themselves, by sizes and digests (`_check_same_shards`)
    if not (job.partition.host_files or isinstance(job.data, FileSpec | Mixture)):
        test: Any = job.data.test if isinstance(job.data.test, str) and job.data.kind not in _FACTORIES else None
        for path in (getattr(job.data, "path", None), getattr(job.data, "held_out_path", None), test):
            files += path if isinstance(path, tuple) else [path]
    local = sorted({str(file).removeprefix(DCP) for file in files if file is not None and not is_url(file)})
    return Look(sorted(modules), local, list(getattr(job.data, "suffixes", ())))


def _texts(value: Any) -> Iterator[str]:
    """Yield the strings in the values of a job, except arguments of functions."""
    if isinstance(value, dict):
        for key, entry in value.items():
            if key != "args":
                yield from _texts(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from _texts(entry)
    elif isinstance(value, str):
        yield value


def _key(place: HostPlace) -> RunKey:
    """Return the key that was passed to this host, or the user's own key.

    The path of the user's key is added to the environment for the ranks.
    """
    if (key := own_key()) is not None:
        return key
    file = default_key_file()
    if not file.exists():
        raise LaunchError(
            "key.host_without",
            "{count} hosts need a key, but host {host} has none. `paceline key` creates one in {file}. "
            "Copy the file to the same path on every host, or to another path and set {variable} to that "
            "path.",
            count=place.count,
            host=place.name,
            file=file,
            variable=KEY_FILE,
        )
    os.environ[KEY_FILE] = str(file)
    return read_key(file)


def _met(place: HostPlace, key: RunKey) -> Iterator[None]:
    hosts, code = _hosts(place, key), 1
    try:
        hosts.engine = place.engine
        with _returns(hosts, place), coordinating(hosts):
            yield
        code = 0
    except BaseException as error:
        code = exit_code_of(error)
        raise
    finally:
        if hosts.takeover is not None and hosts.takeover.next_generation is not None:
            hosts.takeover.next_generation.close()
        hosts.dismiss(code)


def _hosts(place: HostPlace, key: RunKey) -> Hosts:
    now = place
    while True:
        try:
            return _served(now, key) if now.number else gathered(now, key)
        except GoesOnElsewhere as told:  # this host was lost and restarted, and has found a new coordinator
            print(printable(f"paceline: {told}"), file=sys.stderr, flush=True)
            now = told.place_of(place)


def _returns(hosts: Hosts, place: HostPlace) -> Readmission:
    """Make the context that readmits hosts that come back.

    After a takeover, restarted hosts only know the address of the lost coordinator. They must be notified of this
    coordinator's address.
    """
    assert hosts.meeting is not None
    if hosts.takeover is None:
        return Readmission(hosts, place, hosts.meeting)
    own = replace(place, number=0, count=len(hosts.cluster.hosts), name=hosts.cluster.hosts[0].name)
    return Readmission(hosts, own, hosts.meeting, calls=True)


def _served(place: HostPlace, key: RunKey) -> Hosts:
    """Serve host 0 until it is lost; return the hosts that this host then coordinates.

    Raises:
        SystemExit: with the exit code of host 0.
    """
    found: Hosts | Coordinator = joined(place, key, succeeds=True)
    noticed = False
    while isinstance(found, Coordinator):
        with closing(found.connection):
            code = run_agent(found, f"host {place.name} (number {place.number})")
        if found.lost is None or found.succession is None or code != 1:
            found.close()
            failed = f"{'was stopped' if code in (130, 143) else 'has failed'} (exit code {code})"
            how = "has ended" if code == 0 else failed
            if found.released:
                why = "as `paceline scale` has asked" if code == 0 else "which has received SIGTERM"
                how = f"goes on without this host, {why},"
            if found.lost is None or found.released:
                print(printable(f"paceline: the run {how} on {found.who}"), file=sys.stderr, flush=True)
            raise SystemExit(code)
        noticed = found.noticed
        # the new coordinator learns of a SIGTERM that arrives during the meeting
        with ExitStack() as unless_met, StopSignals((signal.SIGTERM,)) as signals:
            unless_met.callback(found.close)
            found = met_again(place, key, found)
            unless_met.pop_all()
        noticed = noticed or signals.first is not None
        if isinstance(found, Coordinator):
            found.noticed = noticed
    if noticed:
        found.notices[0] = time.monotonic()
    return found


_TICK_S = 0.02
_START_S = 300.0  # longest time for the forkserver to import torch
_DISMISSED_S = 10.0  # longest time for a dismissed host process to end
_HANG_UP_S = 5.0  # time from SIGHUP to SIGKILL, for a host process that messages do not reach


@contextmanager
def host_processes(cluster: Cluster, emulated: Sequence[EmulatedHost]) -> Iterator[None]:
    """Start the host processes of emulated hosts, and coordinate them inside the context.

    A single emulated host needs no host process.

    Raises:
        LaunchError: a host process cannot be started, or does not connect.
    """
    if len(emulated) == 1:
        yield
        return
    warm_up(__name__)  # the host processes then share this forkserver
    first, key = emulated[0], RunKey.make()
    meeting = inside(first.namespace, lambda: Meeting(first.address, 0, key))
    place = HostPlace(0, len(emulated), *meeting.address, first.name, EMULATED)
    with closing(meeting), _started(place, emulated, key) as (processes, start):
        links = links_of(place, key, meeting, lambda: _check(processes))
        for link in links:
            link.send(Welcome([host.name for host in emulated]))
        hosts = Hosts(cluster, first.address, links, key, first.namespace)
        code = 1
        try:
            with Readmission(hosts, place, meeting, start), coordinating(hosts):
                yield
            code = 0
        finally:
            hosts.dismiss(code)
            if all(link.lost is None for link in hosts.links):
                _wait(processes, _DISMISSED_S)


def be_host_process(_: list[str]) -> None:
    """Run this process as the agent of its emulated host."""
    environment, key = RankEnvironment.from_env(), own_key()
    assert environment.host is not None
    assert key is not None
    if why_not() is None:
        from paceline.elastic.rank import split_off

        split_off()  # called before this process starts a thread
    signal.signal(signal.SIGHUP, lambda *_: sys.exit())  # the coordinator sends SIGHUP if the link to this host is cut
    name, number = environment.host.name, environment.rank
    where = environment.master_address, environment.master_port
    coordinator = joined(HostPlace(number, environment.world_size, *where, name, EMULATED), key)
    run_agent(coordinator, f"host {name} (number {number})")
    coordinator.connection.close()


@contextmanager
def _started(
    place: HostPlace, emulated: Sequence[EmulatedHost], key: RunKey
) -> Iterator[tuple[list[StartedRank], Callable[[int], None]]]:
    """Start the host processes; yield them and a function that starts another host process.

    All host processes are ended when the context exits.
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
    for process in processes:
        if process.has_ended:
            record = ErrorRecord.read(process.record)
            why = record.message if record else "it was killed"
            raise LaunchError(
                "hosts.emulated_ended",
                "the process of emulated host {host} has ended: {reason}",
                host=process.number,
                reason=why,
            )


def _forget_ended(processes: list[StartedRank]) -> None:
    """Drop host processes that have ended, so that zombies and descriptors do not accumulate."""
    for process in [process for process in processes if process.has_ended]:
        process.note_end()
        processes.remove(process)


def _end(processes: Sequence[StartedRank]) -> None:
    for process in processes:
        if not process.has_ended:
            process.signal(signal.SIGHUP)
    _wait(processes, _HANG_UP_S)
    for process in processes:
        process.note_end()


def _wait(processes: Sequence[StartedRank], wait_s: float) -> None:
    until = time.monotonic() + wait_s
    while not all(process.has_ended for process in processes) and time.monotonic() < until:
        time.sleep(_TICK_S)
