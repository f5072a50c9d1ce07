"""The optimizer of a job and its parameter groups."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from math import prod
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, cast

from pydantic import (
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from paceline.errors import InvalidValue, JobError
from paceline.job.parameters import ModelNames, Names, Patterns, is_dense, matching
from paceline.job.quantize import quantized_row_bytes
from paceline.job.spec import Args, Spec, check_call, load_object, resolve_import_path
from paceline.text import nearest

if TYPE_CHECKING:
    import torch

    from paceline.job.zoo.optimizer_trials import Scope, StateTried


class GroupSpec(Spec):
    """A group of parameters with its own settings: `{match: ["*.bias"], weight_decay: 0, lr: 0.001}`.

    Every key except `match` is an argument of the optimizer and applies only to the matching parameters.
    """

    model_config = ConfigDict(extra="allow")
    match: Patterns = Field(min_length=1)
    lr: float | None = Field(None, gt=0)
    weight_decay: float | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _sets_something(self) -> GroupSpec:
        if not self.settings:
            raise InvalidValue(
                "optimizer.empty_group",
                "the group has no settings. Give it a key of the optimizer, e.g. lr or weight_decay.",
            )
        return self

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments of the group."""
        return _as_arguments(self.model_dump(exclude={"match"}, exclude_defaults=True))


class AdamWSpec(Spec):
    """AdamW for the parameters that Muon does not update: `{lr: 0.0003, match: [embed, head]}`.

    Without `match`, these are embeddings, positions, the output layer and all parameters without matrices. With
    `match`, they are the matching parameters and those without matrices.
    """

    lr: float | None = Field(None, gt=0)  # default: the rate of the matrices
    weight_decay: float | None = Field(None, ge=0)  # default: the decay of the matrices
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    match: Patterns = ()


