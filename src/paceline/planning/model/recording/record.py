"""Recording of a model's forward pass on the meta device, as a list of operations.

Weights and activations are on the meta device. Tensors made of the batch's whole numbers alone (masks, positions) are
computed for real, so that code may read them. A module that reads values of activations (a mixture of experts that
routes tokens) cannot run so: it is recorded as one opaque operation, whose output is assumed to have the shape of its
first input.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from paceline.device import is_device_type
from paceline.job.batch import Batch
from paceline.planning.model.recording.graph import Graph, PythonCall, Shapes, Site
from paceline.planning.model.recording.model_state import kept_tensors, placed, put_placeholders, restored
from paceline.planning.model.recording.module_calls import own_functions, report_calls
from paceline.planning.model.recording.operation_mode import OperationMode
from paceline.planning.model.recording.recorder import BeforeCall, Recorder, recording, silence
from paceline.planning.model.recording.trees import map_tensors, tensors_in, tensors_within

Call = Callable[[nn.Module, Batch], Any]


def record_graph(
    model: nn.Module,
    example: Batch,
    call: Call,
    shapes: Shapes | None = None,
    opaque: Collection[str] | None = None,
    rewrite: BeforeCall | None = None,
) -> Graph:
    """Run `call(model, example)` without weights, in training mode, and record it.

    The model and its buffers are restored afterwards.

    Args:
        shapes: other shapes for parameters, by name.
        opaque: the modules that may be opaque; None for any.
        rewrite: called before every Python call; may change its arguments.

    Raises:
        Unfollowable: a module fails and is not among those that may be opaque.
        Exception: any error of the model's own code outside of its submodules.
    """
    recorder = Recorder(opaque, rewrite)
    before = {id(x) for module in model.modules() for x in tensors_within(module.__dict__)}
    with ExitStack() as stack:
        stack.enter_context(recording(recorder))
        stack.enter_context(restored(model))
        if not model.training:
            model.train()
        put_placeholders(model, recorder, shapes or {})
        report_calls(model, recorder)
        batch = placed(example, recorder)
        stack.enter_context(torch._C._AutoDispatchBelowAutograd())
        stack.enter_context(own_functions(recorder))
        stack.enter_context(FunctionMode(recorder))
        stack.enter_context(OperationMode(recorder.operation))
        result = call(model, batch)
        with silence(recorder):
            recorder.finish(result, kept_tensors(model, before))
    return recorder.graph


_DEVICE = Tensor.device.__get__
_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_TORCH, _OURS = str(Path(torch.__file__).parent), str(Path(__file__).parent)


class FunctionMode(TorchFunctionMode):
    """Function mode that records torch functions called by the model's code.

    Arguments on mixed devices are moved to meta.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder, kwargs = self.recorder, kwargs or {}
        name = getattr(func, "__name__", str(func))
        # masks and positions made for a tensor on meta are real, too
        if func == _DEVICE and not recorder.quiet:
            return recorder.device
        if func == _REQUIRES_GRAD and not recorder.quiet and not sys._getframe(1).f_code.co_filename.startswith(_TORCH):
            return recorder.graph.values[recorder.see(args[0])].requires_grad
        if recorder.quiet or name in {"__get__", "__set__"}:
            return func(*args, **kwargs)
        if name in {"register_hook", "register_post_accumulate_grad_hook", "retain_grad"}:
            recorder.add("hook", (args[0],), {}, None)
            return RemovableHandle(OrderedDict())
        if recorder.rewrite is not None:
            args, kwargs = recorder.rewrite(len(recorder.graph.calls), name, args, kwargs)
        args, kwargs = self._on_one_device(args, kwargs)
        # stays on meta
        if name == "to" and args[0].is_meta:
            args = (args[0], *(x for x in args[1:] if not isinstance(x, (str, torch.device))))
            kwargs = {k: v for k, v in kwargs.items() if k != "device"}
            if len(args) + len(kwargs) == 1:
                kwargs = {"dtype": args[0].dtype}
        noted = PythonCall(
            name, recorder.paths[-1], _site(sys._getframe(1)), recorder.refs(args), recorder.refs(kwargs)
        )
        recorder.graph.calls.append(noted)
        result = args[0] if is_device_type(name) else func(*args, **kwargs)
        noted.results = [recorder.see(x) for x in tensors_in(result)]
        return result

    def _on_one_device(self, args: Any, kwargs: Any) -> Any:
        if len({x.is_meta for x in tensors_in((args, kwargs))}) < 2:
            return args, kwargs

        def move(x: Tensor) -> Tensor:
            if x.is_meta:
                return x
            with silence(self.recorder):
                moved = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            self.recorder.same(moved, self.recorder.see(x))
            return moved

        return map_tensors(move, args), map_tensors(move, kwargs)


def _site(frame: FrameType | None) -> Site | None:
    """Site of the innermost code outside of torch and of this folder."""
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _OURS)):
        frame = frame.f_back
    if frame is None:
        return None
    return Site(frame.f_code, _positions(frame.f_code)[frame.f_lasti // 2])


@cache
def _positions(code: CodeType) -> list[tuple[int | None, int | None, int | None, int | None]]:
    return list(code.co_positions())
