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


class Guard:
    """Decision about each update; restores buffers if the update is skipped.

    Args:
        policy: `stop` raises; `skip` and `rewind` skip the update.
        model: the model whose buffers are restored.
        loss_scale: the loss scale of fp16 training, which an overflow reduces; None in other precisions.
        rank: this rank's number in the run.
        late: the update happens before its numbers are known on the host; only `stop` allows this.
        spikes: detects spikes of the loss, whose updates are also skipped; None to make these updates.

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
        self, deciders: Group, batch: Batch | None, samples: list[int], *, step: int, loss: float, norm: float
    ) -> str | None:
        """Return the reason to skip the update of a step, or None.

        Args:
            deciders: the ranks that have this loss and gradient; all of them call this.
            batch: this rank's batch, which is searched for NaN and Inf; `samples` are its samples' numbers in the data
                set.

        Raises:
            NonFiniteError: the policy is to stop, or too many consecutive updates were skipped.
        """
        self.overflowed = False
        if math.isfinite(loss) and math.isfinite(norm):
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
    norm: float,
    rank: int | None = None,
) -> str:
    """Return a sentence with the step, the quantity, the rank and its samples.

    Args:
        group: the ranks that share this loss and gradient; all of them call this.
        rank: this rank's number in the run, if it differs from the number in `group`.
    """
    bad = nonfinite_rows(batch)
    names = [indices[row] for row in bad]
    findings = group.gather_json([group.rank if rank is None else rank, names[:8]])
    sources = [f"rank {number}'s share of the batch has it in samples {found}" for number, found in findings if found]
    what = "loss" if not math.isfinite(loss) else "gradient"
    value = loss if what == "loss" else norm
    where = (
        "; ".join(sources) if sources else "the data of the batch is finite, so the model or the learning rate made it"
    )
    return f"the {what} of step {step} is {value} ({where})"


def stop(problem: str, *, late: bool = False) -> NonFiniteError:
    """Return the error of the `stop` policy; `late`: the weights in memory are already updated."""
    kept = "No checkpoint has what came of it." if late else "Nothing was updated."
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
        "{problem}, and {skipped} updates in a row were left out: the model does not recover. Lower the learning "
        "rate, set clip_norm, or resume from an earlier checkpoint.",
        problem=problem,
        skipped=skipped,
    )


_GROWTH, _BACKOFF, _GROWS_AFTER = 2.0, 0.5, 2000  # as torch.amp.GradScaler


class LossScale:
    """A factor for the loss; gradients are divided by it before they are used.

    All ranks see the same gradients, so they all have the same scale.

    Attributes:
        overflows: number of consecutive gradients that were not finite. After `PATIENCE` of them, lowering the scale
            has not helped, so the scale is not the cause.

    The scale applies to reduced gradients in any memory; `torch.amp.GradScaler` handles only the gradients of one
    optimizer.
    """

    def __init__(self, value: float = 2.0**16) -> None:
        self.value, self.overflows, self._good_steps = value, 0, 0

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to differentiate."""
        return loss * self.value

    def unscale(self, gradients: Sequence[Tensor]) -> None:
        """Divide gradients by the scale."""
        if gradients:
            torch._foreach_mul_(list(gradients), 1.0 / self.value)

    def grow(self) -> None:
        """Record an update that was made."""
        self._good_steps += 1
        if self._good_steps % _GROWS_AFTER == 0:
            self.value *= _GROWTH

    def shrink(self) -> str:
        """Record a gradient that overflowed; return the message about the skipped update."""
        before, self._good_steps = self.value, 0
        self.overflows += 1
        self.value *= _BACKOFF
        return (
            f"a gradient overflowed fp16 at a loss scale of {before:g}; the update is left out, and the scale is "
            f"now {self.value:g}"
        )

    def state_dict(self) -> dict[str, Any]:
        """State as JSON values."""
        return {"value": self.value, "good_steps": self._good_steps, "overflows": self.overflows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore an earlier scale."""
        self.value, self._good_steps = state["value"], state["good_steps"]
        self.overflows = state.get("overflows", 0)


_SIGMA = 1.4826  # standard deviation per median absolute deviation, for normal noise
_LEAST = 0.01  # as a fraction of the median: smallest spread assumed for losses that hardly differ


class LossSpikes:
    """Detection of losses far above the median of the last losses.

    "Far" means many times the spread, measured by the median absolute deviation, which a spike or a slow fall of the
    loss hardly changes. Spikes are not added to the last losses. No loss counts as a spike until the job's window is
    full. All ranks have the same loss and therefore find the same spikes.
    """

    def __init__(self, spec: SpikeSpec) -> None:
        self.spec = spec
        self._losses: deque[float] = deque(maxlen=spec.window)

    def problem(self, step: int, loss: float) -> str | None:
        """Return a sentence about a spike; None for another loss, which is recorded."""
        limit = self.limit
        if loss <= limit:
            self._losses.append(loss)
            return None
        return (
            f"the loss of step {step} is {loss:.6g}, a spike: the last {len(self._losses)} steps had a median of "
            f"{statistics.median(self._losses):.6g}, and {self.spec.threshold:g} times their spread beyond it is "
            f"{limit:.6g}"
        )

    @property
    def limit(self) -> float:
        """Return the largest loss that is not a spike now."""
        if len(self._losses) < self.spec.window:
            return math.inf
        median = statistics.median(self._losses)
        spread = _SIGMA * statistics.median(abs(loss - median) for loss in self._losses)
        return median + self.spec.threshold * max(spread, _LEAST * abs(median))

    def state_dict(self) -> list[float]:
        """Return the last losses."""
        return list(self._losses)

    def load_state_dict(self, losses: list[float]) -> None:
        """Restore the last losses of an earlier run."""
        self._losses = deque(losses, maxlen=self.spec.window)


@dataclass
class Settings:
    """Settings of the engine; the defaults are those of `setup`.

    Attributes:
        compare_every: updates between comparisons of the replicas' parameters and buffers.
        run_ahead: the loop needs the numbers of a step only after the next one is queued; see `runs_ahead`.
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

    def runs_ahead(self, plan: Plan, device: torch.device) -> bool:
        """Return True if the host queues a step before it reads the last one's numbers.

        This is not possible if a step's numbers decide about its update (`nonfinite` other than stop, `spike`, the fp16
        loss scale, a replica's own step), if the host takes part in the step (a pipeline's timer, offload), or if the
        device has no timed events.
        """
        policies = {self.nonfinite, self.spike.policy} & {"skip", "rewind"}
        numbers_decide = bool(policies) or (plan.precision or self.precision) == "fp16"
        host_takes_part = plan.pp > 1 or plan.offload or sync_info(plan.sync).local_steps
        return self.run_ahead and not numbers_decide and not host_takes_part and has_timed_events(device)
