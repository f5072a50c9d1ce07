"""Checks of a plan: every reason why it cannot run a job on a cluster."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from paceline.cluster.cluster import Cluster
from paceline.errors import PacelineError
from paceline.job.job import Job
from paceline.job.loss import build_metrics
from paceline.planning.check.optimizers import check_optimizer
from paceline.planning.check.plan_context import Check, PlanContext, Rule, memory_shortage
from paceline.planning.limits import (
    NO_ATTENTION,
    NO_BLOCKS_TO_RECOMPUTE,
    multiplied,
    no_balance,
    no_graphs,
    other_world,
    sharded_twice,
    too_many_stages,
    undivided_experts,
    undivided_heads,
    undivided_tokens,
    unfit_microbatches,
    whole_batch_in_parts,
    wrong_cuts,
)
from paceline.planning.model.model_info import undivided_attention
from paceline.planning.plan import DATA_AXES, DEGREES, MEANT_FOR, V_SCHEDULES, Plan
from paceline.planning.sync_info import RULES, TRANSPORTS, CompressSpec, SyncSpec, sync_info
from paceline.units import count, size

_ZOO_WITHOUT_IMAGES = ("mlp", "bert", "gpt", "moe")
# built-in metrics that need every prediction at once
_GATHER = ("auc", "r2")
# memory of a rank that has loaded torch, but no model yet
_RANK_BYTES = 2**28
# keys that decide if the state fits the memory
MEMORY = ("zero", "offload", *DEGREES)


def reasons_against(plan: Plan, job: Job, cluster: Cluster, world: int | None = None) -> list[str]:
    """Every reason why the plan cannot run the job on the cluster.

    Each reason names a value that would work. `world` is the number of ranks that were started already, if they were;
    then the number of devices is not checked.
    """
    return reasons_of(PlanContext(plan, job, cluster, world))


def reasons_of(context: PlanContext) -> list[str]:
    """Reasons against the plan of a context."""
    return [f"plan {context.plan} {reason}" for check in CHECKS if (reason := check.reason(context))]


# every check, in the order in which reasons are given
CHECKS: list[Check] = []


def _check(*keys: str) -> Callable[[Rule], Rule]:
    """Register a rule as a check. Its answer depends on the plan keys `keys`."""

    def add(rule: Rule) -> Rule:
        CHECKS.append(Check(rule, keys))
        return rule

    return add


@_check(*DEGREES)
def _other_world(context: PlanContext) -> str | None:
    return None if context.world is None else other_world(context.plan, context.world)


@_check(*DEGREES)
def _too_few_devices(context: PlanContext) -> str | None:
    """Refuse more ranks than GPUs. Ranks on CPUs may share cores."""
    plan, cluster, weights = context.plan, context.cluster, context.job.partition.weights or ()
    if plan.ranks <= context.devices or not cluster.has_accelerators or context.world is not None:
        return None
    have = f"needs {count(plan.ranks, 'rank')}{multiplied(plan)}; {cluster.name} has {count(context.devices, 'device')}"
    if len(weights) > context.devices:
        limit = f"one per data-parallel rank: at most {context.devices} can work here"
        return f"{have}. The job's partition has {count(len(weights), 'weight')}, {limit}."
    others = plan.ranks // plan.dp
    most = context.devices // others
    fits = f"dp is at most {most}" if most else f"degrees that multiply to at most {context.devices}"
    return f"{have}: {fits}."


@_check(*DEGREES)
def _too_little_memory(context: PlanContext) -> str | None:
    plan, cluster = context.plan, context.cluster
    if plan.ranks <= context.devices or cluster.has_accelerators or context.world is not None:
        return None
    most = sum(host.memory_bytes // _RANK_BYTES for host in cluster.hosts)
    if plan.ranks <= most:
        return None
    works = f"dp={context.devices}" if not context.divides else f"degrees that multiply to {context.devices}"
    return (
        f"needs {count(plan.ranks, 'rank')}, for which torch alone takes {size(plan.ranks * _RANK_BYTES)} "
        f"of memory; {cluster.name} has room for {most:,} and cores for {context.devices}: {works}."
    )


@_check(*DATA_AXES)
def _other_weights(context: PlanContext) -> str | None:
    plan, weights = context.plan, context.job.partition.weights
    if weights is None or len(weights) == plan.data_ranks:
        return None
    others = plan.data_ranks // plan.dp
    room = context.world or context.devices
    fits = len(weights) % others == 0 and len(weights) // others * (plan.ranks // plan.dp) <= room
    fitting = f"dp={len(weights) // others}, or " if fits else ""
    return (
        f"has {_data_ranks(plan)}, but the job's partition has {count(len(weights), 'weight')}, one per "
        f"{_data_rank(plan)}: {fitting}{count(min(plan.data_ranks, room), 'weight')} in the job would fit."
    )


@_check("microbatches", *DATA_AXES)
def _share_too_small(context: PlanContext) -> str | None:
    plan, batch = context.plan, context.job.global_batch
    if plan.data_ranks > batch:
        limited = "dp" if plan.data_ranks == plan.dp else "dp × fsdp × ep"
        return (
            f"has {_data_ranks(plan)} for a global batch of {batch}, and each needs a sample: "
            f"{limited} is at most {batch}, or the job's global_batch at least {plan.data_ranks}."
        )
    share = context.smallest_share
    if share == 0 and (weights := context.job.partition.weights):
        enough = math.ceil(sum(weights) / min(weights))
        return (
            f"deals a global batch of {batch} by the job's weights, which leave a {_data_rank(plan)} no "
            f"sample: a global_batch of {enough} is enough."
        )
    if plan.microbatches > share:
        return (
            f"cuts a {_data_rank(plan)}'s share of the global batch into {plan.microbatches} parts, but "
            f"the smallest share is {count(share, 'sample')}: microbatches is at most {share}."
        )
    return None


@_check("microbatches")
def _loss_over_the_whole_batch(context: PlanContext) -> str | None:
    plan = context.plan
    if plan.microbatches == 1 or not context.job.loss.is_over_whole_batch:
        return None
    return whole_batch_in_parts(f"the {context.job.loss.name.rpartition(':')[2]} loss", plan.microbatches)


@_check("microbatches", *DATA_AXES)
def _models_loss_over_the_whole_batch(context: PlanContext) -> str | None:
    """Refuse a batch in parts if the model's own loss compares samples."""
    plan = context.plan
    if (
        plan.microbatches * plan.data_ranks == 1
        or context.job.loss.name != "model"
        or not context.model_info.compares_samples
    ):
        return None
    return (
        f"computes a batch in {plan.microbatches * plan.data_ranks} parts, but the model's own loss "
        "compares all samples of a batch with each other: "
        f"{' '.join(f'{key}=1' for key in ('microbatches', *DATA_AXES) if getattr(plan, key) > 1)}. Or compute the "
        "loss from the model's outputs by a function of your own that has whole_batch = True."
    )


