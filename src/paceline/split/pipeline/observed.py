"""Observations in one forward pass of model code that limits how it can be divided."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn

from paceline.errors import PlanError


@dataclass
class Observed:
    """Observations of one forward pass; they stay even if it fails.

    Attributes:
        transformed: modules called within a transform of `torch.func` (vmap, grad).
        substituted: modules called with other tensors in place of their parameters (`torch.func.functional_call`).
        direct: modules whose `forward` is called without `__call__`, past all hooks.
        written: parameters that the forward pass changes, each with the operation.
        differentiates: True if the forward pass runs autograd (a gradient penalty, forces from energies).
        writes_input: True if the batch is changed in place.
        checkpointed: start and end times of the model's own activation checkpoints, on the trace's clock.
        reentrant: True if some of them are re-entrant.
        functions: start and end times of the forward passes of `torch.autograd.Function`s.
        keeps: (module, attribute) of lists and dictionaries in which modules keep tensors that depend on parameters.
        changes_attributes: True if modules change numbers or strings of their own, such as a counter.
    """

    transformed: set[str] = field(default_factory=set)
    substituted: set[str] = field(default_factory=set)
    direct: set[str] = field(default_factory=set)
    written: dict[str, str] = field(default_factory=dict)
    differentiates: bool = False
    writes_input: bool = False
    checkpointed: list[tuple[int, int]] = field(default_factory=list)
    reentrant: bool = False
    functions: list[tuple[int, int]] = field(default_factory=list)
    keeps: list[tuple[str, str]] = field(default_factory=list)
    changes_attributes: bool = False

    @contextmanager
    def of_autograd_and_checkpoints(self, clock: Callable[[], int]) -> Iterator[None]:
        """Record calls of autograd and activation checkpoints within this context."""
        autograd: Any = torch.autograd
        engine, generator = autograd._engine_run_backward, checkpointing._checkpoint_without_reentrant_generator

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            self.differentiates = True
            return engine(*args, **kwargs)

        def without_reentrant(*args: Any, **kwargs: Any) -> Iterator[None]:
            started = clock()
            yield from generator(*args, **kwargs)
            self.checkpointed.append((started, clock()))

        function = autograd.Function.__dict__["apply"]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            started = clock()
            try:
                return function.__get__(None, cls)(*args, **kwargs)
            finally:
                self.functions.append((started, clock()))

        def note() -> None:
            self.reentrant = True

        with ExitStack() as stack:
            stack.callback(setattr, autograd, "_engine_run_backward", engine)
            stack.callback(setattr, checkpointing, "_checkpoint_without_reentrant_generator", generator)
            stack.callback(setattr, autograd.Function, "apply", function)
            autograd._engine_run_backward = run_backward
            autograd.Function.apply = classmethod(apply)
            checkpointing._checkpoint_without_reentrant_generator = without_reentrant
            stack.enter_context(without_reentrant_checkpoints(note))
            yield


@contextmanager
def without_reentrant_checkpoints(note: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let re-entrant checkpoints run as the other kind, which computes the same.

    The re-entrant kind hides the graph of autograd, so that a tensor received from another stage could not be found in
    it. As with the re-entrant kind, nothing has a gradient where no input has one.
    """
    original = checkpointing.CheckpointFunction

    class NotReentrant:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            note()
            if not any(isinstance(a, Tensor) and a.requires_grad for a in args):
                with torch.no_grad():
                    return function(*args)
            return checkpointing.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)

    checkpointing.CheckpointFunction = NotReentrant  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        checkpointing.CheckpointFunction = original  # type: ignore[misc]


def in_transform() -> bool:
    """True within a transform of `torch.func`."""
    return torch._C._functorch.maybe_current_level() is not None


IN_TRANSFORM = (
    "pp: the model calls its modules within a transform of torch.func (vmap, grad), whose tensors cannot be sent from "
    "stage to stage: pp=1 (fsdp divides such a model)."
)


def refuse_unsupported_code(observed: Observed) -> None:
    """Refuse a model whose forward pass cannot be computed in stages, wherever they begin.

    Raises:
        PlanError: it runs autograd itself, or changes parameters.
    """
    if observed.differentiates:
        raise PlanError(
            "pp: the model's forward pass runs autograd itself (torch.autograd.grad or backward), which would have to "
            "go back through other stages: pp=1 (fsdp divides such a model)."
        )
    for name, operation in observed.written.items():
        # the backward pass reads no weight of an embedding
        if not operation.startswith("aten.embedding_renorm_"):
            raise PlanError(
                f"pp: the model's forward pass changes its parameter {name} ({operation}), and other microbatches in "
                "flight still need it as it was: change it after the optimizer's step instead, or pp=1."
            )


def can_be_exported(model: nn.Module, observed: Observed) -> bool:
    """True if a `torch.export` graph can replace the model's code.

    Such a graph has no backward hooks and changes no module attributes.
    """
    if observed.transformed or observed.substituted or observed.keeps or observed.changes_attributes:
        return False
    return not any(m._backward_hooks or m._backward_pre_hooks for m in model.modules())
