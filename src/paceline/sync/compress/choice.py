"""Implementation of `compress=auto`: gradients are compressed only if this shortens the step.

First, exact and compressed sums are timed outside of training steps. Then whole steps are timed with each codec that
saves enough time.

Most clusters do not benefit from compression (Agarwal et al., 2022, "On the Utility of Gradient Compression in
Distributed Training Systems", arXiv:2103.00543). Therefore, a step uses a codec only if the codec is expected to save
time. Steps without a codec are exact.

`--plan auto` does not try compression. The trials of `--plan auto` run only on the launcher's machine, and must not
change the result of a step. Only the ranks of a run can measure the run's network, which determines whether a codec
saves time. The ranks also choose a codec under torchrun and in custom training loops.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.comm import Group
from paceline.comm.allreduce import Algorithm
from paceline.comm.checks import greatest
from paceline.device import synchronize
from paceline.errors import JobError, PlanError
from paceline.job.spec import load_object
from paceline.planning.sync_info import CODECS, CompressSpec, auto_candidates
from paceline.sync.compress.compressor import Compressor
from paceline.sync.rule import Traffic
from paceline.units import percent, seconds

Buckets = Sequence[tuple[Tensor, Sequence[Tensor]]]
MARGIN = 0.05  # minimum gain of a codec over no codec, and of a codec over a less lossy codec
TRIALS = 2  # number of codecs to try
_WARM_UP, _MEASURED = 2, 3  # number of steps without a codec, and with each candidate
# number of the model's values whose sums are timed; the time is assumed to be proportional to this number
_SAMPLE = 2**20
# maximum number of timed rounds; a round that takes this many seconds is the last
_ROUNDS, _LONG_S = 3, 0.5


class CodecChooser:
    """Choice of the codec from a few timed steps with and without candidate codecs.

    Every rank creates a chooser and calls `step_done` after each step. All ranks make the same choice, based on the
    times of the slowest rank.

    Args:
        algorithm: all-reduce for uncompressed tensors.
        buckets: pairs of a tensor that is summed in every step and the parameters' views of this tensor (see
            `Compressor.sum`).

    Attributes:
        codec: codec of the next step; initially `none`.
        decided: True once the codec is final.
        message: reasons for the final codec.
        clock: function that returns the time in seconds.
    """

    def __init__(self, group: Group, algorithm: Algorithm, buckets: Buckets) -> None:
        self.group = group
        self.codec, self.decided, self.message = "none", False, ""
        candidates, self._left_out = _candidates(self.group)
        self._plain_s, self._coded_s = measure_sums(group, algorithm, buckets, candidates)
        self.clock = time.perf_counter
        self._trials: list[str] = []
        self._measured_s: dict[str, float] = {}
        self._steps_s: list[float] = []
        self._last: float | None = None

    def step_done(self) -> str:
        """Choose the codec for the next step.

        Call this method once per step, after the sums, because the time between two calls counts as the step time.
        """
        if self.decided:
            return self.codec
        synchronize(self.group.device)
        now = self.clock()
        if self._last is not None:
            self._steps_s.append(now - self._last)
        self._last = now
        if len(self._steps_s) == _WARM_UP + _MEASURED:
            own = statistics.median(self._steps_s[_WARM_UP:])
            self._measured_s[self.codec] = greatest(self.group, own)
            self._steps_s.clear()
            self._go_on()
        return self.codec

    def decide(self, codec: str, reason: str) -> None:
        """End the search with a codec; a resumed run passes its earlier choice."""
        left_out = f". Left out: {'; '.join(self._left_out)}" if self._left_out else ""
        self.codec, self.decided, self.message = codec, True, f"compress=auto: {codec}. {reason}{left_out}"

    def _go_on(self) -> None:
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
        least_s = MARGIN * self._measured_s["none"]
        worth = [codec for codec, s in self._coded_s.items() if self._plain_s - s >= least_s]
        return sorted(worth, key=lambda codec: self._coded_s[codec])[:TRIALS]

    def _best(self) -> str:
        """Choose the least lossy codec that is about as fast as the fastest codec.

        The choice is `none` if the fastest codec does not shorten the step by at least `MARGIN`.
        """
        fastest_s = min(self._measured_s.values())
        if fastest_s > (1 - MARGIN) * self._measured_s["none"]:
            return "none"
        tried = [codec for codec in self._coded_s if codec in self._measured_s]
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


def _candidates(group: Group) -> tuple[list[str], list[str]]:
    """Return the codecs to try, equal on every rank, and reasons for skipped codecs.

    A broken package on one rank must not stop a run if the plan does not name the package's codec. Every rank must call
    this function.
    """
    texts, problems = auto_candidates()
    own = []
    for text in texts:
        try:
            for name, _ in CompressSpec.parse(text).codecs:
                load_object(CODECS[name].codec)
            own.append(text)
        except (JobError, PlanError) as error:
            problems.append(f"the codec {text}: {error}")
    everyones = group.gather_json([own, problems])
    common = [text for text in own if all(text in theirs for theirs, _ in everyones)]
    left_out = dict.fromkeys(problem for _, theirs in everyones for problem in theirs)
    missing = dict.fromkeys(text for theirs, _ in everyones for text in theirs if text not in common)
    return common, [*left_out, *(f"{text} is not on every rank" for text in missing)]


def measure_sums(
    group: Group, algorithm: Algorithm, buckets: Buckets, candidates: Sequence[str]
) -> tuple[float, dict[str, float]]:
    """Measure the seconds per step of exact sums, and of sums with each candidate codec.

    The summed tensors are random and have the shapes of the first gradients. Codecs that do not support these tensors
    are left out. Every rank must call this function, and all ranks get the times of the slowest rank.
    """
    generator = torch.Generator(group.device).manual_seed(0)  # leaves the random state of training unchanged
    sample = []
    for flat, shapes in _first(buckets):
        sizes = [shape.numel() for shape in shapes]
        own = algorithm.empty(sum(sizes), flat.dtype)
        parts = [part.view(shape) for part, shape in zip(own.split(sizes), shapes, strict=True)]
        sample.append((own, parts, torch.randn(sum(sizes), device=group.device, generator=generator)))
    grows = sum(view.numel() for _, views in buckets for view in views) / max(1, sum(len(own) for own, *_ in sample))

    def time_s(sum_one: Callable[[str, Tensor, Sequence[Tensor]], object]) -> float:
        times_s: list[float] = []
        while len(times_s) < _ROUNDS and not (times_s and times_s[-1] > _LONG_S):
            for own, _, numbers in sample:
                own.copy_(numbers)
            synchronize(group.device)
            started = time.perf_counter()
            for i, (own, parts, _) in enumerate(sample):
                sum_one(f"{i}", own, parts)
            synchronize(group.device)
            times_s.append(greatest(group, time.perf_counter() - started))
        return grows * min(times_s)

    plain_s, coded_s = time_s(lambda _, own, parts: algorithm.all_reduce(own)), {}
    for codec in candidates:
        try:
            coded_s[codec] = time_s(Compressor(codec, group, Traffic()).sum)
        except PlanError:  # the codec does not support the dtype
            continue
    for own, *_ in sample:
        algorithm.release(own)
    return plain_s, coded_s


def _first(buckets: Buckets) -> list[tuple[Tensor, list[torch.Size]]]:
    """Return each bucket's tensor and the shapes of the bucket's first gradients.

    Together, the shapes have about `_SAMPLE` values.
    """
    found, left = [], _SAMPLE
    for flat, views in buckets:
        shapes = []
        for view in views:
            if left > 0 and view.numel() > 0:
                part = view if view.numel() <= left else view[: max(1, left * len(view) // view.numel())]
                shapes.append(part.shape)
                left -= part.numel()
        if shapes:
            found.append((flat, shapes))
    return found