@_check()
def _optimizer_of_this_model(context: PlanContext) -> str | None:
    """Raise JobError if the optimizer or schedule does not fit the model."""
    check_optimizer(context.job)
    return None


@_check("fused")
def _no_fused_step(context: PlanContext) -> str | None:
    optimizer = context.job.optimizer
    if not context.plan.fused or optimizer.has_fused_step:
        return None
    if {"fused", "foreach"} & optimizer.args.keys():
        return "chooses a fused step, and the job's optimizer.args choose another: fused=off."
    return f"needs a fused step of {optimizer.name}; torch has one of sgd, adam, adamw only: fused=off."


@_check("onednn")
def _no_onednn(context: PlanContext) -> str | None:
    if not context.plan.onednn or not context.cluster.has_accelerators:
        return None
    return f"is for ranks on CPUs, and those of {context.cluster.name} compute on GPUs: onednn=off."


@_check("memory_format")
def _no_images(context: PlanContext) -> str | None:
    """Reason against channels_last for models without images; models by import path pass."""
    plan, model = context.plan, context.job.model
    takes_images = model.zoo not in _ZOO_WITHOUT_IMAGES and model.task in (None, "image_classification")
    if plan.memory_format != "channels_last" or takes_images:
        return None
    return f"is for images, and the model ({model.zoo or model.task}) takes none: memory_format=contiguous."


