"""Shared memory between processes of one host: anonymous files (memfd) without a name.

A segment is a memfd of one process. Other processes open the memfd through `/proc/<pid>/fd/<n>`, which the kernel
allows only for the same user. Once all processes have mapped the segment, the descriptor is closed. The kernel frees
the memory when the last of these processes ends. Segments do not use `/dev/shm`, so its size does not matter.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from paceline.errors import ClusterError
from paceline.shared_words import why_no_shared_memory

# at the end of every segment; proves that the process id was not reused
TOKEN_BYTES = 16


@dataclass(frozen=True)
class Handle:
    """The data that another process needs to map a segment."""

    pid: int
    fd: int
    size: int
    token: str

    def to_bytes(self) -> bytes:
        """Encode the handle as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Handle:
        """Decode a handle from JSON."""
        return cls(**json.loads(data))


class Segment:
    """Shared memory of `size` bytes, mapped into this process.

    `bytes` is a view of the memory as a flat uint8 tensor. The memory initially contains zeros.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        # Python's mmap would keep a copy of the descriptor open for as long as the memory is mapped.
        try:
            mapped = torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=size + TOKEN_BYTES, dtype=torch.uint8)
        except RuntimeError as error:
            raise OSError(str(error)) from error
        self.map: memoryview = mapped.numpy().data
        self.bytes: Tensor = mapped[:size]
        self.address = self.bytes.data_ptr()

    def words(self, start: int = 0, count: int | None = None) -> memoryview:
        """View 64-bit unsigned words, starting at byte `start`; a store to a word is atomic."""
        end = self.size if count is None else start + 8 * count
        return self.map[start : end - (end - start) % 8].cast("Q")


@dataclass
class OwnedSegment:
    """Segment that this process has created.

    Other processes can open the segment until `close_descriptor` is called.
    """

    segment: Segment
    handle: Handle

    def close_descriptor(self) -> None:
        """Prevent other processes from mapping the segment from now on."""
        if self.handle.fd >= 0:
            os.close(self.handle.fd)
            self.handle = Handle(self.handle.pid, -1, self.handle.size, self.handle.token)


def create(size: int, name: str) -> OwnedSegment:
    """Create a segment; `name` appears only in /proc/<pid>/maps.

    Raises:
        ClusterError: the processor or the system does not support the memory.
    """
    if (reason := why_no_shared_memory()) is not None:
        raise ClusterError("memory.unavailable", "shared memory is not available: {reason}", reason=reason)
    try:
        fd = os.memfd_create(f"paceline-{name}", os.MFD_CLOEXEC)
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, size + TOKEN_BYTES)
            segment = Segment(fd, size)
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        raise ClusterError(
            "memory.refused", "shared memory of {size} bytes was refused: {error}", size=size, error=error
        ) from error
    token = secrets.token_bytes(TOKEN_BYTES)
    segment.map[size:] = token
    return OwnedSegment(segment, Handle(os.getpid(), fd, size, token.hex()))


def attach(handle: Handle) -> Segment:
    """Map a segment of another process (or of this one).

    Raises:
        ClusterError: the segment cannot be opened, for instance from another container or by another user.
    """
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ClusterError(
            "memory.not_opened", "shared memory of process {pid} cannot be opened: {error}", pid=handle.pid, error=error
        ) from error
    try:
        if os.fstat(fd).st_size != handle.size + TOKEN_BYTES:
            raise ClusterError(
                "memory.size_differs", "{path} is not the announced shared memory: its size differs", path=path
            )
        segment = Segment(fd, handle.size)
    except OSError as error:
        raise ClusterError(
            "memory.not_mapped", "shared memory of process {pid} cannot be mapped: {error}", pid=handle.pid, error=error
        ) from error
    finally:
        os.close(fd)
    if segment.map[handle.size :].hex() != handle.token:
        raise ClusterError(
            "memory.other_container",
            "{path} is not the announced shared memory. Process {pid} may run in another container.",
            path=path,
            pid=handle.pid,
        )
    return segment
