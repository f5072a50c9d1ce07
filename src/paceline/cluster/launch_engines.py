"""Launch engines: the programs that start runs, and the detection of this process's engine."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import socket
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from paceline.errors import LaunchError
from paceline.extensions import ExtensionPoint
from paceline.rank_environment import RANK, RankEnvironment, is_our_rank


@dataclass(frozen=True)
class HostPlace:
    """The number and the address of a host process among the hosts of its run.

    Attributes:
        number: number of this host, starting at 0; host 0 coordinates the run.
        count: number of hosts, at least 2.
        coordinator: address or name of host 0.
        port: port on which host 0 listens.
        name: name of this host.
        engine: name of the engine that started the process, such as "slurm", "ssh" or "hosts" (by hand).
        run_name: name or id that the engine gives the run, for messages.
        least: minimum number of hosts with which the run begins; other hosts join later. 0 requires all hosts.
    """

    number: int
    count: int
    coordinator: str
    port: int
    name: str
    engine: str
    run_name: str = ""
    least: int = 0


class LaunchEngine:
    """A program that starts the processes of a run.

    Examples are torchrun, MPI, the scheduler of a cluster, and paceline itself.

    An engine starts either one process per rank, for which `place()` returns the rank, or one host process per host,
    for which `hosts()` returns the number of the host. A host process starts the ranks of its host.
    """

    def detect(self) -> bool:
        """Return True if the environment shows that this engine started this process."""
        raise NotImplementedError

    def place(self) -> RankEnvironment | None:
        """Return this process's rank and rendezvous; None if paceline starts the ranks.

        Raises:
            LaunchError: the environment is incomplete.
        """
        return None

    def hosts(self) -> HostPlace | None:
        """Return this host's place among several hosts; None in a rank or with one host.

        Raises:
            LaunchError: the environment is incomplete or contradictory.
        """
        return None

    def note(self) -> str | None:
        """Return a line to show before a run starts, or None.

        Such a line says that the engine offers more nodes or processes than are used.
        """
        return None

    def tell_failure(self, text: str, time_s: float) -> None:
        """Report the failure of this rank in the engine's own format, if any.

        Raise OSError if the report cannot be written.
        """


HOSTS, HOST_NUMBER, COORDINATOR, ENGINE, HOST_DEVICES = (
    "PACELINE_HOSTS",
    "PACELINE_HOST_NUMBER",
    "PACELINE_COORDINATOR",
    "PACELINE_ENGINE",  # set by ssh and Ray, which also set the three variables above
    "PACELINE_HOST_DEVICES",  # number of devices to use on the host
)
MOST_HOSTS = 65_536
# The ports differ from the ports of torchrun (29500) and its store (29400), and are below the ephemeral ports.
_FIRST_PORT, _PORTS = 29_600, 1_000


def number_from(name: str, advice: str, text: str | None = None) -> int:
    """Parse the number in an environment variable, or in a part of its text.

    Raises:
        LaunchError: the variable is not set, or is not a number from 0 to `MOST_HOSTS`.
    """
    if text is None and (text := os.environ.get(name)) is None:
        raise LaunchError("launcher.variable_missing", "{variable} is not set. {advice}", variable=name, advice=advice)
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and int(text) <= MOST_HOSTS):
        raise LaunchError(
            "launcher.number_invalid",
            '{variable} is "{text}", but it must be a number from 0 to {most}. {advice}',
            variable=name,
            text=text[:40],
            most=MOST_HOSTS,
            advice=advice,
        )
    return int(text)


def place_from(
    number_name: str, count_name: str, engine: str, advice: str, *, coordinator: str, run_name: str, name: str = ""
) -> HostPlace | None:
    """Derive the place among the hosts from two environment variables; None with one host.

    Args:
        coordinator: `ADDRESS` or `ADDRESS:PORT` of host 0; PACELINE_COORDINATOR has precedence if it is set.
        run_name: name of the run, from which a default port is derived.

    Raises:
        LaunchError: a variable is not set or is not a number, the host number is not less than the number of hosts, or
            the address of host 0 is unknown.
    """
    number, (least, count) = number_from(number_name, advice), _least_and_count(count_name, advice)
    if number >= count:
        raise LaunchError(
            "launcher.number_out_of_range",
            "{number_name} is {number}, but {count_name} is {count}: host numbers range from 0 to count - 1. {advice}",
            number_name=number_name,
            number=number,
            count_name=count_name,
            count=count,
            advice=advice,
        )
    if count == 1:
        return None
    address, port = address_from(coordinator, default_port(engine, run_name))
    return HostPlace(number, count, address, port, name or socket.gethostname(), engine, run_name, least)


def _least_and_count(name: str, advice: str) -> tuple[int, int]:
    """Return the minimum and maximum number of hosts.

    The minimum is 0 if all hosts are needed.
    """
    text = os.environ.get(name, "")
    first, dots, last = text.partition("..")
    if not dots:
        return 0, number_from(name, advice)
    least, count = number_from(name, advice, first), number_from(name, advice, last)
    if not 1 <= least <= count:
        raise LaunchError(
            "launcher.range_invalid",
            '{variable} is "{text}". The first number must be the smallest number of hosts that the run can start '
            "with, as in 2..8.",
            variable=name,
            text=text,
        )
    return least, count


def address_from(coordinator: str, port: int) -> tuple[str, int]:
    """Return address and port of host 0, from PACELINE_COORDINATOR or else from the engine.

    Raises:
        LaunchError: neither PACELINE_COORDINATOR nor the engine gives an address, or the port is invalid.
    """
    text = os.environ.get(COORDINATOR) or coordinator
    address, colon, after = text.rpartition(":")
    # an address without a port, which may be an IPv6 address
    if not colon or text.endswith("]") or (":" in address and not address.startswith("[")):
        address, after = text, str(port)
    address = address.removeprefix("[").removesuffix("]")
    if not address:
        raise LaunchError(
            "launcher.no_coordinator",
            "The address of host 0 is not known. Set {variable}=ADDRESS:PORT on every host, e.g. 10.0.0.1:{port}.",
            variable=COORDINATOR,
            port=port,
        )
    if not (after.isascii() and after.isdecimal() and 0 < int(after[:9]) < 65_536):
        raise LaunchError(
            "launcher.port_invalid",
            'The port of host 0 is "{port}" (in "{text}"), but it must be a number from 1 to 65535.',
            port=after[:40],
            text=text[:80],
        )
    return address, int(after)


def default_port(engine: str, run_name: str) -> int:
    """Return a port of host 0 for engines that choose no port.

    The port depends on the name of the run, so two runs rarely have the same port.
    """
    return _FIRST_PORT + zlib.crc32(f"{engine} {run_name}".encode()) % _PORTS


_HOSTS_ADVICE = (
    f"On every host set {HOSTS} (their number), {HOST_NUMBER} (0, 1, …: its own) and {COORDINATOR} "
    "(ADDRESS:PORT of host 0)."
)


class ByHand(LaunchEngine):
    """A start with PACELINE_ variables, which the user, `--hosts` (ssh) or Ray sets."""

    def detect(self) -> bool:
        # in an indexed Job of Kubernetes, the manifest sets PACELINE_HOSTS, and the index of the pod is the host number
        return HOST_NUMBER in os.environ or (HOSTS in os.environ and "JOB_COMPLETION_INDEX" not in os.environ)

    def hosts(self) -> HostPlace | None:
        # one default port for all runs, because a manual start gives the run no id
        return place_from(
            HOST_NUMBER, HOSTS, os.environ.get(ENGINE) or "hosts", _HOSTS_ADVICE, coordinator="", run_name=""
        )


class Torchrun(LaunchEngine):
    """torchrun, or another launcher that sets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT."""

    def detect(self) -> bool:
        return RANK in os.environ and not is_our_rank()

    def place(self) -> RankEnvironment | None:
        return RankEnvironment.from_env()

    def tell_failure(self, text: str, time_s: float) -> None:
        if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            facts = {"py_callstack": text.splitlines()[0], "timestamp": str(int(time_s))}
            Path(report).write_text(json.dumps({"message": {"message": text, "extraInfo": facts}}))


_COMMAND = "srun --ntasks-per-node=1 paceline …"
_SLURM_ADVICE = f"Start one process on every node: {_COMMAND}"
_ENTRY = re.compile(r"((?:[^\[\],\s]|\[[0-9,-]+\])+)(?:,|$)")  # commas in brackets do not separate entries
_PART = re.compile(r"\[([0-9,-]+)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


class Slurm(LaunchEngine):
    """A job step of Slurm with one task per node.

    A batch script also has the variables of a task, so only the variables of a step show that Slurm started the
    process.
    """

    def detect(self) -> bool:
        return "SLURM_JOB_ID" in os.environ and ("SLURM_STEP_ID" in os.environ or _nodes() > 1)

    def hosts(self) -> HostPlace | None:
        if "SLURM_STEP_ID" not in os.environ:
            return None
        nodes, tasks = (
            number_from("SLURM_STEP_NUM_NODES", _SLURM_ADVICE),
            number_from("SLURM_STEP_NUM_TASKS", _SLURM_ADVICE),
        )
        if tasks != nodes:
            raise LaunchError(
                "launcher.slurm_tasks",
                "Slurm started {tasks} tasks on {nodes} nodes (SLURM_STEP_NUM_TASKS, SLURM_STEP_NUM_NODES). Start "
                "paceline once per node, because paceline starts the ranks itself. {advice}",
                tasks=tasks,
                nodes=nodes,
                advice=_SLURM_ADVICE,
            )
        names = expand(os.environ.get("SLURM_STEP_NODELIST", ""))
        if len(names) != nodes:
            raise LaunchError(
                "launcher.slurm_nodes",
                "SLURM_STEP_NODELIST names {names} nodes, but SLURM_STEP_NUM_NODES is {nodes}. {advice}",
                names=len(names),
                nodes=nodes,
                advice=_SLURM_ADVICE,
            )
        return place_from(
            "SLURM_NODEID",
            "SLURM_STEP_NUM_NODES",
            "slurm",
            _SLURM_ADVICE,
            coordinator=names[0],
            run_name=os.environ["SLURM_JOB_ID"],
            name=os.environ.get("SLURMD_NODENAME", ""),
        )

    def note(self) -> str | None:
        if "SLURM_STEP_ID" in os.environ:
            return None
        return f"this allocation of Slurm has {_nodes()} nodes; only this one is used. For all of them: {_COMMAND}"


def _nodes() -> int:
    """Return the number of nodes of the allocation; 1 if unknown."""
    text = os.environ.get("SLURM_JOB_NUM_NODES", "")
    return int(text) if text.isascii() and text.isdecimal() else 1


def expand(text: str) -> list[str]:
    """Expand a list of nodes to the names of the nodes, in order.

    For example, `n[01-03,7],m1` becomes n01, n02, n03, n7, m1.

    Raises:
        LaunchError: the text is not a list of nodes, or it names more than `MOST_HOSTS` nodes.
    """
    names: list[str] = []
    position = 0
    while position < len(text) or not text:
        entry = _ENTRY.match(text, position)
        if entry is None:
            raise _not_a_list(text)
        position = entry.end()
        parts = [list(_part(match, text)) for match in _PART.finditer(entry[1])]
        if len(names) + math.prod(map(len, parts)) > MOST_HOSTS:
            raise LaunchError(
                "launcher.too_many_nodes",
                'The node list "{text}" names more than {most} nodes.',
                text=text[:80],
                most=MOST_HOSTS,
            )
        names += map("".join, itertools.product(*parts))
    if text.endswith(","):
        raise _not_a_list(text)
    return names


def _part(match: re.Match[str], text: str) -> Iterator[str]:
    """Expand one part of a name: a text, or a list of numbers in brackets."""
    if match[2] is not None:
        yield match[2]
        return
    total = 0
    for word in match[1].split(","):
        numbers = _RANGE.fullmatch(word)
        first, last = (numbers[1], numbers[2] or numbers[1]) if numbers else ("1", "0")
        total += int(last) - int(first) + 1
        if int(last) < int(first) or total > MOST_HOSTS:
            raise _not_a_list(text)
        yield from (f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1))


def _not_a_list(text: str) -> LaunchError:
    return LaunchError(
        "launcher.node_list_invalid",
        '"{text}" is not a list of nodes such as n[01-03,7],m1, or the text is too long.',
        text=text[:80],
    )


_OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS")
_URI_OF_MPIRUN, _URI_HERE = "OMPI_MCA_orte_hnp_uri", "OMPI_MCA_orte_local_daemon_uri"
_MPI_ADVICE = (
    "Start one process on every host: mpirun --map-by ppr:1:node paceline … (Open MPI), mpiexec -ppn 1 (MPICH)."
)


class Mpi(LaunchEngine):
    """mpirun or mpiexec with one process per host.

    MPI itself is not used.
    """

    def detect(self) -> bool:
        return _OPEN_MPI[1] in os.environ or (_MPICH[1] in os.environ and not _set_by_srun())

    def hosts(self) -> HostPlace | None:
        number, count, here = _OPEN_MPI if _OPEN_MPI[1] in os.environ else _MPICH
        if here in os.environ and number_from(here, _MPI_ADVICE) > 1:
            raise LaunchError(
                "launcher.mpi_processes",
                "mpirun started {processes} processes on this host ({variable}). Start paceline once per host, "
                "because paceline starts the ranks itself. {advice}",
                processes=os.environ[here],
                variable=here,
                advice=_MPI_ADVICE,
            )
        return place_from(
            number,
            count,
            "mpi",
            _MPI_ADVICE,
            coordinator=_address_of_mpirun(),
            run_name=os.environ.get("PMIX_NAMESPACE", ""),
        )


def _set_by_srun() -> bool:
    pairs = (("PMI_RANK", "SLURM_PROCID"), ("PMI_SIZE", "SLURM_STEP_NUM_TASKS"))
    return all(other in os.environ and os.environ.get(own) == os.environ[other] for own, other in pairs)


def _address_of_mpirun() -> str:
    """Return the address of mpirun's host; "" if unknown or not host 0."""
    uri = os.environ.get(_URI_OF_MPIRUN, "")  # "jobid.0;tcp://10.0.0.1,10.1.0.1:40123"
    is_first = os.environ.get("OMPI_COMM_WORLD_RANK") == "0"
    if is_first and os.environ.get(_URI_HERE, uri) != uri:
        return ""  # mpirun runs on a host without a process of this run
    found = re.search(r"tcp://([0-9.]+)[,:]", uri)
    return found[1] if found else ""


