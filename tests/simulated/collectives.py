"""`simccl`, the collective library of the simulated accelerator: as asynchronous as NCCL, and stricter.

A collective runs on a stream of its own, behind what the current stream holds at the call. A thread takes its inputs
when they are computed, moves them with a process group for the CPU, and opens the gate that its stream waits at. `wait`
orders the current stream behind it, and does not block the host. Until then outputs are NaN, or another value that
nobody expects. Ranks that call different collectives, and ranks that do not come in time, are errors.

A rank that is gone is not noticed, as on a GPU: the collective holds its stream until the time is over, or `abort` is
called, by whatever thread. Aborted collectives leave garbage and no error, and later ones are refused; the device, its
memory and its streams go on.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistBackendError

from simulated import recorder
from simulated.device import _C, TYPE
from simulated.environment import INIT_MS, INNER, LOG
from simulated.faults import Faults
from simulated.lane import Lane, Operation
from simulated.signature import Mismatch, agree, check_message, header

BACKEND = "simccl"
GATHER, SCATTER = "_allgather_base", "_reduce_scatter_base"  # torch's names in groups of C++
POLL_S = 20e-6, 5e-4  # the shortest and longest time between two looks for an end, or an abort
Options = Any  # torch's options of a collective; each kind is a class of its own
Tensors = Any  # a tensor, or sequences of such


class SimulatedGroup(dist.ProcessGroup):
    def __init__(self, inner: Any, timeout: timedelta, name: str) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]  # the form for groups in Python
        self._inner, self._name, self._description = inner, name, "undefined"
        self._timeout = timeout
        self._faults = Faults.from_environment()
        self._lanes: dict[tuple[str, torch.device], Lane] = {}
        self._batch: list[SimulatedWork] | None = None
        self._lock, self._closed, self._ended = threading.Lock(), False, False
        self._aborted = threading.Event()
        self._polls = not isinstance(inner, dist.ProcessGroupGloo)  # whose messages end only in `wait`
        self._number = 0  # of the newest collective
        self._end_at_exit = _ending(weakref.ref(self))

    # Collectives

    def allreduce(self, tensors: Tensors, opts: Options = None) -> dist.Work:  # type: ignore[override]
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        options = _options(c10d.AllreduceOptions(), opts)
        return self._reducing("all_reduce", tensors, options, lambda t: self._inner.allreduce(t, options))

    def allreduce_coalesced(self, tensors: Tensors, opts: Options = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Sequence[Tensor], opts: Options) -> dist.Work:  # type: ignore[override]
        opts = _options(c10d.ReduceOptions(), opts)
        name = f"reduce to rank {opts.rootRank}"
        return self._reducing(
            name, tensors, opts, lambda t: self._inner.reduce(t, opts), writes=self._is(opts.rootRank)
        )

    def _reducing(
        self,
        name: str,
        tensors: Sequence[Tensor],
        opts: Options,
        call: Callable[[list[Tensor]], Any],
        writes: bool = True,
    ) -> dist.Work:
        name = f"{name} ({getattr(opts.reduceOp, 'op', opts.reduceOp).name})"
        if writes:
            return self._start(name, tensors, tensors, lambda outs, ins: call(outs), tensors)
        return self._start(name, [], tensors, lambda outs, ins: call(ins), tensors)

    def broadcast(self, tensors: Sequence[Tensor], opts: Options) -> dist.Work:  # type: ignore[override]
        opts = _options(c10d.BroadcastOptions(), opts)
        name = f"broadcast from rank {opts.rootRank}"
        if self._is(opts.rootRank):
            return self._start(name, [], tensors, lambda outs, ins: self._inner.broadcast(ins, opts), tensors)
        return self._start(name, tensors, [], lambda outs, ins: self._inner.broadcast(outs, opts), tensors)

    def allgather(self, outputs: Tensors, inputs: Tensors, opts: Options = None) -> dist.Work:
        opts = _options(c10d.AllgatherOptions(), opts)
        return self._start("all_gather", outputs, inputs, lambda o, i: self._inner.allgather(o, i, opts), inputs)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Options = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Options = None) -> dist.Work:
        opts = _options(c10d.AllgatherOptions(), opts)
        _check_ratio("all_gather", outputs, inputs, self.size())

        def call(outs: list[Tensor], ins: list[Tensor]) -> list[Any]:
            return [getattr(self._inner, GATHER)(o, i, opts) for o, i in zip(outs, ins, strict=True)]

        return self._start("all_gather_single", outputs, inputs, call, inputs)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Options = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Options = None) -> dist.Work:
        options = _options(c10d.ReduceScatterOptions(), opts)
        _check_ratio("reduce_scatter", inputs, outputs, self.size())

        def call(outs: list[Tensor], ins: list[Tensor]) -> list[Any]:
            return [getattr(self._inner, SCATTER)(o, i, options) for o, i in zip(outs, ins, strict=True)]

        return self._start("reduce_scatter_single", outputs, inputs, call, outputs)

    _allgather_base = all_gather_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def reduce_scatter(self, outputs: Tensors, inputs: Tensors, opts: Options = None) -> dist.Work:  # type: ignore[override]
        options = _options(c10d.ReduceScatterOptions(), opts)
        return self._start(
            "reduce_scatter", outputs, inputs, lambda o, i: self._inner.reduce_scatter(o, i, options), outputs
        )

    def scatter(self, outputs: Tensors, inputs: Tensors, opts: Options) -> dist.Work:  # type: ignore[override]
        opts = _options(c10d.ScatterOptions(), opts)
        name = f"scatter from rank {opts.rootRank}"
        return self._start(name, outputs, inputs, lambda o, i: self._inner.scatter(o, i, opts), outputs)

    def gather(self, outputs: Tensors, inputs: Tensors, opts: Options) -> dist.Work:  # type: ignore[override]
        opts = _options(c10d.GatherOptions(), opts)
        name = f"gather to rank {opts.rootRank}"
        return self._start(name, outputs, inputs, lambda o, i: self._inner.gather(o, i, opts), inputs)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Options = None,
    ) -> dist.Work:
        opts = _options(c10d.AllToAllOptions(), opts)

        def call(outs: list[Tensor], ins: list[Tensor]) -> Any:
            return self._inner.alltoall_base(outs[0], ins[0], list(output_sizes), list(input_sizes), opts)

        return self._start("all_to_all_single", [output], [tensor], call)

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Options = None) -> dist.Work:
        opts = _options(c10d.AllToAllOptions(), opts)
        return self._start("all_to_all", outputs, inputs, lambda o, i: self._inner.alltoall(o, i, opts))

    def barrier(self, opts: Options = None) -> dist.Work:
        """Wait for all ranks; unlike the others', this work's `wait` blocks the host."""
        device = torch.device(TYPE, torch.accelerator.current_device_index())
        return self._start("barrier", [], [], lambda o, i: None, device=device)

    # Messages: each pair of ranks has a stream in each direction

    def send(self, tensors: Sequence[Tensor], receiver: int, tag: int = 0) -> dist.Work:
        def call(outs: list[Tensor], ins: list[Tensor]) -> list[Any]:
            self._wait(self._inner.send([header(ins[0])], receiver, tag))
            return [self._inner.send(ins, receiver, tag)]

        return self._start(f"send to rank {receiver}", [], tensors, call, lane=f"to {receiver}")

    def recv(self, tensors: Sequence[Tensor], sender: int, tag: int = 0) -> dist.Work:
        def call(outs: list[Tensor], ins: list[Tensor]) -> list[Any]:
            announced = torch.empty_like(header(outs[0]))
            self._wait(self._inner.recv([announced], sender, tag))
            check_message(announced, outs[0], sender)
            return [self._inner.recv(outs, sender, tag)]

        return self._start(f"receive from rank {sender}", tensors, [], call, lane=f"from {sender}")

    # How they are run

    def _start(
        self,
        name: str,
        outputs: Tensors,
        inputs: Tensors,
        call: Callable[[Any, Any], Any],
        signed: Tensors = None,
        *,
        lane: str = "",
        device: torch.device | None = None,
    ) -> dist.Work:
        """Enqueue a collective or message.

        Args:
            call: the inner group's, with the outputs and inputs in the host's memory.
            signed: tensors whose number of elements and dtype must be the same on all ranks.
            lane: the stream that it runs on; messages do not wait for collectives.
        """
        outs, ins = _flat(outputs), _flat(inputs)
        device = device or self._device_of(name, [*outs, *ins])
        with self._lock:
            if self._closed:
                raise DistBackendError(f"{name}: this process group was destroyed or aborted")
            found = self._lanes.get((lane, device))
            if found is None:
                found = self._lanes[lane, device] = Lane(device, f"{BACKEND} {self._name} {lane}".strip(), self._faults)
        if found.broken:
            raise DistBackendError(f"{name}: {found.broken}")
        host = found.staged(outs, ins)
        signature = None if lane or self.size() == 1 else f"{name} {_sizes(_flat(signed or []))}"

        def run(position: int) -> None:
            begun = time.monotonic()
            try:
                if signature is not None:
                    agree(self._inner, signature, position, self._name, self._wait)
                made = call(_like(outputs, host), _like(inputs, host))
                for work in made if isinstance(made, list) else [made]:
                    if work is not None:
                        self._wait(work)
            except (Mismatch, ValueError):
                raise
            except Exception:
                # A kernel on a device does not see that a peer is gone.
                self._aborted.wait(max(0.0, begun + self._timeout.total_seconds() - time.monotonic()))
                raise

        operation = found.launch(name, outs, ins, host, run)
        self._number += not lane
        recorder.record(self._name, self._number, name, ins or outs, operation, p2p=bool(lane))
        work = SimulatedWork(found, operation, outs, blocks=name == "barrier")
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _wait(self, work: Any) -> None:
        """Wait for the inner group's work, which an abort ends."""
        pause_s, longest_s = POLL_S
        while self._polls and not work.is_completed():
            if self._aborted.wait(pause_s):
                raise DistBackendError("this process group was aborted")
            pause_s = min(2 * pause_s, longest_s)
        work.wait()

    def _device_of(self, name: str, tensors: Sequence[Tensor]) -> torch.device:
        devices = {tensor.device for tensor in tensors}
        wrong = [device for device in devices if device.type != TYPE]
        if wrong or not devices:
            raise RuntimeError(
                f"{name}: No backend type associated with device type {wrong[0].type if wrong else None}"
            )
        if not all(map(_is_dense, tensors)):
            raise ValueError(f"{name}: Tensors must be non-overlapping and dense")
        if len(devices) > 1:
            raise ValueError(f"{name}: all tensors of a rank must be on one device, not {sorted(map(str, devices))}")
        return devices.pop()

    def _is(self, rank: int) -> bool:
        return bool(self.rank() == rank)

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        batch, self._batch = self._batch or [], None
        return Batch(batch)

    # What torch asks of a group

    def shutdown(self) -> None:
        """End the group when what was started is done, or aborted by another thread."""
        for lane in self._close():
            lane.finish(self._timeout.total_seconds())
        self._end("abort" if self._aborted.is_set() else "shutdown")

    def abort(self) -> None:
        for lane in self._close():
            lane.abort()
        self._aborted.set()  # last: a thread that sees it must find its lane aborted
        self._end("abort")

    def _close(self) -> list[Lane]:
        with self._lock:
            self._closed = True
            return list(self._lanes.values())

    def _end(self, how: str) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
        _note_end()
        atexit.unregister(self._end_at_exit)
        end_inner = getattr(self._inner, how, lambda: None)
        if not self._polls:
            end_inner()
        for lane in self._lanes.values():
            lane.end()
        if self._polls:
            end_inner()
        self._lanes.clear()

    def _get_backend(self, device: torch.device) -> Any:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(TYPE)]

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def bound_device_id(self) -> torch.device | None:
        """The device that `init_process_group(device_id=…)` named."""
        return getattr(self, "_bound_device", None)

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        self._bound_device = device

    def getBackendName(self) -> str:
        return BACKEND

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def set_timeout(self, timeout: timedelta) -> None:
        """The longest that a collective or message may take from now on."""
        self._timeout = timeout
        if hasattr(self._inner, "set_timeout"):
            self._inner.set_timeout(timeout)


