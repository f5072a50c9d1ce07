"""Context parallelism (`cp`): each rank computes a part of the tokens of every sequence.

Only attention combines tokens of different ranks, with ring attention.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm import Group
from paceline.errors import DataError, PlanError
from paceline.job.batch import Batch, target_of
from paceline.job.experts import routers_of
from paceline.job.loss_items import IGNORED
from paceline.planning.limits import no_attention, undivided_tokens
from paceline.planning.model.record import Call, record_graph
from paceline.planning.model.recorder import Graph
from paceline.split.context_rows import (
    AttentionCall,
    attends,
    attention_calls,
    divide_rows,
    other_meetings,
    replace_attention,
    replace_forward,
    shape_of,
)
from paceline.split.layout import Parts
from paceline.split.ring import held, join_ring, ring_attention


def divide_context(model: nn.Module, parts: Parts, cp: Group, example: Batch, call: Call) -> Context:
    """Divide the tokens of each sequence over the ranks of `cp` (at least two).

    The model is changed in place. Modules that call `F.scaled_dot_product_attention` then use ring attention; a run
    with the shapes of `example` finds these modules. Hugging Face models build no masks, and receive the positions of
    the rank's tokens as `position_ids`. The gradients of all parameters become partial sums over `cp`. If the tokens
    cannot be divided in this way, every rank keeps all tokens and computes only its own rows of the large modules
    (`divide_rows`).

    Args:
        model: any model with attention, on any device including meta.
        parts: the rank's part of each parameter; the function marks the gradients that must be summed over `cp`.
        cp: the ranks that divide each sequence.
        example: one undivided batch, real or on the meta device.
        call: function that runs the model on a batch. If it passes `labels` to the model, the model computes its own
            loss.

    Raises:
        PlanError: the model cannot be divided. The message lists every reason.
    """
    found = examine(model, cp.size, example, call)
    if found.reasons:
        return _of_rows(model, parts, cp, example, call, found.reasons)
    context = Context(cp, found.own_loss)
    attend, modules = functools.partial(_attend, join_ring(cp)), dict(model.named_modules())
    for name in dict.fromkeys(found.attention):
        context.undo.append(replace_attention(modules[name], attend))
    for module in model.modules():
        if hasattr(module, "set_attn_implementation"):
            context.undo.append(_without_masks(module, cp.size))
    context.undo.append(replace_forward(model, context.run))
    for module in model.modules():
        if hasattr(module, "pieces"):
            module.__dict__["pieces"] = cp.size
    for _, router in routers_of(model):
        router.sum_over_pieces = cp.all_reduce
    for part in parts.values():
        part.summed.add("cp")
    return context


def _of_rows(model: nn.Module, parts: Parts, cp: Group, example: Batch, call: Call, reasons: list[str]) -> Context:
    context = Context(cp, own_loss=False, whole=True)
    try:
        graph = record_graph(model, example, call)
    except Exception as error:  # any error of the user's model
        raise PlanError("plan.attention_not_divisible", "{reasons}", reasons="\n".join(reasons)) from error
    if not attends(graph):
        raise PlanError.of_problems([no_attention(cp.size)])
    try:
        context.undo, line = divide_rows(model, parts, cp, graph)
    except PlanError as error:
        raise PlanError(
            "plan.rows_not_divisible", "{reasons}\n{error}", reasons="\n".join(reasons), error=error
        ) from None
    context.lines = [line, *(f"  no ring attention: {reason}" for reason in reasons)]
    return context


class Context:
    """Division of sequences over the ranks of `cp`, from the view of one rank.

    Attributes:
        whole: True if every rank has all tokens and the same loss, and computes only its own rows of some modules.
            False if each rank has only its own tokens.
        lines: lines of text about the division, for the report.
    """

    def __init__(self, group: Group, own_loss: bool, *, whole: bool = False) -> None:
        self.group, self.own_loss, self.whole = group, own_loss, whole
        self.undo: list[Callable[[], object]] = []
        self.lines: list[str] = []

    def shard(self, batch: Batch) -> Batch:
        """Return this rank's tokens and labels of a batch of tensors (n, tokens, …).

        If the model computes its own loss, the labels are shifted here, because the label of a rank's last token may be
        on another rank. Each rank then divides the sum of its losses by the number of labels in the whole sequences, so
        the losses of all ranks add up to the mean.

        Raises:
            DataError: the number of tokens cannot be divided, or tokens are masked.
        """
        if self.whole:
            return batch
        tokens = tokens_of(batch)
        ranks = self.group.size
        if problem := NO_TOKENS if tokens is None else masked(batch):
            raise DataError("data.sequence_indivisible", "cp={ranks}: {problem}", ranks=ranks, problem=problem)
        assert tokens is not None
        if reason := undivided_tokens(tokens, "cp", ranks):
            raise DataError.of_problems([reason])
        if isinstance(batch, Mapping):
            extra = _shifted(batch["labels"]) if self.own_loss else {}
            return {name: self._own(t, tokens) for name, t in {**extra, **batch}.items()}  # keep the labels last
        return tuple(self._own(t, tokens) for t in batch)

    def positions(self, own_tokens: int, device: torch.device) -> Tensor:
        """Return the positions of this rank's t tokens in the whole sequence, shape (1, t)."""
        intervals = held(own_tokens * self.group.size, self.group.rank, self.group.size)
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in intervals]).unsqueeze(0)

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass on this rank's tokens, with their positions."""
        tokens = next(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.dim() > 1)
        kwargs = {"position_ids": self.positions(tokens.shape[1], tokens.device)} | kwargs
        shifted = {name: kwargs.pop(name) for name in _LOSS_KEYWORDS if name in kwargs}
        if shifted and kwargs.get("labels") is not None:
            kwargs |= shifted | {"num_items_in_batch": shifted["num_items_in_batch"].sum()}
        return forward(*args, **kwargs)

    def close(self) -> None:
        """Restore the model's forward pass.

        Gradients remain partial sums.
        """
        for undo in reversed(self.undo):
            undo()
        self.undo.clear()

    def _own(self, tensor: Tensor, tokens: int) -> Tensor:
        if tensor.dim() < 2 or tensor.shape[1] != tokens:
            return tensor
        intervals = held(tokens, self.group.rank, self.group.size)
        return torch.cat([tensor[:, start:stop] for start, stop in intervals], 1)


