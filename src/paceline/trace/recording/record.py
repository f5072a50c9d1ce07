"""Recording of a model's forward pass on the meta device, as a list of operations.

Weights and activations are on the meta device. Tensors made of the batch's whole numbers alone (masks, positions) are
computed for real, so that code may read them. A module that reads values of activations (a mixture of experts that
routes tokens) cannot run so: it is recorded as one opaque operation, whose output is assumed to have the shape of its
first input.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from paceline.job.batch import Batch
from paceline.trace.recording.graph import Graph, Shapes
from paceline.trace.recording.model_state import kept_tensors, placed, placeholders, restored, training
from paceline.trace.recording.modes import FunctionMode
from paceline.trace.recording.module_calls import own_functions, reported_calls
from paceline.trace.recording.operation_mode import OperationMode
from paceline.trace.recording.recorder import BeforeCall, Recorder, recording, silence
from paceline.trace.recording.trees import tensors_within

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
        stack.enter_context(training(model))
        stack.enter_context(placeholders(model, recorder, shapes or {}))
        stack.enter_context(reported_calls(model, recorder))
        batch = placed(example, recorder)
        stack.enter_context(torch._C._AutoDispatchBelowAutograd())
        stack.enter_context(own_functions(recorder))
        stack.enter_context(FunctionMode(recorder))
        stack.enter_context(OperationMode(recorder.operation))
        result = call(model, batch)
        with silence(recorder):
            recorder.finish(result, kept_tensors(model, before))
    return recorder.graph