class SimulatedWork(dist.Work):
    """torch's handle on a collective. The tensors are kept until it is done, or waited for."""

    def __init__(self, lane: Lane, operation: Operation, outputs: list[Tensor], *, blocks: bool) -> None:
        super().__init__()
        self._lane, self._operation, self._outputs, self._blocks = lane, operation, outputs, blocks
        self._future: torch.futures.Future[list[Tensor]] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._operation.error:
            raise DistBackendError(self._operation.error)
        torch.accelerator.current_stream(self._lane.device).wait_event(self._operation.done)
        self._operation.release()
        if self._blocks:
            self._operation.done.synchronize()
        return True

    synchronize = wait  # type: ignore[assignment]

    def is_completed(self) -> bool:
        return bool(self._operation.done.query())

    def is_success(self) -> bool:
        """True if it has ended without an error."""
        return self.is_completed() and not self._operation.error

    def exception(self) -> Exception | None:
        return DistBackendError(self._operation.error) if self._operation.error else None

    def result(self) -> list[Tensor]:
        """The tensors that it writes to."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future that is done at once: its users' streams wait, as for NCCL's."""
        if self._future is None:
            self._future = torch.futures.Future(devices=[self._lane.device])
            with self._lane.stream:
                self._future.set_result(self._outputs)
        return self._future


