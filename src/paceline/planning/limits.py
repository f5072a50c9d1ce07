"""Limits of plans: rules that need only numbers and names to refuse a plan.

The check before the start applies these rules to a model of which only shapes are known. The split at run time applies
them to the traced model. Each rule returns a problem with values that would work, or None if the plan passes. The
problem names only one part of the plan, such as `tp=3`; `PlanProblem.about` inserts the whole plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from typing import TYPE_CHECKING

from paceline.errors import PlanProblem
from paceline.partition import contiguous, starts
from paceline.planning.plan import DEGREES, V_SCHEDULES, stages_per_rank
from paceline.planning.sync_info import sync_info
from paceline.text import closest, nearest
from paceline.units import count

if TYPE_CHECKING:
    from paceline.planning.plan import Plan


def no_attention(cp: int) -> PlanProblem:
    """Return the problem of context parallelism with a model that has no attention."""
    return PlanProblem(
        "plan.no_attention",
        "plan {plan} divides the tokens of a sequence, but the model has no attention over tokens. Use cp=1.",
        plan=f"cp={cp}",
    )


def no_blocks_to_recompute(remat: str) -> PlanProblem:
    """Return the problem of activation recomputation with a model that has no repeated blocks."""
    return PlanProblem(
        "plan.no_blocks_to_recompute",
        "plan {plan} recomputes blocks instead of keeping their activations, but the model has no repeated blocks. "
        "Use remat=none.",
        plan=f"remat={remat}",
    )


def no_blocks_to_offload() -> PlanProblem:
    """Return the problem of offloaded activations with a model that has no repeated blocks."""
    return PlanProblem(
        "plan.no_blocks_to_offload",
        "plan {plan} keeps the activations of blocks in host memory, but the model has no repeated blocks. Use "
        "offload_activations=off.",
        plan="offload_activations=on",
    )


def other_world(plan: Plan, world: int) -> PlanProblem | None:
    """Check that a plan has as many ranks as were started."""
    if plan.ranks == world:
        return None
    others = plan.ranks // plan.dp
    return PlanProblem(
        "plan.other_number_of_ranks",
        "plan {plan} needs {need}, but {started} were started: {works}.",
        plan=plan,
        need=f"{count(plan.ranks, 'rank')}{multiplied(plan)}",
        ranks=plan.ranks,
        started=world,
        works=f"dp={world // others} here" if world % others == 0 else f"degrees that multiply to {world}",
    )


def undivided_heads(
    heads: Mapping[str, Sequence[int]], tp: int, shared: Mapping[str, Sequence[int]] | None = None
) -> PlanProblem | None:
    """Check that attention heads can be divided over `tp` ranks.

    Args:
        heads: numbers of heads in the model, for each kind of head, such as `attention heads`.
        shared: numbers of key-value heads, for each kind; several ranks may share such a head.
    """
    keys = shared or {}
    wrong = [f"{what} ({_numbers(found)})" for what, found in heads.items() if any(n % tp for n in found)]
    wrong += [f"{what} ({_numbers(found)})" for what, found in keys.items() if not shares_heads(found, tp)]
    if not wrong:
        return None
    divisors = _common_divisors([n for found in heads.values() for n in found])
    choices = [n for n in divisors if all(shares_heads(found, n) for found in keys.values())]
    return PlanProblem(
        "plan.heads_not_divisible",
        "plan {plan} divides the model's {what} by {tp}, which leaves a remainder: {works}.",
        plan=f"tp={tp}",
        tp=tp,
        heads=sorted({n for found in (*heads.values(), *keys.values()) for n in found}),
        choices=choices,
        what=" and ".join(wrong),
        works=_one_of("tp", choices),
    )


def shares_heads(heads: Sequence[int], tp: int) -> bool:
    """True if each rank has whole key-value heads, or several ranks share one."""
    return all(n % tp == 0 or tp % n == 0 for n in heads)


def undivided_experts(experts: Sequence[int], ep: int, where: str = "") -> PlanProblem | None:
    """Check that mixtures of experts can be divided over `ep` ranks.

    Args:
        experts: distinct numbers of experts in the mixtures.
        where: name of the mixture, for the error text.
    """
    if not experts:
        return PlanProblem(
            "plan.no_experts",
            "plan {plan} divides experts, but the model has no mixture of experts in one tensor. Use ep=1 "
            "(fsdp={ep} shards any model).",
            plan=f"ep={ep}",
            ep=ep,
        )
    if not any(n % ep for n in experts):
        return None
    choices = _common_divisors(experts)
    return PlanProblem(
        "plan.experts_not_divisible",
        "plan {plan} divides {what} over {ep} ranks: {works}.",
        plan=f"ep={ep}",
        ep=ep,
        experts=sorted(set(experts)),
        choices=choices,
        what=f"{_numbers(experts)} experts" + (f" ({where})" if where else ""),
        works=_one_of("ep", choices),
    )


def undivided_tokens(tokens: int, key: str, degree: int, others: int = 1) -> PlanProblem | None:
    """Check that `degree` ranks along an axis can divide sequences of `tokens` tokens evenly.

    Args:
        key: `cp`, or `tp` for sequence parallelism.
        others: number of ranks along another axis that also divides the tokens.
    """
    parts = degree * others
    if tokens % parts == 0:
        return None
    choices = [n for n in range(1, tokens + 1) if tokens % (n * others) == 0]
    # with causal attention, cp ranks have equal work only if each holds two equal parts
    step = 2 * parts if key == "cp" else parts
    lengths = [n for n in (tokens // step * step, -(-tokens // step) * step) if n]
    return PlanProblem(
        "plan.tokens_not_divisible",
        "plan {plan} divides sequences of {tokens:,} tokens among {parts} ranks: {works}, or sequences of "
        "{fitting} tokens in the job's data.",
        plan=f"{key}={degree}",
        key=key,
        degree=degree,
        tokens=tokens,
        parts=parts,
        choices=choices,
        lengths=lengths,
        works=_one_of(key, choices) if choices else "cp=1" if key == "cp" else "sequence=off",
        fitting=" or ".join(f"{n:,}" for n in lengths),
    )


def wrong_cuts(plan: Plan, modules: Sequence[str], blocks: Sequence[str]) -> PlanProblem | None:
    """Check that a plan's cuts name the first modules of all stages but the first.

    Args:
        modules: names of all modules in the model.
        blocks: names of the repeated blocks in the model.
    """
    cuts, stages = plan.cut.split(","), plan.stages
    unknown = [name for name in cuts if name not in modules]
    twice = [name for name in dict.fromkeys(cuts) if cuts.count(name) > 1]
    even = even_cuts(blocks, stages)
    wrong = [f'there is no module "{name}" in the model. {nearest(name, modules)}' for name in unknown]
    wrong += [f"a stage begins at {name} once only." for name in twice]
    if len(cuts) != stages - 1:
        proposal = f" cut={','.join(even)}" if even else f" name {stages - 1}"
        made = f"{stages} stages (schedule={plan.schedule})" if stages > plan.pp else f"{stages} stages"
        wrong.append(f"{made} have {count(stages - 1, 'cut')} between them, and there are {len(cuts)}:{proposal}.")
    if not wrong:
        return None
    return PlanProblem(
        "plan.wrong_cuts",
        "plan {plan} cuts at {cuts}: {reasons}",
        plan=plan,
        cuts=cuts,
        unknown=unknown,
        meant=[meant for name in unknown if (meant := closest(name, modules))],
        twice=twice,
        stages=stages,
        even=even,
        reasons=" ".join(wrong),
    )


def even_cuts(blocks: Sequence[str], stages: int) -> list[str]:
    """Return the first block of every stage but the first, for stages of equal size.

    The result is empty if there are fewer blocks than stages.
    """
    return [blocks[start] for start in starts(contiguous([1] * len(blocks), stages))] if len(blocks) >= stages else []


def too_many_stages(plan: Plan, places: int, have: str, *, or_cuts: bool = False) -> PlanProblem | None:
    """Check that a model has enough parts for the stages of a pipeline.

    Args:
        places: largest number of stages into which the model can be cut.
        have: text that states the limit, such as `the model has 4 repeated blocks`.
        or_cuts: True if a cut by module names might create enough stages.
    """
    if places >= plan.stages:
        return None
    most, virtual = places // plan.stages_per_rank, places // plan.pp
    works = [f"pp is at most {most}" if most > 1 else "pp=1"]
    works = ["schedule=1f1b", *works] if virtual >= 1 else works
    works = [f"virtual is at most {virtual}", *works] if plan.schedule == "interleaved" and virtual >= 2 else works
    return PlanProblem(
        "plan.too_many_stages",
        "plan {plan} makes {stages} stages, but {have}. These would work: {works}.",
        plan=plan,
        stages=plan.stages,
        places=places,
        have=have,
        choices=works,
        works=", ".join([*works, "or cut names the modules where stages begin"] if or_cuts else works),
    )


def microbatches_fit(schedule: str, pp: int, microbatches: int) -> bool:
    """True if a schedule can run this number of microbatches on `pp` pipeline ranks.

    The rules are those of the schedule classes in `torch.distributed.pipelining`.
    """
    if schedule == "1f1b":
        return microbatches >= pp
    # in rounds of equal size, with at least one microbatch of each rank
    if schedule == "interleaved":
        return microbatches >= pp and microbatches % (microbatches // pp) == 0
    if schedule == "dualpipe":
        return microbatches >= pp * stages_per_rank(schedule)
    return True


def unfit_microbatches(schedule: str, pp: int, microbatches: int) -> PlanProblem | None:
    """Check that a schedule can run a number of microbatches."""
    if microbatches_fit(schedule, pp, microbatches):
        return None
    fitting = [n for n in range(1, 2 * microbatches + pp) if microbatches_fit(schedule, pp, n)]
    nearby = sorted(sorted(fitting, key=lambda n: (abs(n - microbatches), n))[:2])
    rules = {"1f1b": "at least one for each", "dualpipe": "at least two for each"}
    return PlanProblem(
        "plan.microbatches_do_not_fit",
        "plan {plan} has {has} for {pp} pipeline ranks, but {schedule} needs {rule}: {works}.",
        plan=f"pp={pp} microbatches={microbatches} schedule={schedule}",
        pp=pp,
        microbatches=microbatches,
        schedule=schedule,
        choices=nearby,
        has=count(microbatches, "microbatch", "microbatches"),
        rule=rules.get(schedule, f"equal rounds of {pp} or a few more"),
        works=_one_of("microbatches", nearby),
    )


def fitting_microbatches(shares: Sequence[int], wanted: int) -> int:
    """Return the largest number of microbatches, at most `wanted`, that divides every share.

    A share is the number of samples of a data-parallel rank in a step.
    """
    return next(m for m in range(wanted, 0, -1) if not any(n % m for n in shares))


def sharded_twice(weight: str, schedule: str) -> PlanProblem:
    """Return the problem of a weight that two stages share and FSDP2 would shard twice.

    The two stages are on the same rank, and FSDP2 shards each stage separately.
    """
    return PlanProblem(
        "plan.sharded_twice",
        "plan {plan} would shard {weight} twice, because two stages on one rank share this weight: {works}, or fsdp=1.",
        plan=f"schedule={schedule}",
        weight=weight,
        works="schedule=1f1b, gpipe or interleaved" if schedule in V_SCHEDULES else "schedule=1f1b or gpipe",
    )


def no_float8_layers() -> PlanProblem:
    """Return the problem of `precision=fp8` with a model that has no layer for float8."""
    return PlanProblem(
        "plan.no_float8_layers",
        "plan {plan} multiplies in float8, but the model has no trained linear layer, other than its output layer, "
        "whose sizes are multiples of 16. Use precision=bf16.",
        plan="precision=fp8",
    )


def scales_of_shards(tp: int) -> PlanProblem:
    """Return the problem of `precision=fp8` with tensor parallelism.

    The scale of a matrix would depend on the rank's shard, and thus the numbers on the plan.
    """
    return PlanProblem(
        "plan.float8_with_tp",
        "plan {plan} divides matrices, but each float8 matrix has one scale, which its shards would not share. Use "
        "precision=bf16, or fsdp instead of tp.",
        plan=f"precision=fp8 tp={tp}",
    )


def no_graphs(where: str) -> PlanProblem:
    """Return the problem of `compile=reduce-overhead` on devices that cannot replay CUDA graphs."""
    return PlanProblem(
        "plan.no_graphs",
        "plan {plan} replays graphs of kernels, but {where} has no GPU that supports this. Use compile=on.",
        plan="compile=reduce-overhead",
        where=where,
    )


def whole_batch_in_parts(loss: str, microbatches: int) -> PlanProblem:
    """Return the problem of microbatches with a loss that compares all samples of a batch."""
    return PlanProblem(
        "plan.whole_batch_in_parts",
        "plan {plan} computes a share in {microbatches} parts, but {loss} compares all samples of a batch with "
        "each other. Use microbatches=1.",
        plan=f"microbatches={microbatches}",
        microbatches=microbatches,
        loss=loss,
    )


def no_balance(plan: Plan, kind: str) -> PlanProblem | None:
    """Check that each replica's share of the batch can follow its measured speed.

    Args:
        kind: kind of the job's partition.
    """
    if plan.dp == 1:
        return PlanProblem(
            "plan.balance_needs_replicas",
            "plan {plan} moves samples from slow replicas to fast ones, but there is only one replica. Use dp=2 or "
            "more, or balance=auto.",
            plan=plan,
        )
    if plan.pp > 1:
        return PlanProblem(
            "plan.balance_of_pipelines",
            "plan {plan} cannot move samples between pipelines, because their microbatches must have equal sizes. "
            "Use balance=auto.",
            plan=plan,
        )
    if sync_info(plan.sync).local_steps:
        return PlanProblem(
            "plan.balance_of_local_steps",
            "plan {plan} cannot move samples between replicas that take separate steps (sync={sync}). Use "
            "balance=auto.",
            plan=plan,
            sync=plan.sync,
        )
    if kind == "hierarchical":
        return PlanProblem(
            "plan.balance_of_host_parts",
            "plan {plan} cannot move samples between hosts that read their own part (partition: hierarchical). Use "
            "balance=auto.",
            plan=plan,
        )
    return None


def no_automatic_balance(plan: Plan, kind: str, weighted: bool) -> str | None:
    """Return the reason why `balance=auto` does not change the replicas' shares, or None.

    The reason is a text without a subject, such as "keeps to the weights of the job's partition".

    Args:
        kind: kind of the job's partition.
        weighted: True if the job's partition has weights.
    """
    if weighted:
        return "uses the weights of the job's partition, unless balance=on."
    if plan.compile != "off":
        return f"keeps shares that compile={plan.compile} has compiled code for, unless balance=on."
    found = no_balance(plan, kind)
    return found.predicate if found else None


def degrees(plan: Plan) -> str:
    """Return the degrees of a plan as a product, such as `dp=2 · tp=3`."""
    return " · ".join(f"{key}={getattr(plan, key)}" for key in DEGREES if getattr(plan, key) > 1) or "dp=1"


def multiplied(plan: Plan) -> str:
    """Return the degrees of a plan in parentheses, after a space.

    The result is "" if at most one degree is above 1.
    """
    return f" ({degrees(plan)})" if " · " in degrees(plan) else ""


def _one_of(key: str, values: Sequence[int]) -> str:
    return f"{key}={values[0]}" if len(values) == 1 else f"{key} is one of {_numbers(values)}"


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(map(str, values[:8])) + (", …" if len(values) > 8 else "")


def _common_divisors(numbers: Sequence[int]) -> list[int]:
    common = gcd(*numbers)
    return [n for n in range(1, common + 1) if common % n == 0]