@_check("compile")
def _no_graphs(context: PlanContext) -> str | None:
    if context.plan.compile != "reduce-overhead":
        return None
    hosts = context.cluster.hosts_in_use
    replayed = context.cluster.has_accelerators and all(gpu.graphs is not False for host in hosts for gpu in host.gpus)
    return None if replayed else no_graphs(context.cluster.name)


@_check("transport", *DEGREES)
def _no_such_transport(context: PlanContext) -> str | None:
    plan, cluster = context.plan, context.cluster
    if plan.transport != "auto" and cluster.has_accelerators:
        return f"names a transport between CPUs, but the GPUs of {cluster.name} talk over torch's own: transport=auto."
    one_host = plan.transport != "auto" and TRANSPORTS[plan.transport].one_host
    if one_host and (hosts := sum(ranks > 0 for ranks in context.ranks_per_host)) > 1:
        return f"needs all ranks on one host, but they are on {hosts} hosts: transport=auto."
    return None


@_check("balance", "dp", "pp", "sync")
def _no_balance(context: PlanContext) -> str | None:
    plan = context.plan
    return no_balance(plan, context.job.partition.kind) if plan.balance == "on" else None


def _data_rank(plan: Plan) -> str:
    return "replica" if plan.data_ranks == plan.dp else "data-parallel rank"


def _data_ranks(plan: Plan) -> str:
    if plan.data_ranks == plan.dp:
        return count(plan.dp, "replica")
    return (
        f"{plan.data_ranks} data-parallel ranks "
        f"({' · '.join(f'{key}={n}' for key in DATA_AXES if (n := getattr(plan, key)) > 1)})"
    )


# Sync rules


@_check("sync", "dp")
def _more_servers_than_replicas(context: PlanContext) -> str | None:
    spec = SyncSpec.parse(context.plan.sync)
    if spec.servers is None or spec.info.served or spec.servers.parts <= max(context.plan.dp, 1):
        return None
    servers = spec.servers.parts
    return (
        f"has {servers} servers in {count(context.plan.dp, 'replica')}, of which each holds one: "
        f"servers={context.plan.dp} at most, or a staleness, under which servers are processes of their own."
    )


@_check("sync", "dp", "num_workers")
def _not_by_servers(context: PlanContext) -> str | None:
    plan, job = context.plan, context.job
    if not sync_info(plan.sync).served:
        return None
    start = "has servers deal pieces of the batches to workers"
    if keys := job.beyond_plain_steps:
        return f"{start}, and servers do not follow {', '.join(keys)}: leave that out of the job, or sync=server."
    if context.world is not None:
        return f"{start}, which only paceline train starts: without torchrun, or sync=server."
    if job.partition.kind == "hierarchical" or job.partition.weights is not None:
        return f"{start}, which read any of the samples: partition: uniform in the job, or sync=server."
    if job.global_batch % plan.dp:
        fits = max(n for n in range(1, plan.dp + 1) if job.global_batch % n == 0)
        return f"{start} in {plan.dp} equal pieces, and the global batch is {job.global_batch}: dp={fits}, for example."
    if job.data.num_workers:
        return f"{start}, which read them when they are dealt, without loader processes: num_workers: 0 in the job."
    if plan.num_workers:
        return f"{start}, which read them when they are dealt, without loader processes: num_workers=0."
    return None


@_check("compress", "sync")
def _nothing_to_compress(context: PlanContext) -> str | None:
    """Refuse compression with sync rules that have nothing to compress, such as local SGD."""
    plan, spec = context.plan, SyncSpec.parse(context.plan.sync)
    if plan.compress == "none" or spec.info.compresses:
        return None
    what = "averages parameters, whose every bit counts" if spec.info.sends == "parameters" else "sends by itself"
    others = " or ".join(name for name, info in RULES.built_in.items() if info.compresses)
    return f"compresses what is sent, but sync={spec.name} {what}: compress=none, or sync={others}."


