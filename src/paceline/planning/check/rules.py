"""Checks of a plan that do not depend on how the model is divided.

The checks of plans that divide the model are in `split_rules.py`.
"""

from __future__ import annotations

import math
from importlib.util import find_spec

from paceline.cluster.cluster import Cluster
from paceline.errors import PlanProblem
from paceline.job.job import Job
from paceline.job.optimizer import FUSED
from paceline.planning.check import split_rules
from paceline.planning.check.optimizers import check_optimizer
from paceline.planning.check.plan_context import Check, PlanContext, registering
from paceline.planning.limits import (
    multiplied,
    no_balance,
    no_float8_layers,
    no_graphs,
    other_world,
    scales_of_shards,
    whole_batch_in_parts,
)
from paceline.planning.plan import DATA_AXES, DEGREES, Plan
from paceline.planning.sync_info import RULES, TRANSPORTS, CompressSpec, SyncSpec, sync_info
from paceline.units import count, size

_ZOO_WITHOUT_IMAGES = ("mlp", "bert", "gpt", "moe")
# memory of a rank that has loaded torch, but not yet a model
_RANK_BYTES = 2**28


def reasons_against(plan: Plan, job: Job, cluster: Cluster, world: int | None = None) -> list[PlanProblem]:
    """Return every reason why the plan cannot run the job on the cluster.

    Each reason names a value that would work. `world` is the number of ranks that were started already; if it is given,
    the number of devices is not checked.
    """
    return reasons_of(PlanContext(plan, job, cluster, world))


def reasons_of(context: PlanContext) -> list[PlanProblem]:
    """Return every reason why the plan of a context cannot run."""
    return [problem.about(context.plan) for check in CHECKS if (problem := check.reason(context))]


_checks: list[Check] = []
_check = registering(_checks)


@_check(*DEGREES)
def _other_world(context: PlanContext) -> PlanProblem | None:
    return None if context.world is None else other_world(context.plan, context.world)


@_check(*DEGREES)
def _too_few_devices(context: PlanContext) -> PlanProblem | None:
    """Refuse more ranks than GPUs. Ranks on CPUs may share cores, so they are not limited."""
    plan, cluster, weights = context.plan, context.cluster, context.job.partition.weights or ()
    if plan.ranks <= context.devices or not cluster.has_accelerators or context.world is not None:
        return None
    need, has = f"{count(plan.ranks, 'rank')}{multiplied(plan)}", count(context.devices, "device")
    if len(weights) > context.devices:
        return PlanProblem(
            "plan.too_many_weights",
            "plan {plan} needs {need}, but {cluster} has {has}. The job's partition has {weights}, one per "
            "data-parallel rank, so at most {devices} devices can be used.",
            need=need,
            ranks=plan.ranks,
            cluster=cluster.name,
            has=has,
            devices=context.devices,
            weights=count(len(weights), "weight"),
        )
    most = context.devices // (plan.ranks // plan.dp)
    return PlanProblem(
        "plan.too_few_devices",
        "plan {plan} needs {need}; {cluster} has {has}: {works}.",
        need=need,
        ranks=plan.ranks,
        cluster=cluster.name,
        has=has,
        devices=context.devices,
        works=f"dp is at most {most}" if most else f"degrees that multiply to at most {context.devices}",
    )


