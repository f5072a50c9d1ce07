"""Agreement of a round's updates: bounds, weights, and the mean, median or trimmed mean. Bad updates are refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline_federated.layout import Layout
from paceline_federated.rule import FederatedRule, Update
from paceline_federated.section import FederateSpec, trimmed_share


@dataclass(frozen=True)
class Cohort:
    """Updates of k clients that trained on one task, row by row.

    Attributes:
        clients: their numbers.
        deltas: new weights less the task's, (k, n).
        returned: the rule's own tensors, (k, p) each.
        samples, steps, losses: of each, as in `Update`.
    """

    clients: Sequence[int]
    deltas: Tensor
    returned: Mapping[str, Tensor]
    samples: Sequence[int]
    steps: Sequence[int]
    losses: Sequence[float]

    @classmethod
    def of(cls, update: Update) -> Cohort:
        """One update as a cohort."""
        returned = {name: tensor.unsqueeze(0) for name, tensor in update.returned.items()}
        delta = update.delta.unsqueeze(0)
        return cls([update.client], delta, returned, [update.samples], [update.steps], [update.loss])

    def rows(self, places: Sequence[int]) -> Cohort:
        """The cohort of some of its clients."""
        if list(places) == list(range(len(self.clients))):
            return self
        index = torch.tensor(places, dtype=torch.int64)

        def chosen(values: Sequence[float]) -> list[float]:
            return [values[place] for place in places]

        return Cohort(
            [self.clients[place] for place in places],
            self.deltas[index],
            {name: tensor[index] for name, tensor in self.returned.items()},
            [self.samples[place] for place in places],
            [self.steps[place] for place in places],
            chosen(self.losses),
        )


@dataclass(frozen=True)
class Agreed:
    """Agreement on a round's updates.

    Attributes:
        delta: the agreed update (n,).
        returned: plain means of the rule's own tensors, (p,) each.
        clients: number of updates in it.
        samples: of these clients together.
        loss: their mean training loss, by samples.
        norm: the largest L2 norm of an update, before any bound.
        clipped: updates that were scaled down to a bound.
        refused: number of each refused client, with the reason.
    """

    delta: Tensor
    returned: Mapping[str, Tensor]
    clients: int
    samples: int
    loss: float
    norm: float
    clipped: int
    refused: Mapping[int, str]


@dataclass
class _Sums:
    """Sums over the accepted updates."""

    delta: Tensor
    weight: float = 0.0
    returned: dict[str, Tensor] = field(default_factory=dict)
    clients: int = 0
    samples: int = 0
    loss: float = 0.0
    norm: float = 0.0
    clipped: int = 0


class Aggregator:
    """Takes the updates of one server step, in any order, and agrees on them.

    The mean needs the memory of one update; median and trimmed mean keep all.

    Args:
        rule: discounts updates that began from an older version.
        chosen: expected number of updates under differential privacy, where it divides the sum.
        noise: random numbers of differential privacy; None adds no noise.
    """

    def __init__(
        self,
        spec: FederateSpec,
        layout: Layout,
        rule: FederatedRule,
        *,
        chosen: float = 0.0,
        noise: torch.Generator | None = None,
    ) -> None:
        self.spec, self.layout, self.rule = spec, layout, rule
        self.chosen, self.noise = chosen, noise
        self.refused: dict[int, str] = {}
        self._sums = _Sums(torch.zeros(layout.numel, dtype=layout.dtype))
        self._kept: list[Tensor] = []
        self._trimmed = trimmed_share(spec.aggregate)
        self._bound = spec.privacy.clip if spec.privacy else spec.norm_bound

    @property
    def clients(self) -> int:
        """Updates accepted so far."""
        return self._sums.clients

    def add(self, update: Update, staleness: int = 0) -> str | None:
        """Take one client's update; returns the reason where it is refused."""
        reason = problem_with(update, self.layout)
        if reason is not None:
            self.refused[update.client] = reason
            return reason
        self.add_cohort(Cohort.of(update), staleness)
        return self.refused.get(update.client)

    def add_cohort(self, cohort: Cohort, staleness: int = 0) -> None:
        """Take the updates of clients that trained on one task. Rows that are not finite are refused."""
        norms = cohort.deltas.norm(dim=1)
        finite = norms.isfinite()
        for tensor in cohort.returned.values():
            finite &= tensor.norm(dim=1).isfinite()
        if not bool(finite.all()):
            kept = finite.nonzero().flatten().tolist()
            for place, client in enumerate(cohort.clients):
                if place not in kept:
                    self.refused[client] = "its update holds NaN or Inf"
            cohort, norms = cohort.rows(kept), norms[kept]
        if cohort.clients:
            self._take(cohort, norms, staleness)

    def add_sum(
        self, total: Tensor, weight: float, returned: Mapping[str, Tensor], clients: int, samples: int, loss: float
    ) -> None:
        """Take the sum of several updates, of which none is known by itself (secure aggregation).

        Args:
            total: updates times their weights, summed (n,); `weight` is the sum of the weights.
            returned: sums of the rule's own tensors.
            loss: mean of the clients'.
        """
        sums = self._sums
        sums.delta += total.to(sums.delta)
        sums.weight += weight
        for name, tensor in returned.items():
            cast = tensor.to(sums.delta)
            sums.returned[name] = sums.returned[name] + cast if name in sums.returned else cast
        sums.clients += clients
        sums.samples += samples
        sums.loss += samples * loss

    def agree(self) -> Agreed | None:
        """The agreed update; None where no update was accepted."""
        sums = self._sums
        if not sums.clients:
            return None
        return Agreed(
            self._delta(),
            {name: tensor / sums.clients for name, tensor in sums.returned.items()},
            sums.clients,
            sums.samples,
            sums.loss / sums.samples if sums.samples else math.nan,
            sums.norm,
            sums.clipped,
            dict(self.refused),
        )

    def _take(self, cohort: Cohort, norms: Tensor, staleness: int) -> None:
        sums, deltas, factor = self._sums, cohort.deltas, self.rule.discount(staleness)
        equal = self.spec.weigh == "equal" or self.spec.privacy is not None
        weights = torch.ones_like(norms) if equal else torch.tensor(cohort.samples).to(norms)
        sums.weight += float(weights.sum())
        scales = torch.full_like(norms, factor)
        if self._bound is not None:
            scales *= (self._bound / norms).clamp(max=1.0)
            sums.clipped += int((norms > self._bound).sum())
        if self._trimmed == 0.0:
            sums.delta += (weights * scales) @ deltas
        else:
            self._kept.append(deltas * scales.unsqueeze(1))
        for name, tensor in cohort.returned.items():
            total = tensor.sum(dim=0)
            sums.returned[name] = sums.returned[name] + total if name in sums.returned else total
        sums.clients += len(cohort.clients)
        sums.samples += sum(cohort.samples)
        sums.loss += sum(n * loss for n, loss in zip(cohort.samples, cohort.losses, strict=True))
        sums.norm = max(sums.norm, float(norms.max()))

    def _delta(self) -> Tensor:
        sums, privacy = self._sums, self.spec.privacy
        if privacy is not None:
            total = sums.delta
            if self.noise is not None:
                drawn = torch.empty_like(total).normal_(0.0, privacy.noise * privacy.clip, generator=self.noise)
                total = total + drawn
            return total / self.chosen
        if self._trimmed == 0.0:
            return sums.delta / sums.weight
        ordered = torch.cat(self._kept).sort(dim=0).values
        middle = (len(ordered) - 1) // 2
        cut = middle if self._trimmed is None else min(int(self._trimmed * len(ordered)), middle)
        return ordered[cut : len(ordered) - cut].mean(dim=0)


def problem_with(update: Update, layout: Layout) -> str | None:
    """Reason to refuse an update by its form; None where it fits the layout."""
    if update.delta.shape != (layout.numel,):
        return f"its update has the shape {tuple(update.delta.shape)} instead of ({layout.numel},): another model"
    if update.delta.dtype is not layout.dtype:
        return f"its update is of {update.delta.dtype} instead of {layout.dtype}"
    for name, tensor in update.returned.items():
        if tensor.shape != (layout.parameters,):
            return f"its {name} has the shape {tuple(tensor.shape)} instead of ({layout.parameters},)"
    if update.samples < 1 or update.steps < 1:
        return f"it trained {update.steps} steps on {update.samples} samples"
    return None
