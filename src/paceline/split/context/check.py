"""Checks whether context parallelism (`cp`) can divide a model's sequences."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from paceline.job.batch import Batch, target_of
from paceline.planning.limits import undivided_tokens
from paceline.planning.model.recording.graph import Graph
from paceline.planning.model.recording.record import Call, record_graph
from paceline.split.context.attention_calls import AttentionCall, attention_calls, other_meetings, shape_of

NO_TOKENS = "the tokens of sequences are divided, and the batch has none: its first part should be tokens (n, t)"
_MIXES = "there is {} and the tokens of a sequence may be mixed in attention only: cp=1"


@dataclass
class Examined:
    """Result of running a model on shapes.

    Attributes:
        reasons: reasons against `cp`, each with a remedy.
        attention: names of the modules that attend.
        own_loss: True if the model computed its loss itself.
    """

    reasons: list[str] = field(default_factory=list)
    attention: list[str] = field(default_factory=list)
    own_loss: bool = False


def examine(model: nn.Module, ranks: int, example: Batch, call: Call) -> Examined:
    """Check a batch, then run its shapes through the model unless that failed."""
    found, tokens = Examined(), tokens_of(example)
    if tokens is None:
        problems = [NO_TOKENS]
    else:
        parameters = list(inspect.signature(model.forward).parameters)
        known = (_unfit_forward(model, parameters, example), masked(example), _unfit_target(example, tokens))
        problems = [p for p in known if p]
        if reason := undivided_tokens(tokens, "cp", ranks):
            found.reasons.append(f"cp={ranks} {reason}")
        elif not problems:
            problems = _run_shapes(model, example, call, tokens, found)
    found.reasons += [f"cp={ranks}: {problem}" for problem in problems]
    return found


def _run_shapes(model: nn.Module, example: Batch, call: Call, tokens: int, found: Examined) -> list[str]:
    """Run the model on shapes; fill `found` and return the problems."""
    keywords: dict[str, Any] = {}
    handle = model.register_forward_pre_hook(lambda _module, _args, given: keywords.update(given), with_kwargs=True)
    try:
        graph = record_graph(model, example, call)
    except Exception as error:  # noqa: BLE001 - any error of the user's model
        return [
            f"the model does not run on shapes alone, so its attention cannot be found: {type(error).__name__}: {error}"
        ]
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
    """Length of the batch's sequences, or None if it has none."""
    parts = list(batch.values()) if isinstance(batch, Mapping) else list(batch)
    first = batch.get("input_ids", parts[0]) if isinstance(batch, Mapping) and parts else parts[0]
    return first.shape[1] if isinstance(first, Tensor) and first.dim() in (2, 3) else None


def _unfit_forward(model: nn.Module, parameters: list[str], example: Batch) -> str | None:
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
    """Reason why a batch would need a mask, or None. Reading a mask on a GPU waits for it."""
    if not isinstance(batch, Mapping):
        return None
    if "position_ids" in batch:
        return (
            "the batch has its own position_ids, which separate packed sequences; their attention cannot be "
            "divided: cp=1"
        )
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
    """Modules that cannot be traced and may attend. One that routes tokens to experts treats each token alone."""
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
    """Reasons why the ranks' partial losses do not add up to the model's own loss.

    Those of transformers' causal models, which take shifted labels, do.
    """
    problems = []
    takes_any = any(
        p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values()
    )
    causal = getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
    rows = {shape_of(graph, call.args[0])[0] for call in graph.calls if call.name == "cross_entropy" and call.args}
    # other losses shift the labels by leaving out the last token
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
