"""Modes of torch that report every torch function and every ATen operation to a recorder."""

from __future__ import annotations

import sys
from collections import OrderedDict
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from paceline.trace.recording.graph import PythonCall, Site
from paceline.trace.recording.recorder import Recorder, silence
from paceline.trace.recording.trees import map_tensors, tensors_in

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
        result = args[0] if name in {"cpu", "cuda"} else func(*args, **kwargs)
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
