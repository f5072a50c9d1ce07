"""Blocks that are computed again, or compiled, give the same gradients.

Those computed again keep fewer bytes until the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model_families import hugging_face
from paceline.errors import PlanError
from paceline.job.zoo.models import GPT
from paceline.planning.model.forward_pass import find_blocks, submodules
from paceline.split.fsdp import FullySharded
from paceline.split.layout import local, whole_parts
from paceline.split.remat import compile_blocks, rematerialise
from ranks import Backend, Ranks
from refusals import raises

How = Literal["none", "selective", "block"]
Gradients = dict[str, Tensor | None]


class Living(TorchDispatchMode):
    """Remembers the memory of every result, so as to tell what is still there."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self.made[reference.cdata] = (reference, storage.nbytes())
        return results

    @property
    def kept_bytes(self) -> int:
        return sum(n for memory, n in self.made.values() if not memory.expired())


def remember(model: nn.Module, how: How) -> Callable[[], None]:
    return (lambda: None) if how == "none" else rematerialise(submodules(model, find_blocks(model)), how)


def gradients(how: How) -> tuple[Gradients, int]:
    """Results of a small transformer with dropout, and the bytes kept for the backward pass."""
    torch.manual_seed(0)
    model = GPT(layers=3, hidden=32, heads=4, vocab=17, context=16, dropout=0.3).double()
    remember(model, how)
    tokens = torch.randint(0, 17, (2, 16))
    living = Living()
    with living:
        logits = model(tokens)
    kept = living.kept_bytes
    F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    return {n: p.grad for n, p in model.named_parameters()}, kept


def test_gradients_are_the_same_bit_for_bit_dropout_included_and_less_is_kept() -> None:
    expected, all_kept = gradients("none")
    selective, selected = gradients("selective")
    block, least = gradients("block")

    for found in (selective, block):
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad, rtol=0, atol=0)
    assert least < selected < all_kept


def normalised(how: How) -> Gradients:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 1)) for _ in range(2)
    ]
    model = nn.Sequential(*blocks).double()
    remember(model, how)
    for _ in range(2):
        model(torch.randn(4, 3, 5, 5, dtype=torch.float64)).square().sum().backward()
    return {n: p.grad for n, p in model.named_parameters()} | dict(model.named_buffers())


@pytest.mark.parametrize("how", ["selective", "block"])
def test_the_statistics_of_batch_norms_are_updated_once(how: How) -> None:
    expected, found = normalised("none"), normalised(how)

    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)


def with_a_cache(how: How) -> Gradients:
    torch.manual_seed(0)
    model = hugging_face("LlamaForCausalLM", use_cache=True, bos_token_id=1, eos_token_id=2).double()
    remember(model, how)
    tokens = torch.arange(10).view(2, 5)
    model(input_ids=tokens, labels=tokens).loss.backward()
    return {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("how", ["selective", "block"])
def test_a_cache_that_a_block_would_append_to_twice_is_left_out(how: How) -> None:
    expected = with_a_cache("none")

    for name, grad in with_a_cache(how).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=1e-14)


class Summed(torch.autograd.Function):
    """The sum over the ranks in place, as tensor parallel takes it of a matrix product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Changes(nn.Module):
    """A block that changes the results of its matrix products in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        summed: Tensor = Summed.apply(self.down(torch.relu_(self.up(x))))
        return torch.tanh(summed)


def changed_in_place(how: How) -> Gradients:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(Changes(), Changes()).double()
    remember(model, how)
    model(torch.ones(2, 6, dtype=torch.float64)).square().sum().backward()
    return {n: p.grad for n, p in model.named_parameters()}


def in_turn(function: Callable[..., Gradients], hows: tuple[How, ...], *args: Any) -> list[Gradients]:
    """The function's gradients under each policy, on the same ranks."""
    return [function(how, *args) for how in hows]


