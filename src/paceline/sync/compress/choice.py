"""`compress=auto`: gradients are compressed only where that shortens the step.

It is predicted first and measured then.

Most clusters do not gain: Agarwal et al., 2022, "On the Utility of Gradient Compression in Distributed Training
Systems" (arXiv:2103.00543). So nothing is tried that the prediction does not favour, and without such a codec every
step is exact.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.cluster.doctor.link_speed import GroupLinks
from paceline.comm import Group
from paceline.comm.allreduce.algorithms import Algorithm, Auto
from paceline.comm.measure.transports import measure_links
from paceline.errors import PlanError
from paceline.plans.codec_info import CompressSpec, auto_candidates
from paceline.sync.compress.codec_cost import CodecCost, measure_codec, wait_for
from paceline.units import percent, seconds

MARGIN = 0.05  # a step must become shorter by this share, or a codec that loses more by this share faster
TRIALS = 2  # codecs that are tried
_WARM_UP, _MEASURED = 2, 3  # steps without a codec and with each


class CodecChooser:
    """Chooses the codec of every step from a few steps without one and with candidates.

    Every rank makes one and calls `step_done` after each step; all ranks come to the same answers, from the slowest
    one's times.

    Args:
        algorithm: the all-reduce of tensors that are not compressed.
        buckets: the tensors that are to be summed in a step, with the parameters' views of them, as for
            `Compressor.sum`.

    Attributes:
        codec: the codec of the coming step; "none" at first.
        decided: True once the codec is final.
        message: the reasons, once it is decided.
        clock: returns the time in seconds.
    """

    def __init__(self, algorithm: Algorithm, buckets: Sequence[tuple[Tensor, Sequence[Tensor]]]) -> None:
        self.group = algorithm.group
        self.codec, self.decided, self.message = "none", False, ""
        self._plain_s, self._coded_s = predict(algorithm, buckets)
        self.clock = time.perf_counter
        self._trials: list[str] = []
        self._measured_s: dict[str, float] = {}
        self._steps_s: list[float] = []
        self._last: float | None = None

    def step_done(self) -> str:
        """The codec for the next step.

        Call it once a step, when its sums are done: the time between two calls is that of a step.
        """
        if self.decided:
            return self.codec
        wait_for(self.group.device)
        now = self.clock()
        if self._last is not None:
            self._steps_s.append(now - self._last)
        self._last = now
        if len(self._steps_s) == _WARM_UP + _MEASURED:
            own = statistics.median(self._steps_s[_WARM_UP:])
            self._measured_s[self.codec] = _slowest(self.group, [own])[0]
            self._steps_s.clear()
            self._go_on()
        return self.codec

    def decide(self, codec: str, reason: str) -> None:
        """End the search with a codec.

        A resumed run goes on with what was decided before.
        """
        self.codec, self.decided, self.message = codec, True, f"compress=auto: {codec}. {reason}"

    def _go_on(self) -> None:
        """After the steps with one codec: the next one, or the decision."""
        if self.codec == "none":
            self._trials = self._worth_trying()
            if not self._trials:
                self.decide("none", f"Of {seconds(self._measured_s['none'])} a step, {self._reckoning()}")
                return
        if self._trials:
            self.codec = self._trials.pop(0)
            return
        chosen, without_s = self._best(), self._measured_s["none"]
        measured = ", ".join(f"{seconds(s)} with {codec}" for codec, s in self._measured_s.items() if codec != "none")
        self.decide(chosen, f"A step takes {seconds(without_s)} without and {measured}; {self._reckoning()}")

    def _worth_trying(self) -> list[str]:
        """The codecs that should shorten the step enough, the best first."""
        least_s = MARGIN * self._measured_s["none"]
        worth = [codec for codec, s in self._coded_s.items() if self._plain_s - s >= least_s]
        return sorted(worth, key=lambda codec: self._coded_s[codec])[:TRIALS]

    def _best(self) -> str:
        """The least lossy of the codecs that are about as fast as the fastest.

        "none" if that is not faster than no codec by the margin.
        """
        fastest_s = min(self._measured_s.values())
        if fastest_s > (1 - MARGIN) * self._measured_s["none"]:
            return "none"
        tried = [codec for codec in auto_candidates() if codec in self._measured_s]
        return next(codec for codec in tried if self._measured_s[codec] <= fastest_s / (1 - MARGIN))

    def _reckoning(self) -> str:
        if not self._coded_s:
            return "there is nothing to save: no codec takes these gradients"
        saved_s = {codec: self._plain_s - s for codec, s in self._coded_s.items()}
        saved = ", ".join(f"{codec} {'saves' if s >= 0 else 'costs'} {seconds(abs(s))}" for codec, s in saved_s.items())
        return (
            f"prediction: {saved} (exact sums {seconds(self._plain_s)}); it is asked to save "
            f"{percent(MARGIN, 0)} of the step"
        )


def predict(algorithm: Algorithm, buckets: Sequence[tuple[Tensor, Sequence[Tensor]]]) -> tuple[float, dict[str, float]]:
    """Predicted seconds per step of the exact sums and of each candidate codec.

    Candidates that do not take the tensors are left out. The same on every rank.
    """
    group = algorithm.group
    costs: dict[str, CodecCost] = {}
    for codec in auto_candidates():
        try:
            costs[codec] = measure_codec(codec, group, buckets)
        except PlanError:  # it does not take the dtype
            continue
    sizes = [flat.nbytes for flat, _ in buckets]
    predicted = [algorithm.predicted_s(nbytes) for nbytes in sizes]
    plain_s = sum(s for s in predicted if s is not None) if None not in predicted else _measured_s(algorithm, buckets)
    links = _links(algorithm)
    coded_s = []
    for codec, cost in costs.items():
        if links is None:  # as fast as the exact sums, byte for byte
            travel_s = plain_s * cost.sent_bytes / (2 * (group.size - 1) / group.size * sum(sizes))
        else:
            messages = CompressSpec.parse(codec).first.messages * len(sizes)
            travel_s = (
                messages * links.between.latency_s + _most_over_a_link(group, cost.sent_bytes) / links.between.bandwidth
            )
        coded_s.append(cost.coding_s + travel_s)
    plain_s, *coded_s = _slowest(group, [plain_s, *coded_s])
    return plain_s, dict(zip(costs, coded_s, strict=True))


def _links(algorithm: Algorithm) -> GroupLinks | None:
    """The speed of the links between hosts; None where all ranks are on one."""
    if isinstance(algorithm, Auto):
        return algorithm.links
    return measure_links(algorithm.group) if algorithm.group.spans_hosts else None


def _most_over_a_link(group: Group, sent_bytes: float) -> float:
    """Bytes that the fullest host sends to others.

    Each of its ranks sends equal parts of `sent_bytes` to all ranks.
    """
    counts = [group.hosts.count(host) for host in set(group.hosts)]
    return max(count * (group.size - count) for count in counts) * sent_bytes / (group.size - 1)


def _measured_s(algorithm: Algorithm, buckets: Sequence[tuple[Tensor, Sequence[Tensor]]]) -> float:
    """The time of the exact sums of one step, of zeros."""
    tensors = [algorithm.empty(flat.numel(), flat.dtype) for flat, _ in buckets]
    times_s = []
    for _ in range(1 + _MEASURED):
        wait_for(algorithm.group.device)
        started = time.perf_counter()
        for tensor in tensors:
            algorithm.all_reduce(tensor)
        wait_for(algorithm.group.device)
        times_s.append(time.perf_counter() - started)
    for tensor in tensors:
        algorithm.release(tensor)
    return statistics.median(times_s[1:])


def _slowest(group: Group, times_s: list[float]) -> list[float]:
    """The slowest rank's value of each time."""
    times = torch.tensor(times_s, dtype=torch.float64, device=group.device)
    group.all_reduce(times, op="max")
    return [float(s) for s in times.tolist()]
