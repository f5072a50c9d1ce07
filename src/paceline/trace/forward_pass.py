"""One forward pass of a model and its loss, watched part by part: the repeated blocks, and what lies before, between and after them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from paceline.errors import PacelineError
from paceline.job.batch import Batch, target_of
from paceline.job.job import Job
from paceline.trace.blocks import find_blocks
from paceline.trace.operations import Watcher


@dataclass
class Pass:
    """A forward pass and what was seen of it.

    Attributes:
        samples: in the batch.
        autocast: whether it is one in bf16.
        parts: the name of each part of the model in the order in which the pass went through them; `""` outside of repeated blocks.
        entered: numbers that each repeated block was given.
        left: numbers that each repeated block gave on.
        error: what the model's code raised.
    """

    model: nn.Module
    batch: Batch
    samples: int
    autocast: bool = False
    parts: list[str] = field(default_factory=lambda: [""])
    entered: dict[int, float] = field(default_factory=dict)
    left: dict[int, float] = field(default_factory=dict)
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.watcher = Watcher(self.model, 2 if self.autocast else None)

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
        """Keeps what user's code raises; what paceline says of the job goes on."""
        if not isinstance(error, Exception) or isinstance(error, PacelineError):
            return False
        self.error = error
        return True


def go_forward(seen: Pass, job: Job) -> Pass:
    """Have the model and the job's loss go forward as the engine does; the pass knows what was seen, or what went wrong.

    Raises:
        JobError, DataError: the loss says what is wrong with the job.
    """
    model, batch = seen.model.train(), seen.batch
    loss = job.loss.build()
    _route_evenly(seen)
    with seen, ExitStack() as stack:
        stack.enter_context(_following(seen))
        stack.enter_context(seen.watcher.watching(batch))
        if seen.autocast:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        if isinstance(batch, (tuple, list)):
            output = model(*batch[:-1])
        else:
            output = model(**{name: part for name, part in batch.items() if name != "labels" or job.loss.name == "model"})
        loss(output, target_of(batch))
    return seen


@contextmanager
def _following(seen: Pass) -> Iterator[None]:
    """Tell the watcher when a repeated block begins and ends: what comes after it is another part."""
    hooks = []
    for name in find_blocks(seen.model):
        module = seen.model.get_submodule(name)
        hooks.append(module.register_forward_pre_hook(partial(_enter, seen, name), with_kwargs=True))
        hooks.append(module.register_forward_hook(partial(_leave, seen)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _enter(seen: Pass, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
    seen.parts.append(name)
    seen.watcher.part = len(seen.parts) - 1
    seen.entered[seen.watcher.part] = _numbers(seen, (args, kwargs))


def _leave(seen: Pass, module: nn.Module, args: Any, output: Any) -> None:
    seen.left[seen.watcher.part] = _numbers(seen, output)
    seen.parts.append("")
    seen.watcher.part = len(seen.parts) - 1


def _numbers(seen: Pass, tree: Any) -> float:
    """Of the first tensor with numbers that are no indices or masks: what is passed on from block to block."""
    passed = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return next((seen.watcher.numbers(tensor) for tensor in passed), 0.0)


def _route_evenly(seen: Pass) -> None:
    """Give the tokens to all experts in turn, for nobody knows which ones a router prefers; transformers' experts compute one by one."""
    if hasattr(seen.model, "set_experts_implementation"):
        seen.model.set_experts_implementation("eager")  # type: ignore[operator]  # the kernel of the faster way needs values
    for module in seen.model.modules():
        total, inputs = getattr(module, "num_experts", None), inspect.signature(module.forward).parameters
        own = list(module.parameters(recurse=False))
        if isinstance(total, int) and total > 1 and len(inputs) == 3 and any(p.dim() == 3 and len(p) == total for p in own):
            module.forward = partial(_in_turn, seen, module.forward, total)


def _in_turn(seen: Pass, forward: Callable[..., Tensor], total: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The indices are real, so that the experts' own code can look at them, for which the mode of tensors without values is left."""
    if index.is_floating_point():  # another convention than that of transformers and the zoo
        return forward(hidden, index, weights)
    routed, part = seen.watcher.seen.routed, seen.watcher.part
    routed[part] = routed.get(part, 0.0) + index.numel() * hidden.shape[-1]
    with _disable_current_modes():
        even = (torch.arange(index.numel(), device="cpu") % total).view(index.shape)
        with seen.watcher.operations:
            return forward(hidden, even, weights)