# keyword arguments of transformers; here, num_items_in_batch has one number per sample
_LOSS_KEYWORDS = ("shift_labels", "num_items_in_batch")


def _attend(
    ring: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Compute ring attention over the tokens of all ranks, with the signature of torch's function."""
    if attn_mask is not None or dropout_p > 0:
        unsupported = "a mask" if attn_mask is not None else "dropout"
        raise PlanError(
            "plan.attention_unsupported",
            "the model uses {what}, which attention over cp ranks does not support",
            what=unsupported,
        )
    # Without values, plain attention has the same result, and other splits recognise it in their traces.
    if query.is_meta:
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, **kwargs)
    return ring_attention(query, key, value, ring, causal=is_causal, scale=kwargs.get("scale"))


def _without_masks(model: Any, ranks: int) -> Callable[[], None]:
    """Stop a Hugging Face model from building masks.

    From the positions of a rank's tokens, the model would conclude that there are several sequences.
    """
    from transformers import AttentionInterface

    name, before = f"paceline_cp{ranks}", model.config._attn_implementation
    # an attention function without a function that builds masks
    AttentionInterface.register(name, functools.partial(_hugging_face_attention, ranks=ranks))
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise PlanError(
            "plan.attention_not_replaceable",
            "cp={ranks}: the attention of {class_name} cannot be replaced through the AttentionInterface of "
            "transformers. Use cp=1",
            ranks=ranks,
            class_name=type(model).__name__,
        )
    return functools.partial(model.set_attn_implementation, before)