_INDEX = "JOB_COMPLETION_INDEX"
_TRAIN_JOB = ("PET_NODE_RANK", "PET_NNODES")
_ADVICE_TRAIN_JOB = "A TrainJob's numNodes is one number; PET_NNODES=1:4 (elastic) is torchrun's."
_ADVICE_JOB = f"In the manifest, completionMode is Indexed, and {HOSTS} is the number of completions."


class Kubernetes(LaunchEngine):
    """A pod of a job whose pods can find each other by name.

    An indexed Job does not expose its number of pods. Without PACELINE_HOSTS, each pod is therefore a separate run, as
    in a sweep. With PACELINE_HOST_NUMBER, the manifest sets the number of the pod, which is required if the hosts
    belong to several jobs of a JobSet.
    """

    def detect(self) -> bool:
        return _TRAIN_JOB[1] in os.environ or (
            _INDEX in os.environ and HOSTS in os.environ and HOST_NUMBER not in os.environ
        )

    def hosts(self) -> HostPlace | None:
        if _TRAIN_JOB[1] in os.environ:
            names, advice, coordinator = _TRAIN_JOB, _ADVICE_TRAIN_JOB, os.environ.get("PET_MASTER_ADDR", "")
            if coordinator and (port := os.environ.get("PET_MASTER_PORT")):
                coordinator = f"{coordinator}:{port}"
        else:
            names, advice, coordinator = (_INDEX, HOSTS), _ADVICE_JOB, _first_pod()
        return place_from(*names, "kubernetes", advice, coordinator=coordinator, run_name=_job_name())


