"""Reading of this rank's position in its collectives, at the request of the launcher.

The operations of paceline's own groups are read from their queues. For torch's groups (gloo, NCCL), torch's flight
recorder has the recent collectives. The layer is the innermost module in the stack of the main thread. An accelerator
runs a collective after the host has called it, so the layer comes from the stack in the flight recorder.
"""

from __future__ import annotations

import pickle
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, pairwise
from types import FrameType, FunctionType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d as c10d

from paceline.comm.operation import Description, last_failure
from paceline.comm.process_group import DrivenProcessGroup
from paceline.device import FLIGHT_RECORDERS
from paceline.wire.position import Position, Wait, call_of, read_positions_with

_FAILED_S = 5.0  # for this time, a failed operation counts as the operation in which the rank waits
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Byte": "uint8",
}
_model: weakref.ref[nn.Module] | None = None


def name_layers_of(model: nn.Module) -> None:
    """Take the names of layers in positions from this model."""
    global _model
    _model = weakref.ref(model)


def own_position(error: BaseException | None = None) -> Position:
    """Read the position of this rank, or the position in which `error` was raised."""
    if not dist.is_initialized():
        return Position()
    # a rank that has just failed has left the layer, but handles the layer's error
    layer = _layer(chain(_frames(error), _frames())) or _layer(_frames(_handled()))
    groups = _groups()
    named = {about.name: about for about in groups.values()}
    entered = {about.name: getattr(group, "entered", 0) for group, about in groups.items()}
    driven = [group for group in groups if isinstance(group, DrivenProcessGroup)]
    waits = [
        Wait(
            found.group,
            named[found.group].label,
            found.number,
            found.what,
            found.tensors,
            named[found.group].members,
            [named[found.group].members[rank] for rank in found.awaited] or None,
            layer,
            found.waited_s,
        )
        for found in _operations(driven)
        if found.group in named
    ]
    if len(driven) < len(groups):
        # gloo has just ended the operation that failed
        failed = error is not None and dist.get_backend() == "gloo"
        stacks = any(dist.get_backend(group) != "gloo" for group in groups.keys() - set(driven))
        waits += _recorded_waits(
            {about.name: about for about in groups.values()}, layer, entered, stacks=stacks, failed=failed
        )
    return Position(dist.get_rank(), layer, entered, waits)


read_positions_with(own_position)


_IN_LAYER = "layer "


def in_layer(function: Any, layer: str) -> FunctionType:
    """Return a copy of a function that shows the name of a layer in stacks.

    The flight recorder keeps these stacks.
    """
    code = function.__code__.replace(co_name=f"{_IN_LAYER}{layer}")
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


class _Group(NamedTuple):
    name: str
    label: str
    members: Sequence[int]


def _groups() -> dict[Any, _Group]:
    world, found = dist.distributed_c10d._world, {}
    for group, name in list(world.pg_names.items()):
        members = list(world.pg_group_ranks.get(group, ()))
        description = str(group.group_desc)
        axis = description.removeprefix("mesh_")
        label = "world" if group is dist.group.WORLD else axis if axis != description else "+".join(map(str, members))
        found[group] = _Group(str(name), label, members)
    return found


# Operations of paceline's own groups


def _operations(groups: Sequence[DrivenProcessGroup]) -> Iterator[Description]:
    """Yield an operation that has just failed, and the operations for which a thread waits."""
    failed = last_failure()
    if failed is not None and time.monotonic() - failed.at < _FAILED_S:
        yield failed
    if not any(frame.f_code.co_name == "drive" for frame in _of_all_threads()):
        return
    for driver in {group._progress: None for group in groups if not group._closed}:
        for queue in list(driver._busy):
            with suppress(IndexError):  # the operation has just ended
                yield Description.of(queue.operations[0])


# Flight recorders


def _recorded_waits(
    groups: Mapping[str, _Group], layer: str, entered: dict[str, int], *, stacks: bool, failed: bool
) -> Iterator[Wait]:
    """Yield the first unfinished collective of each of torch's own groups.

    The function sets the number of collectives of each group in `entered`. If the newest collective has failed, it
    counts as unfinished.
    """
    pending: dict[str, tuple[dict[str, Any], tuple[str, str] | None]] = {}
    calls: dict[str, list[tuple[str, str]]] = defaultdict(list)
    entries = _recorded(stacks=stacks)
    for entry in entries:
        name, number = entry["process_group"][0], entry["collective_seq_id"]
        if name not in groups or entry["is_p2p"]:
            continue
        if number < entered.get(name, 0):  # the group has the name of a group of an earlier generation
            calls.pop(name, None)
            pending.pop(name, None)
        entered[name] = number
        calls[name].append(call_of(_operation(entry), _tensors(entry)))
        unfinished = entry["state"] != "completed" and not entry["retired"]
        if name not in pending and (unfinished or (failed and entry is entries[-1])):
            pending[name] = entry, _left_out(calls[name])
    for name, (entry, after) in pending.items():
        tensors, what = _tensors(entry), _operation(entry)
        library = entry["profiling_name"].rpartition(":")[0]
        # on accelerators, the host has called the collective earlier
        called_in = layer if library == "gloo" else _layer_of_lines(entry.get("frames", ()))
        group = groups[name]
        waited_s = time.time() - entry["time_created_ns"] / 1e9
        place = name, group.label, entry["collective_seq_id"], what, tensors, group.members, None, called_in
        yield Wait(*place, waited_s, after)