@_check("compress", "sync")
def _nothing_to_try(context: PlanContext) -> str | None:
    plan = context.plan
    info = sync_info(plan.sync)
    if plan.compress != "auto" or (info.compresses and not info.local_steps):
        return None
    return f"tries compressions out against sums of every step, which sync={plan.sync} does not take: compress=int8."


@_check("compress", "sync")
def _codes_sums(context: PlanContext) -> str | None:
    plan = context.plan
    if plan.compress == "none" or not sync_info(plan.sync).codes_alone:
        return None
    if plan.compress == "auto":
        return "tries codecs out in sums of all-reduce, and servers get what each rank codes: compress=int8."
    if not CompressSpec.parse(plan.compress).first.of_sums:
        return None
    return "codes sums over ranks, and servers get what each rank codes alone: compress=topk:0.01."


@_check("compress", "precision")
def _too_wide_to_compress(context: PlanContext) -> str | None:
    plan = context.plan
    if plan.compress == "none" or plan.precision_for(context.job) != "fp64":
        return None
    return "compresses gradients in fp64, but fp64 is for runs in which every digit counts: compress=none."


@_check("sync")
def _cannot_go_back(context: PlanContext) -> str | None:
    plan = context.plan
    if context.job.nonfinite != "rewind" or not sync_info(plan.sync).local_steps:
        return None
    return (
        "lets replicas train independently, and the job rewinds all of them when a loss is not finite, but the "
        "other replicas do not know of that loss: nonfinite: skip in the job, or sync=allreduce."
    )


@_check("sync")
def _no_common_loss(context: PlanContext) -> str | None:
    plan = context.plan
    if context.job.spike.policy == "off" or not sync_info(plan.sync).local_steps:
        return None
    return (
        "lets replicas train independently, each with a loss of its own, and the job leaves out steps "
        "whose loss is a spike, which all replicas must do together: spike: off in the job, or sync=allreduce."
    )


@_check("sync")
def _batch_over_all_replicas(context: PlanContext) -> str | None:
    plan, job = context.plan, context.job
    if plan.dp == 1 or not sync_info(plan.sync).local_steps:
        return None
    if job.loss.is_over_whole_batch:
        name = job.loss.name.rpartition(":")[2]
        why = f"the {name} loss compares the samples of all of them"
        return f"lets replicas train independently, and {why}: sync=allreduce."
    if job.batch_norm == "sync":
        why = "batch_norm: sync joins them in every layer"
        return f"lets replicas train independently, and {why}: batch_norm: local, or sync=allreduce."
    return None


@_check("cp")
def _loss_over_whole_sequences(context: PlanContext) -> str | None:
    if context.plan.cp == 1 or not context.job.loss.is_over_whole_sequences:
        return None
    return (
        "divides each sample's tokens, and the loss with reduction batchmean divides by samples alone: cp=1, or "
        "reduction: mean."
    )


@_check("cp")
def _metrics_of_whole_samples(context: PlanContext) -> str | None:
    """Refuse metrics that need every token of a sample on one rank."""
    specs = context.job.metrics
    # the built-in ones that are sums over tokens need not be built
    if context.plan.cp == 1 or not any(":" in spec.name or spec.name in _GATHER for spec in specs):
        return None
    built = build_metrics(specs, context.job.loss.build())
    whole = [m.name for m in built if getattr(m, "gathers", False) or getattr(m, "keeps_state", False)]
    if not whole:
        return None
    return (
        f"divides each sample's tokens over {context.plan.cp} ranks, but the metric {whole[0]} needs whole samples: "
        "cp=1, or a metric that is a ratio of two sums."
    )


# Plans that divide the model


def _without_its_degree(key: str, degree: str) -> None:
    """Refuse a key that has no effect while its degree is 1. Most likely the degree was forgotten."""

    @_check(key, degree)
    def _(context: PlanContext) -> str | None:
        value = getattr(context.plan, key)
        if value == getattr(Plan, key) or getattr(context.plan, degree) > 1:
            return None
        shown = "on" if value is True else value
        return f"has {key}={shown}, which is about {degree}, but {degree} is 1: {degree}=2, or leave out {key}."