def _first_pod() -> str:
    """Return the name of the pod with index 0; "" if unknown.

    Raises:
        LaunchError: the pod belongs to a further replica of a job in a JobSet, whose indices begin at 0 again.
    """
    job_set, replicated = os.environ.get("JOBSET_NAME"), os.environ.get("REPLICATED_JOB_NAME")
    if job_set and replicated:
        of_replica = re.match(rf"{re.escape(f'{job_set}-{replicated}')}-(\d+)-\d+$", socket.gethostname())
        if of_replica and int(of_replica[1]):
            raise LaunchError(
                "launcher.job_set_replicas",
                "this pod belongs to job {of_replica} of {replicated} in the JobSet {job_set}. Each job numbers its "
                "pods from 0 ({index}), so two pods would be host 0. Set replicas: 1 for {replicated}, and use the "
                "number of hosts as completions. Or give every job one pod, set {host_number} from the annotation "
                "jobset.sigs.k8s.io/job-global-index, and set {coordinator} to the name of the first pod.",
                of_replica=of_replica[1],
                replicated=replicated,
                job_set=job_set,
                index=_INDEX,
                host_number=HOST_NUMBER,
                coordinator=COORDINATOR,
            )
        return f"{job_set}-{replicated}-0-0.{job_set}"
    host, index = socket.gethostname(), os.environ.get(_INDEX, "")
    if not host.endswith(f"-{index}"):
        return ""
    domain = socket.getfqdn().partition(".")[2]  # the domain of the headless service
    return f"{host.removesuffix(index)}0{'.' if domain else ''}{domain}"


