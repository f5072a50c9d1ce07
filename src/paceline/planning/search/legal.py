"""Checks of very many plans, evaluated once per combination of the relevant keys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from paceline.cluster.cluster import Cluster
from paceline.job.job import Job
from paceline.planning.check.plan_context import Check, PlanContext
from paceline.planning.check.rules import CHECKS
from paceline.planning.check.split_check import MEMORY
from paceline.planning.choices import stages_per_rank
from paceline.planning.plan import Plan
from paceline.units import count

# (keys that the reason depends on, reason)
Refusal = tuple[tuple[str, ...], str]
# degrees of which a value that is refused with the others at 1 is refused with all
_FIXED = ("tp", "ep", "fsdp"), ("pp", "cp")


class LegalPlans:
    """Legality of plans that differ from a base plan in some keys.

    Args:
        blocks: of the traced model; no more stages can be predicted.
    """

    def __init__(self, job: Job, cluster: Cluster, base: Plan, blocks: int) -> None:
        self.blocks = blocks
        self.context = PlanContext(base, job, cluster, weighed=True)
        self._known: list[tuple[Check, dict[tuple[Any, ...], str | None]]] = [
            (check, {}) for check in CHECKS if check.keys != MEMORY
        ]
        self._memory = next(check for check in CHECKS if check.keys == MEMORY)

    def refusal(self, values: dict[str, Any], among: Iterable[str] | None = None) -> Refusal | None:
        """First reason why the base plan with these values cannot run; None if it can.

        Memory is not checked here: see `out_of_memory`.

        Args:
            among: only reasons that depend on no other keys.
        """
        base, plan = self.context.plan, None
        for check, known in self._known:
            if among is not None and not set(check.keys) <= set(among):
                continue
            key = tuple([values[name] if name in values else getattr(base, name) for name in check.keys])
            if key not in known:
                plan = plan or replace(base, **values)
                reason = check.reason(replace(self.context, plan=plan))
                known[key] = reason and reason.removeprefix(f"plan {plan} ")
            if (found := known[key]) is not None:
                return check.keys, found
        return None

    def out_of_memory(self, plan: Plan) -> Refusal | None:
        """Reason why the state of a plan exceeds the memory, or None."""
        reason = self._memory.reason(replace(self.context, plan=plan))
        return (("memory",), reason.removeprefix(f"plan {plan} ")) if reason else None

    def refusal_of_value(self, key: str, value: int) -> Refusal | None:
        """Reason why a degree cannot have this value, whatever the others are; or None."""
        together = next(keys for keys in _FIXED if key in keys)
        return self.refusal({key: value}, together) or (self._too_many_stages(value) if key == "pp" else None)

    def _too_many_stages(self, pp: int) -> Refusal | None:
        one_a_rank = [
            self.refusal({"pp": pp, "schedule": schedule}, ("pp", "schedule", "cut", "virtual"))
            for schedule in ("1f1b", "gpipe")
        ]
        if all(one_a_rank):
            return next(iter(one_a_rank))
        apart = f"no more than {count(self.blocks, 'block')} of the model can be predicted apart"
        return (("pp",), f"makes {pp} stages, and {apart}: pp={self.blocks}.") if pp > self.blocks else None

    def divides_sequence(self, tp: int, cp: int) -> bool:
        """True if sequence parallelism is legal with these degrees."""
        return tp > 1 and self.refusal({"tp": tp, "cp": cp, "sequence": True}, ("sequence", "tp", "cp")) is None

    def schedule_fits(self, schedule: str, virtual: int, pp: int) -> bool:
        """True if the model has blocks for the schedule's stages."""
        values = {"pp": pp, "schedule": schedule, "virtual": virtual}
        stages = pp * stages_per_rank(schedule, virtual) if pp > 1 else 1
        return stages <= self.blocks and self.refusal(values, (*values, "cut")) is None

    def fsdp_refusal(self, schedule: str, pp: int) -> Refusal | None:
        """Reason why fsdp cannot shard a rank's stages of such a pipeline, or None."""
        return self.refusal({"pp": pp, "schedule": schedule, "fsdp": 2}, ("fsdp", "tp", "ep", "pp", "schedule"))

    def allows_microbatches(self) -> bool:
        """True if a rank's part of the batch may be computed in microbatches."""
        return self.refusal({"microbatches": 2}, ("microbatches",)) is None