for _key, _degree in MEANT_FOR.items():
    _without_its_degree(_key, _degree)


@_check("virtual", "schedule")
def _virtual_without_interleaving(context: PlanContext) -> str | None:
    plan = context.plan
    if plan.virtual == 2 or plan.schedule == "interleaved":
        return None
    return (
        f"has virtual={plan.virtual}, the number of stages of a rank with schedule=interleaved, but the "
        f"schedule is {plan.schedule}: schedule=interleaved, or leave out virtual."
    )


@_check("microbatches", "schedule", "pp")
def _schedule_and_microbatches(context: PlanContext) -> str | None:
    plan = context.plan
    return unfit_microbatches(plan.schedule, plan.pp, plan.microbatches) if plan.pp > 1 else None


@_check("pp", "schedule", "virtual")
def _too_few_blocks(context: PlanContext) -> str | None:
    plan = context.plan
    if plan.pp == 1 or plan.cut:
        return None
    blocks = len(context.model_info.blocks)
    pieces = blocks or sum(len(shape.sizes) > 1 for shape in context.model_info.parameters)
    have = count(blocks, "repeated block") if blocks else count(pieces, "weight matrix", "weight matrices")
    found = too_many_stages(plan, pieces, f"the model has {have}")
    return found and f"{found}, or cut names the modules where stages begin."


@_check("cut", "pp", "schedule", "virtual")
def _wrong_cuts(context: PlanContext) -> str | None:
    plan = context.plan
    if plan.pp == 1 or not plan.cut:
        return None
    return wrong_cuts(plan, context.model_info.modules, context.model_info.blocks)


@_check("tp")
def _heads_do_not_divide(context: PlanContext) -> str | None:
    """Reason against a `tp` that does not divide the heads, or None.

    Ranks that share a head of keys and values need projections that can be used in part, which depends on the model's
    code. A vocabulary that cannot be divided stays replicated, which is slower but works: see `plan_errors.py`.
    """
    if context.plan.tp == 1:
        return None
    heads = {"attention heads": context.model_info.heads}
    keys = {"heads of keys and values": context.model_info.key_value_heads}
    reason = undivided_heads(heads, context.plan.tp, keys)
    if reason is None and any(n % context.plan.tp for n in context.model_info.key_value_heads):
        # the trace reports samples that cannot be read
        with suppress(PacelineError):
            reason = undivided_attention(context.job, context.plan.tp)
    return reason


@_check("ep")
def _experts_do_not_divide(context: PlanContext) -> str | None:
    ep = context.plan.ep
    return undivided_experts(context.model_info.experts, ep) if ep > 1 else None


@_check("cp")
def _tokens_do_not_divide(context: PlanContext) -> str | None:
    plan = context.plan
    if plan.cp == 1:
        return None
    if not context.model_info.heads and not context.model_info.vocabulary:
        return NO_ATTENTION
    # other models have all tokens on every rank
    tokens = context.tokens if context.model_info.takes_parts_of_sequences else None
    return undivided_tokens(tokens, "cp", plan.cp) if tokens else None


@_check("sequence", "tp", "cp")
def _no_sequence_to_divide(context: PlanContext) -> str | None:
    """Reason against sequence parallelism, or None. It further divides a `cp` rank's tokens."""
    plan = context.plan
    if not plan.sequence or plan.tp == 1:
        return None
    if not context.model_info.heads or not context.model_info.blocks:
        return (
            "divides the tokens between matrices, but the model has no blocks with attention over tokens: sequence=off."
        )
    return undivided_tokens(context.tokens, "tp", plan.tp, plan.cp) if context.tokens else None


@_check("pp", "cp")
def _loss_over_stages(context: PlanContext) -> str | None:
    plan = context.plan
    divided = [key for key in ("pp", "cp") if getattr(plan, key) > 1]
    if not divided or not context.job.loss.is_over_whole_batch:
        return None
    ones = " ".join(f"{key}=1" for key in divided)
    return (
        f"never has all outputs of a batch on one rank ({', '.join(divided)}), and the "
        f"{context.job.loss.name.rpartition(':')[2]} loss compares all samples of a batch with each other: {ones}."
    )


