"""Descriptions of sync rules, and the values of `sync=` in a plan. No rule is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from paceline.errors import PlanError
from paceline.extensions import ExtensionPoint
from paceline.planning.arguments import Argument, between, converted, one_of, pieces, whole
from paceline.planning.codec_info import CompressSpec

_ALGORITHMS = "paceline.comm.allreduce"
# import path of each all-reduce algorithm; `auto` takes one of them
ALGORITHMS = {
    "flat": f"{_ALGORITHMS}.flat:FlatAllReduce",
    "ring": f"{_ALGORITHMS}.ring:RingAllReduce",
    "tree": f"{_ALGORITHMS}.tree:TreeAllReduce",
    "hierarchical": f"{_ALGORITHMS}.hierarchical:HierarchicalAllReduce",
}


class ServerProcesses(NamedTuple):
    """Servers that share the sums or the parameters.

    Attributes:
        parts: number of servers, each with a part of the numbers.
        each: number of processes with the same part: one, or a server and its backup.
    """

    parts: int
    each: int

    @classmethod
    def of(cls, sync: str) -> ServerProcesses:
        """Servers that a plan's `sync=` asks for. Raises PlanError if its rule has none."""
        found = SyncSpec.parse(sync).servers
        if found is None:
            raise PlanError(f"sync={sync} has no servers")
        return found

    @property
    def processes(self) -> int:
        """Number of all processes."""
        return self.parts * self.each


@dataclass(frozen=True)
class SyncInfo:
    """Description of a sync rule, readable without torch.

    Planner, checks and engine ask it, never for the rule's name.

    Attributes:
        rule: import path of the class, which is called with its arguments.
        exact: True if every update uses the mean of all replicas' gradients, up to rounding, where nothing is
            compressed.
        every_step: True if it acts in every step, after which all replicas hold the same parameters.
        sends: gradients; parameters; or deltas, which is how far parameters moved.
        arguments: name to type, default and limits. The value after the colon is under "", and comes first.
        check: problem with the arguments together, or None.
        period: the argument that is the number of steps between two agreements; None where it agrees in every step.
        compresses: True if it codes what it sends by the plan's `compress=`, which is then an argument.
        codes_alone: True if each rank's numbers are coded by themselves, which codecs of sums cannot do.
        several_optimizers: True if it heeds `replica.backward.only`, for models that several optimizers train.
        needs_inner: True if it uses `replica.inner`, the ranks of its own replica, which costs a process group.
        takes_rows: True if it takes sparse gradients: only the rows that a batch looked up (see `sync/rows.py`).
        served: True if servers own the parameters: workers take microbatches of the global batches as they can, and no
            collective joins them between step boundaries.
        run_rank: import path of the function that each rank of a served run calls.
        servers: number of servers for the arguments; None if replicas sum by themselves.
        varies: what of this description is otherwise for some arguments, by field; asked with all of them.
    """

    rule: str
    exact: bool
    every_step: bool
    sends: Literal["gradients", "parameters", "deltas"]
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    check: Callable[[Mapping[str, Any]], str | None] = lambda arguments: None
    period: str | None = None
    compresses: bool = False
    codes_alone: bool = False
    several_optimizers: bool = False
    needs_inner: bool = True
    takes_rows: bool = False
    served: bool = False
    run_rank: str = ""
    servers: Callable[[Mapping[str, Any]], ServerProcesses | None] = lambda arguments: None
    varies: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda arguments: {}

    @property
    def local_steps(self) -> bool:
        """True if replicas step by their own gradients, and so differ between agreements."""
        return not self.every_step or self.sends != "gradients"


def _check_diloco(arguments: Mapping[str, Any]) -> str | None:
    """Check the fragments against the period.

    Each fragment is sent once in a period, and has arrived before it is sent again.
    """
    period, fragments, overlap = arguments[""], arguments["fragments"], arguments["overlap"]
    if fragments > 1 and fragments > period:
        return f"{fragments} fragments are sent at different steps of a period of {period}: fragments={period} at most"
    if overlap and overlap >= period:
        return (
            f"a fragment must have arrived before it is sent again after {period} steps: overlap={period - 1} at most"
        )
    return None


