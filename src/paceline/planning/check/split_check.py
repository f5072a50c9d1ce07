"""Checks of a plan's splits: every reason why it cannot divide a model.

The other reasons are in `rules.py`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from paceline.errors import PacelineError
from paceline.planning.axes import DEGREES
from paceline.planning.check.plan_context import Check, PlanContext
from paceline.planning.check.state import memory_shortage
from paceline.planning.choices import V_SCHEDULES
from paceline.planning.limits import (
    NO_ATTENTION,
    NO_BLOCKS_TO_RECOMPUTE,
    sharded_twice,
    too_many_stages,
    undivided_experts,
    undivided_heads,
    undivided_tokens,
    unfit_microbatches,
    wrong_cuts,
)
from paceline.planning.model.build import undivided_attention
from paceline.units import count

# optimizers whose step of an element needs no other element, so that they work on any shard
_BY_NUMBER = ("sgd", "adam", "adamw")
MEANT_FOR = {
    "zero": ("fsdp", 3),
    "offload": ("fsdp", False),
    "sequence": ("tp", False),
    "schedule": ("pp", "1f1b"),
    "cut": ("pp", ""),
}


def _without_its_degree(key: str) -> Check:
    """Check of a key that has no effect while its degree is 1. Most likely the degree was forgotten."""
    degree, default = MEANT_FOR[key]

    def reason(context: PlanContext) -> str | None:
        value = getattr(context.plan, key)
        if value == default or getattr(context.plan, degree) > 1:
            return None
        shown = "on" if value is True else value
        return (
            f"plan {context.plan} has {key}={shown}, which is about {degree}, but {degree} is 1: {degree}=2, or "
            f"leave out {key}."
        )

    return Check(reason, (key, degree))


def _virtual_without_interleaving(context: PlanContext) -> str | None:
    plan = context.plan
    if plan.virtual == 2 or plan.schedule == "interleaved":
        return None
    return (
        f"plan {plan} has virtual={plan.virtual}, the number of stages of a rank with schedule=interleaved, but the "
        f"schedule is {plan.schedule}: schedule=interleaved, or leave out virtual."
    )


def _schedule_and_microbatches(context: PlanContext) -> str | None:
    plan = context.plan
    return context.reason(unfit_microbatches(plan.schedule, plan.pp, plan.microbatches)) if plan.pp > 1 else None


def _too_few_blocks(context: PlanContext) -> str | None:
    plan = context.plan
    if plan.pp == 1 or plan.cut:
        return None
    blocks = len(context.model_info.blocks)
    pieces = blocks or sum(len(shape.sizes) > 1 for shape in context.model_info.parameters)
    have = count(blocks, "repeated block") if blocks else count(pieces, "weight matrix", "weight matrices")
    found = too_many_stages(plan, pieces, f"the model has {have}")
    return context.reason(found and f"{found}, or cut names the modules where stages begin.")


def _wrong_cuts(context: PlanContext) -> str | None:
    plan = context.plan
    if plan.pp == 1 or not plan.cut:
        return None
    return context.reason(wrong_cuts(plan, context.model_info.modules, context.model_info.blocks))


def _heads_do_not_divide(context: PlanContext) -> str | None:
    """Reason against a `tp` that does not divide the heads, or None.

    Ranks that share a head of keys and values need projections that can be used in part: the model's code tells. A
    vocabulary that cannot be divided stays replicated, which is slower but works: see `warnings.py`.
    """
    if context.plan.tp == 1:
        return None
    heads = {"attention heads": context.model_info.heads}
    keys = {"heads of keys and values": context.model_info.key_value_heads}
    reason = undivided_heads(heads, context.plan.tp, keys)
    if reason is None and any(n % context.plan.tp for n in context.model_info.key_value_heads):
        # samples that cannot be read are the trace's to report
        with suppress(PacelineError):
            reason = undivided_attention(context.job, context.plan.tp)
    return context.reason(reason)


def _experts_do_not_divide(context: PlanContext) -> str | None:
    ep = context.plan.ep
    return context.reason(undivided_experts(context.model_info.experts, ep)) if ep > 1 else None


def _tokens_do_not_divide(context: PlanContext) -> str | None:
    plan = context.plan
    if plan.cp == 1:
        return None
    if not context.model_info.heads and not context.model_info.vocabulary:
        return f"plan {plan} {NO_ATTENTION}"
    # other models have all tokens on every rank
    tokens = context.tokens if context.model_info.takes_parts_of_sequences else None
    return context.reason(undivided_tokens(tokens, "cp", plan.cp)) if tokens else None


def _no_sequence_to_divide(context: PlanContext) -> str | None:
    """Reason against sequence parallelism, or None. It divides the tokens that a rank of `cp` has once more."""
    plan = context.plan
    if not plan.sequence or plan.tp == 1:
        return None
    if not context.model_info.heads or not context.model_info.blocks:
        return (
            f"plan {plan} divides the tokens between matrices, but the model has no blocks with attention over "
            "tokens: sequence=off."
        )
    return context.reason(undivided_tokens(context.tokens, "tp", plan.tp, plan.cp)) if context.tokens else None


def _loss_over_stages(context: PlanContext) -> str | None:
    plan = context.plan
    divided = [key for key in ("pp", "cp") if getattr(plan, key) > 1]
    if not divided or not context.job.loss.is_over_whole_batch:
        return None
    ones = " ".join(f"{key}=1" for key in divided)
    return (
        f"plan {plan} never has all outputs of a batch on one rank ({', '.join(divided)}), and the "
        f"{context.job.loss.name.rpartition(':')[2]} loss compares all samples of a batch with each other: {ones}."
    )


def _norms_of_whole_layers(context: PlanContext) -> str | None:
    plan, name = context.plan, context.job.optimizer.name
    divided = [key for key in ("fsdp", "tp", "ep") if getattr(plan, key) > 1]
    if name in _BY_NUMBER or not divided:
        return None
    return (
        f"plan {plan} divides layers ({', '.join(divided)}), and {name} scales each layer's step by the norm of the "
        f"whole layer: {', '.join(_BY_NUMBER)} work, or {' '.join(f'{key}=1' for key in divided)}."
    )


def _format_of_divided_images(context: PlanContext) -> str | None:
    if context.plan.memory_format != "channels_last" or not context.divides:
        return None
    return (
        f"plan {context.plan} divides the model, whose parts keep the ordinary layout of memory: "
        "memory_format=contiguous."
    )


def _graphs_of_divided_models(context: PlanContext) -> str | None:
    if context.plan.compile != "reduce-overhead" or not context.divides or not context.cluster.has_accelerators:
        return None
    return (
        f"plan {context.plan} replays graphs of kernels, which cannot hold the communication inside a divided "
        "model: compile=on."
    )


def _nothing_to_compute_again(context: PlanContext) -> str | None:
    plan = context.plan
    if plan.remat == "none" or plan.pp > 1 or context.model_info.blocks:
        return None
    return f"plan {plan} {NO_BLOCKS_TO_RECOMPUTE}"


def _compiled_v_schedule(context: PlanContext) -> str | None:
    plan = context.plan
    if plan.pp == 1 or plan.schedule not in V_SCHEDULES or plan.compile == "off":
        return None
    return (
        f"plan {plan} computes gradients of inputs and of weights apart ({plan.schedule}), which PyTorch cannot do "
        "with compiled stages: compile=off, or schedule=interleaved."
    )


def _shards_of_a_tied_weight(context: PlanContext) -> str | None:
    """Reason against FSDP2 shards of a tied weight, or None.

    A V schedule has the first and the last stage on one rank, and FSDP2 shards each stage by itself.
    """
    plan = context.plan
    if plan.schedule not in V_SCHEDULES or plan.pp == 1 or plan.fsdp == 1 or not context.model_info.tied:
        return None
    return context.reason(sharded_twice(" = ".join(context.model_info.tied[0][:2]), plan.schedule))


def _state_beyond_memory(context: PlanContext) -> str | None:
    if not (context.divides or context.weighed) or (shortage := memory_shortage(context)) is None:
        return None
    return (
        f"plan {context.plan} keeps parameters, gradients and optimizer state of {shortage}: {_enough_fsdp(context)}."
    )


def _enough_fsdp(context: PlanContext) -> str:
    """The value that would work: more ranks to shard the state over. It is limited by devices and samples."""
    plan = context.plan
    others = plan.ranks // plan.fsdp
    most = (context.world or context.devices) // others
    for zero in dict.fromkeys((plan.zero, 3)):
        for fsdp in (plan.fsdp * 2**n for n in range(max(1, most // plan.fsdp).bit_length())):
            bigger = replace(plan, fsdp=fsdp, zero=zero)
            if fsdp > 1 and memory_shortage(replace(context, plan=bigger)) is None:
                return f"fsdp={fsdp}" + (f" zero={zero}" if zero != plan.zero else "") + " is enough"
    return f"more memory, or a smaller model (this one has {context.model_info.numel:,} parameters)"


MEMORY = ("zero", "offload", *DEGREES)
SPLIT_CHECKS = (
    *(_without_its_degree(key) for key in MEANT_FOR),
    Check(_virtual_without_interleaving, ("virtual", "schedule")),
    Check(_schedule_and_microbatches, ("microbatches", "schedule", "pp")),
    Check(_too_few_blocks, ("pp", "schedule", "virtual")),
    Check(_wrong_cuts, ("cut", "pp", "schedule", "virtual")),
    Check(_heads_do_not_divide, ("tp",)),
    Check(_experts_do_not_divide, ("ep",)),
    Check(_tokens_do_not_divide, ("cp",)),
    Check(_no_sequence_to_divide, ("sequence", "tp", "cp")),
    Check(_loss_over_stages, ("pp", "cp")),
    Check(_norms_of_whole_layers, ("fsdp", "tp", "ep")),
    Check(_format_of_divided_images, ("memory_format", *DEGREES[1:])),
    Check(_graphs_of_divided_models, ("compile", *DEGREES[1:])),
    Check(_nothing_to_compute_again, ("remat", "pp")),
    Check(_compiled_v_schedule, ("compile", "schedule", "pp")),
    Check(_shards_of_a_tied_weight, ("schedule", "fsdp", "pp")),
    Check(_state_beyond_memory, MEMORY),
)
