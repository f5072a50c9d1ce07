"""Engine settings, and the guard that stops or skips updates with NaN, Inf or spikes."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from paceline.comm import Group
from paceline.device import has_timed_events
from paceline.errors import NonFiniteError
from paceline.job.batch import Batch, nonfinite_rows
from paceline.job.stop import SpikeSpec
from paceline.planning.plan import Plan
from paceline.planning.sync_info import sync_info
from paceline.sync.rows import LateNorm


class Guard:
    """Check of each update for NaN, Inf and spikes.

    The guard restores buffers if an update is skipped.

    Args:
        policy: `stop` raises an error; `skip` and `rewind` skip the update.
        model: the model whose buffers are restored.
        loss_scale: the loss scale of fp16 training, which an overflow reduces; None in other precisions.
        rank: this rank's number in the run.
        late: True if the update is made before the host knows the loss and gradient norm; only `stop` allows this.
        spikes: detector of loss spikes, whose updates are also skipped; None disables the detection.

    Attributes:
        overflowed: True if the newest update was skipped because the loss scale was too large.
    """

    def __init__(
        self,
        policy: Policy,
        model: nn.Module,
        loss_scale: LossScale | None,
        rank: int,
        *,
        late: bool = False,
        spikes: LossSpikes | None = None,
    ) -> None:
        self.spikes = spikes
        self.policy, self.model, self.loss_scale, self.rank, self.late = policy, model, loss_scale, rank, late
        self.overflowed = False
        self._left_out_in_a_row = 0
        self._saved: list[tuple[Tensor, Tensor]] = []

    def remember(self) -> None:
        """Copy the buffers before a forward pass whose update may be skipped."""
        if self.policy != "stop" or self.spikes is not None:
            self._saved = [(buffer, buffer.clone()) for buffer in self.model.buffers()]

    def check(
        self,
        deciders: Group,
        batch: Batch | None,
        samples: list[int],
        *,
        step: int,
        loss: float,
        norm: float | LateNorm,
    ) -> str | None:
        """Return the reason to skip the update of a step, or None.

        Args:
            deciders: the ranks that share this loss and gradient; all of them must call this method.
            batch: this rank's batch, which is searched for NaN and Inf.
            samples: indices of the batch's samples in the data set.
            norm: L2 norm of the gradient; a `LateNorm` is known to be finite.

        Raises:
            NonFiniteError: the policy is `stop`, or too many consecutive updates were skipped.
        """
        self.overflowed = False
        if math.isfinite(loss) and (isinstance(norm, LateNorm) or math.isfinite(norm)):
            problem = None if self.spikes is None else self.spikes.problem(step, loss)
            if self.loss_scale is not None:
                self.loss_scale.overflows = 0
            if problem is None:
                self._left_out_in_a_row = 0
                return None
        elif self.loss_scale is not None and math.isfinite(loss) and self.loss_scale.overflows < PATIENCE:
            self.overflowed = True
            return self.loss_scale.shrink()
        else:
            problem = explain(deciders, batch, samples, step=step, loss=loss, norm=norm, rank=self.rank)
            if self.policy == "stop":
                raise stop(problem, late=self.late)
        self._left_out_in_a_row += 1
        if self._left_out_in_a_row >= PATIENCE:
            raise gave_up(problem, self._left_out_in_a_row)
        for buffer, saved in self._saved:
            buffer.copy_(saved)
        return problem


Policy = Literal["stop", "skip", "rewind"]
PATIENCE = 20  # number of consecutive skipped updates before the run fails


def explain(
    group: Group,
    batch: Batch | None,
    indices: list[int],
    *,
    step: int,
    loss: float,
    norm: float | LateNorm,
    rank: int | None = None,
) -> str:
    """Describe a loss or gradient that is not finite, with step, rank and samples.

    Args:
        group: the ranks that share this loss and gradient; all of them must call this function.
        rank: this rank's number in the run, if it differs from the number in `group`.
    """
    bad = nonfinite_rows(batch)
    names = [indices[row] for row in bad]
    findings = group.gather_json([group.rank if rank is None else rank, names[:8]])
    sources = [
        f"rank {number}'s share of the batch contains NaN or Inf in samples {found}"
        for number, found in findings
        if found
    ]
    what = "loss" if not math.isfinite(loss) else "gradient"
    value = loss if what == "loss" else norm
    where = (
        "; ".join(sources)
        if sources
        else "the data of the batch is finite, so the cause is the model or the learning rate"
    )
    return f"the {what} of step {step} is {value} ({where})"


def stop(problem: str, *, late: bool = False) -> NonFiniteError:
    """Return the error that the `stop` policy raises.

    Args:
        late: True if the weights in memory are already updated.
    """
    kept = "No checkpoint contains this update." if late else "Nothing was updated."
    return NonFiniteError(
        "nonfinite.stopped",
        "{problem}. {kept} Clean the data, lower the learning rate or set clip_norm. To continue instead, set "
        "`nonfinite: skip` (skips such updates) or `nonfinite: rewind` (returns to the last good state, without "
        "that batch).",
        problem=problem,
        kept=kept,
    )


def gave_up(problem: str, skipped: int) -> NonFiniteError:
    """Return the error to raise if skipping updates does not help."""
    return NonFiniteError(
        "nonfinite.not_recovering",
        "{problem}, and the model has not recovered after {skipped} skipped updates in a row. Lower the learning "
        "rate, set clip_norm, or resume from an earlier checkpoint.",
        problem=problem,
        skipped=skipped,
    )


_GROWTH, _BACKOFF, _GROWS_AFTER = 2.0, 0.5, 2000  # as torch.amp.GradScaler


class LossScale:
    """Loss scale of fp16 training; gradients are divided by the scale before their use.

    All ranks see the same gradients, so they all have the same scale.

    Attributes:
        overflows: number of consecutive gradients with NaN or Inf. After `PATIENCE` of them, the scale is not
            considered the cause, because lowering it did not help.

    `torch.amp.GradScaler` unscales only the gradients of one optimizer; this class unscales reduced gradients in any
    tensors.
    """

    def __init__(self, value: float = 2.0**16) -> None:
        self.value, self.overflows, self._good_steps = value, 0, 0

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss multiplied by the scale."""
        return loss * self.value

    def unscale(self, gradients: Sequence[Tensor]) -> None:
        """Divide gradients by the scale."""
        if gradients:
            torch._foreach_mul_(list(gradients), 1.0 / self.value)

    def grow(self) -> None:
        """Count an update without overflow; double the scale after every 2000 such updates."""
        self._good_steps += 1
        if self._good_steps % _GROWS_AFTER == 0:
            self.value *= _GROWTH

    def shrink(self) -> str:
        """Halve the scale after an overflow, and return a message about the skipped update."""
        before, self._good_steps = self.value, 0
        self.overflows += 1
        self.value *= _BACKOFF
        return (
            f"a gradient overflowed fp16 at a loss scale of {before:g}; the update is skipped, and the scale is "
            f"now {self.value:g}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {"value": self.value, "good_steps": self._good_steps, "overflows": self.overflows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore an earlier scale."""
        self.value, self._good_steps = state["value"], state["good_steps"]
        self.overflows = state.get("overflows", 0)


_SIGMA = 1.4826  # standard deviation per median absolute deviation, for normal noise
_LEAST = 0.01  # as a fraction of the median: smallest spread assumed for losses that hardly differ


class LossSpikes:
    """Detection of losses far above the median of recent losses.

    The distance from the median is measured in median absolute deviations. A spike or a slow decrease of the loss
    hardly changes this measure. Spikes are not added to the recent losses. No loss counts as a spike until the window
    of recent losses is full. All ranks have the same loss and therefore find the same spikes.
    """

    def __init__(self, spec: SpikeSpec) -> None:
        self.spec = spec
        self._losses: deque[float] = deque(maxlen=spec.window)

    def problem(self, step: int, loss: float) -> str | None:
        """Describe the loss if it is a spike; otherwise record the loss and return None."""
        limit = self.limit
        if loss <= limit:
            self._losses.append(loss)
            return None
        return (
            f"the loss of step {step} is {loss:.6g}, a spike: the last {len(self._losses)} steps have a median of "
            f"{statistics.median(self._losses):.6g}, and {self.spec.threshold:g} times their spread above the median "
            f"is {limit:.6g}"
        )

    @property
    def limit(self) -> float:
        """Return the largest loss that does not count as a spike."""
        if len(self._losses) < self.spec.window:
            return math.inf
        median = statistics.median(self._losses)
        spread = _SIGMA * statistics.median(abs(loss - median) for loss in self._losses)
        return median + self.spec.threshold * max(spread, _LEAST * abs(median))

    def state_dict(self) -> list[float]:
        """Return the recent losses."""
        return list(self._losses)

    def load_state_dict(self, losses: list[float]) -> None:
        """Restore the recent losses of an earlier run."""
        self._losses = deque(losses, maxlen=self.spec.window)


@dataclass
class Settings:
    """Settings of the engine, with the same defaults as `setup`.

    Attributes:
        compare_every: number of updates between comparisons of the replicas' parameters and buffers.
        keeps_base: True if the frozen parameters can be loaded or initialised again, so that the state of a rank
            leaves them out.
        run_ahead: True if the loop reads the result of a step only after it has queued the next step; see `runs_ahead`.
    """

    clip_norm: float | None = None
    nonfinite: Policy = "stop"
    batch_norm: str = "local"
    precision: str = "fp32"
    seed: int = 0
    buffers: str = "same"
    compare_every: int = 100
    run_ahead: bool = False
    spike: SpikeSpec = field(default_factory=SpikeSpec)
    clip_value: float | None = None
    ema: float | None = None
    keeps_base: bool = False

    def runs_ahead(self, plan: Plan, device: torch.device) -> bool:
        """Return True if the host queues a step before it reads the previous step's result.

        The host must read the result first if the result decides about the update: with a policy other than `stop`, or
        in fp16. The host also waits in pipelines, with offload and with local rules, and if the device has no timed
        events.
        """
        policies = {self.nonfinite, self.spike.policy} & {"skip", "rewind"}
        numbers_decide = bool(policies) or (plan.precision or self.precision) == "fp16"
        host_takes_part = plan.pp > 1 or plan.offload or sync_info(plan.sync).local_steps
        return self.run_ahead and not numbers_decide and not host_takes_part and has_timed_events(device)