OUTER_LR = Argument(between(0, 10, open_below=True), 0.7, "the outer learning rate, above 0")
OUTER_MOMENTUM = Argument(between(0, 0.9999), 0.9, "the outer Nesterov momentum, from 0 to below 1")
_PERIOD = Argument(whole(1), None, "the number of steps between agreements, at least 1")
RULES = ExtensionPoint(
    "rule",
    "paceline.sync_rules",
    SyncInfo,
    {
        "averaging": SyncInfo(
            "paceline.sync.averaging:Averaging",
            exact=True,
            every_step=True,
            sends="gradients",
            several_optimizers=True,
            needs_inner=False,
        ),
        "allreduce": SyncInfo(
            "paceline.sync.allreduce:AllReduce",
            exact=True,
            every_step=True,
            sends="gradients",
            arguments={"": Argument(one_of(("auto", *ALGORITHMS)), "auto", f"one of auto, {', '.join(ALGORITHMS)}")},
            compresses=True,
            several_optimizers=True,
            needs_inner=False,
            takes_rows=True,
        ),
        "local": SyncInfo(
            "paceline.sync.local:LocalSGD",
            exact=False,
            every_step=False,
            sends="parameters",
            arguments={"": _PERIOD},
            period="",
            several_optimizers=True,
        ),
        "diloco": SyncInfo(
            "paceline.sync.diloco:DiLoCo",
            exact=False,
            every_step=False,
            sends="deltas",
            arguments={
                "": _PERIOD,
                "fragments": Argument(
                    whole(1),
                    1,
                    "into how many parts the model is divided, which are sent at different steps, at least 1",
                ),
                "overlap": Argument(
                    whole(0), 0, "for how many steps training goes on while a fragment travels, at least 0"
                ),
                "lr": OUTER_LR,
                "momentum": OUTER_MOMENTUM,
            },
            check=_check_diloco,
            period="",
            compresses=True,
            several_optimizers=True,
        ),
    },
    PlanError,
)


@dataclass(frozen=True)
class SyncSpec:
    """`NAME[:VALUE][,KEY=VALUE…]`, e.g. `allreduce:ring`, `local:8`, `diloco:30,fragments=4,overlap=5`.

    Attributes:
        name: of a built-in rule, or of one that an installed package registers under the entry point
            `paceline.sync_rules`.
        arguments: the rule's own, converted and with their defaults; the value after the colon is under "".
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> SyncSpec:
        """Read the value of `sync=`.

        Raises:
            PlanError: an unknown rule or argument (with the nearest), or a value that it does not take.
        """
        name, given = pieces("sync", text)
        try:
            info = RULES[name]
        except PlanError as error:
            raise PlanError(f"sync={text}: {error}") from None
        arguments = converted(f"sync={text}", name, info.arguments, given)
        if problem := info.check(arguments):
            raise PlanError(f"sync={text}: {problem}")
        return cls(name, arguments)

    @property
    def info(self) -> SyncInfo:
        """Description of the rule with these arguments."""
        info = RULES[self.name]
        changes = info.varies(self.arguments)
        return replace(info, **changes) if changes else info

    @property
    def servers(self) -> ServerProcesses | None:
        """Servers of the rule with these arguments, or None."""
        return self.info.servers(self.arguments)

    @property
    def period(self) -> int:
        """Steps from one agreement to the next; 1 where replicas agree in every step."""
        period = self.info.period
        return 1 if period is None else int(self.arguments[period])


def sync_info(text: str) -> SyncInfo:
    """Description of the rule that a plan's `sync=` names. Raises as `SyncSpec.parse` does."""
    return SyncSpec.parse(text).info


def problem_with(key: str, value: object) -> str | None:
    """The problem with a value of `sync` or `compress`; None if it is valid."""
    if not isinstance(value, str) or not value:
        return f'{key} is text, e.g. {key}={"allreduce:ring" if key == "sync" else "int8"}, not "{value}"'
    if key == "compress" and value in ("none", "auto"):
        return None
    try:
        (SyncSpec if key == "sync" else CompressSpec).parse(value)
    except PlanError as error:
        return str(error)
    return None
