"""Descriptions of sync rules, and the values of `sync=` in a plan. No rule is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from paceline.errors import PlanError
from paceline.extensions import ExtensionPoint
from paceline.plans.arguments import Argument, between, converted, one_of, pieces, whole, whole_or_inf
from paceline.plans.codec_info import CompressSpec

_ALGORITHMS = "paceline.comm.allreduce"
# import path of each all-reduce algorithm; `auto` takes one of them
ALGORITHMS = {
    "flat": f"{_ALGORITHMS}.flat:FlatAllReduce",
    "ring": f"{_ALGORITHMS}.ring:RingAllReduce",
    "tree": f"{_ALGORITHMS}.tree:TreeAllReduce",
    "hierarchical": f"{_ALGORITHMS}.hierarchical:HierarchicalAllReduce",
}


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
        served: True if servers own the parameters: workers take pieces of the global batches as they can, and no
            collective joins them between borders (`training/served/`).
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


def _check_server(arguments: Mapping[str, Any]) -> str | None:
    """Check the arguments of servers against each other."""
    if arguments["period"] == 1 and (arguments["lr"], arguments["momentum"]) != (
        _OUTER_LR.default,
        _OUTER_MOMENTUM.default,
    ):
        return "lr and momentum are the outer optimizer's, which only a period of 2 or more has"
    if not arguments["staleness"] and arguments["backup"] == "off":
        return "servers keep nothing, and have no backup, but with a staleness of 1 or more"
    return None


def _variants_of_server(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Description of the server rule that pushes deltas, or waits for nobody."""
    found: dict[str, Any] = {}
    if arguments["period"] > 1:
        found |= {
            "rule": "paceline.sync.server:ServerDeltas",
            "exact": False,
            "every_step": False,
            "sends": "deltas",
            "period": "period",
            "needs_inner": True,
        }
    if arguments["staleness"]:
        found |= {
            "rule": "paceline.sync.served:ServedDeltas" if found else "paceline.sync.served:Served",
            "exact": False,
            "every_step": False,
            "served": True,
            "several_optimizers": False,
            "needs_inner": False,
        }
    return found


_OUTER_LR = Argument(between(0, 10, open_below=True), 0.7, "the outer learning rate, above 0")
_OUTER_MOMENTUM = Argument(between(0, 0.9999), 0.9, "the outer Nesterov momentum, from 0 to below 1")
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
                "lr": _OUTER_LR,
                "momentum": _OUTER_MOMENTUM,
            },
            check=_check_diloco,
            period="",
            compresses=True,
            several_optimizers=True,
        ),
        "server": SyncInfo(
            "paceline.sync.server:ServerSums",
            exact=True,
            every_step=True,
            sends="gradients",
            arguments={
                "staleness": Argument(
                    whole_or_inf, 0.0, "by how many global batches a worker may be ahead, a whole number or inf"
                ),
                "period": Argument(whole(1), 1, "the number of steps between agreements, at least 1"),
                "servers": Argument(whole(1), 1, "the number of servers that share the parameters, at least 1"),
                "lr": _OUTER_LR,
                "momentum": _OUTER_MOMENTUM,
                "backup": Argument(one_of(("on", "off")), "on", "on or off: a second process for each server"),
            },
            check=_check_server,
            compresses=True,
            codes_alone=True,
            several_optimizers=True,
            needs_inner=False,
            varies=_variants_of_server,
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
    def period(self) -> int:
        """Steps from one agreement to the next; 1 where replicas agree in every step."""
        period = self.info.period
        return 1 if period is None else int(self.arguments[period])


class ServerProcesses(NamedTuple):
    """Server processes of a run whose servers own the parameters.

    Attributes:
        parts: how many share the parameters.
        each: how many processes have the same part: one, or a server and its backup.
    """

    parts: int
    each: int

    @classmethod
    def of(cls, sync: str) -> ServerProcesses:
        """Processes that a plan's `sync=` asks for."""
        arguments = SyncSpec.parse(sync).arguments
        return cls(int(arguments["servers"]), 2 if arguments["backup"] == "on" else 1)

    @property
    def processes(self) -> int:
        """All of them."""
        return self.parts * self.each


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
