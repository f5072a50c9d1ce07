"""Lower bounds of step times on a calibrated machine.

The work of a microbatch, as measured, evenly over a pipeline's ranks. Everything else of a step only adds to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.planner.cost.layout import Layout
from paceline.planner.cost.measured import added_by, calibration_of, passes_of
from paceline.planner.search.bounds import Bounds, Floats, RankCost, ShardConfig
from paceline.planner.search.space import divisors, numbered
from paceline.plans.choices import Remat


class MeasuredBounds(Bounds):
    """Bounds of the plans of one job on a calibrated machine. Those of memory are the catalogue's."""

    def least_s(self, rows: Mapping[str, NDArray[Any]], sequence: bool, remat: Remat) -> Floats:
        """Least seconds of a step for each row of degrees."""
        names = ("tp", "cp", "ep", "pp", "shared", "size")
        keys, place = numbered(*(rows[name] for name in names))
        samples = dict(zip(rows["size"].tolist(), rows["samples"].tolist(), strict=True))
        each = np.array(
            [self._microbatch_s(tp, cp, ep, pp, shared, samples[size], remat) for tp, cp, ep, pp, shared, size in keys]
        )
        return np.asarray(each[place] * rows["microbatches"]) if len(keys) else np.zeros(0)

    def rank_cost(self, config: ShardConfig) -> RankCost:
        """Rank cost without times, of which `least_s` has the measured ones."""
        return replace(super().rank_cost(config), forward_s=0.0, backward_s=0.0, repeated_s=0.0, dense=0.0, hop_s=0.0)

    def sum_s_per_byte(self, apart: int, dp: int) -> float:
        """No seconds: what a calibration point's update sent is in its times already."""
        return 0.0

    def _microbatch_s(self, tp: int, cp: int, ep: int, pp: int, shared: int, samples: float, remat: Remat) -> float:
        """Least seconds of a rank's work for one microbatch."""
        trace = self._trace_at(tp)
        layout = replace(self.layout, trace=trace, tp=tp, cp=cp, ep=ep, pp=pp, dp=shared, samples=samples, remat=remat)
        found = calibration_of(layout)
        assert found is not None, "these bounds are for calibrated machines"
        passes = passes_of(layout, found)
        some = [added_by(one, found) for one in _shared_over(layout, shared)]
        share = min(one.share for one in some)
        # fsdp's part of the overhead may be smaller with other `zero`
        each_s = min(one.each_s for one in some) if shared == 1 else min(0.0, *(one.each_s for one in some))
        return share * (passes.seconds + passes.again_s) / pp + each_s


def _shared_over(layout: Layout, shared: int) -> list[Layout]:
    """Layouts of the kinds of factorisations of data-parallel ranks into dp × fsdp."""
    factors = divisors(shared)
    some = {1, shared, factors[len(factors) // 2]}
    return [replace(layout, dp=shared // fsdp, fsdp=fsdp) for fsdp in some]
