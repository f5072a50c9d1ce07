"""Fully sharded training computes what one process computes, with its share of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleavedZeroBubble

from paceline.errors import PlanError
from paceline.planning.model.forward_pass import find_blocks, submodules
from paceline.split.deferred_init import allocate
from paceline.split.fsdp import FullySharded
from paceline.split.layout import Parts, local, whole_parts
from paceline.split.pipeline import PipelineTimer, TimedStage
from ranks import Backend, Ranks

WORDS, WIDTH, LENGTH, BATCH, MICROBATCHES, STEPS = 13, 6, 5, 8, 2, 3
Weights = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)  # no multiple of any number of ranks
        self.down = nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.as_tensor(self.down(torch.tanh(self.up(x))))


class Words(nn.Module):
    """A language model with every unusual kind of parameter.

    A tied head, a number, a frozen matrix, a buffer, a vector shorter than the ranks and an unused layer.
    """

    middle: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        blocks = [Block() for _ in range(3)]
        blocks[1].up.weight.requires_grad_(False)
        self.blocks: Any = nn.ModuleList(blocks)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.randn(1, WIDTH))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.tokens.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("middle", torch.tensor(0.5))

    def forward(self, x: Tensor, *, all_layers: bool = True) -> Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        if all_layers:
            x = x + self.sometimes(x)
        return torch.as_tensor(self.head(x + self.middle * self.shift) * self.scale)


def built() -> Words:
    torch.manual_seed(0)
    return Words().double()


def words(step: int) -> Tensor:
    return torch.randint(0, WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, x: Tensor, step: int) -> Tensor:
    """The part of the mean loss over the global batch that these samples make up."""
    logits = model(x, all_layers=step != 1)
    return F.cross_entropy(logits.flatten(0, 1), x.flatten(), reduction="sum") / (BATCH * LENGTH)


def alone() -> tuple[list[float], Weights, set[str]]:
    """Losses, weights, and the parameters without a gradient in step 1, of one process."""
    model, losses, unused = built(), [], set()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, words(step), step)
        loss.backward()
        if step == 1:
            unused = {name for name, p in model.named_parameters() if p.grad is None}
        optimizer.step()
        losses.append(loss.item())
    return losses, {n: p.detach() for n, p in model.named_parameters()}, unused


def sharded(size: int, zero: int) -> tuple[Words, Parts, FullySharded]:
    """The model on the meta device, sharded, given memory and filled with its weights."""
    with torch.device("meta"):
        model = Words().double()
    model.middle = torch.tensor(0.5, dtype=torch.float64)  # a buffer that is real from the start
    parts = whole_parts(model)
    blocks = submodules(model, find_blocks(model))
    named = dict(model.named_parameters())
    fully = FullySharded(
        [model],
        blocks,
        named,
        parts,
        init_device_mesh("cpu", (size,)),
        zero=zero,
        precision="fp32",
        offload=False,
        pipelined=False,
    )
    allocate(model, torch.device("cpu"))
    full = built()
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            local(parameter).copy_(parts[name].layout.take(dict(full.named_parameters())[name]))
    return model, parts, fully


def whole(parameters: dict[str, Tensor], parts: Parts) -> Weights:
    """The full tensors, put together from every rank's piece as `parts` says."""
    full = {}
    for name, own in parameters.items():
        together = torch.zeros(parts[name].layout.full, dtype=own.dtype)
        parts[name].layout.put(own, together)
        if "fsdp" in parts[name].sharded:
            torch.distributed.all_reduce(together)
        full[name] = together
    return full


def trained_sharded(size: int, zero: int, microbatches: int) -> tuple[list[float], Weights, set[str], bool]:
    model, parts, fully = sharded(size, zero)
    rank = torch.distributed.get_rank()
    divided = dict(model.named_parameters())
    held = {n: nn.Parameter(local(p).detach(), requires_grad=p.requires_grad) for n, p in divided.items()}
    optimizer = torch.optim.AdamW(held.values(), lr=0.05)
    losses, unused = [], set()
    for step in range(STEPS):
        for p in divided.values():
            p.grad = None
        total = torch.zeros((), dtype=torch.float64)
        pieces = words(step).chunk(size)[rank].chunk(microbatches)
        for i, x in enumerate(pieces):
            fully.microbatch(i == len(pieces) - 1)
            loss = loss_of(model, x, step)
            loss.backward()
            total += loss.detach()
        fully.after_backward()
        for name, p in divided.items():
            held[name].grad = None if p.grad is None else local(p.grad)
            if "fsdp" in parts[name].summed and p.grad is not None:
                torch.distributed.all_reduce(held[name].grad)
        if step == 1:
            unused = {name for name, p in held.items() if p.grad is None}
        optimizer.step()
        torch.distributed.all_reduce(total)
        losses.append(total.item())
        with torch.no_grad():
            model(words(0))  # an evaluation in between must not leave gathered weights for the next step
    tied = model.head.weight is model.tokens.weight and model.middle.item() == 0.5
    fully.close()
    return losses, whole({n: p.detach() for n, p in held.items()}, parts), unused, tied


