"""The section `federate` of a job, and descriptions of rules, without importing torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, field_validator, model_validator

from paceline.errors import InvalidValue, JobError, PlanError
from paceline.extensions import ExtensionPoint
from paceline.job.job import Job
from paceline.job.spec import JobSection, Spec, load_object
from paceline.planning.sync_info import Argument, between, converted, pieces, whole

if TYPE_CHECKING:
    from paceline_federated.rules import FederatedRule


_TRIMMED = re.compile(r"trimmed:(0?\.\d+)")


class ClientsSpec(Spec):
    """Division of a data set over simulated clients: `iid`, or `{kind: dirichlet, alpha: 0.3}`.

    - `iid`: nearly equal numbers of samples, drawn at random.
    - `dirichlet`: each class is divided by shares from a Dirichlet distribution (Hsu et al., 2019, arXiv:1909.06335);
      the smaller `alpha` is, the more the clients differ. Some clients may have no samples.
    - `shards`: samples are sorted by class and divided into equal shards; each client gets `shards` of them.
    - `user`: one client per distinct value in the data set's attribute `users`, which has one value per sample.
    """

    short: ClassVar[str | None] = "kind"
    kind: Literal["iid", "dirichlet", "shards", "user"] = "iid"
    alpha: float = Field(0.5, gt=0)
    shards: int = Field(2, ge=1)

    @model_validator(mode="after")
    def _takes_what_is_given(self) -> ClientsSpec:
        for key, kind in (("alpha", "dirichlet"), ("shards", "shards")):
            if key in self.model_fields_set and self.kind != kind and getattr(self, key) != _default(ClientsSpec, key):
                raise InvalidValue(
                    "federate.partition_key",
                    "{key} belongs to kind: {kind}, but the kind of this section is {own}",
                    key=key,
                    kind=kind,
                    own=self.kind,
                )
        return self


class PrivacySpec(Spec):
    """Differential privacy of each client (McMahan et al., 2018, arXiv:1710.06963).

    The L2 norm of an update is clipped to `clip`. Gaussian noise with standard deviation `noise` × `clip` is added to
    the sum of a round's updates. ε is reported for `delta`.
    """

    clip: float = Field(gt=0)
    noise: float = Field(gt=0)
    delta: float = Field(1e-5, gt=0, lt=1)


class SecureSpec(Spec):
    """Secure aggregation of a deployment by Flower's SecAgg+.

    The server receives only sums of updates.

    Each number of an update lies within ±`clipping_range`, and is rounded to one of `quantization_range` values. A
    client's weight is its number of samples, at most `max_weight`. Each client's keys are divided into `num_shares`
    shares (by default, the number of clients in the round). `reconstruction_threshold` is the fraction of the shares
    that is enough to restore a key.
    """

    clipping_range: PositiveFloat = 8.0
    quantization_range: int = Field(2**22, ge=2**8, le=2**31)
    max_weight: int = Field(1000, ge=1, le=2**20)
    num_shares: int | None = Field(None, ge=4)
    reconstruction_threshold: float = Field(0.67, gt=0.5, le=1)


class SimulateSpec(Spec):
    """Behaviour of simulated clients.

    `drop_out` is the fraction of chosen clients that never answer. `spread` is the standard deviation of the logarithm
    of clients' speeds. Updates later than `deadline` are left out; the unit of `deadline` is the time that a typical
    client needs for a typical task. A fraction `poisoners` of the clients multiply their updates by -10.
    """

    drop_out: float = Field(0.0, ge=0, lt=1)
    spread: float = Field(0.0, ge=0, le=5)
    deadline: PositiveFloat | None = None
    poisoners: float = Field(0.0, ge=0, lt=1)


class FederateSpec(Spec):
    """Federated training of the job: `paceline federate`. A step of the job's `stop` rule then means a round."""

    rule: str = "fedavg"  # rule of the server and its clients, as in `fedprox:0.01`
    clients: int = Field(10, ge=1)  # number of simulated clients, or of nodes that a deployment waits for
    per_round: int | None = Field(None, ge=1)  # number of clients chosen per round; None: all
    local_epochs: int | None = Field(None, ge=1)  # number of passes of a client over its samples per round; default 1
    local_steps: int | None = Field(None, ge=1)  # alternatively, number of optimizer steps per round
    batch: int | None = Field(None, ge=1)  # number of samples in a client's step; None: the job's global_batch
    partition: ClientsSpec = ClientsSpec()
    weigh: Literal["samples", "equal"] = "samples"  # weighting of clients' updates
    aggregate: str = "mean"  # or median, or trimmed:SHARE, which drops this share of the values at each end
    norm_bound: PositiveFloat | None = None  # L2 bound to which updates are clipped
    compress: str = "none"  # codec of clients' updates
    compress_down: str = "none"  # codec of the weights sent to clients
    privacy: PrivacySpec | None = None
    secure: SecureSpec | None = None  # for a deployment; `secure: {}` uses the defaults
    personal: tuple[Annotated[str, Field(min_length=1)], ...] = ()  # parameters that stay local, such as "head.*"
    held_out: float = Field(0.0, ge=0, lt=1)  # fraction of each client's samples for its evaluation
    least: int = Field(1, ge=1)  # minimum number of updates for a step
    max_failures: int = Field(3, ge=1)  # number of consecutive rounds without a step that end the run
    deadline_s: PositiveFloat = 60.0  # deadline for the answer of a deployed client
    simulate: SimulateSpec = SimulateSpec()

    @field_validator("aggregate")
    @classmethod
    def _is_known(cls, text: str) -> str:
        trimmed_share(text)
        return text

    @model_validator(mode="after")
    def _fits_together(self) -> FederateSpec:
        if self.local_epochs is not None and self.local_steps is not None:
            raise InvalidValue(
                "federate.local_work_twice",
                "give either local_epochs or local_steps, because only one of them can end a client's work",
            )
        if self.per_round is not None and self.partition.kind != "user" and self.per_round > self.clients:
            raise InvalidValue(
                "federate.per_round",
                "per_round is {per_round}, but there are {clients} clients",
                per_round=self.per_round,
                clients=self.clients,
            )
        if self.least > (self.per_round or self.clients):
            raise InvalidValue(
                "federate.least",
                "least is {least}, but a round has only {per_round} clients",
                least=self.least,
                per_round=self.per_round or self.clients,
            )
        if self.privacy is not None and self.aggregate != "mean":
            raise InvalidValue(
                "federate.privacy_of_aggregate",
                "privacy needs aggregate: mean. It is not known how much {aggregate} reveals about a client.",
                aggregate=self.aggregate,
            )
        if self.privacy is not None and self.norm_bound is not None:
            raise InvalidValue(
                "federate.clip_and_bound", "privacy.clip already limits the norm of updates. Leave norm_bound out."
            )
        self._can_be_secure()
        return self

    def _can_be_secure(self) -> None:
        """Refuse settings that need individual updates, or that change masked numbers."""
        if self.secure is None:
            return
        if self.aggregate != "mean" or self.norm_bound is not None:
            key = "norm_bound" if self.norm_bound is not None else f"aggregate: {self.aggregate}"
            raise InvalidValue(
                "federate.secure_hides_updates",
                "{key} needs individual updates, but secure aggregation hides them from the server. Leave {key} "
                "out: secure.clipping_range limits each number of an update on the client",
                key=key,
            )
        if self.compress != "none":
            raise InvalidValue(
                "federate.secure_compress",
                "compress: {compress} cannot be combined with the masks of secure aggregation. Leave it out.",
                compress=self.compress,
            )

    @property
    def epochs(self) -> int:
        """Return the number of passes over a client's samples, used if `local_steps` is not set."""
        return self.local_epochs or 1


