"""Expert parallelism: experts are divided over ranks, and tokens are sent to their experts.

Ranks read different samples. One all-to-all sends the tokens to the ranks of their experts, and a second all-to-all
returns the results. A small all-to-all first exchanges the token counts, so tokens are neither padded nor dropped. The
method is that of GShard (Lepikhin et al., 2020, arXiv:2006.16668).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function

from paceline.comm import Group
from paceline.errors import PlanError, PlanProblem
from paceline.job.batch import Batch
from paceline.job.experts import by_expert, combined, without_values
from paceline.planning.limits import undivided_experts
from paceline.planning.model.forward_pass import mixtures
from paceline.planning.model.record import Call, record_graph
from paceline.planning.plan import Plan
from paceline.split.layout import Parts, shard_parameter


@dataclass(frozen=True)
class ExpertReport:
    """Result of `divide_experts`.

    Attributes:
        experts: total number of experts in each mixture, by the name of the module with the experts.
        own: half-open interval of the experts of this rank in each mixture.
        parameters: names of the divided parameters.
        notes: notes for the user about this model with expert parallelism.
    """

    experts: dict[str, int]
    own: dict[str, tuple[int, int]]
    parameters: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        """The report as lines of text."""
        if not self.experts:
            return []
        numbers = sorted({f"{stop - start} of {self.experts[name]}" for name, (start, stop) in self.own.items()})
        return [f"ep: {' and '.join(numbers)} experts a rank in {len(self.experts)} mixtures", *self.notes]


def divide_experts(model: nn.Module, parts: Parts, ep: Group) -> ExpertReport:
    """Divide the experts of every mixture over the ranks, and route tokens to all experts.

    The experts of a mixture are a module with the attribute `num_experts`. In its parameters, dim 0 is the index of the
    expert, and at least one parameter has three dimensions. The call `experts(hidden (tokens, h), top_k_index (tokens,
    k), top_k_weights (tokens, k)) -> (tokens, h)` returns the weighted sum of the outputs of each token's experts. The
    zoo's `moe` has this form, and so do Mixtral, Qwen2-MoE, OLMoE, DeepSeek-V3, gpt-oss and other models of
    transformers. The module computes this rank's experts with the implementation that its configuration selects.

    Ranks along ep read different samples. All ranks must run the same number of forward and backward passes in the same
    order. A rank without samples runs these passes with an empty batch, or with a loss of weight 0. The gradients of
    experts are complete after the backward pass. All other gradients are marked as partial sums over ep.

    A load-balancing loss that the model itself computes (`output_router_logits` in transformers) covers the tokens of
    one rank and one forward pass, so its gradient depends on the plan. The load-balancing loss of the zoo's `moe` does
    not depend on the plan.

    Args:
        model: a model on any device including meta.
        parts: the rank's part of each parameter, which the function updates.
        ep: the ranks that divide the experts. With a single rank, the model does not change.

    Raises:
        PlanError: the experts cannot be divided, for a reason that `undivided` returns.
    """
    if ep.size == 1:
        return ExpertReport({}, {}, ())
    if reason := undivided(model, ep.size):
        raise PlanError.of_problems([reason])
    experts, own, divided = {}, {}, []
    for name, module in mixtures(model):
        total = module.num_experts
        each = total // ep.size
        experts[name], own[name] = total, (ep.rank * each, (ep.rank + 1) * each)
        for key in list(dict(module.named_parameters(recurse=False))):
            part = parts[f"{name}.{key}" if name else key]
            shard_parameter(module, key, part, axis="ep", dim=0, index=ep.rank, of=ep.size)
            divided.append(part.name)
        module.num_experts = each
        # a partial function, because a pipeline stage must see the arguments to bind them to a copy of the module
        module.__dict__["forward"] = partial(_dispatched, module.forward, inspect.signature(module.forward), total, ep)
    for part_name, part in parts.items():
        if part_name not in divided:
            part.summed.add("ep")
    own_balance = getattr(getattr(model, "config", None), "output_router_logits", False)
    return ExpertReport(experts, own, tuple(divided), (_OWN_BALANCE,) if own_balance else ())


def refuse_other_readers(model: nn.Module, plan: Plan, example: Batch, call: Call) -> None:
    """Raise an error if a model reads parameters of experts elsewhere.

    An example is a penalty on all weights.

    A model that cannot be traced is accepted.

    Raises:
        PlanError: the model reads a parameter of an expert outside of the experts; the message names the parameter.
    """
    try:
        graph = record_graph(model, example, call)
    except Exception:  # noqa: BLE001 - whatever the model's code raises on tensors without data
        return
    experts = tuple(name for name, _ in mixtures(model))
    for value in graph.values:
        path = value.name.rpartition(".")[0]
        if value.kind != "parameter" or path not in experts:
            continue
        for reader in (graph.nodes[number].path for number, _ in value.uses):
            if not f"{reader}.".startswith(f"{path}."):
                raise PlanError(
                    "plan.expert_read_outside",
                    "plan {plan}: {reader} reads {name}, a parameter of experts, outside of {path}. At that point, a "
                    "rank has only its own experts, so the result would be wrong. Use dp={ranks} or fsdp={ranks} "
                    "zero=2, or remove this read from the model's forward pass. For an L2 penalty, set the "
                    "optimizer's weight_decay instead.",
                    plan=plan,
                    reader=reader or "the model",
                    name=value.name,
                    path=path,
                    ranks=plan.ranks,
                )


def undivided(model: nn.Module, ep_size: int) -> PlanProblem | None:
    """Return why a model's experts cannot be divided over `ep_size` ranks, with a remedy."""
    found = {name: module.num_experts for name, module in mixtures(model)}
    where = next((name for name, number in found.items() if number % ep_size), "")
    reason = undivided_experts(tuple(dict.fromkeys(found.values())), ep_size, where)
    named = [module for name, module in model.named_modules() if "expert" in name.rpartition(".")[2].lower()]
    apart = sorted({type(module).__name__ for module in named if any(True for _ in module.parameters())})
    if reason is None or found or not apart:
        return reason
    return PlanProblem(
        "plan.experts_in_modules",
        "plan {plan} cannot divide the experts of {modules}: experts can be divided only if one tensor holds the "
        "parameters of all experts, and if they are called with tokens, expert indices and weights, as in "
        "transformers' Mixtral. Use ep=1 (fsdp={ep} shards any model).",
        plan=f"ep={ep_size}",
        modules=apart,
        ep=ep_size,
    )


