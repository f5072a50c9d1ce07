"""The dispatch mode of all traces: it reports every operation to its trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode

_VALUE = torch.ops.aten._local_scalar_dense.default
# (operation, arguments, keyword arguments, result)
Report = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
Prepare = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


class OperationMode(TorchDispatchMode):
    """Dispatch mode that reports every ATen operation.

    Args:
        report: called after every operation.
        answer: what a tensor without a value says when code asks for it, by its dtype; None: that raises torch's own
            error.
        prepare: changes the arguments of every operation.
    """

    def __init__(
        self,
        report: Report,
        answer: Callable[[torch.dtype], bool | int | float] | None = None,
        prepare: Prepare | None = None,
    ) -> None:
        super().__init__()
        self._report, self._answer, self._prepare = report, answer, prepare

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._answer is not None and func is _VALUE and args[0].is_meta:
            return self._answer(args[0].dtype)
        if self._prepare is not None:
            args, kwargs = self._prepare(args, kwargs)
        try:
            result = func(*args, **kwargs)
        except DataDependentOutputException:
            if self._answer is None or func is not _VALUE:
                raise
            return self._answer(args[0].dtype)
        self._report(func, args, kwargs, result)
        return result