def _job_name() -> str:
    """Return the name of the job, which is a prefix of its pods' names."""
    return os.environ.get("JOBSET_NAME") or socket.gethostname().rpartition("-")[0]


_RANK, _COUNT, _ADDRESSES = "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS"
_SKY_ADVICE = "They are set by SkyPilot in the task's `run` section; start paceline there, once."


class Sky(LaunchEngine):
    """A node of a SkyPilot task."""

    def detect(self) -> bool:
        return _RANK in os.environ

    def hosts(self) -> HostPlace | None:
        addresses, count = os.environ.get(_ADDRESSES, "").split(), number_from(_COUNT, _SKY_ADVICE)
        if len(addresses) != count:
            raise LaunchError(
                "launcher.sky_addresses",
                "{variable} has {addresses} addresses, but {count_variable} is {count}. {advice}",
                variable=_ADDRESSES,
                addresses=len(addresses),
                count_variable=_COUNT,
                count=count,
                advice=_SKY_ADVICE,
            )
        run_name = os.environ.get("SKYPILOT_TASK_ID", "")
        return place_from(
            _RANK, _COUNT, "sky", _SKY_ADVICE, coordinator=addresses[0] if addresses else "", run_name=run_name
        )


class Local(LaunchEngine):
    """Paceline's own launcher, `elastic/attempt.py`, on this machine or on emulated hosts."""

    def detect(self) -> bool:
        return True