@pytest.mark.parametrize(("zero", "size", "backend"), [(1, 4, "shm"), (2, 2, "gloo"), (3, 4, "shm")])
def test_every_stage_of_zero_learns_what_one_process_learns(
    ranks: Ranks, size: int, backend: Backend, zero: int
) -> None:
    losses, weights, unused = alone()

    for found in ranks(size, trained_sharded, size, zero, MICROBATCHES, backend=backend):
        assert found[0] == pytest.approx(losses, rel=1e-12)
        assert found[2] == unused
        assert "sometimes.weight" in unused
        assert found[3], "the head is no longer tied to the embedding, or a real buffer lost its value"
        for name, weight in weights.items():
            torch.testing.assert_close(found[1][name], weight, rtol=1e-11, atol=1e-12)


def used_on_one_rank_only() -> dict[str, Tensor]:
    model, parts, fully = sharded(2, 3)
    rank = torch.distributed.get_rank()
    loss_of(model, words(0).chunk(2)[rank], step=rank).backward()  # rank 1 leaves out a layer
    fully.after_backward()
    return whole(
        {n: local(p.grad) for n, p in model.named_parameters() if p.grad is not None and "fsdp" in parts[n].sharded},
        parts,
    )


def test_a_layer_that_one_rank_uses_and_another_does_not_gets_the_gradient_of_the_one(ranks: Ranks) -> None:
    model = built()
    sum(loss_of(model, x, step) for step, x in enumerate(words(0).chunk(2))).backward()  # type: ignore[union-attr]
    expected = {n: p.grad for n, p in model.named_parameters()}

    for found in ranks(2, used_on_one_rank_only, backend="shm"):
        assert "sometimes.weight" in found
        for name, grad in found.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-11, atol=1e-13)


def closed_early() -> list[str]:
    """Kinds of parameters after `close`: before the first step, and after a forward pass.

    The forward pass had no backward pass after it.
    """
    found = []
    for forwards in range(2):
        model, _, fully = sharded(2, 2)
        for _ in range(forwards):
            loss_of(model, words(0), 0)
        fully.close()
        found.append(type(model.blocks[0].up.weight).__name__)
    return found


def test_a_run_can_end_before_its_first_step_and_amid_one(ranks: Ranks) -> None:
    assert ranks(2, closed_early, backend="shm") == [["DTensor", "DTensor"]] * 2


def state_bytes(size: int, zero: int) -> tuple[int, int]:
    """Bytes of parameters, gradients and Adam's moments: this rank's, and those of one process."""
    model, _, fully = sharded(size, zero)
    fully.microbatch(True)
    loss_of(model, words(0).chunk(size)[torch.distributed.get_rank()], 0).backward()
    fully.after_backward()
    return bytes_of(model.parameters()), bytes_of(reference().parameters())


def reference() -> Words:
    model = built()
    loss_of(model, words(0), 0).backward()
    return model


