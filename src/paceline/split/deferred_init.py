"""Deferred initialisation: a model is built without memory, and its weights are created later.

The construction runs once without values while its operations are recorded (`construction_log`). Every rank then
replays the operations, which create one weight after the other, and keeps its shard of each parameter. All ranks draw
all random numbers, so the weights are bit-equal to the weights of a single process.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from paceline.errors import JobError, PlanError
from paceline.split.construction_log import ConstructionRecorder, NotRecordable, OperationLog, Take
from paceline.split.layout import carry_hooks, refuse_kept_parameters, replace_tensors

# the report has a note if the construction holds real tensors of more than this fraction of the model's bytes
_MUCH = 1 / 8


@dataclass
class DeferredModel:
    """A model whose parameters have no memory, with a way to compute their values.

    Attributes:
        model: the model, whose parameters are on the meta device. Buffers are on the meta device or real.
        note: why every rank first had the whole model, or much of it, in memory; None if none had.
    """

    model: nn.Module
    note: str | None
    _replay: Callable[[Callable[[str], bool], Take], None]

    @torch.no_grad()
    def replay(self, take: Take, names: Collection[str] | None = None) -> None:
        """Call `take(name, full tensor)` for every parameter and every meta buffer.

        Names refer to the undivided model. A tied tensor is passed once, under its first name. Parameters are passed in
        the order in which the construction finishes them. A tensor is freed when `take` returns, unless `take` keeps a
        reference. torch's random state is reset to its state before the construction. If one of the tensors is random,
        the random state is then the same as after a plain construction.

        The values are bit-equal to those of a plain construction with the same number of threads. Random numbers do not
        depend on the number of threads, but the rounding of linear algebra (orthogonal initialisation) does.

        Args:
            take: function that gets the name and the value of each tensor.
            names: names of the tensors to compute; None for all tensors.
        """
        self._replay((lambda name: True) if names is None else set(names).__contains__, take)


def record(build: Callable[[], nn.Module]) -> DeferredModel:
    """Build a model without memory for its floating-point tensors.

    torch's random state does not change. A construction that reads random values, or uses an operation without a meta
    implementation, cannot be recorded. It then runs again with memory, and the model's `note` gives the reason.

    Raises:
        JobError: the built model has parameters on the meta device, or parameters of unknown shape.
        Exception: any error that `build` raises.
    """
    others = random.getstate(), np.random.get_state()
    recorder = ConstructionRecorder()
    try:
        with recorder.recording():
            model = build()
        _check(model)
        problem = recorder.problem
        if problem is None:
            return _from_log(model, recorder)
    except Exception as error:  # noqa: BLE001 - an error that the model's own code causes is raised again below
        problem = recorder.problem or (
            str(error) if isinstance(error, NotRecordable) else f"{type(error).__name__}: {error}"
        )
    random.setstate(others[0])
    np.random.set_state(others[1])
    return _built_whole(build, problem)


def deferred_from(model: nn.Module) -> DeferredModel:
    """Return a deferred model for a model that is already built.

    Its parameters become meta tensors, tied as before. The full tensors are kept until `replay` passes them on, which
    is possible only once. Buffers do not change.

    Raises:
        JobError: the model has parameters on the meta device, or parameters of unknown shape.
        PlanError: modules also have parameters in plain attributes, or the model was compiled with torch.jit.
    """
    _check(model)
    refuse_kept_parameters(model)
    if on_meta := [name for name, p in model.named_parameters() if p.is_meta]:
        raise JobError(
            "model.parameter_on_meta",
            "parameter {name} is on the meta device, so it has no values. Build the model on the CPU.",
            name=on_meta[0],
        )
    full = _without_memory(model)

    def replay(wanted: Callable[[str], bool], take: Take) -> None:
        for name in list(full):
            tensor = full.pop(name)
            if wanted(name):
                take(name, tensor)

    return DeferredModel(model, None, replay)


def _built_whole(build: Callable[[], nn.Module], why: str | None) -> DeferredModel:
    start = torch.get_rng_state()
    model = build()
    end = torch.get_rng_state()
    torch.set_rng_state(start)
    recorded = deferred_from(model)

    def replay(wanted: Callable[[str], bool], take: Take) -> None:
        recorded._replay(wanted, take)
        torch.set_rng_state(end)

    note = f"every rank held the whole model at first, for its construction cannot be recorded: {why}"
    return DeferredModel(model, note, replay)


def _from_log(model: nn.Module, recorder: ConstructionRecorder) -> DeferredModel:
    _compute_attributes(model, recorder)
    log: OperationLog = recorder.log
    tensors = dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if b.is_meta}
    views = {name: recorder.view(tensor) for name, tensor in tensors.items() if tensor.is_meta}
    # parameters that the construction created from numbers, such as torch.tensor(0.07)
    known = _without_memory(model)

    def replay(wanted: Callable[[str], bool], take: Take) -> None:
        for name, tensor in known.items():
            if wanted(name):
                take(name, tensor)
        log.replay({name: view for name, view in views.items() if wanted(name)}, take)

    note = None
    total = sum(p.nbytes for p in model.parameters())
    if recorder.constant_bytes > _MUCH * total:
        note = (
            f"every rank holds {recorder.constant_bytes:,} bytes that the model's construction brings along (weights "
            f"that it loads or computes outside torch), of {total:,} bytes of parameters"
        )
    return DeferredModel(model, note, replay)


def _without_memory(model: nn.Module) -> dict[str, Tensor]:
    full = {name: p.detach() for name, p in model.named_parameters() if not p.is_meta}
    replace_tensors(model, lambda p: p if p.is_meta else _shape(p), None)
    return full


def _shape(parameter: nn.Parameter) -> nn.Parameter:
    shape = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
    # attributes that the user or a library set on the parameter
    shape.__dict__.update(parameter.__dict__)
    carry_hooks(parameter, shape)
    return shape


def _compute_attributes(model: nn.Module, recorder: ConstructionRecorder) -> None:
    """Compute the values of meta tensors that are plain attributes of modules.

    Raises:
        NotRecordable: a value depends on random numbers.
    """
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for path, module in model.named_modules():
        for name, value in list(vars(module).items()):
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            for holder, key, tensor in _tensors(vars(module), name, value):
                if not tensor.is_meta or id(tensor) in own:
                    continue
                real = recorder.log.value(recorder.view(tensor))
                if real is None:
                    raise NotRecordable(
                        f"{path or 'the model'} keeps random numbers in {name}, which is neither parameter nor buffer"
                    )
                holder[key] = real


def _tensors(holder: Any, key: Any, value: Any) -> Iterator[tuple[Any, Any, Tensor]]:
    """Yield tensors in an attribute, a list or a dict, with container and key."""
    if isinstance(value, Tensor):
        yield holder, key, value
    elif isinstance(value, (list, dict)):
        for inner, entry in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield from _tensors(value, inner, entry)


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise JobError(
            "model.construction_invalid",
            "the constructor returned a {class_name}, not an nn.Module",
            class_name=type(model).__name__,
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise PlanError(
            "plan.torchscript",
            "a model that was compiled with torch.jit cannot be divided. Pass the original module, or do not divide "
            "the model (dp only).",
        )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise JobError(
                "model.lazy_parameter",
                "parameter {name} gets its shape from the first batch. Run a batch through the model in its factory.",
                name=name,
            )


def allocate(module: nn.Module, device: torch.device, *, offload: bool = False) -> None:
    """Allocate memory on `device` for every parameter and buffer of `module`.

    Meta tensors become uninitialised tensors of the same shape, which the caller fills through
    `paceline.split.layout.local`. Real buffers and parameters move with their values. A tensor that is used in several
    places stays a single tensor and keeps its attributes. Call `local` for an FSDP2 parameter only after this function,
    because FSDP2 replaces the memory of uneven shards to pad them.

    Args:
        module: a plain module, or a module that `FullySharded` has sharded.
        device: the device on which the rank computes.
        offload: whether to allocate the shards of FSDP2 in host memory, as `CPUOffloadPolicy` requires. All other
            tensors are still allocated on `device`.
    """
    sharded_on = torch.device("cpu") if offload else device

    def allocated(parameter: nn.Parameter) -> nn.Parameter:
        sharded = isinstance(parameter, DTensor)
        own = _on(parameter.detach(), sharded_on if sharded else device)
        new = nn.Parameter(own, requires_grad=parameter.requires_grad)
        new.__dict__.update(parameter.__dict__)
        if sharded:  # FSDP2 holds a reference to this object
            torch.utils.swap_tensors(parameter, new)
            return parameter
        carry_hooks(parameter, new)
        return new

    replace_tensors(module, allocated, lambda buffer: _on(buffer, device))
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            # FSDP2 looks up its shards again whenever `_apply` is called
            submodule._apply(lambda tensor: tensor, recurse=False)


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
