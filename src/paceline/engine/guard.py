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
    """Decides on each update, and restores buffers where it is left out.

    Args:
        policy: `stop` raises; `skip` and `rewind` leave the update out.
        model: its buffers are put back.
        loss_scale: that of fp16 training, which an overflow shrinks; None in other precisions.
        rank: this rank's number in the run.
        late: the update is made before its numbers are known here, which only `stop` allows.
        spikes: tells spikes of the loss, whose updates are left out, too; None where they are made.
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
        self._left_out_in_a_row = 0
        self._saved: list[tuple[Tensor, Tensor]] = []

    def remember(self) -> None:
        """Copy the buffers, before a forward pass whose update may be left out."""
        if self.policy != "stop" or self.spikes is not None:
            self._saved = [(buffer, buffer.clone()) for buffer in self.model.buffers()]

    def check(
        self, deciders: Group, batch: Batch | None, samples: list[int], *, step: int, loss: float, norm: float
    ) -> str | None:
        """Reason to leave the update of a step out; None to make it.

        Args:
            deciders: the ranks that have this loss and gradient; all of them call this.
            batch: this rank's, to look for NaN and Inf in it; `samples` are its samples' numbers in the data set.

        Raises:
            NonFiniteError: the policy is to stop, or too many updates in a row were left out.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            problem = None if self.spikes is None else self.spikes.problem(step, loss)
            if self.loss_scale is not None:
                self.loss_scale.overflows = 0
            if problem is None:
                self._left_out_in_a_row = 0
                return None
        elif self.loss_scale is not None and math.isfinite(loss) and self.loss_scale.overflows < PATIENCE:
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
PATIENCE = 20  # updates left out in a row before the run is called broken


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
    """One sentence naming the step, the quantity, and the rank and samples it came from.

    Args:
        group: the ranks whose loss and gradient it is; all of them call this.
        rank: this rank's number in the run, where that is not the one in `group`.
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
    """The error of the `stop` policy; `late`: the weights in memory were updated meanwhile."""
    kept = "No checkpoint has what came of it." if late else "Nothing was updated."
    return NonFiniteError(
        "nonfinite.stopped",
        "{problem}. {kept} Clean the data, lower the learning rate or set clip_norm. To continue instead, set "
        "`nonfinite: skip` (leave such updates out) or `nonfinite: rewind` (return to the last good state, without "
        "that batch).",
        problem=problem,
        kept=kept,
    )


def gave_up(problem: str, skipped: int) -> NonFiniteError:
    """The error when leaving updates out does not help."""
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

    All ranks see the same gradients, so it is the same on all.

    Attributes:
        overflows: number of consecutive gradients that were not finite. After `PATIENCE` of them, lowering the scale
            has not helped, so the scale is not the cause.

    It acts on reduced gradients, wherever they lie; `torch.amp.GradScaler` knows only those of one optimizer.
    """

    def __init__(self, value: float = 2.0**16) -> None:
        self.value, self.overflows, self._good_steps = value, 0, 0

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to differentiate."""
        return loss * self.value

    def unscale(self, gradients: Sequence[Tensor]) -> None:
        """Divide gradients by the scale."""
        if gradients:
            torch._foreach_mul_(list(gradients), 1.0 / self.value)

    def grow(self) -> None:
        """Note an update that was made."""
        self._good_steps += 1
        if self._good_steps % _GROWS_AFTER == 0:
            self.value *= _GROWTH

    def shrink(self) -> str:
        """Note a gradient that overflowed; returns the message about the skipped update."""
        before, self._good_steps = self.value, 0
        self.overflows += 1
        self.value *= _BACKOFF
        return (
            f"a gradient overflowed fp16 at a loss scale of {before:g}; the update is left out, and the scale is "
            f"now {self.value:g}"
        )

    def state_dict(self) -> dict[str, Any]:
        """State as JSON values."""
        return {"value": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over an earlier scale."""
        self.value, self._good_steps = state["value"], state["good_steps"]


_SIGMA = 1.4826  # standard deviations per median absolute deviation, of normal noise
_LEAST = 0.01  # of the median: the spread of losses that hardly differ


class LossSpikes:
    """Tells losses that lie far beyond the median of the last ones.

    Far is many times their spread, the median absolute deviation, which neither a spike nor a slow fall of the loss
    widens much. Spikes are not counted among the last losses, and nothing is one before as many losses are known as the
    job's window has. Equal on all ranks, as the loss is.
    """

    def __init__(self, spec: SpikeSpec) -> None:
        self.spec = spec
        self._losses: deque[float] = deque(maxlen=spec.window)

    def problem(self, step: int, loss: float) -> str | None:
        """Sentence about a spike; None for another loss, which is then one of the last."""
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
        """The largest loss that is no spike now."""
        if len(self._losses) < self.spec.window:
            return math.inf
        median = statistics.median(self._losses)
        spread = _SIGMA * statistics.median(abs(loss - median) for loss in self._losses)
        return median + self.spec.threshold * max(spread, _LEAST * abs(median))

    def state_dict(self) -> list[float]:
        """The last losses."""
        return list(self._losses)

    def load_state_dict(self, losses: list[float]) -> None:
        """Take over the last losses of an earlier run."""
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
        """True if the host queues a step before it reads the last one's numbers.

        Not where a step's numbers decide on its update (`nonfinite` other than stop, `spike`, fp16's loss scale, a
        replica's own step), where the host takes part in it (a pipeline's timer, offload), or where events do not tell
        the time.
        """
        policies = {self.nonfinite, self.spike.policy} & {"skip", "rewind"}
        numbers_decide = bool(policies) or (plan.precision or self.precision) == "fp16"
        host_takes_part = plan.pp > 1 or plan.offload or sync_info(plan.sync).local_steps
        return self.run_ahead and not numbers_decide and not host_takes_part and has_timed_events(device)