def _hugging_face_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    ranks: int,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the calling convention of transformers.

    The inputs have the shape (n, heads, t, size), and the output (n, t, heads, size). Attention weights are not
    returned.
    """
    tokens = query.shape[2] * ranks
    if sliding_window is not None and sliding_window < tokens:
        raise PlanError(
            "plan.attention_window",
            "cp={ranks}: attention in a window of {window} tokens cannot be divided. Use sequences with at most as "
            "many tokens as the window.",
            ranks=ranks,
            window=sliding_window,
        )
    if refused := [name for name in _REFUSED if others.get(name) is not None]:
        raise PlanError(
            "plan.attention_variant",
            "cp={ranks}: attention with {variants} cannot be divided over ranks. Use cp=1 for this model.",
            ranks=ranks,
            variants=list(refused),
        )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    grouped = key.shape[1] != query.shape[1]
    mixed = F.scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, bool(causal), scale=scaling, enable_gqa=grouped
    )
    return mixed.transpose(1, 2).contiguous(), None


_REFUSED = ("softcap", "s_aux", "position_bias")


def _shifted(labels: Tensor) -> dict[str, Tensor]:
    """Shift the labels, and count the labels of each sample.

    The keys of the result are the keyword arguments that causal models of transformers expect.
    """
    shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    return {"shift_labels": shifted, "num_items_in_batch": (shifted != IGNORED).sum(1)}


NO_TOKENS = "the tokens of sequences are divided, and the batch has none: its first part should be tokens (n, t)"
_MIXES = "there is {} and the tokens of a sequence may be mixed in attention only: cp=1"


@dataclass
class Examined:
    """Result of running a model without values.

    Attributes:
        reasons: reasons why the tokens cannot be divided, each with a remedy.
        attention: names of the modules that compute attention.
        own_loss: True if the model computed its loss itself.
    """

    reasons: list[str] = field(default_factory=list)
    attention: list[str] = field(default_factory=list)
    own_loss: bool = False


def examine(model: nn.Module, ranks: int, example: Batch, call: Call) -> Examined:
    """Check a batch and, if it is valid, run the model on its shapes."""
    found, tokens = Examined(), tokens_of(example)
    problems: list[str | None] = [NO_TOKENS]
    if tokens is not None:
        problems = [_unfit_forward(model, example), masked(example), _unfit_target(example, tokens)]
        if reason := undivided_tokens(tokens, "cp", ranks):
            found.reasons.append(reason.text)
        elif not any(problems):
            problems += _run_shapes(model, example, call, tokens, found)
    found.reasons += [f"cp={ranks}: {problem}" for problem in problems if problem]
    return found


def _run_shapes(model: nn.Module, example: Batch, call: Call, tokens: int, found: Examined) -> list[str]:
    keywords: dict[str, Any] = {}
    handle = model.register_forward_pre_hook(lambda _module, _args, given: keywords.update(given), with_kwargs=True)
    try:
        graph = record_graph(model, example, call)
    except Exception as error:  # noqa: BLE001 - any error of the user's model
        what = f"{type(error).__name__}: {error}"
        return [f"the model does not run on shapes alone, so its attention cannot be found: {what}"]
    finally:
        handle.remove()
    found.own_loss = keywords.get("labels") is not None
    calls = attention_calls(graph)
    found.attention = [call.module for call in calls]
    problems = [_MIXES.format(what) for what in other_meetings(graph, tokens)] + _opaque_attention(graph, model, calls)
    problems += [problem for one in calls if (problem := _unfit_call(one, tokens))]
    if not calls and not problems:
        problems.append(
            "the model never calls scaled_dot_product_attention, which alone can mix tokens of several ranks: cp=1"
        )
    if graph.logits is not None and (shape := graph.values[graph.logits].shape)[1:2] != (tokens,):
        problems.append(f"the output {list(shape)} is not one per token, and no rank has the whole sequence: cp=1")
    if found.own_loss:
        problems += _unfit_loss(graph, model, target_of(example).numel())
    return list(dict.fromkeys(problems))


def tokens_of(batch: Batch) -> int | None:
    """Return the length of the batch's sequences; None if it has no sequences."""
    parts = list(batch.values()) if isinstance(batch, Mapping) else list(batch)
    first = batch.get("input_ids", parts[0]) if isinstance(batch, Mapping) and parts else parts[0]
    return first.shape[1] if isinstance(first, Tensor) and first.dim() in (2, 3) else None