@_check(*DEGREES)
def _updates_of_whole_parameters(context: PlanContext) -> str | None:
    """Refuse to divide what one update of the optimizer depends on."""
    plan, optimizer = context.plan, context.job.optimizer
    if plan.ranks == 1 or (not context.divides and ":" not in optimizer.name):
        return None
    scope = optimizer.scope
    if scope == "random":
        return f"has {count(plan.ranks, 'rank')}, and {optimizer.name} draws random numbers, which differ: dp=1."
    keys = {"element": (), "parameter": ("fsdp", "tp", "ep"), "model": ("fsdp", "tp", "ep", "pp")}[scope]
    divided = [key for key in keys if getattr(plan, key) > 1]
    if not divided:
        return None
    whole = {"parameter": "each parameter by values of the whole of it", "model": "all parameters by common values"}
    return (
        f"divides the model ({', '.join(divided)}), and {optimizer.name} updates {whole[scope]}: RMSprop, sgd, adam, "
        f"adamw work, or {' '.join(f'{key}=1' for key in divided)}."
    )


@_check("memory_format", *DEGREES[1:])
def _format_of_divided_images(context: PlanContext) -> str | None:
    if context.plan.memory_format != "channels_last" or not context.divides:
        return None
    return "divides the model, whose parts keep the ordinary layout of memory: memory_format=contiguous."


@_check("compile", *DEGREES[1:])
def _graphs_of_divided_models(context: PlanContext) -> str | None:
    if context.plan.compile != "reduce-overhead" or not context.divides or not context.cluster.has_accelerators:
        return None
    return "replays graphs of kernels, which cannot hold the communication inside a divided model: compile=on."


@_check("remat", "pp")
def _nothing_to_compute_again(context: PlanContext) -> str | None:
    plan = context.plan
    if plan.remat == "none" or plan.pp > 1 or context.model_info.blocks:
        return None
    return NO_BLOCKS_TO_RECOMPUTE


@_check("compile", "schedule", "pp")
def _compiled_v_schedule(context: PlanContext) -> str | None:
    plan = context.plan
    if plan.pp == 1 or plan.schedule not in V_SCHEDULES or plan.compile == "off":
        return None
    return (
        f"computes gradients of inputs and of weights apart ({plan.schedule}), which PyTorch cannot do "
        "with compiled stages: compile=off, or schedule=interleaved."
    )


@_check("schedule", "fsdp", "pp")
def _shards_of_a_tied_weight(context: PlanContext) -> str | None:
    """Refuse tied weights that FSDP2 would shard twice. A V schedule has both stages on one rank."""
    plan = context.plan
    if plan.schedule not in V_SCHEDULES or plan.pp == 1 or plan.fsdp == 1 or not context.model_info.tied:
        return None
    return sharded_twice(" = ".join(context.model_info.tied[0][:2]), plan.schedule)


@_check(*MEMORY)
def _state_beyond_memory(context: PlanContext) -> str | None:
    if not (context.divides or context.weighed) or (shortage := memory_shortage(context)) is None:
        return None
    return f"keeps parameters, gradients and optimizer state of {shortage}: {_enough_fsdp(context)}."


def _enough_fsdp(context: PlanContext) -> str:
    """Return the fsdp degree that would work, limited by the numbers of devices and samples."""
    plan = context.plan
    others = plan.ranks // plan.fsdp
    most = (context.world or context.devices) // others
    for zero in dict.fromkeys((plan.zero, 3)):
        for fsdp in (plan.fsdp * 2**n for n in range(max(1, most // plan.fsdp).bit_length())):
            bigger = replace(plan, fsdp=fsdp, zero=zero)
            if fsdp > 1 and memory_shortage(replace(context, plan=bigger)) is None:
                return f"fsdp={fsdp}" + (f" zero={zero}" if zero != plan.zero else "") + " is enough"
    return f"more memory, or a smaller model (this one has {context.model_info.numel:,} parameters)"
