"""Checks of a plan's splits: every reason why it cannot divide a model.

The other reasons are in `rules.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.nearest import nearest
from paceline.partition import contiguous, starts
from paceline.planner.check.plan_context import Check, PlanContext
from paceline.planner.check.state import memory_shortage
from paceline.plans.axes import DEGREES
from paceline.units import count

# optimizers whose step of an element needs no other element, so that they work on any shard
_BY_NUMBER = ("sgd", "adam", "adamw")
MEANT_FOR = {"zero": ("fsdp", 3), "offload": ("fsdp", False), "sequence": ("tp", False), "schedule": ("pp", "1f1b"), "cut": ("pp", "")}


def _without_its_degree(key: str) -> Check:
    """Check of a key that has no effect while its degree is 1. Most likely the degree was forgotten."""
    degree, default = MEANT_FOR[key]

    def reason(context: PlanContext) -> str | None:
        value = getattr(context.plan, key)
        if value == default or getattr(context.plan, degree) > 1:
            return None
        shown = "on" if value is True else value
        return f"plan {context.plan} has {key}={shown}, which is about {degree}, but {degree} is 1: {degree}=2, or leave out {key}."

    return Check(reason, (key, degree))


def _schedule_and_microbatches(context: PlanContext) -> str | None:
    plan = context.plan
    if plan.pp == 1 or microbatches_fit(plan.schedule, plan.pp, plan.microbatches):
        return None
    fitting = [n for n in range(1, 2 * plan.microbatches + plan.pp) if microbatches_fit(plan.schedule, plan.pp, n)]
    nearby = sorted(sorted(fitting, key=lambda n: (abs(n - plan.microbatches), n))[:2])
    rule = "at least one for each" if plan.schedule == "1f1b" else f"equal rounds of {plan.pp} or a few more"
    has = f"plan {plan} has {count(plan.microbatches, 'microbatch', 'microbatches')} for {plan.pp} pipeline ranks"
    return f"{has}; {plan.schedule} needs {rule}: {_one_of('microbatches', nearby)}."


def microbatches_fit(schedule: str, pp: int, microbatches: int) -> bool:
    """True if a schedule can run `microbatches` microbatches over `pp` ranks.

    These are the rules of the classes in `torch.distributed.pipelining`.
    """
    if schedule == "1f1b":
        return microbatches >= pp
    # in rounds of equal size, at least one microbatch of each rank
    if schedule == "interleaved":
        return microbatches >= pp and microbatches % (microbatches // pp) == 0
    return True


def _too_few_blocks(context: PlanContext) -> str | None:
    plan, stages = context.plan, context.stages
    if plan.pp == 1 or plan.cut:
        return None
    blocks = len(context.model_info.blocks)
    pieces = blocks or sum(len(shape.sizes) > 1 for shape in context.model_info.parameters)
    if pieces >= stages:
        return None
    have = count(blocks, "repeated block") if blocks else count(pieces, "weight matrix", "weight matrices")
    most = pieces * plan.pp // stages
    works = f"pp is at most {most}" if most > 1 else "pp=1"
    return f"plan {plan} makes {stages} stages, but the model has {have}: {works}, or cut names the modules where stages begin."


def _wrong_cuts(context: PlanContext) -> str | None:
    plan, cuts, wanted = context.plan, context.plan.cut.split(","), context.stages - 1
    if plan.pp == 1 or not plan.cut:
        return None
    known = context.model_info.modules
    wrong = [f'there is no module "{cut}" in the model. {nearest(cut, known)}' for cut in cuts if cut not in known]
    wrong += [f"a stage begins at {cut} once only." for cut in dict.fromkeys(cuts) if cuts.count(cut) > 1]
    if len(cuts) != wanted:
        proposal = f" cut={evenly}" if (evenly := _even_cuts(context)) else ""
        stages = f"{context.stages} stages (schedule={plan.schedule})" if context.stages > plan.pp else f"{plan.pp} stages"
        wrong.append(f"{stages} have {count(wanted, 'cut')} between them, and there are {len(cuts)}:{proposal or f' name {wanted}'}.")
    return f"plan {plan} cuts at {', '.join(cuts)}: {' '.join(wrong)}" if wrong else None


def _even_cuts(context: PlanContext) -> str:
    blocks, stages = context.model_info.blocks, context.stages
    return ",".join(blocks[start] for start in starts(contiguous([1] * len(blocks), stages))) if len(blocks) >= stages else ""


def _heads_do_not_divide(context: PlanContext) -> str | None:
    """Reason against a `tp` that does not divide the heads, or None.

    A vocabulary that cannot be divided stays replicated, which is slower but works: see `warnings.py`.
    """
    tp = context.plan.tp
    if tp == 1:
        return None
    numbers = {"attention heads": context.model_info.heads, "heads of keys and values": context.model_info.key_value_heads}
    wrong = [f"{what} ({_numbers(found)})" for what, found in numbers.items() if any(n % tp for n in found)]
    if not wrong:
        return None
    working = _common_divisors([n for found in numbers.values() for n in found])
    return f"plan {context.plan} divides the model's {' and '.join(wrong)} by {tp}, which leaves a remainder: {_one_of('tp', working)}."


def _experts_do_not_divide(context: PlanContext) -> str | None:
    plan = context.plan
    experts = context.model_info.experts if plan.ep > 1 else ()
    if plan.ep == 1 or (experts and not any(n % plan.ep for n in experts)):
        return None
    if not experts:
        instead = f"ep=1 (fsdp={plan.ep} shards any model)"
        return f"plan {plan} divides experts, but the model has no mixture of experts in one tensor: {instead}."
    return f"plan {plan} divides {_numbers(experts)} experts over {plan.ep} ranks: {_one_of('ep', _common_divisors(experts))}."


def _tokens_do_not_divide(context: PlanContext) -> str | None:
    plan = context.plan
    if plan.cp == 1:
        return None
    if not context.model_info.heads and not context.model_info.vocabulary:
        return f"plan {plan} divides the tokens of a sequence, but the model has no attention over tokens: cp=1."
    # other models have all tokens on every rank
    return _remainder_of_tokens(context, "cp", plan.cp) if context.model_info.takes_parts_of_sequences else None


def _no_sequence_to_divide(context: PlanContext) -> str | None:
    """Reason against sequence parallelism, or None. It divides the tokens that a rank of `cp` has once more."""
    plan = context.plan
    if not plan.sequence or plan.tp == 1:
        return None
    if not context.model_info.heads or not context.model_info.blocks:
        return f"plan {plan} divides the tokens between matrices, but the model has no blocks with attention over tokens: sequence=off."
    return _remainder_of_tokens(context, "tp", plan.tp * plan.cp)


def _remainder_of_tokens(context: PlanContext, key: str, parts: int) -> str | None:
    tokens, others = context.tokens, parts // getattr(context.plan, key)
    if tokens is None or tokens % parts == 0:
        return None
    working = [n for n in range(1, tokens + 1) if tokens % (n * others) == 0]
    alone = "cp=1" if key == "cp" else "sequence=off"
    degree = _one_of(key, working) if working else alone
    return (
        f"plan {context.plan} divides sequences of {tokens} tokens among {parts} ranks: {degree}, "
        f"or sequences of {max(1, round(tokens / parts)) * parts} tokens in the job's data."
    )


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
        f"plan {plan} divides layers ({', '.join(divided)}), and {name} scales each layer's step by the norm of the whole layer: "
        f"{', '.join(_BY_NUMBER)} work, or {' '.join(f'{key}=1' for key in divided)}."
    )


def _format_of_divided_images(context: PlanContext) -> str | None:
    if context.plan.memory_format != "channels_last" or not context.divides:
        return None
    return f"plan {context.plan} divides the model, whose parts keep the ordinary layout of memory: memory_format=contiguous."


def _graphs_of_divided_models(context: PlanContext) -> str | None:
    if context.plan.compile != "reduce-overhead" or not context.divides or context.cluster.kind == "cpu":
        return None
    return f"plan {context.plan} replays CUDA graphs, which cannot hold the communication inside a divided model: compile=on."


def _nothing_to_compute_again(context: PlanContext) -> str | None:
    plan = context.plan
    if plan.remat == "none" or plan.pp > 1 or context.model_info.blocks:
        return None
    return f"plan {plan} recomputes blocks instead of keeping their activations, but the model has no repeated blocks: remat=none."


def _compiled_zero_bubble(context: PlanContext) -> str | None:
    plan = context.plan
    if plan.pp == 1 or plan.schedule != "zero-bubble" or plan.compile == "off":
        return None
    return (
        f"plan {plan} computes gradients of inputs and of weights apart (zero-bubble), which PyTorch cannot do with compiled stages: "
        "compile=off, or schedule=interleaved."
    )


def _shards_of_a_tied_weight(context: PlanContext) -> str | None:
    """Reason against FSDP2 shards of a tied weight, or None.

    The V schedule has the first and the last stage on one rank, and FSDP2 shards each stage by itself.
    """
    plan = context.plan
    if plan.schedule != "zero-bubble" or plan.pp == 1 or plan.fsdp == 1 or not context.model_info.tied:
        return None
    tied = " and ".join(context.model_info.tied[0][:2])
    return f"plan {plan} would shard {tied} twice, which are one weight, on two stages of a rank: schedule=1f1b, or fsdp=1."


def _state_beyond_memory(context: PlanContext) -> str | None:
    if not (context.divides or context.weighed) or (shortage := memory_shortage(context)) is None:
        return None
    return f"plan {context.plan} keeps parameters, gradients and optimizer state of {shortage}: {_enough_fsdp(context)}."


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


def _one_of(key: str, values: Sequence[int]) -> str:
    return f"{key}={values[0]}" if len(values) == 1 else f"{key} is one of {_numbers(values)}"


def _numbers(values: Sequence[int]) -> str:
    """Numbers as text, of many only the first ones."""
    return ", ".join(map(str, values[:8])) + (", …" if len(values) > 8 else "")


def _common_divisors(numbers: Sequence[int]) -> list[int]:
    return [n for n in range(1, min(numbers) + 1) if not any(number % n for number in numbers)] if numbers else [1]


MEMORY = ("zero", "offload", *DEGREES)
SPLIT_CHECKS = (
    *(_without_its_degree(key) for key in MEANT_FOR),
    Check(_schedule_and_microbatches, ("microbatches", "schedule", "pp")),
    Check(_too_few_blocks, ("pp", "schedule")),
    Check(_wrong_cuts, ("cut", "pp", "schedule")),
    Check(_heads_do_not_divide, ("tp",)),
    Check(_experts_do_not_divide, ("ep",)),
    Check(_tokens_do_not_divide, ("cp",)),
    Check(_no_sequence_to_divide, ("sequence", "tp", "cp")),
    Check(_loss_over_stages, ("pp", "cp")),
    Check(_norms_of_whole_layers, ("fsdp", "tp", "ep")),
    Check(_format_of_divided_images, ("memory_format", *DEGREES[1:])),
    Check(_graphs_of_divided_models, ("compile", *DEGREES[1:])),
    Check(_nothing_to_compute_again, ("remat", "pp")),
    Check(_compiled_zero_bubble, ("compile", "schedule", "pp")),
    Check(_shards_of_a_tied_weight, ("schedule", "fsdp", "pp")),
    Check(_state_beyond_memory, MEMORY),
)
