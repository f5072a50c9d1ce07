"""What every check of a plan is given, and what the search for a plan that works needs to know of a check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from paceline.cluster.cluster import Cluster, spread
from paceline.job.data import Synthetic, Text
from paceline.job.job import Job
from paceline.job.partition import Partition, PartitionSpec

if TYPE_CHECKING:
    from paceline.plans.plan import Plan
    from paceline.trace.anatomy import Anatomy

DEGREES = ("dp", "fsdp", "tp", "pp", "cp", "ep")
DATA_AXES = ("dp", "fsdp", "ep")  # along these the ranks read different samples
STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 2}


def loss_is_tried(job: Job, plan: Plan) -> bool:
    """Whether the plan computes batches in parts, and the loss is one that only trying tells to be a mean over samples."""
    in_parts = plan.cp == 1 and plan.data_ranks * plan.microbatches > 1
    return in_parts and (job.loss.name == "model" or ":" in job.loss.name)


@dataclass(frozen=True)
class Case:
    """A plan, held against a job and a cluster.

    Attributes:
        world: the number of ranks that were started already, as by torchrun; None where the plan says how many to start.
        weighed: whether the state is held against the memory even where no rank divides the model, which is built for that.
        per_host: how many ranks fit on each host; taken from the cluster.
    """

    plan: Plan
    job: Job
    cluster: Cluster
    world: int | None = None
    weighed: bool = False
    per_host: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.per_host:  # once per search: counting the devices of a thousand hosts takes longer than all checks
            object.__setattr__(self, "per_host", self.cluster.devices_per_host)

    @property
    def devices(self) -> int:
        """How many ranks fit on the cluster."""
        return sum(self.per_host)

    @cached_property
    def anatomy(self) -> Anatomy:
        """The model's. Builds it without memory: only for plans that divide it."""
        from paceline.trace.anatomy import anatomy

        return anatomy(self.job.model)

    @property
    def divides(self) -> bool:
        """Whether a replica takes more than one rank."""
        return self.plan.ranks > self.plan.dp

    @property
    def stages(self) -> int:
        """Into how many pieces the pipeline cuts the model."""
        return self.plan.pp * STAGES_PER_RANK[self.plan.schedule] if self.plan.pp > 1 else 1

    @property
    def tokens(self) -> int | None:
        """The length of the job's sequences, where its data or the model's dimensions say so; else None."""
        data = self.job.data
        if isinstance(data, Text):
            return data.context
        if isinstance(data, Synthetic) and data.vocab and data.shape:
            return data.shape[0]
        return self.job.model.transformer.seq if self.job.model.transformer else None

    @property
    def ranks_per_host(self) -> list[int]:
        """See `Cluster.ranks_per_host`."""
        return spread(self.plan.ranks, self.per_host)

    @property
    def shares(self) -> tuple[int, ...]:
        """The distinct shares of a full global batch, in samples, that data-parallel ranks get.

        They follow the job's weights where there is one per data-parallel rank.
        """
        weights, batch, data_ranks = self.job.partition.weights, self.job.global_batch, self.plan.data_ranks
        if weights is None or len(weights) != data_ranks or data_ranks > batch:
            return (batch // data_ranks, batch // data_ranks + 1) if batch % data_ranks else (batch // data_ranks,)
        spec = PartitionSpec(weights=weights)
        shares = Partition(spec, samples=batch, global_batch=batch, seed=0, replica=0, replicas=data_ranks).shares(0)
        return tuple(sorted(set(shares)))

    @property
    def smallest_share(self) -> int:
        """That of the data-parallel rank with the fewest."""
        return self.shares[0]


class Check(NamedTuple):
    """One reason why a plan may be refused.

    Attributes:
        reason: the text, with the value that would work, or None where the plan is right in this.
        keys: the plan keys that the answer depends on; changing one of them may help.
    """

    reason: Callable[[Case], str | None]
    keys: tuple[str, ...]


def degrees(plan: Plan) -> str:
    """`dp=2 · tp=3`: what multiplies to the plan's ranks."""
    return " · ".join(f"{key}={getattr(plan, key)}" for key in DEGREES if getattr(plan, key) > 1) or "dp=1"
