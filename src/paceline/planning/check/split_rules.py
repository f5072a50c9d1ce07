"""Checks of plans that divide the model."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from paceline.errors import PacelineError, PlanProblem
from paceline.job.loss import build_metrics
from paceline.planning.check.plan_context import Check, PlanContext, memory_shortage, registering
from paceline.planning.limits import (
    no_attention,
    no_blocks_to_offload,
    no_blocks_to_recompute,
    sharded_twice,
    too_many_stages,
    undivided_experts,
    undivided_heads,
    undivided_tokens,
    unfit_microbatches,
    wrong_cuts,
)
from paceline.planning.model.model_info import undivided_attention
from paceline.planning.plan import DEGREES, MEANT_FOR, V_SCHEDULES, Plan
from paceline.planning.sync_info import SyncSpec
from paceline.units import count

# built-in metrics that need all predictions at once
_GATHER = ("auc", "r2")
# keys that affect whether the state fits the memory
MEMORY = ("zero", "offload", *DEGREES)
# in the order in which reasons are given
CHECKS: list[Check] = []
_check = registering(CHECKS)


def _without_its_degree(key: str, degree: str) -> None:
    """Refuse a key that has no effect because its degree is 1."""

    @_check(key, degree)
    def _(context: PlanContext) -> PlanProblem | None:
        value = getattr(context.plan, key)
        if value == getattr(Plan, key) or getattr(context.plan, degree) > 1:
            return None
        return PlanProblem(
            "plan.key_without_its_degree",
            "plan {plan} has {key}={value}, which has an effect only with {degree}, but {degree} is 1. Use "
            "{degree}=2, or leave out {key}.",
            key=key,
            value="on" if value is True else value,
            degree=degree,
        )


for _key, _degree in MEANT_FOR.items():
    _without_its_degree(_key, _degree)


@_check("virtual", "schedule")
def _virtual_without_interleaving(context: PlanContext) -> PlanProblem | None:
    plan = context.plan
    if plan.virtual == 2 or plan.schedule == "interleaved":
        return None
    return PlanProblem(
        "plan.virtual_without_interleaving",
        "plan {plan} sets virtual={virtual}, the number of stages per rank with schedule=interleaved, but the "
        "schedule is {schedule}. Use schedule=interleaved, or leave out virtual.",
        virtual=plan.virtual,
        schedule=plan.schedule,
    )


@_check("microbatches", "schedule", "pp")
def _schedule_and_microbatches(context: PlanContext) -> PlanProblem | None:
    plan = context.plan
    return unfit_microbatches(plan.schedule, plan.pp, plan.microbatches) if plan.pp > 1 else None


@_check("pp", "schedule", "virtual")
def _too_few_blocks(context: PlanContext) -> PlanProblem | None:
    plan = context.plan
    if plan.pp == 1 or plan.cut:
        return None
    blocks = len(context.model_info.blocks)
    pieces = blocks or sum(len(shape.sizes) > 1 for shape in context.model_info.parameters)
    have = count(blocks, "repeated block") if blocks else count(pieces, "weight matrix", "weight matrices")
    return too_many_stages(plan, pieces, f"the model has {have}", or_cuts=True)


@_check("cut", "pp", "schedule", "virtual")
def _wrong_cuts(context: PlanContext) -> PlanProblem | None:
    plan = context.plan
    if plan.pp == 1 or not plan.cut:
        return None
    return wrong_cuts(plan, context.model_info.modules, context.model_info.blocks)


@_check("tp")
def _heads_do_not_divide(context: PlanContext) -> PlanProblem | None:
    """Refuse a `tp` that does not divide the attention heads.

    Ranks can share a key-value head only if each rank can use a part of its projection, which depends on the model's
    code. A vocabulary that cannot be divided is not refused, because a replicated vocabulary works, only more slowly.
    """
    if context.plan.tp == 1:
        return None
    heads = {"attention heads": context.model_info.heads}
    keys = {"heads of keys and values": context.model_info.key_value_heads}
    reason = undivided_heads(heads, context.plan.tp, keys)
    if reason is None and any(n % context.plan.tp for n in context.model_info.key_value_heads):
        # the trace reports unreadable samples
        with suppress(PacelineError):
            reason = undivided_attention(context.job, context.plan.tp)
    return reason


@_check("ep")
def _experts_do_not_divide(context: PlanContext) -> PlanProblem | None:
    ep = context.plan.ep
    return undivided_experts(context.model_info.experts, ep) if ep > 1 else None


@_check("cp")
def _tokens_do_not_divide(context: PlanContext) -> PlanProblem | None:
    plan = context.plan
    if plan.cp == 1:
        return None
    if not context.model_info.heads and not context.model_info.vocabulary:
        return no_attention(plan.cp)
    # other models have all tokens on every rank
    tokens = context.tokens if context.divides_sequences else None
    return undivided_tokens(tokens, "cp", plan.cp) if tokens else None


@_check("sequence", "tp", "cp")
def _no_sequence_to_divide(context: PlanContext) -> PlanProblem | None:
    """Refuse sequence parallelism that cannot divide each `cp` rank's tokens among the `tp` ranks."""
    plan = context.plan
    if not plan.sequence or plan.tp == 1:
        return None
    if not context.model_info.heads or not context.model_info.blocks:
        return PlanProblem(
            "plan.no_sequence_to_divide",
            "plan {plan} uses sequence parallelism, but the model has no blocks with attention over "
            "tokens. Use sequence=off.",
        )
    return undivided_tokens(context.tokens, "tp", plan.tp, plan.cp) if context.tokens else None