def assert_alike(found: list[list[Gradients]]) -> None:
    """On each rank, the gradients of every policy are those of the first, bit for bit."""
    for expected, *others in found:
        for other in others:
            for name, grad in expected.items():
                torch.testing.assert_close(other[name], grad, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_what_is_kept_is_not_what_the_block_changes_in_place(ranks: Ranks, backend: Backend) -> None:
    assert_alike(ranks(2, in_turn, changed_in_place, ("none", "selective"), backend=backend))


def fully_sharded(how: How, compiled: bool = False) -> Gradients:
    torch.manual_seed(0)
    model = GPT(layers=2, hidden=16, heads=2, vocab=17, context=8).double()
    remember(model, how)
    blocks = submodules(model, find_blocks(model))
    if compiled:
        compile_blocks(blocks, "on", torch.device("cpu"))
    FullySharded(
        [model], blocks, dict(model.named_parameters()), whole_parts(model), init_device_mesh("cpu", (2,)),
        zero=3, precision="fp32", offload=False, pipelined=False,
    )  # fmt: skip
    tokens = torch.randint(0, 17, (2, 8), generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    return {n: None if p.grad is None else local(p.grad).clone() for n, p in model.named_parameters()}


def test_blocks_that_are_fully_sharded_are_computed_again_from_gathered_weights(ranks: Ranks) -> None:
    assert_alike(ranks(2, in_turn, fully_sharded, ("none", "selective", "block"), backend="shm"))


def in_a_pipeline(how: How, schedule: str) -> Gradients:
    torch.manual_seed(0)
    rank = dist.get_rank()
    blocks = [nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(4)]
    stage = nn.Sequential(*blocks[2 * rank : 2 * rank + 2]).double()
    remember(stage, how)
    runner = PipelineStage(stage, rank, 2, torch.device("cpu"))
    pipeline: Any = (
        Schedule1F1B(runner, 4, F.mse_loss)
        if schedule == "1f1b"
        else ScheduleInterleavedZeroBubble([runner], 4, F.mse_loss)
    )
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    pipeline.step(x) if rank == 0 else pipeline.step(target=x)
    return {n: p.grad for n, p in stage.named_parameters()}


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_the_stages_of_a_pipeline_are_computed_again_in_every_schedule(ranks: Ranks, schedule: str) -> None:
    assert_alike(ranks(2, in_turn, in_a_pipeline, ("none", "selective", "block"), schedule))


def test_undone_a_block_has_again_the_forward_it_had() -> None:
    block, own = nn.Linear(2, 2), nn.Linear(2, 2)
    own.forward = mine = lambda x: x  # type: ignore[method-assign]
    names = list(nn.Sequential(block, own).state_dict())

    undo = rematerialise([block, own], "block")
    assert "forward" in block.__dict__
    assert list(nn.Sequential(block, own).state_dict()) == names
    undo()

    assert "forward" not in block.__dict__
    assert own.forward is mine


def test_graphs_are_refused_where_a_device_has_none() -> None:
    with raises(PlanError, "plan.no_graphs"):
        compile_blocks([nn.Linear(2, 2)], "reduce-overhead", torch.device("cpu"))


def compiled_gradients(how: How, mode: str | None) -> Gradients:
    torch.manual_seed(0)
    model = GPT(layers=2, hidden=16, heads=2, vocab=17, context=8).double()
    remember(model, how)
    if mode is not None:
        compile_blocks(submodules(model, find_blocks(model)), mode, torch.device("cpu"))
    tokens = torch.arange(16).view(2, 8)
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    return {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["none", "selective", "block"])
def test_compiled_blocks_have_the_same_gradients(ranks: Ranks, how: How) -> None:
    expected = compiled_gradients("none", None)

    for name, grad in ranks(1, compiled_gradients, how, "on", deadline_s=300)[0].items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_blocks_can_be_sharded_computed_again_and_compiled_at_once(ranks: Ranks) -> None:
    expected = ranks(2, fully_sharded, "none")

    for found, right in zip(ranks(2, fully_sharded, "selective", True, deadline_s=300), expected, strict=True):
        for name, grad in right.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-10, atol=1e-12)
