"""Context that every check of a plan receives, and the type of a check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from paceline.cluster.cluster import Cluster, spread
from paceline.errors import PlanProblem
from paceline.job.data import Synthetic, Text
from paceline.job.job import Job
from paceline.job.partition import Partition, PartitionSpec
from paceline.units import size

if TYPE_CHECKING:
    from paceline.planning.model.model_info import ModelInfo, Sizes
    from paceline.planning.plan import Plan


def loss_is_tried(job: Job, plan: Plan) -> bool:
    """True if the plan divides a batch and the loss must be tested first.

    The loss is the model's own or a custom function, so only a test shows whether it is a mean over samples.
    """
    in_parts = plan.cp == 1 and plan.data_ranks * plan.microbatches > 1
    return in_parts and (job.loss.name == "model" or ":" in job.loss.name)


@dataclass(frozen=True)
class PlanContext:
    """A plan, with the job and the cluster for which it is checked.

    Attributes:
        world: the number of ranks that were started already, for example by torchrun; None if the plan says how many to
            start.
        weighed: True if the state is compared with the memory even though the plan does not divide the model. The model
            is then built.
        per_host: number of ranks that fit on each host; by default, the devices of the cluster's hosts.
    """

    plan: Plan
    job: Job
    cluster: Cluster
    world: int | None = None
    weighed: bool = False
    per_host: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # once per search: counting the devices of a thousand hosts takes longer than all checks
        if not self.per_host:
            object.__setattr__(self, "per_host", self.cluster.devices_per_host)

    @property
    def devices(self) -> int:
        """Number of ranks that fit on the cluster."""
        return sum(self.per_host)

    @cached_property
    def model_info(self) -> ModelInfo:
        """Information about the model, which is built on first access without memory for its weights."""
        from paceline.planning.model.model_info import model_info

        return model_info(self.job.model)

    @property
    def divides(self) -> bool:
        """True if a replica has more than one rank."""
        return self.plan.ranks > self.plan.dp

    @property
    def tokens(self) -> int | None:
        """Length of the job's sequences in tokens; None if it is unknown.

        The data or the dimensions of the model determine it.
        """
        data = self.job.data
        if isinstance(data, Text):
            return data.context
        if isinstance(data, Synthetic) and data.vocab and data.shape:
            return data.shape[0]
        return self.job.model.transformer.seq if self.job.model.transformer else None

    @property
    def divides_sequences(self) -> bool:
        """True if `cp` can divide the tokens of the job's sequences among ranks.

        Otherwise every rank holds all tokens. Packed sequences cannot be divided.
        """
        data = self.job.data
        packs = any(getattr(source, "pack", False) for source in (data, *getattr(data, "sources", {}).values()))
        return self.model_info.takes_parts_of_sequences and not packs

    @property
    def ranks_per_host(self) -> list[int]:
        """Number of the plan's ranks on each host."""
        return spread(self.plan.ranks, self.per_host)

    @property
    def shares(self) -> tuple[int, ...]:
        """Distinct numbers of samples that data-parallel ranks get from a full global batch, ascending.

        The job's weights determine them if there is one weight per data-parallel rank.
        """
        weights, batch, data_ranks = self.job.partition.weights, self.job.global_batch, self.plan.data_ranks
        if weights is None or len(weights) != data_ranks or data_ranks > batch:
            return (batch // data_ranks, batch // data_ranks + 1) if batch % data_ranks else (batch // data_ranks,)
        spec = PartitionSpec(weights=weights)
        shares = Partition(spec, samples=batch, global_batch=batch, seed=0, replica=0, replicas=data_ranks).shares(0)
        return tuple(sorted(set(shares)))

    @property
    def smallest_share(self) -> int:
        """Smallest number of samples that a data-parallel rank gets from a full global batch."""
        return self.shares[0]


Rule = Callable[[PlanContext], PlanProblem | None]


class Check(NamedTuple):
    """One check of a plan.

    Attributes:
        reason: function of the context; it returns a problem that names a working value, or None if the plan passes.
        keys: the plan keys that the result depends on; changing one of them may solve the problem.
    """

    reason: Rule
    keys: tuple[str, ...]


def registering(checks: list[Check]) -> Callable[..., Callable[[Rule], Rule]]:
    """Return a decorator factory that adds rules to `checks`.

    The factory takes the plan keys that a rule depends on.
    """

    def check(*keys: str) -> Callable[[Rule], Rule]:
        def add(rule: Rule) -> Rule:
            checks.append(Check(rule, keys))
            return rule

        return add

    return check


def state_bytes(plan: Plan, job: Job, model: ModelInfo) -> int:
    """Return the minimum size of the state on a rank's compute device, in bytes.

    This minimum holds both during and between steps. Activations are not included.
    """
    from paceline.planning.model.model_info import optimizer_bytes, state_tensors
    from paceline.planning.plan import reduces_once

    whole, trained, largest_block = _held(plan, model)
    size = plan.held_bytes(job)
    if plan.offload:
        # one block at a time is on the device, with its gradients
        return int(size * 2 * largest_block)
    kept = whole if plan.zero < 3 or plan.pp > 1 else max(whole / plan.fsdp, largest_block)
    gradients = trained if reduces_once(plan.zero, plan.pp, plan.schedule) else trained / plan.fsdp
    state = optimizer_bytes(job, state_tensors(job, model), size)
    return int(size * (kept + gradients) + state * trained / plan.fsdp)


def offloaded_bytes(plan: Plan, job: Job, model: ModelInfo) -> int:
    """Return the bytes that one rank keeps in host memory under a plan with `offload`."""
    from paceline.planning.model.model_info import optimizer_bytes, state_tensors

    whole, trained, _ = _held(plan, model)
    size = plan.held_bytes(job)
    return int((size * (whole + trained) + optimizer_bytes(job, state_tensors(job, model), size) * trained) / plan.fsdp)


def memory_shortage(context: PlanContext) -> str | None:
    """Describe a memory shortage, such as `30 GiB on a GPU that has 16 GiB`; None if the state fits."""
    plan, job, cluster = context.plan, context.job, context.cluster
    on_device = state_bytes(plan, job, context.model_info)
    in_host = offloaded_bytes(plan, job, context.model_info) if plan.offload else 0
    if not cluster.has_accelerators:
        in_host = max(on_device, in_host)
    elif on_device > (memory := min(gpu.memory_bytes for host in cluster.hosts for gpu in host.gpus)):
        return f"{size(on_device)} on a GPU that has {size(memory)}"
    # the hosts of ranks that were started elsewhere are unknown
    if not in_host or context.world is not None:
        return None
    for host, ranks in zip(cluster.hosts, context.ranks_per_host, strict=True):
        if ranks * in_host > host.memory_bytes:
            return f"{size(ranks * in_host)} in the memory of a host that has {size(host.memory_bytes)}"
    return None


def _held(plan: Plan, model: ModelInfo) -> tuple[float, float, float]:
    """Count one rank's parameters before fsdp shards them.

    The result has the number of all parameters, of trained parameters, and of parameters in the largest block.
    Quantized parameters count as the unquantized parameters of equal size.
    """
    whole, trained = (_part(plan, sizes) / plan.pp for sizes in (model.total, model.trained))
    largest = max((_part(plan, sizes) for sizes in model.kinds_of_blocks), default=0.0)
    return whole * model.held_part, trained, largest * model.held_part


def _part(plan: Plan, sizes: Sizes) -> float:
    return sizes.vectors + sizes.matrices / plan.tp + sizes.experts / plan.tp / plan.ep
