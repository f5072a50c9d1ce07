"""A plan: *how* a job runs on a cluster.

The text form of a plan states every parallel choice in one line, such as `dp=2 microbatches=4 precision=bf16`. The axes
of the device mesh come first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Host
from paceline.errors import PlanError, PlanProblem
from paceline.job.job import Job, Precision
from paceline.job.spec import load_object
from paceline.planning.sync_info import devices_of_ranks, problem_with, problem_with_transport, sync_info
from paceline.text import nearest


class Axis(NamedTuple):
    """One axis of the device mesh.

    Attributes:
        name: key of the plan, which is also the name of the mesh dimension.
        term: usual name of this kind of parallelism.
        reads_data: True if ranks along the axis read different samples. The product of the degrees of such axes is the
            number of data-parallel ranks.
    """

    name: str
    term: str
    reads_data: bool = False


# In the mesh the last axis varies fastest: its ranks are neighbours, which communicate most.
MESH_AXES = (
    Axis("dp", "data parallel: replicas", reads_data=True),
    Axis("pp", "pipeline parallel: stages of layers"),
    Axis("fsdp", "fully sharded data parallel: parameters, gradients and optimizer state", reads_data=True),
    Axis("cp", "context parallel: the tokens of a sequence"),
    Axis("ep", "expert parallel: the experts of a mixture", reads_data=True),
    Axis("tp", "tensor parallel: the matrices of a layer"),
)
AXES = tuple(axis.name for axis in MESH_AXES)
DATA_AXES = tuple(axis.name for axis in MESH_AXES if axis.reads_data)
# The axes inside a replica: all but the first.
REPLICA = AXES[1:]
# In the order in which a plan writes the keys, and in which changes to them are tried.
DEGREES = ("dp", "fsdp", "tp", "pp", "cp", "ep")
assert set(DEGREES) == set(AXES)
# keys that have no effect while a degree is 1
MEANT_FOR = {"zero": "fsdp", "offload": "fsdp", "sequence": "tp", "schedule": "pp", "cut": "pp"}


MemoryFormat = Literal["contiguous", "channels_last"]
Compile = Literal["off", "on", "reduce-overhead"]
Schedule = Literal["1f1b", "gpipe", "interleaved", "zero-bubble", "dualpipe"]
Remat = Literal["none", "selective", "block"]
Balance = Literal["auto", "on", "off"]

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
REMATS: tuple[Remat, ...] = get_args(Remat)
# Schedules whose stages go down through all ranks and up again: each rank has two stages, rank 0 the first and the
# last.
V_SCHEDULES = ("zero-bubble", "dualpipe")


def stages_per_rank(schedule: str, virtual: int = 2) -> int:
    """Return the number of stages on each pipeline rank.

    Args:
        virtual: number of stages per rank with schedule=interleaved.
    """
    return virtual if schedule == "interleaved" else 2 if schedule in V_SCHEDULES else 1


def reduces_once(zero: int, pp: int, schedule: str) -> bool:
    """Return True if fsdp adds up the gradients of all microbatches before it reduces them."""
    return zero == 1 or (pp > 1 and (zero == 3 or schedule in V_SCHEDULES))


T = TypeVar("T")


class _Kind(NamedTuple):
    """Parser and check for the values of a plan key.

    Attributes:
        read: function that parses text into a value; it returns invalid text unchanged.
        problem: function of a key and a value; it returns a problem with the value, or None.
        example: valid value other than the default, as text.
    """

    read: Callable[[str], Any]
    problem: Callable[[str, Any], PlanProblem | None]
    example: str


def _kind(words: str, valid: Callable[[Any], bool], example: str, read: Callable[[str], Any] = str) -> _Kind:
    def problem(key: str, value: Any) -> PlanProblem | None:
        if valid(value):
            return None
        return PlanProblem(
            "plan.wrong_value",
            '{where}{key} must be {takes}, not "{value}"',
            where="",
            key=key,
            takes=words,
            value=value,
        )

    return _Kind(read, problem, example)


def _named(reason: Callable[[str, Any], str | None], example: str) -> _Kind:
    """Return a kind whose values are checked by a function of `sync_info`."""

    def problem(key: str, value: Any) -> PlanProblem | None:
        if (found := reason(key, value)) is None:
            return None
        return PlanProblem("plan.value_refused", "{where}{reason}", where="", key=key, value=value, reason=found)

    return _Kind(str, problem, example)


def _whole(least: int, most: int | None = None, example: str = "2") -> _Kind:
    words = f"a whole number, at least {least}" + ("" if most is None else f" and at most {most}")
    return _kind(
        words,
        lambda value: type(value) is int and least <= value <= (most or 10**9 - 1),
        example,
        lambda text: int(text) if text.isascii() and text.isdecimal() and len(text) <= 9 else text,
    )


def _one_of(choices: tuple[Any, ...], example: str = "", *, optional: bool = False) -> _Kind:
    words = " or ".join(choices)
    return _kind(words, lambda value: value in choices or (optional and value is None), example or choices[-1])


_SWITCH = _kind(
    "on or off", lambda value: isinstance(value, bool), "on", lambda text: {"on": True, "off": False}.get(text, text)
)
_KINDS = {
    **dict.fromkeys((*DEGREES, "microbatches"), _whole(1)),
    **dict.fromkeys(("threads", "num_workers"), _whole(0)),
    "zero": _whole(1, most=3),
    "virtual": _whole(2, example="3"),
    **dict.fromkeys(("offload", "offload_activations", "sequence", "pin", "fused", "onednn"), _SWITCH),
    "schedule": _one_of(SCHEDULES),
    "remat": _one_of(REMATS),
    "precision": _one_of(get_args(Precision), optional=True),
    "memory_format": _one_of(get_args(MemoryFormat)),
    "compile": _one_of(get_args(Compile), "on"),
    "balance": _one_of(get_args(Balance), "off"),
    "cut": _kind(
        "names of modules with commas between, e.g. cut=blocks.2",
        lambda value: isinstance(value, str) and (not value or all(value.split(","))),
        "blocks.2",
    ),
    "sync": _named(problem_with, "allreduce:ring"),
    "compress": _named(problem_with, "int8"),
    "transport": _named(lambda _, value: problem_with_transport(value), "gloo"),
}


@dataclass(frozen=True, repr=False)
class Plan:
    """Parallel choices that determine how a job runs.

    The text form omits defaults. `Plan.parse` accepts keys in any order, and `Plan.parse(str(p)) == p`.

    Raises:
        PlanError: a field has an invalid value.

    Example:
        >>> paceline.Plan(dp=2, tp=2, sync="diloco:30") == paceline.Plan.parse("dp=2 tp=2 sync=diloco:30")
        True
    """

    dp: int = 1  # replicas, each with a share of the global batch
    # ranks that shard a replica's parameters, gradients and optimizer state, each with a part of its batch (FSDP2)
    fsdp: int = 1
    tp: int = 1  # tensor-parallel ranks, which shard the matrices of every layer
    pp: int = 1  # pipeline stages
    cp: int = 1  # context-parallel ranks, which shard the tokens of every sequence
    ep: int = 1  # expert-parallel ranks, which shard the experts of every mixture, each with a share of the batch
    zero: int = 3  # fsdp: what is sharded: 1 optimizer state, 2 gradients as well, 3 parameters as well
    offload: bool = False  # fsdp: keep the shards in host memory
    sequence: bool = False  # tp: shard the tokens between the matrices as well (sequence parallel)
    schedule: Schedule = "1f1b"  # pp: the order in which microbatches pass the stages
    virtual: int = 2  # schedule=interleaved: stages of each rank
    # pp: the modules that begin the second and later stages, separated by commas; "": balanced by measured cost
    cut: str = ""
    remat: Remat = "none"  # activation checkpointing: what the backward pass recomputes
    offload_activations: bool = False  # keep what blocks save for the backward pass in host memory
    microbatches: int = 1  # parts of a data-parallel rank's share, computed one after the other
    precision: Precision | None = None  # compute dtype; None: the job's
    memory_format: MemoryFormat = "contiguous"  # layout of images and convolutions
    compile: Compile = "off"  # torch.compile; `reduce-overhead` is its mode that replays CUDA graphs
    threads: int = 0  # per rank; 0: the host's physical cores, divided evenly
    pin: bool = False  # bind each rank to its own cores
    fused: bool = False  # torch's fused optimizer step
    onednn: bool = False  # compute float32 matrix products on CPUs with oneDNN instead of MKL
    num_workers: int = 0  # loader processes per rank for prefetching; 0: the job's number
    # sync rule of the replicas: allreduce:ALGORITHM, local:PERIOD, diloco:PERIOD, …, or a custom rule
    sync: str = "allreduce"
    balance: Balance = "auto"  # whether the replicas' shares of the batch follow their measured speeds
    # codec for the data that the sync rule sends: none, auto, fp16, bf16, int8, int4, 1bit, topk:SHARE, powersgd:RANK
    compress: str = "none"
    transport: str = "auto"  # between ranks on CPUs; auto: shared memory within a host. GPUs use NCCL

    def __post_init__(self) -> None:
        problems = [p for key, kind in _KINDS.items() if (p := kind.problem(key, getattr(self, key)))]
        if problems:
            raise PlanError.of_problems(problems)

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Parse a plan from text.

        Raises:
            PlanError: a key or value is invalid; the error lists each of them on its own line, with valid alternatives.
        """
        values: dict[str, Any] = {}
        problems = []
        if not text.strip():
            problems = [PlanProblem("plan.empty", "{where}no key is given; one replica is dp=1")]
        for word in text.split():
            key, equals, value = word.partition("=")
            problem = _problem_of_key(key, equals, known=values)
            if problem is None:
                values[key] = _KINDS[key].read(value)
                problem = _KINDS[key].problem(key, values[key])
            if problem:
                problems.append(problem)
        if problems:
            where = f'plan "{text}": '
            raise PlanError.of_problems([problem.replaced(where=where) for problem in problems])
        return cls(**values)

    def __repr__(self) -> str:
        """Return the call that creates the plan, without defaults."""
        changed = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Plan({', '.join(f'{name}={getattr(self, name)!r}' for name in changed)})"

    def _repr_html_(self) -> str:
        """Return the mesh of ranks and the choices as HTML for notebooks."""
        html: str = load_object("paceline.report.notebook:plan_html")(self)
        return html

    def __str__(self) -> str:
        words = [f"{f.name}={_text(getattr(self, f.name))}" for f in fields(self) if getattr(self, f.name) != f.default]
        return " ".join(words) or "dp=1"

    @property
    def ranks(self) -> int:
        """Number of ranks that the plan needs, which is the product of all degrees."""
        return self.dp * self.fsdp * self.tp * self.pp * self.cp * self.ep

    @property
    def data_ranks(self) -> int:
        """Number of data-parallel ranks (dp × fsdp × ep), each with its own share of the batch.

        Ranks along the other axes read the same samples.
        """
        return self.dp * self.fsdp * self.ep

    @property
    def stages_per_rank(self) -> int:
        """Number of pipeline stages on each rank; 1 without a pipeline."""
        return stages_per_rank(self.schedule, self.virtual) if self.pp > 1 else 1

    @property
    def stages(self) -> int:
        """Number of pipeline stages into which the model is divided."""
        return self.pp * self.stages_per_rank

    @property
    def splits(self) -> bool:
        """True if a replica has more than one rank, or activations are recomputed (remat) or offloaded."""
        return self.ranks > self.dp or self.remat != "none" or self.offload_activations

    @property
    def inexact(self) -> str:
        """Inexact choices of the plan as text, such as `compress=int8`; "" if there are none.

        With an inexact choice, replicas do not apply the exact mean of all gradients in every step.
        """
        local = f"sync={self.sync}" if not sync_info(self.sync).exact else ""
        coded = f"compress={self.compress}" if self.compress != "none" else ""
        return " ".join(word for word in (local, coded) if word)

    def precision_for(self, job: Job) -> Precision:
        """Return the compute precision of a job under this plan."""
        return self.precision or job.precision

    def fuses(self, job: Job, *, accelerators: bool) -> bool:
        """Return True if the optimizer's step is fused, by choice or by default."""
        return self.fused or job.optimizer.fuses(accelerators=accelerators)

    def held_bytes(self, job: Job) -> int:
        """Return the bytes of a number of the weights, gradients and optimizer state."""
        if self.precision_for(job) == "fp64":
            return 8
        # precision bf16 is autocast: the parameters stay in their own type
        return 2 if job.model.dtype == "bf16" and job.quantize is None else 4

    def for_job(self, job: Job) -> Plan:
        """Return the plan with the job's `gradient_accumulation_steps` as microbatches.

        A plan that sets more than one microbatch is returned unchanged.
        """
        return replace(self, microbatches=job.gradient_accumulation_steps) if self.microbatches == 1 else self

    def threads_for(self, host: Host, local_ranks: int) -> int:
        """Return the number of compute threads of each rank on a host with `local_ranks` ranks."""
        return self.threads or max(1, host.physical_cores // local_ranks)


def threads_on(cluster: Cluster, plan: Plan) -> int:
    """Return the number of torch threads of each rank, equal on all hosts."""
    if cluster.emulate is not None:  # all hosts share this machine's cores
        return plan.threads_for(cluster.hosts[0], plan.ranks)
    counts = zip(cluster.hosts, cluster.ranks_per_host(plan.ranks), strict=True)
    return min(plan.threads_for(host, count) for host, count in counts if count)


def cores_of(local_rank: int, local_ranks: int, host: Host) -> list[int]:
    """Return the ids of the cores to which a rank is pinned.

    The first hyper-thread of each physical core comes first. The cores are a contiguous part of those that this process
    may use. Ranks share a physical core only if there are more ranks than physical cores, and a logical core only if
    there are more ranks than logical cores. CPU time limits of control groups are ignored.
    """
    physical = host.affinity or tuple((core,) for core in range(host.cores))
    if local_ranks <= len(physical):
        own = _part(physical, local_rank, local_ranks)
        return [group[0] for group in own] + [core for group in own for core in group[1:]]
    logical = [core for group in physical for core in group]
    if local_ranks <= len(logical):
        return list(_part(logical, local_rank, local_ranks))
    return [logical[local_rank % len(logical)]]


def _part(whole: Sequence[T], index: int, parts: int) -> Sequence[T]:
    return whole[len(whole) * index // parts : len(whole) * (index + 1) // parts]


def _problem_of_key(key: str, equals: str, known: dict[str, Any]) -> PlanProblem | None:
    if key in known:
        return PlanProblem("plan.key_twice", "{where}{key} is given twice", key=key)
    if key in ("device", "backend"):
        return PlanProblem(
            "plan.key_of_devices",
            '{where}unknown key "{key}": leave it out. {devices}',
            key=key,
            devices=devices_of_ranks(),
        )
    if key not in _KINDS:
        return PlanProblem(
            "plan.unknown_key", '{where}unknown key "{key}". {hint}', key=key, hint=nearest(key, [*_KINDS])
        )
    if not equals:
        example = f"{key}={_KINDS[key].example}"
        return PlanProblem(
            "plan.key_without_value", "{where}{key} needs a value, e.g. {example}", key=key, example=example
        )
    return None


def _text(value: Any) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def on_devices(base: Plan, devices: int, cluster: Cluster) -> Plan:
    """Adapt a base plan to `devices` devices.

    Without GPUs, each device is one core with one thread. If the number of devices is not a multiple of the ranks in a
    replica, every device holds a whole replica.
    """
    threads = base.threads if cluster.has_accelerators else 1
    if devices % (base.ranks // base.dp) == 0:
        return replace(base, dp=devices // (base.ranks // base.dp), threads=threads)
    parts = 1 if base.pp > 1 else base.microbatches  # the microbatches of a pipeline keep its stages busy
    whole = {key: getattr(Plan, key) for key in (*DEGREES, *MEANT_FOR)}
    return replace(base, **(whole | {"dp": devices, "threads": threads, "microbatches": parts}))


def spelled_out(plan: Plan, cluster: Cluster) -> Plan:
    """Return the plan as `paceline train` runs it, with explicit threads on CPUs."""
    if cluster.has_accelerators:
        return plan
    return replace(plan, threads=plan.threads_for(cluster.hosts[0], plan.ranks))
