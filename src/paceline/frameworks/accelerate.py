"""Support for Accelerate, and for the `Trainer` of Transformers, which is built on Accelerate.

    init_process_group()              # from frameworks/pytorch.py; call before Accelerator(…) or TrainingArguments(…)
    code_gradients(accelerator, "int8")  # or pass a trainer

Accelerate itself offers only gloo for CPUs, but it uses a process group that already exists.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import LaunchError, PlanError
from paceline.frameworks.pytorch import CodecState, register_codec


def code_gradients(owner: Any, codec: str) -> None:
    """Make the model of an `Accelerator` or a Transformers `Trainer` send compressed gradients.

    Call this function before `accelerator.prepare` or `trainer.train`. See `CodecState` for the codecs.

    Raises:
        PlanError: the codec is unknown, or Accelerate has another `comm_hook`.
        LaunchError: the model is already prepared, or `owner` has no `Accelerator`.
    """
    CodecState(codec)  # raises an error for an unknown codec
    accelerator = owner if isinstance(owner, Accelerator) else getattr(owner, "accelerator", None)
    if not isinstance(accelerator, Accelerator):
        raise LaunchError(
            "frameworks.not_an_accelerator",
            "code_gradients needs an Accelerator or a Trainer, not a {class_name}",
            class_name=type(owner).__name__,
        )
    if accelerator._models:
        raise LaunchError(
            "frameworks.prepared_already",
            "a model is already prepared. Call code_gradients before accelerator.prepare or trainer.train.",
        )
    before = accelerator.ddp_handler or DistributedDataParallelKwargs()
    if before.comm_hook != DDPCommunicationHookType.NO:
        raise PlanError(
            "frameworks.two_hooks",
            "a DDP model can have only one hook. Use the codec {codec} or comm_hook={comm_hook}, not both.",
            codec=codec,
            comm_hook=before.comm_hook,
        )
    kept = {field.name: getattr(before, field.name) for field in dataclasses.fields(DistributedDataParallelKwargs)}
    # Accelerator(kwargs_handlers=…) rejects subclasses of its own handlers.
    accelerator.ddp_handler = _CodedGradients(**kept, codec=codec)


@dataclass
class _CodedGradients(DistributedDataParallelKwargs):
    """Arguments for a model's DDP wrapper, with a codec for the gradients."""

    codec: str = ""

    def to_dict(self, ignore_keys: tuple[str, ...] = ("comm_hook", "comm_wrapper", "comm_state_option")) -> Any:
        return super().to_dict((*ignore_keys, "codec"))

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        register_codec(model, self.codec)
