"""Descriptions of federated rules, and the value of `federate.rule` in a job. No rule is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.errors import JobError, PlanError
from paceline.extensions import ExtensionPoint
from paceline.job.spec import load_object
from paceline.planning.sync_info import Argument, between, converted, pieces, whole

if TYPE_CHECKING:
    from paceline_federated.rule import FederatedRule


@dataclass(frozen=True)
class FederatedRuleInfo:
    """Description of a federated rule, readable without torch.

    Attributes:
        rule: import path of the class, which is called with its arguments as keywords.
        arguments: name to type, default and limits. The value after the colon is under "", and is called `value`.
        asynchronous: True if the server steps by a buffer of updates instead of rounds.
    """

    rule: str
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    asynchronous: bool = False


_RULES = "paceline_federated.rules"
_RATE = "the server's learning rate, above 0 and at most 100"
_LR = {"lr": Argument(between(0, 100, open_below=True), 1.0, _RATE)}
_DECAY = between(0, 0.999999)
_ADAPTIVE = {
    "lr": Argument(between(0, 100, open_below=True), 0.01, _RATE),
    "beta1": Argument(_DECAY, 0.9, "the decay of the first moment, from 0 to below 1"),
    "beta2": Argument(_DECAY, 0.99, "the decay of the second moment, from 0 to below 1"),
    "tau": Argument(between(0, 1, open_below=True), 1e-3, "the adaptivity, above 0 and at most 1"),
}
FEDERATED_RULES = ExtensionPoint(
    "federated rule",
    "paceline.federated_rules",
    FederatedRuleInfo,
    {
        "fedavg": FederatedRuleInfo(
            f"{_RULES}:FedAvg",
            {**_LR, "momentum": Argument(between(0, 0.9999), 0.0, "the server's momentum, from 0 to below 1")},
        ),
        "fedprox": FederatedRuleInfo(
            f"{_RULES}:FedProx",
            {"": Argument(between(0, 1e6), 0.01, "the weight μ of the term that holds clients near, at least 0")},
        ),
        "fedadam": FederatedRuleInfo(f"{_RULES}:FedAdam", _ADAPTIVE),
        "fedyogi": FederatedRuleInfo(f"{_RULES}:FedYogi", _ADAPTIVE),
        "scaffold": FederatedRuleInfo(f"{_RULES}:Scaffold", _LR),
        "fedbuff": FederatedRuleInfo(
            f"{_RULES}:FedBuff",
            {"": Argument(whole(1), 10, "the number of updates of a server step, at least 1"), **_LR},
            asynchronous=True,
        ),
    },
    JobError,
)


@dataclass(frozen=True)
class FederatedRuleSpec:
    """`NAME[:VALUE][,KEY=VALUE…]`, e.g. `fedprox:0.01`, `fedadam,lr=0.05`.

    Attributes:
        name: of a built-in rule, or of one that a package registers under the entry point `paceline.federated_rules`.
        arguments: the rule's own, converted and with their defaults.
    """

    name: str
    arguments: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> FederatedRuleSpec:
        """Read the value of `federate.rule`.

        Raises:
            JobError: an unknown rule or argument (with the nearest), or a value that it does not take.
        """
        where = f"federate.rule {text}"
        try:
            name, given = pieces("federate.rule ", text)
            arguments = converted(where, name, FEDERATED_RULES[name].arguments, given)
        except (PlanError, JobError) as error:
            told = str(error).replace("federate.rule =", "federate.rule ")
            raise JobError(told if told.startswith(where) else f"{where}: {told}") from None
        return cls(name, {key or "value": value for key, value in arguments.items()})

    @property
    def info(self) -> FederatedRuleInfo:
        """Description of the rule."""
        return FEDERATED_RULES[self.name]

    def build(self) -> FederatedRule:
        """A new instance of the rule.

        Raises:
            JobError: its class cannot be imported, or does not take its arguments.
        """
        try:
            rule: FederatedRule = load_object(self.info.rule)(**self.arguments)
        except (TypeError, ValueError) as error:
            raise JobError(f"federate.rule {self.name}: {self.info.rule} cannot be made: {error}") from error
        return rule