def _unfit_forward(model: nn.Module, example: Batch) -> str | None:
    parameters = list(inspect.signature(model.forward).parameters)
    if "position_ids" not in parameters:
        return (
            f"{type(model).__name__}.forward takes no position_ids, so it would number each rank's tokens from 0. Give "
            "it an argument position_ids (1, t), and have it use that for positions where it is not None; or take cp=1"
        )
    if not isinstance(example, Mapping) and "attention_mask" in parameters[: len(example) - 1]:
        return (
            "a tuple brings an attention_mask, which would not be looked at; have the dataset return dicts with "
            '"attention_mask"'
        )
    return None


def masked(batch: Batch) -> str | None:
    """Return why a batch needs an attention mask; None if it needs no mask.

    On a GPU, this synchronizes with the host.
    """
    if not isinstance(batch, Mapping):
        return None
    if "position_ids" in batch:
        return "the batch has its own position_ids, which separate packed sequences, and these cannot be divided: cp=1"
    mask = batch.get("attention_mask")
    if mask is None or mask.is_meta or mask.all():
        return None
    return (
        f"attention_mask leaves out {int((mask == 0).sum())} of {mask.numel()} tokens, and attention over ranks has no "
        "mask. Cut sequences to full length; a causal model needs no mask where padding stands on the right and has "
        "the label -100"
    )


def _unfit_target(example: Batch, tokens: int) -> str | None:
    target = target_of(example)
    if target.dim() > 1 and target.shape[1] == tokens:
        return None
    return (
        f"the target {list(target.shape)} is not one per token (n, {tokens}), so ranks cannot each have a part of "
        "the loss: cp=1"
    )


def _opaque_attention(graph: Graph, model: nn.Module, calls: list[AttentionCall]) -> list[str]:
    """Find modules that cannot be traced and may contain attention.

    Modules that only route tokens to experts are omitted, because they process each token separately.
    """
    modules = dict(model.named_modules())
    attending = tuple({type(modules[call.module]) for call in calls})
    return [
        f"{name} cannot be seen into without its values, and attends: cp=1 ({why})"
        for name, why in graph.opaque.items()
        if any(isinstance(module, attending) for module in modules[name].modules())
    ]


def _unfit_call(call: AttentionCall, tokens: int) -> str | None:
    if len(call.query) != 4 or call.query[2] != tokens or call.key[2] != tokens:
        return (
            f"{call.where} attends from {list(call.query)} to {list(call.key)}; only (n, heads, {tokens} tokens, "
            "size) to the same: cp=1"
        )
    if call.masked:
        return (
            f"{call.where} attends with a mask or bias (padding, a sliding window, relative positions), which is "
            "not divided: cp=1"
        )
    if call.dropout > 0:
        return (
            f"{call.where} drops out {call.dropout:g} of its attention, which is not divided; set the model's "
            "attention dropout to 0"
        )
    return None


def _unfit_loss(graph: Graph, model: nn.Module, labels: int) -> list[str]:
    """List reasons why the ranks' losses do not add up to the model's loss.

    The losses of causal models of transformers, which accept shifted labels, add up.
    """
    problems, parameters = [], inspect.signature(model.forward).parameters.values()
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    causal = getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
    rows = {shape_of(graph, call.args[0])[0] for call in graph.calls if call.name == "cross_entropy" and call.args}
    # other losses shift the labels by dropping the last token
    if not (takes_any and causal and rows == {labels}):
        problems.append(
            f"{type(model).__name__} computes its loss itself, as a mean over one rank's tokens; take the loss "
            "cross_entropy"
        )
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        problems.append(
            "the model adds a loss for the balance of its experts, over one rank's tokens; set "
            "output_router_logits to false"
        )
    return problems
