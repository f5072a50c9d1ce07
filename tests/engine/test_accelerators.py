"""Steps on accelerators: where the host waits, and what a late device makes visible."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import device as devices
from paceline.comm.backend import join, leave
from paceline.comm.comm_thread import CommStream
from paceline.elastic.place import on_this_machine
from paceline.engine.meter import BUBBLE, COMPUTE
from paceline.errors import LaunchError, PlanError
from paceline.job.zoo.losses import CrossEntropy
from ranks import Ranks, run_in_places
from simulated.environment import Simulated

SETTLED, COUNTED = 8, 4  # steps before and while waits are counted; the loss is examined in steps 1, 2, 4, 8


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)])


def data() -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(5)
    inputs = torch.randn(160, 8, generator=draw)
    return DataLoader(TensorDataset(inputs, inputs.argmax(dim=1)), batch_size=8)


def engine(plan: str) -> Any:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return paceline.setup(model, optimizer, loss=nn.functional.cross_entropy, loader=data(), plan=plan)


def idle_waits_in_steps(plan: str) -> int:
    """Number of host waits in some steps that left the device without a kernel to run."""
    made, module = engine(plan), torch.get_device_module()
    batches = iter(made.loader)
    for _ in range(SETTLED):
        made.step(next(batches))
    module.reset_counts()
    for _ in range(COUNTED):
        made.step(next(batches))
    waits: int = module.counts()["idle_waits"]
    made.close()
    return waits


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "tp=2"])
def test_the_device_is_never_without_work_while_the_host_waits(simulated: Simulated, plan: str) -> None:
    size = int(plan[-1])
    assert simulated.ranks(size, idle_waits_in_steps, plan) == [0] * size


def messages(plan: str) -> list[str]:
    made = engine(plan)
    said = [str(line) for line in made.messages]
    made.close()
    return said


def test_an_algorithm_that_is_not_used_beside_the_backward_pass_is_told(simulated: Simulated) -> None:
    said = simulated.ranks(2, messages, "dp=2 sync=allreduce:ring")[0]
    assert [line for line in said if line.startswith("sync=allreduce")] == [
        "sync=allreduce: simccl sums while the backward pass computes; ring is for a divided model or a codec"
    ]


def losses(plan: str) -> list[float]:
    made = engine(plan)
    found = [made.step(batch).loss for batch in made.loader][:6]
    made.close()
    return found


def in_a_pipeline() -> tuple[list[float], list[float]]:
    """Losses of a pipeline whose cuts are measured on the device, and seconds of the last timed step."""
    made, timings = engine("pp=2 microbatches=2"), []
    found = []
    for batch in made.loader:
        result = made.step(batch)
        found.append(result.loss)
        timings.append(result.timing)
    made.close()
    return found[:6], timings[-1].parts_s


def test_a_pipeline_measures_its_cuts_on_the_device_and_its_bubble(simulated: Simulated) -> None:
    expected = losses("dp=1")
    for found, parts_s in simulated.ranks(2, in_a_pipeline, deadline_s=100):
        assert found == pytest.approx(expected, rel=1e-5)
        assert parts_s[BUBBLE] > 0
        assert parts_s[COMPUTE] > 0


def with_buffers() -> list[float]:
    """Losses of a sharded model with batch norms, whose buffers begin in host memory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = paceline.setup(
        model, optimizer, loss=nn.functional.cross_entropy, loader=data(), plan="fsdp=2", batch_norm="sync"
    )
    found = [made.step(batch).loss for batch in made.loader][:6]
    made.close()
    return found


def test_buffers_of_a_sharded_model_are_on_the_device(simulated: Simulated, ranks: Ranks) -> None:
    expected = ranks(2, with_buffers)
    for found, same in zip(simulated.ranks(2, with_buffers), expected, strict=True):
        assert found == pytest.approx(same, rel=1e-5)


def joined_again(times: int) -> int:
    for _ in range(times):
        group = join(deadline_s=30)
        group.barrier()
        leave(group)
    return times


