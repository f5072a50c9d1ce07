"""DDP with a codec: the losses of plain DDP within what the codec loses, on real ranks."""

from __future__ import annotations

import os
import socket
from multiprocessing import get_context

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from commands import DEADLINE_S
from paceline.device import use
from paceline.errors import LaunchError, PlanError
from paceline.frameworks.pytorch import CodecState, codec_hook, init_process_group, register_codec
from ranks import Backend, RankError, Ranks
from refusals import raises
from simulated.environment import Simulated

STEPS, BATCH = 60, 32
TOLERANCE = {"fp16": 0.01, "bf16": 0.02, "int8": 0.02, "int4": 0.1, "1bit": 0.15, "powersgd:4": 0.1}


def a_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).to(dtype)


def batches(rank: int, count: int) -> list[tuple[Tensor, Tensor]]:
    rule = torch.randn(64, 10, generator=torch.Generator().manual_seed(9))
    drawn = torch.randn(count, BATCH, 64, generator=torch.Generator().manual_seed(rank))
    return [(inputs, (inputs @ rule).argmax(1)) for inputs in drawn]


def trained(ddp: nn.Module, steps: list[tuple[Tensor, Tensor]], lr: float = 0.05) -> list[float]:
    """Mean losses over the ranks."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr, momentum=0.9)
    losses = []
    for inputs, target in steps:
        loss = F.cross_entropy(ddp(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    means = torch.stack(losses)
    dist.all_reduce(means, op=dist.ReduceOp.AVG if dist.get_backend() == "shm" else dist.ReduceOp.SUM)
    return (means if dist.get_backend() == "shm" else means / dist.get_world_size()).tolist()


def every_codec(codecs: list[str]) -> dict[str, tuple[list[float], float, int, list[Tensor]]]:
    """Losses, bytes sent relative to plain ones, buckets, and weights, by codec; "plain" is DDP as it is."""
    found = {}
    for codec in ["plain", *codecs]:
        ddp = DistributedDataParallel(a_model(), bucket_cap_mb=0.25)
        state = None if codec == "plain" else register_codec(ddp, codec)
        losses = trained(ddp, batches(dist.get_rank(), STEPS))
        sent = 1.0 if state is None else state.traffic.sent_bytes / state.traffic.plain_bytes
        buckets = 0 if state is None else len({name.partition("/")[0] for name in state.state_dict()})
        found[codec] = (losses, sent, buckets, [p.detach().clone() for p in ddp.parameters()])
    return found


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_every_codec_trains_a_ddp_model_as_plain_ddp_does(ranks: Ranks, backend: Backend) -> None:
    codecs = [*TOLERANCE] if backend == "shm" else ["int8", "powersgd:4"]
    first, second = ranks(2, every_codec, codecs, backend=backend, deadline_s=100)
    plain = first["plain"][0]
    for codec in codecs:
        losses, sent, buckets, weights = first[codec]
        assert losses[-1] == pytest.approx(plain[-1], rel=TOLERANCE[codec]), codec
        assert losses[-1] < 0.6 * losses[0]
        # DDP lays the buckets out anew after the first pass, and the codec sees the second layout alone
        assert buckets > 1
        assert sent < 0.6
        assert all(torch.equal(a, b) for a, b in zip(weights, second[codec][3], strict=True)), codec
        assert losses[1:] != plain[1:], f"{codec} has coded nothing"


def on_a_device(codec: str | None) -> list[float]:
    device = use(int(os.environ["LOCAL_RANK"]))
    ddp = DistributedDataParallel(a_model().to(device), bucket_cap_mb=0.1)
    if codec is not None:
        register_codec(ddp, codec)
    optimizer, losses = torch.optim.SGD(ddp.parameters(), 0.05), []
    for inputs, target in batches(dist.get_rank(), 12):
        loss = F.cross_entropy(ddp(inputs.to(device)), target.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("order", ["late", "random"])
def test_on_accelerators_the_hook_waits_for_the_gradients_of_the_device(simulated: Simulated, order: str) -> None:
    plain, coded = (simulated.ranks(2, on_a_device, codec, order=order) for codec in (None, "int8"))
    assert coded[1] == pytest.approx(plain[1], rel=1e-3)
    assert coded[1] != plain[1]


def first_passes() -> list[bool]:
    """Whether each of three passes gave the gradients of plain DDP to the bit."""
    plain, coded = (DistributedDataParallel(a_model(), bucket_cap_mb=0.25) for _ in range(2))
    register_codec(coded, "int4")
    exact = []
    for inputs, target in batches(dist.get_rank(), 3):
        for ddp in (plain, coded):
            ddp.zero_grad()
            F.cross_entropy(ddp(inputs), target).backward()
        pairs = zip(plain.parameters(), coded.parameters(), strict=True)
        exact.append(all(torch.allclose(a.grad, b.grad, rtol=1e-6, atol=1e-9) for a, b in pairs))  # type: ignore[arg-type]
    return exact


def resumed_error() -> tuple[bool, bool]:
    """Whether the error feedback of a saved state is taken over by a new process's state, and changes what is sent."""
    steps = batches(dist.get_rank(), 4)
    ddp = DistributedDataParallel(a_model(), bucket_cap_mb=0.25)
    kept = register_codec(ddp, "topk:0.05").state_dict
    for inputs, target in steps:
        F.cross_entropy(ddp(inputs), target).backward()
    saved, gradients = kept(), []
    for state in ({}, saved, saved):
        again = DistributedDataParallel(a_model(), bucket_cap_mb=0.25)
        hook = CodecState("topk:0.05")
        hook.load_state_dict(state)
        again.register_comm_hook(hook, codec_hook)
        for inputs, target in steps[:2]:
            again.zero_grad()
            F.cross_entropy(again(inputs), target).backward()
        gradients.append([p.grad.clone() for p in again.parameters() if p.grad is not None])
    without, one, other = gradients
    same = all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    return same, all(torch.equal(a, b) for a, b in zip(one, without, strict=True))