@_check("pp", "cp")
def _loss_over_stages(context: PlanContext) -> PlanProblem | None:
    plan = context.plan
    divided = [key for key in ("pp", "cp") if getattr(plan, key) > 1]
    if not divided or not context.job.loss.is_over_whole_batch:
        return None
    return PlanProblem(
        "plan.whole_batch_loss_over_stages",
        "plan {plan} never has all outputs of a batch on one rank ({divided}), but the {loss} loss compares all "
        "samples of a batch with each other: {works}.",
        divided=divided,
        loss=context.job.loss.name.rpartition(":")[2],
        works=" ".join(f"{key}=1" for key in divided),
    )


@_check(*DEGREES)
def _updates_of_whole_parameters(context: PlanContext) -> PlanProblem | None:
    """Refuse to shard parameters that the optimizer needs as a whole for an update."""
    plan, optimizer = context.plan, context.job.optimizer
    if plan.ranks == 1 or optimizer.steps_on_parts or (not context.divides and ":" not in optimizer.name):
        return None
    scope = optimizer.scope
    if scope == "random":
        return PlanProblem(
            "plan.random_updates",
            "plan {plan} has {has}, but {optimizer} draws random numbers, which differ between ranks. Use dp=1.",
            has=count(plan.ranks, "rank"),
            optimizer=optimizer.name,
        )
    keys = {"element": (), "parameter": ("fsdp", "tp", "ep"), "model": ("fsdp", "tp", "ep", "pp")}[scope]
    divided = [key for key in keys if getattr(plan, key) > 1]
    if not divided:
        return None
    whole = {
        "parameter": "each parameter from values of the whole parameter",
        "model": "all parameters from values that they share",
    }
    return PlanProblem(
        "plan.updates_of_whole_parameters",
        "plan {plan} divides the model ({divided}), but {optimizer} updates {whole}. Use {choices}, or {works}.",
        divided=divided,
        optimizer=optimizer.name,
        whole=whole[scope],
        choices=["muon", "lamb", "adamw", "sgd"],
        works=" ".join(f"{key}=1" for key in divided),
    )


@_check("sync")
def _matrices_on_servers(context: PlanContext) -> PlanProblem | None:
    """Refuse Muon on parameter servers, each of which holds only rows of a matrix."""
    if context.job.optimizer.name != "muon" or SyncSpec.parse(context.plan.sync).servers is None:
        return None
    return PlanProblem(
        "plan.matrices_on_servers",
        "plan {plan} updates rows of the parameters on parameter servers, but muon needs whole matrices. Use "
        "sync=allreduce, or the optimizer adamw.",
    )


@_check("cp")
def _loss_over_whole_sequences(context: PlanContext) -> PlanProblem | None:
    if context.plan.cp == 1 or not context.job.loss.is_over_whole_sequences:
        return None
    return PlanProblem(
        "plan.loss_over_whole_sequences",
        "plan {plan} divides each sample's tokens, but the loss {loss} needs whole sequences. Use cp=1.",
        loss=context.job.loss.name,
    )


@_check("cp")
def _metrics_of_whole_samples(context: PlanContext) -> PlanProblem | None:
    """Refuse context parallelism with a metric that needs whole samples on one rank."""
    specs = context.job.metrics
    # built-in metrics that are sums over tokens need not be built
    if context.plan.cp == 1 or not any(":" in spec.name or spec.name in _GATHER for spec in specs):
        return None
    built = build_metrics(specs, context.job.loss.build())
    whole = [m.name for m in built if getattr(m, "gathers", False) or getattr(m, "keeps_state", False)]
    if not whole:
        return None
    return PlanProblem(
        "plan.metric_of_whole_samples",
        "plan {plan} divides each sample's tokens over {cp} ranks, but the metric {metric} needs whole samples. "
        "Use cp=1, or a metric that is a ratio of two sums.",
        cp=context.plan.cp,
        metric=whole[0],
    )