class OptimizerSpec(Spec):
    """The optimizer of a job: a short name, a torch class, or an import path.

    Examples are `optimizer: adamw`, `{name: RMSprop, lr: 0.01, args: {alpha: 0.9}}` and `{name: pkg.mod:Class, lr:
    0.1}`.

    LARS (You et al., 2017, arXiv:1708.03888) and LAMB (You et al., 2020, arXiv:1904.00962) are for large batches:
    they scale each layer's step by the ratio of its weight norm to its update norm.

    `muon` updates the matrices of hidden layers with Muon and all other parameters with AdamW.
    """

    short: ClassVar[str | None] = "name"
    name: str  # sgd, adam, adamw, lars, lamb, muon; a class of torch.optim; or an import path
    lr: float = Field(default=cast("float", None), gt=0)  # default 0.001, or the own default of a class of torch.optim
    weight_decay: float = Field(0.0, ge=0)
    momentum: float = Field(0.0, ge=0, lt=1)  # used by sgd, lars and muon (0.95)
    nesterov: bool = False  # used by sgd and muon (true)
    betas: tuple[float, float] = (0.9, 0.999)  # used by adam, adamw and lamb
    eps: float = Field(1e-8, gt=0)
    trust: float = Field(1e-3, gt=0)  # trust coefficient of lars
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"  # muon: scale of lr by a matrix's shape
    adamw: AdamWSpec = AdamWSpec()  # muon: settings of all other parameters
    args: Args = Field(default_factory=dict)  # further arguments of the class
    groups: tuple[GroupSpec, ...] = ()
    no_decay: Patterns = ()  # parameters without weight decay, in any group
    state: Literal["bf16", "int8"] | None = None  # adam and adamw: type of the moments; None: the parameter's type

    @model_validator(mode="before")
    @classmethod
    def _gather_arguments(cls, value: Any) -> Any:
        """Set the default learning rate. For a class, move all other arguments into `args`."""
        value = {"name": value} if isinstance(value, str) else value
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return value
        name, given = value["name"], dict(value)
        if name not in _SHORT and isinstance(args := given.get("args", {}), dict):
            keys = [key for key in _ARGUMENTS if key in given]
            for key in [key for key in (*keys, "lr") if key in args and key in given]:
                raise InvalidValue("optimizer.key_twice", "{key} is given twice, once in args", key=key)
            given["args"] = args | {key: given.pop(key) for key in keys}
            if "lr" in args:
                given |= {"lr": args["lr"], "args": {k: v for k, v in given["args"].items() if k != "lr"}}
        if name == "muon":
            given = {"momentum": 0.95, "nesterov": given.get("momentum") != 0} | given
        if given.get("lr") is None:
            if ":" in name:
                raise InvalidValue(
                    "optimizer.no_learning_rate",
                    "the optimizer {name} needs a learning rate, for example lr: 0.001",
                    name=name,
                )
            given["lr"] = _TORCH.get(name, 1e-3)
        return given

    @model_serializer(mode="wrap")
    def _write(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit the fields of short names if the optimizer is a class.

        The class then keeps its own defaults.
        """
        values: dict[str, Any] = write(self)
        unused = () if self.has_short_name else (*_ARGUMENTS, "trust")
        unused = unused if self.name == "muon" else (*unused, *_OF_MUON)
        return {key: value for key, value in values.items() if key not in unused}

    @field_validator("name")
    @classmethod
    def _known(cls, value: str, info: ValidationInfo) -> str:
        if ":" in value:
            return resolve_import_path(value, info.context)
        if value not in _SHORT and value not in _TORCH:
            raise InvalidValue(
                "optimizer.unknown",
                'unknown optimizer "{name}". {hint}',
                name=value,
                hint=nearest(value, (*_SHORT, *_TORCH)),
            )
        return value

    @model_validator(mode="after")
    def _takes_what_is_given(self) -> OptimizerSpec:
        if self.name in _SHORT:
            kind = _SHORT[self.name]
            refuse_unused(self, self.name, (*kind.options, *_OF_ALL, *(("adamw",) if self.name == "muon" else ())))
            if self.nesterov and not self.momentum:
                raise InvalidValue(
                    "optimizer.nesterov_without_momentum",
                    "nesterov needs a momentum, e.g. {{name: sgd, lr: 0.1, momentum: 0.9, nesterov: true}}",
                )
            if twice := [key for key in self.args if key in kind.options]:
                raise InvalidValue(
                    "optimizer.key_in_args",
                    "{key} is a key of {name}. Set it outside of args.",
                    key=twice[0],
                    name=self.name,
                )
        if self.state is not None and self.name not in ("adam", "adamw"):
            raise InvalidValue(
                "optimizer.state_of_other",
                "state: {state} is supported by adam and adamw, not by {name}. Use adamw, or leave out state.",
                state=self.state,
                name=self.name,
            )
        if self.state is not None and self.args:
            raise InvalidValue(
                "optimizer.state_with_args",
                "with state: {state}, {name} does not support args. Leave out args or state.",
                state=self.state,
                name=self.name,
            )
        if self.name != "muon" and (given := sorted(self.model_fields_set.intersection(_OF_MUON))):
            raise InvalidValue(
                "optimizer.key_of_muon",
                "{key} is a key of muon, but the optimizer is {name}. Use muon, or leave out {key}.",
                key=given[0],
                name=self.name,
            )
        if self.name == "muon" and self.adjust_lr_fn == "original" and self.adamw.lr is None:
            raise InvalidValue(
                "optimizer.adamw_without_rate",
                "with adjust_lr_fn: original, Muon and AdamW need learning rates of their own. Set adamw.lr, e.g. "
                "{{name: muon, lr: 0.02, adjust_lr_fn: original, adamw: {{lr: 0.0003}}}}, or leave out adjust_lr_fn.",
            )
        for betas in (self.betas, self.adamw.betas):
            if not all(0 <= beta < 1 for beta in betas):
                raise InvalidValue(
                    "optimizer.betas", "betas should be at least 0 and less than 1, got {betas}", betas=betas
                )
        return self

    @property
    def has_short_name(self) -> bool:
        """True for sgd, adam, adamw, lars, lamb and muon."""
        return self.name in _SHORT

    # Scope of an update

    @property
    def scope(self) -> Scope:
        """Return the scope of an update; a trial determines it if it is unknown."""
        if known := self._known_without_torch:
            return known.scope
        from paceline.job.zoo.optimizer_trials import scope_of

        return _tried(self, scope_of)  # type: ignore[no-any-return]

    @property
    def _known_without_torch(self) -> _Optimizer | None:
        """Return the known properties of the optimizer; None if a trial must determine them."""
        return _SHORT[self.name] if self.has_short_name and not self.args else None

    @property
    def steps_on_parts(self) -> bool:
        """Return True if ranks that hold parts of parameters can take the step together."""
        return self.has_short_name

    @property
    def has_fused_step(self) -> bool:
        """Return True if torch has a fused step and the job selects no other implementation."""
        return self.state is None and self.name.lower() in FUSED and not self.selects_step

    @property
    def selects_step(self) -> bool:
        """Return True if `args` or a group select an implementation of torch's step."""
        return any({"fused", "foreach", "differentiable"} & own.keys() for own in self._all_settings)

    def fuses(self, *, accelerators: bool) -> bool:
        """Return True if a job takes torch's fused step by default.

        Adam, AdamW and Adagrad fuse on every device. SGD fuses only on accelerators, because its fused step is no
        faster on CPUs, and only without momentum: torch 2.13's fused step with momentum needs the first gradients of
        all parameters in the same step.
        """
        if not self.has_fused_step:
            return False
        has_momentum = self.momentum or any(own.get("momentum") for own in self._all_settings)
        return self.name.lower() != "sgd" or (accelerators and not has_momentum)

    @property
    def _all_settings(self) -> list[dict[str, Any]]:
        return [self.args, *(group.settings for group in self.groups)]

    @property
    def state_tensors(self) -> float:
        """Return the number of state tensors that the optimizer keeps for a float32 matrix.

        Only tensors with the shape of the matrix count. A tensor of a smaller type counts as a fraction.
        """
        if self.state is not None:
            return 2 * (2 if self.state == "bf16" else quantized_row_bytes("int8", 64) / 64) / 4
        if known := self._known_without_torch:
            return float(bool(self.momentum) if self.name == "sgd" else known.kept)
        tensors = self._state(2).tensors
        return sum((kept.element_bytes or 4) / 4 for kept in tensors if kept.dims == (0, 1))

    def state_bytes(self, shape: Sequence[int], element_bytes: int, *, matrix: bool = True) -> int:
        """Return the bytes that the optimizer keeps for a parameter.

        Args:
            matrix: for Muon, whether the parameter is one of the matrices that Muon updates.
        """
        if self.name == "muon":
            whole = prod(shape) * element_bytes
            return whole if matrix else OptimizerSpec(name="adamw").state_bytes(shape, element_bytes)
        if self.state == "int8" and len(shape) > 1:
            return 4 + 2 * prod(shape[:-1]) * quantized_row_bytes("int8", shape[-1])
        return sum(kept.bytes(shape, element_bytes) for kept in self._state(len(shape)).tensors)

    def refusal(self, dims: int) -> str:
        """Return why the optimizer rejects parameters with this number of dimensions; "" if it accepts them."""
        return self._state(dims).refused

    def _state(self, dims: int) -> StateTried:
        from paceline.job.zoo.optimizer_trials import state_of

        return _tried(self, state_of, dims)  # type: ignore[no-any-return]

    # Building

    def build(
        self,
        parameters: Mapping[str, torch.nn.Parameter] | Iterable[torch.nn.Parameter],
        *,
        names: Names | None = None,
        fused: bool = False,
    ) -> torch.optim.Optimizer:
        """Build the optimizer of a model's trainable parameters.

        Muon updates the matrices of `names`; without names, it updates all 2-D parameters. Weight decay applies to all
        parameters, but LARS and LAMB exempt parameters with fewer than two dimensions. Every rank has the same groups;
        if a rank holds only a part of the model, some groups may be empty. The first group contains the parameters
        that no other group matches.

        Args:
            parameters: this rank's parameters by name; the names may be missing if the job has no groups.
            names: names of the whole model's parameters; None if this rank has all parameters.
            fused: whether to use torch's fused step, if torch has one for the device and dtype of these parameters.
                A group with a parameter whose memory has gaps or overlaps is never fused.

        Raises:
            JobError: no parameter is trainable, or the class rejects the arguments.
        """
        named = parameters if isinstance(parameters, Mapping) else {str(n): p for n, p in enumerate(parameters)}
        trained = {name: p for name, p in named.items() if p.requires_grad}
        if not trained and (names is None or names.keys() <= named.keys()):  # true only if the whole model has none
            raise JobError(
                "model.no_parameters", "the model has no trainable parameters: requires_grad is False for all of them"
            )
        kind, options = self._class(), self._options()
        if self.has_fused_step:
            from paceline.device import has_fused_optimizers

            has_fused = all(p.is_floating_point() and has_fused_optimizers(p.device.type) for p in trained.values())
            options["fused"] = True if fused and has_fused else None
        groups = [
            {"params": [trained[name] for name in held if name in trained], **settings}
            for settings, held in self.groups_of(names if names is not None else _names_of_tensors(named))
        ]
        optimizer: torch.optim.Optimizer = _made(self.name, kind, groups, options)
        for group in optimizer.param_groups:
            group[BASE_LR] = group.get("lr", self.lr)
            if group.get("fused") and not all(is_dense(p) for p in group["params"]):
                group["fused"] = None
        return optimizer

    def groups_of(self, names: Names) -> list[tuple[dict[str, Any], list[str]]]:
        """Return settings and parameter names of each group; the first has the unmatched parameters.

        Raises:
            JobError: a pattern matches no parameter, or two groups match the same parameter.
        """
        owner: dict[str, int] = {}
        for number, group in enumerate(self.groups, 1):
            for name in matching("optimizer.groups", group.match, names):
                if name in owner:
                    both = f"{_written(self.groups[owner[name] - 1].match)} and {_written(group.match)}"
                    raise JobError(
                        "optimizer.groups_overlap",
                        "optimizer.groups: two groups, {groups}, match {name}. Change the patterns so that only "
                        "one of them matches.",
                        groups=both,
                        name=name,
                    )
                owner[name] = number
        without = set(matching("optimizer.no_decay", self.no_decay, names))
        others = self.beside_matrices(names)
        found: dict[tuple[int, bool, bool], list[str]] = {(0, False, False): []}
        for name in names:
            found.setdefault((owner.get(name, 0), name in without, name in others), []).append(name)
        return [
            (
                (self._of_adamw if by_adamw else {})
                | (self.groups[n - 1].settings if n else {})
                | ({"weight_decay": 0.0} if kept else {}),
                held,
            )
            for (n, kept, by_adamw), held in sorted(found.items())
        ]

    def beside_matrices(self, names: Names) -> set[str]:
        """Return the parameters that AdamW updates beside Muon; none for other optimizers."""
        if self.name != "muon" or not isinstance(names, ModelNames):
            return set()
        matched = set(matching("optimizer.adamw.match", self.adamw.match, names))
        return matched | (names.keys() - (names.shaped if self.adamw.match else names.matrices))

    @property
    def _of_adamw(self) -> dict[str, Any]:
        own = self.adamw.model_dump(exclude={"match"}, exclude_none=True)
        return _as_arguments(own) | {"matrices": False}

    def _class(self) -> type[torch.optim.Optimizer]:
        import torch

        from paceline.job.zoo.optimizer_trials import check_step

        if self.name in _SHORT:
            path = _SHORT[self.name].path if self.state is None else "paceline.job.zoo.low_precision:LowPrecisionAdam"
            return resolve_name(path)  # type: ignore[no-any-return]
        found = load_object(self.name if ":" in self.name else f"torch.optim:{self.name}")
        if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
            raise JobError(
                "optimizer.not_an_optimizer",
                "{name} is not an optimizer class. A job needs a torch.optim.Optimizer.",
                name=self.name,
            )
        check_step(self.name, found)
        return found

    def _options(self) -> dict[str, Any]:
        own = _SHORT[self.name].options if self.name in _SHORT else ("lr",)
        low = {} if self.state is None else {"state": self.state, "decoupled": self.name == "adamw"}
        return {option: getattr(self, option) for option in own} | low | _as_arguments(self.args)


FUSED = ("sgd", "adam", "adamw", "adagrad")  # optimizers of torch.optim that have a fused step
BASE_LR = "base_lr"  # the group's learning rate before a schedule changes it


def _made(
    name: str, kind: type[torch.optim.Optimizer], groups: list[dict[str, Any]], options: dict[str, Any]
) -> torch.optim.Optimizer:
    check_call(name, kind, groups, **options)
    known = inspect.signature(kind).parameters.keys() - {"params"}
    for key in dict.fromkeys(key for group in groups for key in group if key != "params" and key not in known):
        raise JobError(
            "optimizer.group_argument_unknown",
            'optimizer.groups: {name} has no argument "{argument}". {hint}',
            name=name,
            argument=key,
            hint=nearest(key, sorted(known)),
        )
    try:
        return kind(groups, **options)
    except (TypeError, ValueError) as error:
        raise JobError("optimizer.args_refused", "optimizer {name}: {error}", name=name, error=error) from error


def _names_of_tensors(named: Mapping[str, torch.nn.Parameter]) -> ModelNames:
    matrices = [name for name, p in named.items() if p.dim() == 2]
    return ModelNames({name: (name,) for name in named}, matrices, matrices)


@cache
def _tried_by_json(text: str, trial: Any, *args: Any) -> Any:
    spec = OptimizerSpec.model_validate_json(text)
    return trial(spec.build, *args)


def _tried(spec: OptimizerSpec, trial: Any, *args: Any) -> Any:
    plain = spec.model_copy(update={"groups": (), "no_decay": ()})
    try:
        return _tried_by_json(plain.model_dump_json(), trial, *args)
    except JobError as error:
        raise (
            error
            if spec.name in str(error)
            else JobError("optimizer.not_made", "optimizer {name}: {error}", name=spec.name, error=error)
        ) from error


def _as_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values from a file to Python arguments; lists become tuples."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _written(patterns: Iterable[str]) -> str:
    return f"[{', '.join(patterns)}]"


class _Optimizer(NamedTuple):
    """The class behind a short name, and properties that are known without importing torch.

    Attributes:
        options: arguments of the class that are keys of the job's `optimizer` section.
        kept: number of state tensors per parameter; sgd without momentum has none.
        scope: scope of an update, see `Scope`.
    """

    path: str
    options: tuple[str, ...]
    kept: int
    scope: Scope


_COMMON = ("lr", "weight_decay")
_ADAM = (*_COMMON, "betas", "eps")
_OF_ALL = ("args", "groups", "no_decay", "state")
_OF_MUON = ("adjust_lr_fn", "adamw")
_ARGUMENTS = ("weight_decay", "momentum", "nesterov", "betas", "eps")
_SHORT = {
    "sgd": _Optimizer("torch.optim:SGD", (*_COMMON, "momentum", "nesterov"), 1, "element"),
    "adam": _Optimizer("torch.optim:Adam", _ADAM, 2, "element"),
    "adamw": _Optimizer("torch.optim:AdamW", _ADAM, 2, "element"),
    "lars": _Optimizer("paceline.job.zoo.optimizers:LARS", (*_COMMON, "momentum", "trust"), 1, "parameter"),
    "lamb": _Optimizer("paceline.job.zoo.optimizers:LAMB", _ADAM, 2, "parameter"),
    "muon": _Optimizer(
        "paceline.job.zoo.muon:Muon", (*_COMMON, "momentum", "nesterov", "adjust_lr_fn"), 1, "parameter"
    ),
}
# torch's optimizer classes and their default learning rates, listed here because importing torch is slow
_TORCH = {
    "ASGD": 0.01,
    "Adadelta": 1.0,
    "Adafactor": 0.01,
    "Adagrad": 0.01,
    "Adam": 0.001,
    "AdamW": 0.001,
    "Adamax": 0.002,
    "LBFGS": 1.0,
    "Muon": 0.001,
    "NAdam": 0.002,
    "RAdam": 0.001,
    "RMSprop": 0.01,
    "Rprop": 0.01,
    "SGD": 0.001,
    "SparseAdam": 0.001,
}


def refuse_unused(spec: Spec, name: str, keys: tuple[str, ...]) -> None:
    """Raise an error for keys that the chosen type would ignore."""
    unused = [key for key in spec.model_dump(exclude_defaults=True) if key not in ("name", *keys)]
    if unused:
        raise InvalidValue(
            "optimizer.argument_unknown",
            "{name} does not support {unused}; it supports {keys}",
            name=name,
            unused=" or ".join(unused),
            keys=list(keys),
        )