def test_ranks_on_accelerators_meet_again(simulated: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in simulated.environment(devices=2).items():
        monkeypatch.setenv(name, value)
    assert run_in_places(on_this_machine(2), joined_again, [8], deadline_s=60.0) == [8, 8]


def waits_for_rank_1() -> str | None:
    """What rank 0 says of rank 1, which does not join."""
    if os.environ["RANK"] == "1":
        return None
    with pytest.raises(LaunchError) as found:
        join(deadline_s=2)
    return str(found.value)


def test_a_rank_on_an_accelerator_that_does_not_come_is_named(
    simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in simulated.environment(devices=2).items():
        monkeypatch.setenv(name, value)
    said, _ = run_in_places(on_this_machine(2), waits_for_rank_1, [], deadline_s=60.0)
    assert "for ranks 1, which did not start" in said


def arrives_late(path: str) -> bool:
    """Rank 1 writes a file before it comes to a barrier; whether rank 0 sees it behind that."""
    group = join(deadline_s=30)
    if group.rank == 1:
        time.sleep(1.0)
        Path(path).write_text("here")
    group.barrier()
    seen = Path(path).exists()
    leave(group)
    return seen


def test_a_barrier_holds_the_host(simulated: Simulated, tmp_path: Path) -> None:
    assert simulated.ranks(2, arrives_late, str(tmp_path / "file")) == [True, True]


def summed_beside() -> list[float]:
    """A sum on a stream of its own, of what was queued before, read after it was waited for."""
    device = torch.device("sim", dist.get_rank())
    beside, numbers = CommStream(device), torch.zeros(1 << 16, device=device)
    numbers.add_(1.0 + dist.get_rank())
    task = beside.start(lambda: dist.all_reduce(numbers) and None)
    busy: Tensor = torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
    task.wait()
    beside.close()
    return [float(numbers.min()), float(numbers.max()), float(busy[0, 0])]


@pytest.mark.parametrize("order", ["late", "random"])
def test_a_stream_beside_the_computation_is_ordered_with_it(simulated: Simulated, order: Any) -> None:
    assert simulated.ranks(2, summed_beside, order=order) == [[3.0, 3.0, 64.0]] * 2


def test_sums_over_samples_are_narrower_where_a_device_has_no_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(*_: Any, dtype: torch.dtype, **__: Any) -> Tensor:
        raise TypeError(f"this device has no {dtype}")

    assert devices.widest_float(torch.device("cpu")) == torch.float64
    monkeypatch.setattr(torch, "zeros", zeros)
    assert devices.widest_float.__wrapped__(torch.device("cpu")) == torch.float32


def launches_of_the_loss() -> list[int]:
    """Launches of torch's mean cross-entropy, of ours where the host knows the labels, and where it does not."""
    module = torch.get_device_module()
    logits = torch.randn(8, 5, device="sim", requires_grad=True)
    labels, loss = torch.arange(8) % 5, CrossEntropy()
    on_device, found = labels.to("sim"), []

    def count(value: Callable[[], Tensor]) -> None:
        logits.grad = None
        module.reset_counts()
        value().backward()
        found.append(module.counts()["launches"])

    count(lambda: nn.functional.cross_entropy(logits, on_device))
    with loss.knowing(labels):
        count(lambda: loss(logits, on_device))
    count(lambda: loss(logits, on_device))
    with loss.knowing(labels.where(labels < 2, -100)):
        assert float(loss(logits, torch.full((8,), -100, device="sim"))) == 0.0
    return found


def test_a_loss_whose_labels_all_count_is_torchs_own(simulated: Simulated) -> None:
    plain, known, unknown = simulated.ranks(1, launches_of_the_loss)[0]
    assert plain == known < unknown


def test_a_device_that_the_compiler_has_no_code_for_is_a_clear_error(simulated: Simulated) -> None:
    [error] = simulated.ranks(1, error_of_a_compiled_step)
    assert error.startswith("compile=on: torch cannot compile the model here: ")
    assert "It needs code for devices of type sim, " in error
    assert error.endswith("You can also leave compile out.")


def error_of_a_compiled_step() -> str:
    made = engine("compile=on")
    with pytest.raises(PlanError) as raised:
        made.step(next(iter(made.loader)))
    made.close()
    return str(raised.value)
