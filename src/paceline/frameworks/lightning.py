"""Strategy for Lightning: `Trainer(strategy=PacelineStrategy(codec="int8"))`, or `strategy="paceline"`.

The strategy uses `lightning` or `pytorch_lightning`, whichever package the script has imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.device import widest_float
from paceline.errors import PlanError
from paceline.frameworks.pytorch import LocalSteps, check_sync, cpu_backend, register_codec

_NAMES = ("lightning.pytorch", "pytorch_lightning")
_PACKAGE = next((name for name in _NAMES if name in sys.modules), _NAMES[0])
try:
    _strategies = importlib.import_module(f"{_PACKAGE}.strategies")
except ImportError:
    _strategies = importlib.import_module(f"{_NAMES[1]}.strategies")
_STATE = "paceline"  # key in checkpoints


class PacelineStrategy(_strategies.DDPStrategy):  # type: ignore[name-defined]
    """`DDPStrategy` with paceline's transports between CPU ranks, codecs and local rules.

    The ranks use shared memory on one host, `tcp` between hosts, and torch's own library on accelerators.

    Args:
        codec: codec for gradients (see `CodecState`) or for DiLoCo's pseudo-gradients; None disables compression.
        sync: `allreduce`, or a local rule as in a plan: `local:8`, `diloco:30`. With a local rule, validation and
            checkpoints use the synchronized parameters.
        items: function of a batch that returns the number of items over which `training_step` averages its loss, such
            as labels that are not ignored. The gradient is then that of the mean over the items of all ranks and all
            accumulated batches. None: every batch of every rank has the same weight, as in `DDPStrategy`.
        options: options of `DDPStrategy`.

    Raises:
        PlanError: the codec or rule is unknown, or this strategy does not support it.
    """

    strategy_name = "paceline"

    def __init__(
        self,
        codec: str | None = None,
        sync: str = "allreduce",
        items: Callable[[Any], float | Tensor] | None = None,
        **options: Any,
    ) -> None:
        check_sync(sync, codec)
        if items is not None and sync != "allreduce":
            raise PlanError(
                "frameworks.items_of_local_steps",
                "items weights the batches of all ranks in each step, but with sync={sync} the ranks take steps "
                "independently. Leave out items or sync.",
                sync=sync,
            )
        self._process_group_backend: str | None
        super().__init__(**options)
        self.codec, self.sync, self.items = codec, sync, items
        self._batch_items: float | Tensor = 0.0
        self._step_items: float | Tensor = 0.0
        self._steps: LocalSteps | None = None
        self._loaded: dict[str, Any] = {}
        self._shared_parameters = ExitStack()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the strategy as `paceline`; the names of `DDPStrategy` stay unchanged."""
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description="DDP over paceline's transports")

    def setup_distributed(self) -> None:
        """Join the process group of the other ranks."""
        if self._process_group_backend is None and self.root_device.type == "cpu":
            self._process_group_backend = cpu_backend(one_host=self.num_nodes == 1)
        super().setup_distributed()

    def configure_ddp(self) -> None:
        """Wrap the model with DDP, or attach the plain model to the local rule."""
        if self.sync == "allreduce":
            super().configure_ddp()
            if self.codec is not None:
                register_codec(self.model, self.codec)
            return
        self._steps = LocalSteps(self.lightning_module, self.sync, self.codec, self.root_device)
        if self._loaded:
            self._steps.load_state_dict(self._loaded)

    def setup_optimizers(self, trainer: Any) -> None:
        """Create the optimizers; a local rule supports only one optimizer."""
        super().setup_optimizers(trainer)
        if self._steps is not None and len(self.optimizers) > 1:
            raise PlanError(
                "frameworks.several_optimizers",
                "sync={sync} supports one optimizer, but the model has {optimizers}",
                sync=self.sync,
                optimizers=len(self.optimizers),
            )
        if self.items is not None and not self.lightning_module.automatic_optimization:
            raise PlanError(
                "frameworks.items_of_manual_steps",
                "items needs automatic optimization, because the gradient is divided before the optimizer's step. "
                "Leave out items, or set automatic_optimization = True.",
            )

    # Normalization over the items of all ranks

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss of a batch, and count the batch's items."""
        if self.items is not None:
            self._batch_items = self.items(args[0])
        return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Accumulate a gradient; with `items`, that of the sum over the batch's items."""
        if self.items is None:
            return super().backward(closure_loss, *args, **kwargs)  # type: ignore[no-any-return]
        self._step_items = self._step_items + self._batch_items
        # Lightning has divided the loss by the number of accumulated batches
        weight = self._batch_items * self.lightning_module.trainer.accumulate_grad_batches
        super().backward(closure_loss * weight, *args, **kwargs)
        return closure_loss.detach()

    def _divided(self, closure: Callable[[], Any]) -> Any:
        """Compute a step's gradients, and divide them by the items of all ranks."""
        output = closure()
        items = torch.as_tensor(self._step_items, dtype=widest_float(self.root_device), device=self.root_device)
        dist.all_reduce(items)
        self._step_items = 0.0
        gradients = [p.grad for p in self.lightning_module.parameters() if p.grad is not None]
        # DDP has averaged over the ranks
        torch._foreach_mul_(gradients, self.world_size / items.item())
        return output

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: nn.Module | None = None,
        **options: Any,
    ) -> Any:
        """Take an optimizer step, then let the local rule synchronize the parameters."""
        closure = closure if self.items is None else partial(self._divided, closure)
        output = super().optimizer_step(optimizer, closure, model, **options)
        if self._steps is not None:
            self._steps.stepped()
        return output

    # Checkpoints and validation with replicas that differ

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's state with synchronized parameters; every rank must call this."""
        if self._steps is None:
            return dict(super().lightning_module_state_dict())
        with self._steps.shared_parameters():
            return {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in super().lightning_module_state_dict().items()
            }

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint that includes the rule's outer state."""
        if self._steps is not None:
            checkpoint[_STATE] = self._steps.state_dict()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the model, and keep the checkpoint's outer state for the rule."""
        self._loaded = dict(checkpoint.get(_STATE, {}))
        super().load_model_state_dict(checkpoint, strict=strict)

    def on_validation_start(self) -> None:
        """Switch to the synchronized parameters for validation."""
        super().on_validation_start()
        self._shared_parameters.enter_context(nullcontext() if self._steps is None else self._steps.shared_parameters())

    def on_validation_end(self) -> None:
        """Restore each replica's own parameters."""
        self._shared_parameters.close()
        super().on_validation_end()

    def on_train_end(self) -> None:
        """Leave every rank with the synchronized parameters."""
        if self._steps is not None:
            self._steps.end()
            self._steps = None
        super().on_train_end()

    def teardown(self) -> None:
        """Release the model, even after a failure."""
        self._shared_parameters.pop_all()
        self._steps = None
        super().teardown()


PacelineStrategy.register_strategies(_strategies.StrategyRegistry)
