"""A group over shared memory ends without a trace, and leaves nothing in the file system."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from leaks import of_the_transport
from paceline.comm.shm import ShmProcessGroup
from paceline.errors import LaunchError
from ranks import Ranks
from refusals import raises


def traces() -> None:
    """What is open, mapped and running: before, during, and after the end of the group."""
    group = dist.group.WORLD
    assert isinstance(group, ShmProcessGroup)
    assert not any(name.startswith("paceline") for name in _entries("/dev/shm"))
    found = of_the_transport()
    assert not any(name == "/memfd:paceline-group (deleted)" for name in _open()), "only the mappings remain"
    assert any("memfd:paceline-group" in name for name in found)
    shared = group.transport.empty(100_000, torch.float32)
    assert shared is not None
    work = dist.all_reduce(shared, async_op=True)
    work.wait()
    assert not any("paceline-tensor" in name for name in _open())
    assert any("memfd:paceline-tensor" in name for name in of_the_transport())
    other = dist.new_group(backend="shm")
    dist.barrier(other)
    dist.destroy_process_group(other)
    with pytest.raises(Exception, match=r"destroyed|Invalid process group|not registered"):
        dist.barrier(other)
    del group, shared, work, other
    dist.barrier()
    dist.destroy_process_group()
    assert not of_the_transport()


def _entries(folder: str) -> list[str]:
    return os.listdir(folder) if Path(folder).is_dir() else []


def _open() -> list[str]:
    """Open descriptors of groups and tensors.

    The one of this process' doorbell stays while it has groups, for groups to come.
    """
    links = []
    for fd in _entries("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return links


@pytest.mark.parametrize("size", [2, 3])
def test_nothing_is_in_the_file_system_and_nothing_stays(ranks: Ranks, size: int) -> None:
    ranks(size, traces, backend="shm")


def again_and_again() -> None:
    """Groups come and go."""
    for i in range(6):
        group = dist.new_group(backend="shm")
        tensor = torch.ones(100_000 * i)
        dist.all_reduce(tensor, group=group)
        assert (tensor == dist.get_world_size()).all()
        dist.destroy_process_group(group)
        del group
        mapped = Path("/proc/self/maps").read_text().count("memfd:paceline-group")
        assert mapped == dist.get_world_size(), "those of the default group alone"


def test_a_group_that_ends_gives_its_memory_back(ranks: Ranks) -> None:
    ranks(2, again_and_again, backend="shm")


def test_a_group_that_is_not_met_leaves_no_driver() -> None:
    with raises(LaunchError, "rendezvous.timeout", missing=[1]):
        ShmProcessGroup(HashStore(), 0, 2, timedelta(seconds=0.2), "alone")
    assert not of_the_transport()