def not_finite() -> list[bool]:
    """Whether each of two coded passes, of which rank 1's second one has an infinite loss, gave finite gradients."""
    ddp = DistributedDataParallel(a_model())
    register_codec(ddp, "int8")
    finite = []
    for step, (inputs, target) in enumerate(batches(dist.get_rank(), 4)):
        ddp.zero_grad()
        bad = step == 2 and dist.get_rank() == 1
        (F.cross_entropy(ddp(inputs), target) * (float("inf") if bad else 1.0)).backward()
        finite.append(all(bool(p.grad.isfinite().all()) for p in ddp.parameters() if p.grad is not None))
    return finite


def passes_in_turn() -> tuple[list[bool], tuple[bool, bool], list[bool]]:
    return first_passes(), resumed_error(), not_finite()


def test_coded_passes_are_exact_at_first_go_on_from_what_was_left_out_and_forget_infinities(ranks: Ranks) -> None:
    for exact, resumed, finite in ranks(2, passes_in_turn, backend="shm"):
        assert exact == [True, False, False], "DDP lays its buckets out anew after the first pass"
        assert resumed == (True, False), "what a codec left out outlives the process"
        assert finite == [True, True, False, True], "on all ranks"


def in_float64() -> None:
    ddp = DistributedDataParallel(a_model(torch.float64))
    register_codec(ddp, "int8")
    for inputs, target in batches(dist.get_rank(), 2):
        F.cross_entropy(ddp(inputs.double()), target).backward()


def test_a_codec_that_does_not_take_the_dtype_says_so(ranks: Ranks) -> None:
    with raises(RankError, "compress.dtype", text="int8", dtype="float64"):
        ranks(2, in_float64, backend="shm")


@pytest.mark.parametrize(
    ("codec", "code"),
    [
        ("int9", "plan.compress_refused"),
        ("none", "frameworks.hook_without_codec"),
        ("topk:2", "plan.rule_value_invalid"),
    ],
)
def test_an_unknown_codec_is_refused_before_training(codec: str, code: str) -> None:
    with raises(PlanError, code):
        CodecState(codec)


def second_group() -> str:
    with pytest.raises(LaunchError) as raised:
        init_process_group()
    return str(raised.value)


def test_a_process_group_that_is_there_already_is_not_replaced(ranks: Ranks) -> None:
    assert "a process group over gloo already exists" in ranks(2, second_group)[0]


def meets_as_under_torchrun(rank: int, port: int) -> None:
    """One of two processes with the variables that torchrun sets."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in places.items()}
    init_process_group()
    total = torch.ones(3)
    dist.all_reduce(total)
    assert (dist.get_backend(), total.tolist()) == ("shm", [2.0, 2.0, 2.0])
    dist.destroy_process_group()


def test_ranks_of_torchrun_meet_over_shared_memory() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = [get_context("fork").Process(target=meets_as_under_torchrun, args=(rank, port)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE_S)
        assert process.exitcode == 0


def test_a_process_alone_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    init_process_group()
    assert not dist.is_initialized()
