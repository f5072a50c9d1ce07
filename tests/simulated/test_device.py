"""The simulated device as torch knows it: events, memory, random numbers, forks, counters."""

from __future__ import annotations

import io
import os
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, _foreach_norm, nn

from simulated.environment import Simulated

DEVICE = "sim"


def torch_finds_the_device() -> None:
    assert torch.accelerator.current_accelerator() == torch.device(DEVICE)
    assert torch.accelerator.device_count() == torch.get_device_module(DEVICE).device_count() == 3
    assert torch.randn(3).to("sim:1").device == torch.device("sim:1")
    assert torch.distributed.get_default_backend_for_device(DEVICE) == "simccl"
    module: Any = torch.get_device_module(DEVICE)
    assert module.get_device_properties(0).uuid != module.get_device_properties(1).uuid
    with module.device(2):
        assert torch.empty(1, device=DEVICE).device.index == 2
    assert torch.accelerator.current_device_index() == 0
    weight = nn.Linear(2, 2)
    parameter = weight.weight
    assert weight.to(DEVICE).weight is parameter
    assert nn.Linear(3, 3, device="meta").to_empty(device=DEVICE).weight.device.type == DEVICE


def streams_and_events_behave_as_torch_says() -> None:
    first, last = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
    first.record()
    torch.ones(9, device=DEVICE)
    last.record()
    assert not last.query()
    with pytest.raises(RuntimeError, match="must be completed"):
        first.elapsed_time(last)
    last.synchronize()
    assert last.query()
    assert first.elapsed_time(last) >= 0
    side = torch.Stream(DEVICE)
    with side:
        assert torch.accelerator.current_stream() == side
        torch.ones(9, device=DEVICE)
    assert not side.query()
    side.synchronize()
    assert side.query()


def memory_is_counted_and_limited() -> None:
    module: Any = torch.get_device_module(DEVICE)
    assert module.mem_get_info() == (1 << 20, 1 << 20)
    assert not module.is_initialized(), "it may be asked before a fork"
    before = module.memory_allocated()
    held = torch.empty(1000, device=DEVICE)
    assert module.memory_allocated() - before == 4096
    assert held.isnan().all()
    del held
    assert module.memory_allocated() == before
    assert module.max_memory_allocated() >= before + 4096
    module.reset_peak_memory_stats()
    assert module.max_memory_allocated() == before
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(1 << 20, device=DEVICE)
    # What was freed serves again: half of the memory, many times.
    for _ in range(9):
        torch.zeros(1 << 17, device=DEVICE).sum().item()
        module.empty_cache()
    assert module.mem_get_info()[1] == 1 << 20


def random_numbers_are_of_the_devices_own_generator() -> None:
    module: Any = torch.get_device_module(DEVICE)

    def draws() -> list[Tensor]:
        normal, integers = torch.randn(4, device=DEVICE), torch.randint(9, (4,), device=DEVICE)
        return [tensor.cpu() for tensor in (normal, integers, F.dropout(torch.ones(50, device=DEVICE)))]

    def same(one: list[Tensor], other: list[Tensor]) -> bool:
        return all(map(torch.equal, one, other))

    torch.manual_seed(3)
    host = torch.get_rng_state()
    first, state = draws(), module.get_rng_state()
    second = draws()
    assert torch.equal(host, torch.get_rng_state()), "the CPU's generator was used"
    assert not same(first, second)
    module.set_rng_state(state)
    assert same(draws(), second)
    torch.manual_seed(3)
    assert same(draws(), first)
    with torch.random.fork_rng([0], device_type=DEVICE):
        inside = draws()
    assert same(inside, draws())
    own = torch.Generator(DEVICE).manual_seed(1)
    one = torch.randn(3, device=DEVICE, generator=own).cpu()
    own.manual_seed(1)
    assert torch.equal(one, torch.randn(3, device=DEVICE, generator=own).cpu())
    # As on a GPU, the numbers are those of the launch: what runs later, or first, changes nothing.
    torch.manual_seed(3)
    launched = torch.randn(4, device=DEVICE)
    torch.randn(4, device=DEVICE).sum().item()
    assert torch.equal(launched.cpu(), first[0])


def pinned_memory_is_known_as_pinned() -> None:
    from torch.utils.data import DataLoader, TensorDataset

    host = torch.ones(4).pin_memory()
    assert host.is_pinned()
    assert host[1:].is_pinned()
    assert not torch.ones(4).is_pinned()
    assert all(batch.is_pinned() for (batch,) in DataLoader(TensorDataset(torch.randn(8, 2)), 4, pin_memory=True))