@_check(*DEGREES)
def _too_little_memory(context: PlanContext) -> PlanProblem | None:
    plan, cluster = context.plan, context.cluster
    if plan.ranks <= context.devices or cluster.has_accelerators or context.world is not None:
        return None
    most = sum(host.memory_bytes // _RANK_BYTES for host in cluster.hosts)
    if plan.ranks <= most:
        return None
    return PlanProblem(
        "plan.too_many_ranks_for_memory",
        "plan {plan} needs {need}, for which torch alone takes {memory} of memory, but {cluster} has "
        "memory for {room:,} ranks and cores for {devices}: {works}.",
        need=count(plan.ranks, "rank"),
        ranks=plan.ranks,
        memory=size(plan.ranks * _RANK_BYTES),
        cluster=cluster.name,
        room=most,
        devices=context.devices,
        works=f"degrees that multiply to {context.devices}" if context.divides else f"dp={context.devices}",
    )


@_check(*DATA_AXES)
def _other_weights(context: PlanContext) -> PlanProblem | None:
    plan, weights = context.plan, context.job.partition.weights
    if weights is None or len(weights) == plan.data_ranks:
        return None
    others = plan.data_ranks // plan.dp
    room = context.world or context.devices
    fits = len(weights) % others == 0 and len(weights) // others * (plan.ranks // plan.dp) <= room
    return PlanProblem(
        "plan.other_number_of_weights",
        "plan {plan} has {has}, but the job's partition has {weights}, one per {each}: {works} in the job would fit.",
        has=_data_ranks(plan),
        data_ranks=plan.data_ranks,
        weights=count(len(weights), "weight"),
        each=_data_rank(plan),
        works=(f"dp={len(weights) // others}, or " if fits else "") + count(min(plan.data_ranks, room), "weight"),
    )


@_check("microbatches", *DATA_AXES)
def _share_too_small(context: PlanContext) -> PlanProblem | None:
    plan, batch = context.plan, context.job.global_batch
    if plan.data_ranks > batch:
        return PlanProblem(
            "plan.too_few_samples",
            "plan {plan} has {has} for a global batch of {global_batch}, but each of them needs a sample. "
            "Set {limited} to at most {global_batch}, or the job's global_batch to at least {data_ranks}.",
            has=_data_ranks(plan),
            data_ranks=plan.data_ranks,
            global_batch=batch,
            limited="dp" if plan.data_ranks == plan.dp else "dp × fsdp × ep",
        )
    share = context.smallest_share
    if share == 0 and (weights := context.job.partition.weights):
        return PlanProblem(
            "plan.weights_leave_no_sample",
            "plan {plan} divides a global batch of {global_batch} by the job's weights, which leaves a {each} "
            "without a sample. Use a global_batch of {enough} or more.",
            global_batch=batch,
            each=_data_rank(plan),
            enough=math.ceil(sum(weights) / min(weights)),
        )
    if plan.microbatches > share:
        return PlanProblem(
            "plan.too_many_microbatches",
            "plan {plan} divides a {each}'s share of the global batch into {microbatches} parts, but the smallest "
            "share is {has}. Use at most {share} microbatches.",
            each=_data_rank(plan),
            microbatches=plan.microbatches,
            has=count(share, "sample"),
            share=share,
        )
    return None


@_check("microbatches")
def _loss_over_the_whole_batch(context: PlanContext) -> PlanProblem | None:
    plan = context.plan
    if plan.microbatches == 1 or not context.job.loss.is_over_whole_batch:
        return None
    return whole_batch_in_parts(f"the {context.job.loss.name.rpartition(':')[2]} loss", plan.microbatches)


@_check("microbatches", *DATA_AXES)
def _models_loss_over_the_whole_batch(context: PlanContext) -> PlanProblem | None:
    """Refuse to divide a batch if the model's own loss compares its samples."""
    plan = context.plan
    if (
        plan.microbatches * plan.data_ranks == 1
        or context.job.loss.name != "model"
        or not context.model_info.compares_samples
    ):
        return None
    return PlanProblem(
        "plan.models_loss_in_parts",
        "plan {plan} computes a batch in {parts} parts, but the model's own loss compares all samples of a batch "
        "with each other: {works}. Or compute the loss from the model's outputs in your own function with "
        "whole_batch = True.",
        parts=plan.microbatches * plan.data_ranks,
        works=" ".join(f"{key}=1" for key in ("microbatches", *DATA_AXES) if getattr(plan, key) > 1),
    )


@_check()
def _optimizer_of_this_model(context: PlanContext) -> PlanProblem | None:
    """Raise JobError if the optimizer or schedule does not fit the model."""
    check_optimizer(context.job)
    return None


@_check("fused")
def _no_fused_step(context: PlanContext) -> PlanProblem | None:
    optimizer = context.job.optimizer
    if not context.plan.fused or optimizer.has_fused_step:
        return None
    if optimizer.selects_step:
        return PlanProblem(
            "plan.other_step_in_job",
            "plan {plan} sets the fused step of the optimizer, but the job's optimizer.args set it to a different "
            "value. Use fused=off.",
        )
    return PlanProblem(
        "plan.no_fused_step",
        "plan {plan} needs a fused step of {optimizer}, but torch has fused steps only for {choices}. Use fused=off.",
        optimizer=optimizer.name,
        choices=list(FUSED),
    )


@_check("onednn")
def _no_onednn(context: PlanContext) -> PlanProblem | None:
    if not context.plan.onednn or not context.cluster.has_accelerators:
        return None
    return PlanProblem(
        "plan.onednn_on_gpus",
        "plan {plan} uses oneDNN, which is for ranks on CPUs, but the ranks of {cluster} compute on GPUs. Use "
        "onednn=off.",
        cluster=context.cluster.name,
    )


@_check("memory_format")
def _no_images(context: PlanContext) -> PlanProblem | None:
    """Refuse channels_last for a model without image input. A model given by import path passes."""
    plan, model = context.plan, context.job.model
    takes_images = model.zoo not in _ZOO_WITHOUT_IMAGES and model.task in (None, "image_classification")
    if plan.memory_format != "channels_last" or takes_images:
        return None
    return PlanProblem(
        "plan.no_images",
        "plan {plan} has memory_format=channels_last, which is for images, but the model ({model}) has no image "
        "input. Use memory_format=contiguous.",
        model=model.zoo or model.task,
    )


@_check("compile")
def _no_graphs(context: PlanContext) -> PlanProblem | None:
    if context.plan.compile != "reduce-overhead":
        return None
    hosts = context.cluster.hosts_in_use
    replayed = context.cluster.has_accelerators and all(gpu.graphs is not False for host in hosts for gpu in host.gpus)
    return None if replayed else no_graphs(context.cluster.name)


@_check("transport", *DEGREES)
def _no_such_transport(context: PlanContext) -> PlanProblem | None:
    plan, cluster = context.plan, context.cluster
    if plan.transport != "auto" and cluster.has_accelerators:
        return PlanProblem(
            "plan.transport_of_gpus",
            "plan {plan} names a transport between CPUs, but the GPUs of {cluster} communicate through torch's own "
            "transport. Use transport=auto.",
            cluster=cluster.name,
        )
    one_host = plan.transport != "auto" and TRANSPORTS[plan.transport].one_host
    if one_host and (hosts := sum(ranks > 0 for ranks in context.ranks_per_host)) > 1:
        return PlanProblem(
            "plan.transport_of_one_host",
            "plan {plan} needs all ranks on one host, but they are on {hosts} hosts. Use transport=auto.",
            transport=plan.transport,
            hosts=hosts,
        )
    return None


@_check("balance", "dp", "pp", "sync")
def _no_balance(context: PlanContext) -> PlanProblem | None:
    plan = context.plan
    if plan.balance == "on" and context.job.data.kind == "iterable":
        return PlanProblem(
            "plan.balance_of_stream",
            "plan {plan} cannot move samples of a stream, because each rank reads its own parts. Use balance=auto.",
            plan=plan,
        )
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


@_check("sync")
def _average_of_other_weights(context: PlanContext) -> PlanProblem | None:
    info = sync_info(context.plan.sync)
    if context.job.ema is None or not info.local_steps or info.served:
        return None
    return PlanProblem(
        "plan.average_of_local_steps",
        "plan {plan} lets replicas train independently, so each would have a different average of the weights "
        "(ema). Use sync=allreduce, or leave ema out of the job.",
    )


@_check("sync")
def _reference_of_local_steps(context: PlanContext) -> PlanProblem | None:
    info = sync_info(context.plan.sync)
    if not context.job.loss.has_reference or not info.local_steps or info.served:
        return None
    return PlanProblem(
        "plan.reference_of_local_steps",
        "plan {plan} lets replicas train independently, so their copies of the initial weights, which are the "
        "reference of the loss, could differ. Use sync=allreduce.",
    )


@_check("sync", "dp")
def _more_servers_than_replicas(context: PlanContext) -> PlanProblem | None:
    spec = SyncSpec.parse(context.plan.sync)
    if spec.servers is None or spec.info.served or spec.servers.parts <= max(context.plan.dp, 1):
        return None
    return PlanProblem(
        "plan.more_servers_than_replicas",
        "plan {plan} has {servers} servers in {replicas}, but each replica can run only one. Use servers={dp} or "
        "less, or set a staleness, which makes servers separate processes.",
        servers=spec.servers.parts,
        replicas=count(context.plan.dp, "replica"),
        dp=context.plan.dp,
    )


@_check("sync", "dp", "num_workers")
def _not_by_servers(context: PlanContext) -> PlanProblem | None:
    plan, job = context.plan, context.job
    if not sync_info(plan.sync).served:
        return None
    if keys := job.beyond_plain_steps:
        return PlanProblem(
            "plan.servers_and_job",
            "plan {plan} lets servers distribute pieces of batches to workers, and these servers do not support "
            "{keys}. Leave them out of the job, or use sync=server.",
            keys=list(keys),
        )
    if context.world is not None:
        return PlanProblem(
            "plan.servers_under_torchrun",
            "plan {plan} lets servers distribute pieces of batches to workers, which works only in paceline train. "
            "Start the run without torchrun, or use sync=server.",
        )
    if job.partition.kind == "hierarchical" or job.partition.weights is not None:
        return PlanProblem(
            "plan.servers_and_partition",
            "plan {plan} lets servers distribute pieces of batches to workers, and every worker may get any "
            "sample. Use partition: uniform in the job, or sync=server.",
        )
    if job.global_batch % plan.dp:
        return PlanProblem(
            "plan.servers_and_batch",
            "plan {plan} lets servers distribute batches to workers in {dp} equal pieces, but the global batch is "
            "{global_batch}. Use dp={fits}, for example.",
            dp=plan.dp,
            global_batch=job.global_batch,
            fits=max(n for n in range(1, plan.dp + 1) if job.global_batch % n == 0),
        )
    if job.data.num_workers or plan.num_workers:
        return PlanProblem(
            "plan.servers_and_loader_processes",
            "plan {plan} lets servers distribute pieces of batches to workers, which read the samples without "
            "loader processes: {works}.",
            works="num_workers: 0 in the job" if job.data.num_workers else "num_workers=0",
        )
    return None


@_check("compress", "sync")
def _nothing_to_compress(context: PlanContext) -> PlanProblem | None:
    """Refuse compression with a sync rule that does not support it, such as local SGD."""
    plan, spec = context.plan, SyncSpec.parse(context.plan.sync)
    if plan.compress == "none" or spec.info.compresses:
        return None
    return PlanProblem(
        "plan.nothing_to_compress",
        "plan {plan} compresses the data that is sent, but sync={sync} {why}. Use compress=none, or sync={works}.",
        sync=spec.name,
        why="averages parameters, which must not lose precision"
        if spec.info.sends == "parameters"
        else "sends by itself",
        works=" or ".join(name for name, info in RULES.built_in.items() if info.compresses),
    )


@_check("compress", "sync")
def _nothing_to_try(context: PlanContext) -> PlanProblem | None:
    plan = context.plan
    info = sync_info(plan.sync)
    if plan.compress != "auto" or (info.compresses and not info.local_steps):
        return None
    return PlanProblem(
        "plan.nothing_to_try",
        "plan {plan} sets compress=auto, which needs a rule that compresses the gradients of each step, but "
        "sync={sync} does not. Use compress=int8.",
        sync=plan.sync,
    )


@_check("compress", "sync")
def _codes_sums(context: PlanContext) -> PlanProblem | None:
    plan = context.plan
    if plan.compress == "none" or not sync_info(plan.sync).codes_alone:
        return None
    if plan.compress == "auto":
        return PlanProblem(
            "plan.codecs_tried_on_sums",
            "plan {plan} tests codecs in all-reduces, but servers receive separate gradients from each rank. Use "
            "compress=int8.",
        )
    if not CompressSpec.parse(plan.compress).first.of_sums:
        return None
    return PlanProblem(
        "plan.codec_of_sums",
        "plan {plan} compresses sums over ranks, but servers receive separate gradients from each rank. Use "
        "compress=topk:0.01.",
        compress=plan.compress,
    )


@_check("precision")
def _narrow_weights(context: PlanContext) -> PlanProblem | None:
    precision = context.plan.precision_for(context.job)
    if context.job.model.dtype != "bf16" or precision in ("bf16", "fp8", "fp64"):
        return None
    return PlanProblem(
        "plan.dtype_and_precision",
        "model.dtype is bf16, so the weights are in bf16, but precision is {precision}. Use precision: bf16, or set "
        "model.dtype: fp32.",
        precision=precision,
    )


@_check("precision")
def _no_float8_units(context: PlanContext) -> PlanProblem | None:
    hosts = context.cluster.hosts_in_use
    without = {device.name for host in hosts for device in host.devices if device.fp8 is False}
    if context.plan.precision_for(context.job) != "fp8" or not without:
        return None
    return PlanProblem(
        "plan.no_float8_units",
        "plan {plan} multiplies in float8, which {devices} cannot do. Use precision=bf16.",
        devices=sorted(without),
    )


@_check("precision", "tp")
def _scales_of_shards(context: PlanContext) -> PlanProblem | None:
    plan = context.plan
    return scales_of_shards(plan.tp) if plan.precision_for(context.job) == "fp8" and plan.tp > 1 else None


@_check("precision")
def _float8_of_frozen_layers(context: PlanContext) -> PlanProblem | None:
    job = context.job
    keys = [key for key in ("adapter", "quantize") if getattr(job, key) is not None]
    if context.plan.precision_for(job) != "fp8" or not keys:
        return None
    return PlanProblem(
        "plan.float8_with_frozen_layers",
        "plan {plan} multiplies in float8, which supports only layers whose weights are trained, but the job has "
        "{keys}. Use precision=bf16.",
        keys=keys,
    )


@_check("precision")
def _no_float8_library(context: PlanContext) -> PlanProblem | None:
    if context.plan.precision_for(context.job) != "fp8" or find_spec("torchao") is not None:
        return None
    return PlanProblem(
        "plan.no_float8_library",
        "plan {plan} multiplies in float8, which needs the library torchao. Run: pip install 'paceline[quantize]', or "
        "use precision=bf16.",
    )


@_check("precision")
def _no_float8_layers(context: PlanContext) -> PlanProblem | None:
    if context.plan.precision_for(context.job) != "fp8" or context.model_info.float8_layers:
        return None
    return no_float8_layers()


@_check("compress", "precision")
def _too_wide_to_compress(context: PlanContext) -> PlanProblem | None:
    plan = context.plan
    if plan.compress == "none" or plan.precision_for(context.job) != "fp64":
        return None
    return PlanProblem(
        "plan.compressed_fp64",
        "plan {plan} compresses gradients in fp64, but fp64 is for runs that need exact results. Use compress=none.",
    )


def _without_loss_scale(key: str) -> None:
    """Refuse fp16 with a key under which ranks lack whole and exact gradients."""

    @_check(key)
    def _(context: PlanContext) -> PlanProblem | None:
        plan, value = context.plan, getattr(context.plan, key)
        exact = sync_info(plan.sync).exact if key == "sync" else value == getattr(Plan, key)
        if exact or plan.precision_for(context.job) != "fp16":
            return None
        return PlanProblem(
            "plan.fp16_needs_whole_gradients",
            "plan {plan} has {key}={value}, but fp16 scales the loss, which needs whole and exact gradients on "
            "every rank. Use precision=bf16, or leave out {key}.",
            key=key,
            value=value,
        )


for _key in ("fsdp", "tp", "pp", "cp", "ep", "remat", "offload_activations", "sync", "compress"):
    _without_loss_scale(_key)


@_check("sync")
def _cannot_go_back(context: PlanContext) -> PlanProblem | None:
    plan = context.plan
    if context.job.nonfinite != "rewind" or not sync_info(plan.sync).local_steps:
        return None
    return PlanProblem(
        "plan.rewind_of_local_steps",
        "plan {plan} lets replicas train independently, but the job rewinds all of them when a loss is not finite, "
        "and the other replicas do not know about that loss. Use nonfinite: skip in the job, or sync=allreduce.",
    )


@_check("sync")
def _no_common_loss(context: PlanContext) -> PlanProblem | None:
    plan = context.plan
    if context.job.spike.policy == "off" or not sync_info(plan.sync).local_steps:
        return None
    return PlanProblem(
        "plan.spikes_of_local_steps",
        "plan {plan} lets replicas train independently, each with its own loss, but the job skips steps whose loss "
        "is a spike, and all replicas must skip such a step together. Use spike: off in the job, or sync=allreduce.",
    )


@_check("sync")
def _batch_over_all_replicas(context: PlanContext) -> PlanProblem | None:
    plan, job = context.plan, context.job
    if plan.dp == 1 or not sync_info(plan.sync).local_steps:
        return None
    if job.loss.is_over_whole_batch:
        return PlanProblem(
            "plan.whole_batch_loss_of_local_steps",
            "plan {plan} lets replicas train independently, but the {loss} loss compares the samples of all of "
            "them. Use sync=allreduce.",
            loss=job.loss.name.rpartition(":")[2],
        )
    if job.batch_norm == "sync":
        return PlanProblem(
            "plan.batch_norm_of_local_steps",
            "plan {plan} lets replicas train independently, but batch_norm: sync connects them in every layer. Use "
            "batch_norm: local, or sync=allreduce.",
        )
    return None


@_check("cp")
def _prompts_over_ranks(context: PlanContext) -> PlanProblem | None:
    if context.plan.cp == 1 or not context.job.evaluate.prompts:
        return None
    return PlanProblem(
        "plan.prompts_with_cp",
        "plan {plan} divides each text over ranks (cp), so the model cannot continue evaluate.prompts during training. "
        "Use a plan without cp, or remove the key and use paceline generate after training.",
    )


# every check, in the order in which reasons are given
CHECKS = (*_checks, *split_rules.CHECKS)