def _operation(entry: Mapping[str, Any]) -> str:
    return str(entry["profiling_name"].rpartition(":")[2])


def _tensors(entry: Mapping[str, Any]) -> str:
    sizes = zip(entry["input_dtypes"], entry["input_sizes"], strict=True)
    return ", ".join(f"{_DTYPES.get(dtype, dtype.lower())} {list(size)}" for dtype, size in sizes)


def _left_out(calls: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    """Return the call that usually comes before the last of these calls.

    The result is None if an earlier call like the last one came after the same call as now, or if there is none.
    """
    *before, last = calls
    pairs = list(pairwise(before))
    if not before or (before[-1], last) in pairs:
        return None
    return next((first for first, second in reversed(pairs) if second == last), None)


def _recorded(*, stacks: bool) -> list[dict[str, Any]]:
    """Return the entries of all flight recorders, in order."""
    # torch would import its compiler to look up compiled code in stacks, which takes seconds
    hides_compiler = stacks and "torch._inductor" not in sys.modules
    if hides_compiler:
        vars(torch)["_inductor"] = None
    try:
        dumps = [dump(True, stacks, False) for name in FLIGHT_RECORDERS if (dump := getattr(c10d, name, None))]
    finally:
        if hides_compiler:
            vars(torch).pop("_inductor", None)
    # torch has pickled these bytes in this process
    return [entry for dumped in dumps for entry in pickle.loads(dumped).get("entries", ())]


def _layer_of_lines(frames: Sequence[Mapping[str, Any]]) -> str:
    """Return the layer whose forward pass contains the innermost line of the model's code.

    If several layers share this code, the result names all of them.
    """
    model = _model() if _model is not None else None
    for frame in frames:
        if frame["name"].startswith(_IN_LAYER):
            return str(frame["name"].removeprefix(_IN_LAYER))
        if frame["name"] != "forward":
            continue
        found = [name or type(module).__name__ for name, module in _layers_of(model) if _has_line(module, frame)]
        if found:
            return found[0] if len(found) == 1 else f"one of {', '.join(found)}"
    return ""


def _layers_of(model: nn.Module | None) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model by name, without the numbers of a pipeline's stages."""
    for name, module in model.named_modules() if model is not None else ():
        yield name.partition(".")[2] if isinstance(model, nn.ModuleList) else name, module


def _has_line(module: nn.Module, frame: Mapping[str, Any]) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    if code is None or code.co_filename != frame["filename"]:
        return False
    lines = [line for _, _, line in code.co_lines() if line is not None]
    return bool(min(lines) <= frame["line"] <= max(lines))


# Stacks


def _frames(error: BaseException | None = None) -> Iterator[FrameType]:
    """Yield the frames of the main thread, or of an error, innermost first."""
    if error is None:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None:
            yield frame
            frame = frame.f_back
        return
    traced, found = error.__traceback__, list[FrameType]()
    while traced is not None:
        found.append(traced.tb_frame)
        traced = traced.tb_next
    yield from reversed(found)


def _handled() -> BaseException | None:
    """Return the exception that the main thread handles, or None."""
    found: Any = sys._current_exceptions().get(threading.main_thread().ident or 0)
    handled: BaseException | None = found[1] if isinstance(found, tuple) else found  # a tuple before Python 3.12
    return handled


def _of_all_threads() -> Iterator[FrameType]:
    for frame in sys._current_frames().values():
        at: FrameType | None = frame
        while at is not None:
            yield at
            at = at.f_back


def _layer(frames: Iterable[FrameType]) -> str:
    """Return the name of the innermost module with a method in the stack, or ""."""
    model = _model() if _model is not None else None
    names = {id(module): name for name, module in _layers_of(model)}
    for frame in frames:
        first = frame.f_code.co_varnames[:1]
        if first not in (("self",), ("ctx",)):
            continue
        own: Any = frame.f_locals.get(first[0])
        if isinstance(own, nn.Module):
            return names.get(id(own)) or type(own).__name__
        # torch's FSDP2 gathers and scatters outside of the module's methods
        if type(own).__name__ == "FSDPParamGroup":
            # the unit of the model itself is named after its first layer
            name = own._module_fqn or (own.fsdp_params[0]._param_fqn or "").rpartition(".")[0]
            if name:
                return str(name)
        # tensor parallelism sums gradients in an autograd function, whose context names the layer
        if first == ("ctx",) and isinstance(name := getattr(own, "layer", None), str) and name:
            return name
    return ""