@_check("memory_format", *DEGREES[1:])
def _format_of_divided_images(context: PlanContext) -> PlanProblem | None:
    if context.plan.memory_format != "channels_last" or not context.divides:
        return None
    return PlanProblem(
        "plan.channels_last_of_divided_models",
        "plan {plan} divides the model, and the parts of a model need the ordinary memory layout. Use "
        "memory_format=contiguous.",
    )


@_check("compile", *DEGREES[1:])
def _graphs_of_divided_models(context: PlanContext) -> PlanProblem | None:
    if context.plan.compile != "reduce-overhead" or not context.divides or not context.cluster.has_accelerators:
        return None
    return PlanProblem(
        "plan.graphs_of_divided_models",
        "plan {plan} replays graphs of kernels, but such graphs cannot contain the communication inside a divided "
        "model. Use compile=on.",
    )


@_check("remat", "pp")
def _nothing_to_compute_again(context: PlanContext) -> PlanProblem | None:
    plan = context.plan
    if plan.remat == "none" or plan.pp > 1 or context.model_info.blocks:
        return None
    return no_blocks_to_recompute(plan.remat)


@_check("offload_activations", "pp")
def _nothing_to_offload(context: PlanContext) -> PlanProblem | None:
    plan = context.plan
    if not plan.offload_activations or plan.pp > 1 or context.model_info.blocks:
        return None
    return no_blocks_to_offload()


@_check("offload_activations", "remat", "compile")
def _offload_of_unsaved_tensors(context: PlanContext) -> PlanProblem | None:
    """Refuse to offload activations that autograd does not save one by one."""
    plan = context.plan
    key = "remat" if plan.remat == "selective" else "compile" if plan.compile != "off" else ""
    if not plan.offload_activations or not key:
        return None
    return PlanProblem(
        "plan.offload_of_unsaved_tensors",
        "plan {plan} offloads the tensors that autograd saves, but with {key}={value} others decide what is kept. Use "
        "{works}, or offload_activations=off.",
        key=key,
        value=getattr(plan, key),
        works="remat=block" if key == "remat" else "compile=off",
    )


@_check("compile", "schedule", "pp")
def _compiled_v_schedule(context: PlanContext) -> PlanProblem | None:
    plan = context.plan
    if plan.pp == 1 or plan.schedule not in V_SCHEDULES or plan.compile == "off":
        return None
    return PlanProblem(
        "plan.compiled_v_schedule",
        "plan {plan} computes gradients of inputs and of weights separately ({schedule}), which PyTorch cannot do "
        "with compiled stages. Use compile=off, or schedule=interleaved.",
        schedule=plan.schedule,
    )


@_check("schedule", "fsdp", "pp")
def _shards_of_a_tied_weight(context: PlanContext) -> PlanProblem | None:
    """Refuse tied weights that FSDP2 would shard twice.

    A V schedule places the first and the last stage on the same rank.
    """
    plan = context.plan
    if plan.schedule not in V_SCHEDULES or plan.pp == 1 or plan.fsdp == 1 or not context.model_info.tied:
        return None
    return sharded_twice(" = ".join(context.model_info.tied[0][:2]), plan.schedule)


@_check(*MEMORY)
def _state_beyond_memory(context: PlanContext) -> PlanProblem | None:
    if not (context.divides or context.weighed) or (shortage := memory_shortage(context)) is None:
        return None
    return PlanProblem(
        "plan.state_beyond_memory",
        "plan {plan} keeps parameters, gradients and optimizer state of {shortage}: {works}.",
        shortage=shortage,
        works=_enough_fsdp(context),
    )


def _enough_fsdp(context: PlanContext) -> str:
    """Describe an fsdp degree with which the state fits, or what else would help."""
    plan = context.plan
    others = plan.ranks // plan.fsdp
    most = (context.world or context.devices) // others
    for zero in dict.fromkeys((plan.zero, 3)):
        for fsdp in (plan.fsdp * 2**n for n in range(max(1, most // plan.fsdp).bit_length())):
            bigger = replace(plan, fsdp=fsdp, zero=zero)
            if fsdp > 1 and memory_shortage(replace(context, plan=bigger)) is None:
                return f"fsdp={fsdp}" + (f" zero={zero}" if zero != plan.zero else "") + " is enough"
    return f"more memory, or a smaller model (this one has {context.model_info.numel:,} parameters)"