class Batch(dist.Work):
    def __init__(self, works: list[SimulatedWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _options(made: Any, given: Any) -> Any:
    """Options of one collective of the inner group, from those of any kind or the reduction alone."""
    if isinstance(given, type(made)):
        made = given
    elif given is not None:
        made.reduceOp = getattr(given, "reduceOp", given)
        if timeout := getattr(given, "timeout", None):
            made.timeout = timeout
    made.asyncOp = True  # so that an abort ends the wait
    return made


def _flat(tensors: Tensors) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else [leaf for part in tensors for leaf in _flat(part)]


def _like(tensors: Tensors, host: dict[int, Tensor]) -> Any:
    return host[id(tensors)] if isinstance(tensors, Tensor) else [_like(part, host) for part in tensors]


def _sizes(tensors: Iterable[Tensor]) -> str:
    return " ".join(f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors)


def _is_dense(tensor: Tensor) -> bool:
    """True if the elements fill a part of the memory, in whatever order of the dimensions."""
    if tensor.layout != torch.strided:
        return False
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def _check_ratio(name: str, larger: Sequence[Tensor], smaller: Sequence[Tensor], ranks: int) -> None:
    for one, other in zip(larger, smaller, strict=True):
        if one.numel() != ranks * other.numel() or one.dtype != other.dtype:
            raise ValueError(f"{name} over {ranks} ranks: {_sizes([one])} does not fit {_sizes([other])}")


def _ending(group: weakref.ref[SimulatedGroup]) -> Callable[[], None]:
    """A function that ends the group when Python does: a thread inside of torch would abort the process."""

    def end() -> None:
        if (found := group()) is not None:
            found.abort()

    atexit.register(end)
    return end


def inner_group(options: Any) -> Any:
    """A process group from the options that torch gives a backend: paceline's over shared memory or TCP, or gloo.

    Raises:
        ValueError: the environment names another one.
    """
    kind = os.environ.get(INNER) or "shm"
    # a name of its own: what ranks wait for is a collective of the device's group, and none of this group
    options = SimpleNamespace(
        store=options.store,
        group_rank=options.group_rank,
        group_size=options.group_size,
        timeout=options.timeout,
        group_id=f"inner {options.group_id}",
        global_ranks_in_group=options.global_ranks_in_group,
    )
    if kind == "shm":
        from paceline.comm import shm

        return shm.create(options, None)
    if kind == "tcp":
        from paceline.comm import tcp

        return tcp.create(options, None)
    if kind == "gloo":
        return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
    raise ValueError(f"{INNER}={kind}: it is shm, tcp or gloo")


def _create(options: Any, _: Any) -> SimulatedGroup:
    init_s = float(os.environ.get(INIT_MS) or 0) / 1000
    time.sleep(init_s)
    group = SimulatedGroup(inner_group(options), options.timeout, options.group_id)
    if folder := os.environ.get(LOG):
        note(Path(folder), options.group_size, init_s)
    return group


_ended_at: dict[int, int] = {}  # allocations of each device when a group ended last


def _note_end() -> None:
    _ended_at.update({device: _C.allocations(device) for device in range(_C.device_count())})


def note(folder: Path, size: int, init_s: float) -> None:
    """Write down that this process has a new group: when, as which rank of the run, and what its device has kept.

    `held_bytes` is all memory of the device that is allocated, and `kept_bytes` the part of it that was so before a
    group of this process ended last.
    """
    device = torch.accelerator.current_device_index()
    line = {"time": time.time(), "rank": int(os.environ.get("RANK", 0)), "size": size, "init_s": init_s}
    line["held_bytes"] = _C.bytes_older_than(device, _C.allocations(device))
    line["kept_bytes"] = _C.bytes_older_than(device, _ended_at.get(device, 0))
    with open(folder / f"{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def register() -> None:
    """Make `simccl` the backend of the device; a second call does nothing."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=[TYPE])
        dist.Backend.default_device_backend_map[TYPE] = BACKEND
        recorder.register()
    assert _C.device_count()