def trimmed_share(text: str) -> float | None:
    """Return the share of values that `aggregate` drops at each end.

    The share is 0 for `mean`, and None for `median`.

    Raises:
        ValueError: `aggregate` is not mean, median or trimmed:SHARE.
    """
    if text in ("mean", "median"):
        return 0.0 if text == "mean" else None
    found = _TRIMMED.fullmatch(text)
    if found is None or not 0 < float(found[1]) < 0.5:
        raise InvalidValue(
            "federate.aggregate_invalid",
            "should be mean, median or trimmed:SHARE with a share below 0.5, got {text!r}",
            text=text,
        )
    return float(found[1])


def _default(spec: type[Spec], key: str) -> Any:
    return spec.model_fields[key].default


def federate_spec(job: Job) -> FederateSpec:
    """Return the federated section of a job.

    Raises:
        JobError: the job has no such section.
    """
    found = (job.model_extra or {}).get("federate")
    if not isinstance(found, FederateSpec):
        raise JobError(
            "federate.no_section",
            'the job has no "federate" section. Add one, e.g. `federate: {{rule: fedavg, clients: 10}}`.',
        )
    return found


SECTION = JobSection(FederateSpec)


@dataclass(frozen=True)
class FederatedRuleInfo:
    """Description of a federated rule, which does not need torch.

    Attributes:
        rule: import path of the class. The class is called with the arguments as keywords.
        arguments: type, default and limits of each argument, by name. The key "" describes the value after the colon,
            which is passed as `value`.
    """

    rule: str
    arguments: Mapping[str, Argument] = field(default_factory=dict)


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
        ),
    },
    JobError,
)


@dataclass(frozen=True)
class FederatedRuleSpec:
    """`NAME[:VALUE][,KEY=VALUE…]`, e.g. `fedprox:0.01`, `fedadam,lr=0.05`.

    Attributes:
        name: name of a built-in rule, or of a rule that a package registers under the entry point
            `paceline.federated_rules`.
        arguments: converted arguments of the rule, including defaults.
    """

    name: str
    arguments: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> FederatedRuleSpec:
        """Read the value of `federate.rule`.

        Raises:
            JobError: the rule or an argument is unknown, or a value is invalid. The message suggests the nearest name.
        """
        where = f"federate.rule {text}"
        try:
            name, given = pieces("federate.rule ", text)
            arguments = converted(where, name, FEDERATED_RULES[name].arguments, given)
        except (PlanError, JobError) as error:
            told = str(error).replace("federate.rule =", "federate.rule ")
            raise JobError(
                "federate.rule_refused", "{reason}", reason=told if told.startswith(where) else f"{where}: {told}"
            ) from None
        return cls(name, {key or "value": value for key, value in arguments.items()})

    @property
    def info(self) -> FederatedRuleInfo:
        """Return the description of the rule."""
        return FEDERATED_RULES[self.name]

    def build(self) -> FederatedRule:
        """Make a new instance of the rule.

        Raises:
            JobError: the rule's class cannot be imported, or does not accept its arguments.
        """
        try:
            rule: FederatedRule = load_object(self.info.rule)(**self.arguments)
        except (TypeError, ValueError) as error:
            raise JobError(
                "federate.rule_not_made",
                "federate.rule {name}: {rule} cannot be created: {error}",
                name=self.name,
                rule=self.info.rule,
                error=error,
            ) from error
        return rule