# The first engine that is detected is used, because a start by hand or with MPI may happen inside a scheduler's job.
_BUILT_IN: dict[str, LaunchEngine] = {
    "torchrun": Torchrun(),
    "hosts": ByHand(),
    "sky": Sky(),
    "kubernetes": Kubernetes(),
    "mpi": Mpi(),
    "slurm": Slurm(),
    "local": Local(),
}
ENGINES = ExtensionPoint("launch engine", "paceline.engines", LaunchEngine, _BUILT_IN, LaunchError)


def own_engine() -> LaunchEngine:
    """Return the engine that started this process.

    If this process is a rank, its rank and rendezvous are written to the environment.

    Raises:
        LaunchError: an engine of a package cannot be loaded, the environment of an engine is incomplete, or two engines
            contradict each other.
    """
    return ENGINES["local"] if is_our_rank() else _own_engine()


@cache
def _own_engine() -> LaunchEngine:
    engine = detected()
    if RANK not in os.environ and (place := engine.place()) is not None:
        os.environ.update(place.to_env())
    return engine


def is_rank() -> bool:
    """Return True if this process is a rank, whatever engine started it."""
    if RANK not in os.environ:
        own_engine()
    return RANK in os.environ


def detected() -> LaunchEngine:
    """Detect the engine from the environment without a cache; raise like `own_engine`."""
    if RANK in os.environ:
        return ENGINES["torchrun"]
    for name in ENGINES.installed:
        if (engine := ENGINES[name]).detect():
            return engine
    found = [name for name, engine in ENGINES.built_in.items() if engine.detect()]
    _refuse_contradiction(found)
    return ENGINES[found[0]]


def _refuse_contradiction(found: list[str]) -> None:
    """Raise a LaunchError if two engines give this host different numbers.

    Engines that are known to run inside each other are exempt.
    """
    first = found[0]
    if ENGINE in os.environ:  # set by paceline itself
        return
    inside = {("mpi", "slurm")}  # mpirun inside the allocation of a scheduler
    places = {name: _place(name) for name in found if (first, name) not in inside}
    for name, other in places.items():
        own = places[first]
        if own and other and (own.number, own.count) != (other.number, other.count):
            raise LaunchError(
                "launcher.ambiguous",
                "The environment of {first} says that this process is host {number} of {count}, but the environment "
                "of {name} says that it is host {other_number} of {other_count}. Unset the variables of the launcher "
                "that did not start it ({variables}; {variables_2}).",
                number=own.number,
                count=own.count,
                first=first,
                other_number=other.number,
                other_count=other.count,
                name=name,
                variables=_VARIABLES[first],
                variables_2=_VARIABLES[name],
            )


def _place(name: str) -> HostPlace | None:
    try:
        return ENGINES[name].hosts()
    except LaunchError:  # if this engine is selected, it reports the error itself
        return None


_VARIABLES = {
    "hosts": "PACELINE_HOSTS, PACELINE_HOST_NUMBER",
    "sky": "SKYPILOT_NODE_RANK, …",
    "kubernetes": "JOB_COMPLETION_INDEX, PET_NNODES, PET_NODE_RANK",
    "mpi": "OMPI_COMM_WORLD_RANK or PMI_RANK, …",
    "slurm": "SLURM_STEP_ID, SLURM_NODEID, …",
}