_OWN_BALANCE = (
    "ep: the model adds a loss for the balance of its experts over one rank's tokens, so its gradient depends on the "
    "plan; output_router_logits: false leaves it out"
)


# not compiled, because the token counts are known only after routing
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _dispatched(
    forward: Any, signature: inspect.Signature, experts: int, ep: Group, *args: Any, **kwargs: Any
) -> Tensor:
    """Compute the output of all experts.

    Each rank runs its own experts on the tokens of all ranks.
    """
    hidden, top_k_index, top_k_weights = signature.bind(*args, **kwargs).args
    if without_values(hidden):
        raise RuntimeError("which tokens go to which experts depends on their values, and these tensors have none")
    order, counts = by_expert(top_k_index, experts)
    of_experts = counts.view(ep.size, experts // ep.size)
    # number of tokens that this rank receives, shape (rank, own expert)
    from_ranks = torch.empty_like(of_experts)
    ep.all_to_all(from_ranks, of_experts)
    return sent_to_experts(forward, hidden, order, of_experts, from_ranks, top_k_weights, ep)


def sent_to_experts(
    forward: Any, hidden: Tensor, order: Tensor, of_experts: Tensor, from_ranks: Tensor, weights: Tensor, ep: Group
) -> Tensor:
    """Send tokens, sorted by expert, to their experts' ranks, and combine the results.

    Args:
        forward: function that computes this rank's experts.
        of_experts: number of tokens that this rank sends to each expert, shape (rank, expert of that rank).
        from_ranks: number of tokens that this rank receives for each of its experts, shape (rank, own expert).
    """
    # the only point at which the host waits for the GPU
    sends, receives = torch.stack([of_experts.sum(1), from_ranks.sum(1)]).tolist()
    order = order[: sum(sends)]
    rows = _exchanged(hidden[order // weights.shape[1]], sends, receives, ep)
    made = _own_experts(forward, rows, from_ranks, weights.dtype)
    back = _exchanged(made, receives, sends, ep)
    return combined(back, order, weights).to(hidden.dtype)


def _own_experts(forward: Any, rows: Tensor, from_ranks: Tensor, dtype: torch.dtype) -> Tensor:
    count = len(rows)
    own = torch.arange(from_ranks.shape[1], device=rows.device).repeat(from_ranks.shape[0])
    index = own.repeat_interleave(from_ranks.flatten(), output_size=count)
    if not count:
        # One row of zeros, so that the parameters and this rank's collectives take part in the backward pass. The
        # gradient is 0, as for an expert without tokens in a single process.
        rows, index = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), own[:1]
    made: Tensor = forward(rows, index.unsqueeze(1), torch.ones(len(rows), 1, dtype=dtype, device=rows.device))
    return made[:count]


def _exchanged(rows: Tensor, sends: list[int], receives: list[int], ep: Group) -> Tensor:
    """Exchange `rows` with an all-to-all; gradients travel in the opposite direction.

    This rank sends `sends[r]` rows to rank r, in rank order, and receives `receives[r]` rows from it.
    """
    exchanged: Tensor = _AllToAll.apply(rows, sends, receives, ep)
    return exchanged


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sends: list[int], receives: list[int], ep: Group) -> Tensor:
        ctx.way_back = receives, sends, ep
        received = rows.new_empty(sum(receives), *rows.shape[1:])
        ep.all_to_all(received, rows.contiguous(), receives, sends)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        sends, receives, ep = ctx.way_back
        returned = gradient.new_empty(sum(receives), *gradient.shape[1:])
        ep.all_to_all(returned, gradient.contiguous(), receives, sends)
        return returned, None, None, None