def saved_tensors_come_back_on_any_device() -> None:
    file = io.BytesIO()
    torch.save({"tensor": torch.arange(5, device="sim:0")}, file)
    for place in (None, "cpu", "sim:0"):
        file.seek(0)
        found = torch.load(file, map_location=place)["tensor"]
        assert found.device == torch.device(place or "sim:0")
        assert found.tolist() == [0, 1, 2, 3, 4]


def the_host_waits_only_where_cuda_makes_it_wait() -> None:
    module: Any = torch.get_device_module(DEVICE)
    pinned, pageable = torch.ones(4, pin_memory=True), torch.ones(4)
    tensor = torch.ones(4, device=DEVICE)
    calls: dict[str, tuple[int, Callable[[], object]]] = {
        "kernels": (0, lambda: tensor.add_(1).mul(2).softmax(0).sum()),
        "an optimizer": (0, optimizer_step),
        "a copy from pinned memory": (0, lambda: pinned.to(DEVICE, non_blocking=True)),
        "a copy to pinned memory": (0, lambda: pinned.copy_(tensor, non_blocking=True)),
        "a copy from pageable memory": (1, lambda: pageable.to(DEVICE)),
        "item": (1, lambda: tensor.sum().item()),
        "a mask": (1, lambda: tensor[tensor > 0]),
        "to the CPU": (1, tensor.cpu),
        "synchronize": (1, torch.accelerator.synchronize),
        "if": (1, lambda: bool(tensor.sum() > 0)),
    }
    for name, (expected, call) in calls.items():
        module.reset_counts()
        call()
        assert module.counts()["host_waits"] == expected, (name, module.waits_by_kind())
        assert len(module.wait_lines()) == expected
        assert all("test_device.py" in line for line in module.wait_lines()), module.wait_lines()
    module.reset_counts()
    tensor.add_(1).mul_(2)
    assert module.counts()["launches"] == 2
    _foreach_norm([tensor, tensor, tensor])
    assert module.counts()["launches"] == 3, "one kernel for a list, as on a GPU"
    pageable.to(DEVICE)
    assert module.counts()["copies_to_device"] == 1
    reached = torch.Event(DEVICE)
    reached.record()
    tensor.add_(1)
    idle = module.counts()["idle_waits"]
    reached.synchronize()
    assert module.counts()["idle_waits"] == idle, "the device still has a kernel to run"
    tensor.sum().item()
    assert module.counts()["idle_waits"] == idle + 1


def optimizer_step() -> None:
    parameter = nn.Parameter(torch.zeros(4, device=DEVICE))
    (parameter * 2).sum().backward()
    nn.utils.clip_grad_norm_([parameter], 1.0, foreach=True)
    torch.optim.AdamW([parameter], foreach=True).step()


def an_error_of_a_kernel_is_raised_by_the_next_wait() -> None:
    table = nn.Embedding(5, 3).to(DEVICE)
    table(torch.ones(1, dtype=torch.int64, device=DEVICE) * 9)
    with pytest.raises(IndexError):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()


def a_fork_before_use_has_the_device_and_one_after_it_has_not() -> None:
    module: Any = torch.get_device_module(DEVICE)

    def in_a_fork(call: Callable[[], object]) -> int:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                call()
                code = 0
            except RuntimeError as error:
                code = 7 if "Cannot re-initialize" in str(error) else 1
                if code == 1:
                    traceback.print_exc()
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def use() -> None:
        assert torch.ones(2, device=DEVICE).sum().item() == 2

    def stay_off() -> None:
        torch.manual_seed(1)
        assert torch.ones(2).sum().item() == 2
        assert not module.is_initialized()

    torch.manual_seed(1)
    assert not module.is_initialized()
    assert in_a_fork(use) == 0
    kept = torch.ones(2, device=DEVICE)
    assert in_a_fork(use) == 7
    assert in_a_fork(stay_off) == 0
    assert kept.sum().item() == 2


@pytest.mark.parametrize(
    ("check", "settings"),
    [
        (torch_finds_the_device, {"devices": 3}),
        (streams_and_events_behave_as_torch_says, {}),
        (memory_is_counted_and_limited, {"memory_bytes": 1 << 20}),
        (random_numbers_are_of_the_devices_own_generator, {}),
        (pinned_memory_is_known_as_pinned, {}),
        (saved_tensors_come_back_on_any_device, {}),
        (the_host_waits_only_where_cuda_makes_it_wait, {"trace_waits": True}),
        (an_error_of_a_kernel_is_raised_by_the_next_wait, {}),
        (a_fork_before_use_has_the_device_and_one_after_it_has_not, {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_device_is_as_torch_knows_devices(
    simulated: Simulated, check: Callable[[], None], settings: dict[str, Any]
) -> None:
    simulated.ranks(1, check, **settings)