def bytes_of(parameters: Iterator[nn.Parameter]) -> int:
    held = []
    for p in parameters:
        plain = nn.Parameter(local(p).detach(), requires_grad=p.requires_grad)
        plain.grad = None if p.grad is None else local(p.grad)
        held.append(plain)
    optimizer = torch.optim.Adam(held)
    optimizer.step()
    tensors = [*held, *(p.grad for p in held if p.grad is not None)]
    tensors += [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    storages = (t.untyped_storage() for t in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("zero", [1, 3])
def test_a_rank_keeps_its_share_of_the_state_only(ranks: Ranks, zero: int) -> None:
    for own, full in ranks(4, state_bytes, 4, zero, backend="shm"):
        assert own < 0.33 * full  # a quarter, and what rows that do not divide by 4 are padded to


class Stage(nn.Module):
    """A part of the trunk, with the tokens before or the head behind it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH) if number == 0 else None
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS) if number == 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) if self.tokens is not None else x
        for block in self.blocks:
            x = block(x)
        return torch.as_tensor(self.head(x)) if self.head is not None else x


def stages() -> list[Stage]:
    torch.manual_seed(0)
    return [Stage(0).double(), Stage(1).double()]


def shares(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum") / (2 * BATCH * LENGTH)


class WatchedStage(TimedStage):
    """Stage that counts what it holds after each microbatch's backward pass: whole gradients, and receive buffers."""

    fully: FullySharded

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.timer, self.autocast, self.begin = PipelineTimer(torch.device("cpu")), nullcontext, int
        self.whole: list[int] = []
        self.buffers: list[int] = []

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(*args, **kwargs)
        self.whole.append(len(self.fully.whole_gradients()))
        received = [*self.args_recv_info.values(), *self.grad_recv_info.values()]
        held = [info.buffer for infos in received for info in infos if info.buffer is not None]
        self.buffers.append(sum(not buffer.is_meta for buffer in held))


def gradients_in_a_pipeline(schedule: str, zero: int) -> Weights:
    """Two stages, each over two ranks: the gradients of this rank's stage after one step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))
    number, reader = mesh.get_coordinate() or (0, 0)
    stage = stages()[number]
    parts = whole_parts(stage)
    fully = FullySharded(
        [stage], submodules(stage, find_blocks(stage)), dict(stage.named_parameters()), parts, mesh["fsdp"],
        zero=zero, precision="fp32", offload=False, pipelined=True,
    )  # fmt: skip
    runner = WatchedStage(stage, number, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    runner.fully = fully
    pipeline: Any = Schedule1F1B(runner, 4, shares, scale_grads=False)
    if schedule == "zero-bubble":
        pipeline = ScheduleInterleavedZeroBubble([runner], 4, shares, scale_grads=False)
    x = torch.cat([words(0), words(1)]).chunk(2)[reader]
    for _ in range(2):  # the first step also finds out shapes
        for p in stage.parameters():
            p.grad = None
        pipeline.step(x) if number == 0 else pipeline.step(target=x)
        fully.after_backward()
    assert not fully.whole_gradients()
    # no buffers for all of the four microbatches, but for those in flight
    assert max(runner.buffers) <= 2
    assert runner.buffers[3] == runner.buffers[7] == 0
    if schedule == "1f1b":
        # zero=2 reduce-scatters the gradients of each microbatch; otherwise, they add up in whole tensors
        assert [bool(count) for count in runner.whole] == [zero != 2] * 8
    grads = {n: local(p.grad) for n, p in stage.named_parameters() if p.grad is not None}
    full = {}
    for name, own in grads.items():
        together = torch.zeros(parts[name].layout.full, dtype=own.dtype)
        parts[name].layout.put(own, together)
        torch.distributed.all_reduce(together, group=mesh.get_group("fsdp"))
        full[f"{number}.{name}"] = together
    return full


@pytest.mark.parametrize(("schedule", "zero"), [("1f1b", 1), ("1f1b", 2), ("zero-bubble", 3)])
def test_a_sharded_stage_of_a_pipeline_gets_the_gradients_of_one_process(
    ranks: Ranks, schedule: str, zero: int
) -> None:
    model = nn.Sequential(*stages())
    x = torch.cat([words(0), words(1)])
    shares(model(x), x).backward()
    expected = {n: p.grad for n, p in model.named_parameters()}

    found: Weights = {}
    for own in ranks(4, gradients_in_a_pipeline, schedule, zero, backend="gloo"):
        found |= own

    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-11, atol=1e-13)


def in_bfloat16(norms: bool) -> tuple[bool, str, str, str, list[str]]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4) if norms else nn.LayerNorm(4), nn.Linear(4, 4))
    seen = []
    model[2].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    fully = FullySharded(
        [model],
        [model[2]],
        dict(model.named_parameters()),
        whole_parts(model),
        init_device_mesh("cpu", (2,)),
        zero=3,
        precision="bf16",
        offload=True,
        pipelined=False,
    )
    out = model(torch.randn(3, 4))
    out.sum().backward()
    grad = model[0].weight.grad
    assert grad is not None
    return fully.casts, str(seen[0]), str(out.dtype), str(grad.dtype), fully.notes


def test_bfloat16_computes_in_it_but_returns_and_sums_float32(ranks: Ranks) -> None:
    casts, within, out, grad, notes = ranks(2, in_bfloat16, False)[0]

    assert (casts, within, out, grad) == (True, "torch.bfloat16", "torch.float32", "torch.float32")
    assert any(note.startswith("offload: this rank computes on the CPU") for note in notes)


def test_a_model_with_batch_norms_is_left_to_autocast(ranks: Ranks) -> None:
    casts, within, _, _, notes = ranks(2, in_bfloat16, True)[0]

    assert (casts, within) == (False, "torch.float32")
    assert any("batch norms" in note for note in notes)


def with_two_types() -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    with pytest.raises(PlanError) as error:
        FullySharded(
            [model], [], dict(model.named_parameters()), whole_parts(model), init_device_mesh("cpu", (2,)),
            zero=3, precision="fp32", offload=False, pipelined=False,
        )  # fmt: skip
    return str(error.value)


def test_types_that_cannot_be_reduced_together_are_refused_before_the_first_step(ranks: Ranks) -> None:
    assert "0.weight is float32, 1.weight is float64" in ranks(2, with_two_types)[0]


def test_memory_given_to_a_plain_model_keeps_ties_and_what_is_real() -> None:
    with torch.device("meta"):
        model = Words()
    model.middle = torch.tensor(0.5)
    model.shift = nn.Parameter(torch.ones(1, WIDTH))

    allocate(model, torch.device("cpu"))

    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert model.head.weight is model.tokens.weight
    assert model.middle.item() == 0.5
    assert model.shift.tolist() == [[1.0] * WIDTH]
    assert not model.blocks[1].up.weight.requires_grad
