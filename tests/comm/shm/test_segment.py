"""Shared memory has no name, is nobody else's, and ends with the processes that map it."""

from __future__ import annotations

import gc
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from leaks import of_the_transport
from paceline.comm.shm.segment import Handle, OwnedSegment, attach, create
from paceline.errors import ClusterError
from refusals import raises

Make = Callable[[], OwnedSegment]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes segments, which the test alone keeps."""
    made: list[OwnedSegment] = []

    def one() -> OwnedSegment:
        made.append(create(4096, "test"))
        return made[-1]

    yield one
    while made:
        made.pop().close_descriptor()


def test_what_one_process_writes_another_reads(make: Make) -> None:
    own = make()
    there = attach(own.handle)
    there.bytes[:4] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    there.words(8, 1)[0] = 2**64 - 1
    assert own.segment.bytes[:16].tolist() == [1, 2, 3, 4, 0, 0, 0, 0] + [255] * 8


def test_a_new_segment_is_zero_and_as_large_as_asked_for() -> None:
    for size in (1, 64, 4097, 2**22):
        made = create(size, "test")
        assert made.segment.bytes.shape == (size,)
        assert not made.segment.bytes.any()
        made.close_descriptor()


def test_it_has_no_name_in_the_file_system_and_belongs_to_this_user_alone(make: Make) -> None:
    own = make()
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    state = os.fstat(own.handle.fd)
    assert (stat.S_IMODE(state.st_mode), state.st_uid, state.st_nlink) == (0o600, os.geteuid(), 0)
    assert os.readlink(f"/proc/self/fd/{own.handle.fd}") == "/memfd:paceline-test (deleted)"
    assert not any("paceline" in name for name in before)


def test_its_descriptor_is_not_handed_to_programs_that_are_started(make: Make) -> None:
    own = make()
    assert not os.get_inheritable(own.handle.fd)


def test_behind_a_closed_door_only_those_who_have_mapped_it_see_it(make: Make) -> None:
    own = make()
    there, handle = attach(own.handle), own.handle
    own.close_descriptor()
    own.close_descriptor()  # a second time is nothing
    with raises(ClusterError, "memory.not_opened", pid=os.getpid()):
        attach(handle)
    there.bytes[0] = 5
    assert own.segment.bytes[0] == 5


def test_after_the_last_reference_nothing_is_mapped() -> None:
    made = create(4096, "test")
    view = made.segment.bytes[10:20].view(torch.int16)
    made.close_descriptor()
    del made
    gc.collect()
    assert of_the_transport(), "a tensor in the segment keeps it"
    del view
    assert not of_the_transport()


def test_a_descriptor_of_something_else_is_not_taken_for_shared_memory(make: Make) -> None:
    own, other = make(), make()
    with raises(ClusterError, "memory.other_container"):
        attach(replace(own.handle, fd=other.handle.fd))
    with raises(ClusterError, "memory.size_differs"):
        attach(replace(own.handle, size=64))


def test_memory_that_is_refused_is_a_clear_error() -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with raises(ClusterError, "memory.refused", size=4096):
            create(4096, "test")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not of_the_transport()


def test_a_handle_crosses_as_bytes(make: Make) -> None:
    own = make()
    assert Handle.from_bytes(own.handle.to_bytes().ljust(256)) == own.handle


STRANGER = """
import os, sys
path = f"/proc/{sys.argv[1]}/fd/{sys.argv[2]}"
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
for attempt in (lambda: os.open(path, os.O_RDWR), lambda: os.open(path, os.O_RDONLY), lambda: os.readlink(path)):
    try:
        print("allowed", attempt())
    except PermissionError:
        print("refused")
"""


@pytest.mark.needs_root
def test_another_user_can_neither_open_nor_read_it(make: Make) -> None:
    own = make()
    command = [sys.executable, "-c", STRANGER, str(os.getpid()), str(own.handle.fd)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == ["refused"] * 3
