"""A forward pass of a model and its loss, observed part by part.

Parts are the repeated blocks, and what lies before, between and after them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from paceline.errors import PacelineError
from paceline.job.batch import Batch, target_of
from paceline.job.job import Job
from paceline.job.zoo.losses import call
from paceline.planning.model.blocks import find_blocks, mixtures
from paceline.planning.model.operations import Watcher
from paceline.planning.model.sample import tokens_of


@dataclass
class Pass:
    """A forward pass and its observations.

    Attributes:
        samples: samples in the batch.
        autocast: True for a pass in bf16.
        error: the exception that the model's code raised.
    """

    model: nn.Module
    batch: Batch
    samples: int
    autocast: bool = False
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.watcher = Watcher(self.model, 2 if self.autocast else None)
        self.seen = self.watcher.seen
        self.seen.samples, self.seen.tokens = self.samples, tokens_of(self.batch)

    def module_of(self, error: Exception) -> str:
        """The innermost module in the traceback, by its name in the model."""
        names, found = {id(module): name for name, module in self.model.named_modules()}, "the model"
        frames = error.__traceback__
        while frames is not None:
            asking = frames.tb_frame.f_locals.get("self")
            if names.get(id(asking)):
                found = f"{names[id(asking)]} ({type(asking).__name__})"
            frames = frames.tb_next
        return found

    def __enter__(self) -> Pass:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, where: Any) -> bool:
        """Keep exceptions of the user's code; raise paceline's own."""
        if not isinstance(error, Exception) or isinstance(error, PacelineError):
            return False
        self.error = error
        return True


def go_forward(forward: Pass, job: Job) -> Pass:
    """Run the model and the job's loss forward as the engine does.

    Raises:
        JobError, DataError: the loss finds a fault in the job.
    """
    model, batch = forward.model.train(), forward.batch
    loss = job.loss.build()
    _route_evenly(forward)
    with forward, ExitStack() as stack:
        stack.enter_context(_following(forward))
        stack.enter_context(forward.watcher.watching(batch))
        if forward.autocast:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        loss(call(model, batch, loss=loss), target_of(batch))
    return forward


@contextmanager
def _following(forward: Pass) -> Iterator[None]:
    """Tell the watcher when a repeated block begins and ends; each end begins another part."""
    hooks = []
    for name in find_blocks(forward.model):
        module = forward.model.get_submodule(name)
        hooks.append(module.register_forward_pre_hook(partial(_enter, forward, name), with_kwargs=True))
        hooks.append(module.register_forward_hook(partial(_leave, forward)))
    for name, module in forward.model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            hooks.append(module.register_forward_pre_hook(partial(_look_up, forward, name), with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _enter(forward: Pass, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
    forward.seen.parts.append(name)
    forward.watcher.part = len(forward.seen.parts) - 1
    forward.seen.entered[forward.watcher.part] = _numbers(forward, (args, kwargs))


def _leave(forward: Pass, module: nn.Module, args: Any, output: Any) -> None:
    forward.seen.left[forward.watcher.part] = _numbers(forward, output)
    forward.seen.parts.append("")
    forward.watcher.part = len(forward.seen.parts) - 1


def _look_up(
    forward: Pass, name: str, module: nn.Embedding | nn.EmbeddingBag, args: Any, kwargs: dict[str, Any]
) -> None:
    index = args[0] if args else kwargs["input"]
    _, _, before = forward.seen.ids.get(name, (0, 0, 0.0))
    ids = before + index.numel() / forward.samples
    forward.seen.ids[name] = module.num_embeddings, module.embedding_dim, ids


def _numbers(forward: Pass, tree: Any) -> float:
    """Elements of the first floating-point tensor, which is passed from block to block."""
    passed = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return next((forward.watcher.numbers(tensor) for tensor in passed), 0.0)


def _route_evenly(forward: Pass) -> None:
    """Route the tokens to all experts in turn, since the real routing is unknown.

    Experts of transformers are set to compute one by one.
    """
    if hasattr(forward.model, "set_experts_implementation"):
        # the kernel of the faster implementation needs values
        forward.model.set_experts_implementation("eager")  # type: ignore[operator]
    for _, module in mixtures(forward.model):
        module.forward = partial(_in_turn, forward, module.forward, module.num_experts)


def _in_turn(
    watched: Pass, forward: Callable[..., Tensor], total: int, hidden: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """Run the experts on even indices.

    The indices are real, so that the experts' code can read them, outside of the mode of tensors without values.
    """
    # another convention than that of transformers and the zoo
    if index.is_floating_point():
        return forward(hidden, index, weights)
    routed, part = watched.seen.routed, watched.watcher.part
    routed[part] = routed.get(part, 0.0) + index.numel() * hidden.shape[-1]
    with _disable_current_modes():
        even = (torch.arange(index.numel(), device="cpu") % total).view(index.shape)
        with watched.watcher.operations:
            return forward(hidden, even, weights)
