"""A model whose tokens are divided among ranks learns what one process learns, in float64.

What cannot be divided is refused, with why.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model_families import hugging_face
from paceline.comm import Group
from paceline.errors import DataError, PlanError
from paceline.job.batch import Batch
from paceline.job.zoo.huggingface import bert
from paceline.job.zoo.losses import CrossEntropy
from paceline.job.zoo.models import GPT
from paceline.split.context_parallel import divide_context, examine
from paceline.split.layout import whole_parts
from ranks import Backend, Ranks
from refusals import raises

VOCAB, TOKENS, STEPS = 32, 16, 3


def gpt() -> nn.Module:
    return GPT(vocab=VOCAB, context=TOKENS, layers=2, hidden=16, heads=2)


def zoo_bert() -> nn.Module:
    return bert(vocab=VOCAB, context=TOKENS, layers=2, hidden=16, heads=2)


def of_tokens(kind: str, **settings: Any) -> nn.Module:
    return hugging_face(kind, num_attention_heads=4, **settings)


def llama() -> nn.Module:
    return of_tokens("LlamaForCausalLM", num_key_value_heads=2)


def gpt2() -> nn.Module:
    return hugging_face("GPT2LMHeadModel")


def mixtral() -> nn.Module:
    eager = {"experts_implementation": "eager"}
    return of_tokens("MixtralForCausalLM", num_key_value_heads=2, num_local_experts=4, **eager)


class _Recomputed:
    """A block's forward that keeps nothing, and runs again in the backward pass."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, x: Tensor) -> Any:
        return checkpoint(self.forward, x, use_reentrant=False)


def batches() -> list[tuple[Tensor, Tensor]]:
    """Tokens and labels; the ignored labels do not divide evenly."""
    torch.manual_seed(11)
    made = []
    for _ in range(STEPS):
        tokens, labels = torch.randint(0, VOCAB, (3, TOKENS)), torch.randint(0, VOCAB, (3, TOKENS))
        labels[0, 2:9] = -100
        made.append((tokens, labels))
    return made


def as_tuple(tokens: Tensor, labels: Tensor) -> Batch:
    return (tokens, labels)


def as_mapping(tokens: Tensor, labels: Tensor) -> Batch:
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def without_labels(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**{k: v for k, v in batch.items() if k != "labels"})
    return model(*batch[:-1])


def with_labels(model: nn.Module, batch: Any) -> Any:
    return model(**batch)


def trained(
    make: Callable[[], nn.Module], form: Callable[..., Batch], call: Callable[..., Any], cp: int
) -> dict[str, Any]:
    """Losses of some steps of SGD with momentum, the first gradients, and the weights.

    As the engine computes them with `cp` ranks.
    """
    torch.manual_seed(3)
    model = make().double()
    group = Group(dist.get_rank(), cp, dist.group.WORLD) if cp > 1 else Group()
    parts = whole_parts(model)
    context = divide_context(model, parts, group, form(*batches()[0]), call) if cp > 1 else None
    assert cp == 1 or all(part.summed == {"cp"} for part in parts.values())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses: list[float] = []
    first: dict[str, Tensor] = {}
    for batch in batches():
        loss = one_loss(model, form(*batch), call, context)
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                group.all_reduce(p.grad)
        first = first or {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        total = loss.detach().clone()
        group.all_reduce(total)
        losses.append(total.item())
        optimizer.step()
    return {"losses": losses, "gradients": first, "weights": {n: p.detach() for n, p in model.named_parameters()}}


def one_loss(model: nn.Module, batch: Any, call: Callable[..., Any], context: Any) -> Tensor:
    """This rank's addend of the mean loss over the whole batch."""
    part = batch if context is None else context.shard(batch)
    output = call(model, part)
    if call is with_labels:
        own: Tensor = output.loss
        return own
    loss = CrossEntropy()
    target, whole = (b["labels"] if isinstance(b, dict) else b[-1] for b in (part, batch))
    return loss(output, target) * loss.items(target) / loss.items(whole)


def assert_equal(one: dict[str, Any], many: dict[str, Any], *, single: bool = False) -> None:
    """The same to float64's precision, or to float32's (`single`)."""
    rtol, atol = (1e-4, 1e-7) if single else (1e-8, 1e-11)
    assert many["losses"] == pytest.approx(one["losses"], rel=1e-6 if single else 1e-10)
    for kind in ("gradients", "weights"):
        assert many[kind].keys() == one[kind].keys()
        for name, expected in one[kind].items():
            difference = (many[kind][name] - expected).abs().max().item()
            assert torch.allclose(many[kind][name], expected, rtol=rtol, atol=atol), (
                f"{kind}: {name} differs by up to {difference:g}"
            )


CASES = {
    "gpt": (gpt, as_tuple, without_labels),
    "bert": (zoo_bert, as_tuple, without_labels),
    "llama": (llama, as_mapping, without_labels),
    "llama-own-loss": (llama, as_mapping, with_labels),  # transformers computes it in float32
    "gpt2-own-loss": (gpt2, as_mapping, with_labels),
    "mixtral": (mixtral, as_mapping, without_labels),
}


def trained_in_turn(cases: list[str], cp: int) -> dict[str, Any]:
    """One after the other in the same processes, as to import transformers takes longest."""
    return {case: trained(*CASES[case], cp) for case in cases}


@pytest.mark.parametrize(
    ("ranks_of_cp", "backend", "cases"),
    [
        (2, "gloo", ["gpt", "bert", "llama", "gpt2-own-loss"]),
        (4, "shm", ["gpt"]),
        pytest.param(4, "shm", [*CASES], marks=pytest.mark.slow),
    ],
    ids=lambda x: str(x) if not isinstance(x, list) else "",
)
def test_ranks_with_parts_of_the_tokens_learn_what_one_process_learns(
    ranks: Ranks, ranks_of_cp: int, backend: Backend, cases: list[str]
) -> None:
    one = trained_in_turn(cases, 1)
    for many in ranks(ranks_of_cp, trained_in_turn, cases, ranks_of_cp, backend=backend, deadline_s=110):
        for case in cases:
            assert_equal(one[case], many[case], single="own-loss" in case)


def trained_with_blocks(kind: str) -> dict[str, Any]:
    """A step with blocks recomputed or compiled after the model was divided.

    Compiled without a graph break; in the order of `apply`.
    """
    torch.manual_seed(3)
    model = gpt().double()
    group = Group(dist.get_rank(), 2, dist.group.WORLD)
    context = divide_context(model, whole_parts(model), group, batches()[0], without_labels)
    for block in model.get_submodule("blocks").children():
        if kind == "compiled":
            block.compile(backend="aot_eager", fullgraph=True)
        else:
            block.forward = _Recomputed(block.forward)
    loss = one_loss(model, batches()[0], without_labels, context)
    loss.backward()
    total = loss.detach().clone()
    group.all_reduce(total)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for gradient in gradients.values():
        group.all_reduce(gradient)
    return {"losses": [total.item()], "gradients": gradients}


@pytest.mark.parametrize("kind", ["recomputed", pytest.param("compiled", marks=pytest.mark.slow)])
def test_blocks_may_be_recomputed_or_compiled_whole(ranks: Ranks, kind: str) -> None:
    one = trained(gpt, as_tuple, without_labels, 1)
    first = {"losses": one["losses"][:1], "gradients": one["gradients"], "weights": {}}
    for many in ranks(2, trained_with_blocks, kind, deadline_s=100):
        assert_equal(first, many | {"weights": {}})


def shapes_only(case: str) -> tuple[int, ...]:
    """A model divided on the meta device, run by other splits, and whole after `close`."""
    make, form, call = CASES[case]
    with torch.device("meta"):
        model = make()
    batch = form(*(t.to("meta") for t in batches()[0]))
    names = [name for name, _ in model.named_modules()]
    context = divide_context(model, whole_parts(model), Group(dist.get_rank(), 2, dist.group.WORLD), batch, call)
    output = call(model, context.shard(batch))
    context.close()
    assert [name for name, _ in model.named_modules()] == names
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert getattr(getattr(model, "config", None), "_attn_implementation", "sdpa") == "sdpa"
    return tuple(getattr(output, "logits", output).shape)


@pytest.mark.parametrize("case", ["gpt", pytest.param("llama-own-loss", marks=pytest.mark.slow)])
def test_a_model_without_memory_is_divided_as_well_and_given_back(ranks: Ranks, case: str) -> None:
    assert ranks(2, shapes_only, case) == [(3, TOKENS // 2, VOCAB)] * 2


def refused_batches() -> list[str]:
    """Each rank says so by itself, so one of the two is enough."""
    model, group = llama(), Group(0, 2, dist.group.WORLD)
    context = divide_context(model, whole_parts(model), group, as_mapping(*batches()[0]), without_labels)
    tokens = torch.zeros(2, 8, dtype=torch.long)
    errors = []
    for bad in (
        {"input_ids": tokens, "attention_mask": F.pad(torch.ones(2, 6), (0, 2)), "labels": tokens},
        {"input_ids": tokens[:, :7], "labels": tokens[:, :7]},
        {"input_ids": tokens, "position_ids": tokens, "labels": tokens},
    ):
        with pytest.raises(DataError) as error:
            context.shard(bad)
        errors.append(str(error.value))
    return errors


def test_batches_that_cannot_be_divided_are_refused(ranks: Ranks) -> None:
    [[masked, odd, packed]] = ranks(1, refused_batches)
    assert "attention_mask leaves out 4 of 16 tokens" in masked
    assert "padding stands on the right" in masked
    assert (
        "cp=2 divides sequences of 7 tokens among 2 ranks: cp is one of 1, 7, or sequences of 4 or 8 tokens in "
        "the job's data."
    ) in odd
    assert "position_ids" in packed


class NoPositions(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return F.one_hot(tokens, VOCAB).float()


class NoAttention(NoPositions):
    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return torch.cumsum(F.one_hot(tokens, VOCAB).float(), dim=1)


class TorchsAttention(NoPositions):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(VOCAB, 2, batch_first=True)

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Any:
        x = F.one_hot(tokens, VOCAB).float()
        return self.attention(x, x, x, need_weights=False)[0]


def mistral() -> nn.Module:
    return of_tokens("MistralForCausalLM", num_key_value_heads=2, sliding_window=8)


def bert_as_published() -> nn.Module:
    return of_tokens("BertForMaskedLM", attention_probs_dropout_prob=0.1)


def roberta() -> nn.Module:
    return of_tokens("RobertaForMaskedLM", max_position_embeddings=2 * TOKENS)


@pytest.mark.parametrize(
    ("make", "call", "reason"),
    [
        (NoPositions, without_labels, r"NoPositions.forward takes no position_ids"),
        (NoAttention, without_labels, r"cumsum along the tokens in the model itself .*cp=1"),
        (TorchsAttention, without_labels, r"multi_head_attention_forward.* in attention "),
        (mistral, without_labels, r"model.layers.0.self_attn attends with a mask or bias \(.*a sliding window"),
        (
            bert_as_published,
            without_labels,
            r"layer.0.attention.self drops out 0.1 of its attention.*set .* attention dropout to 0",
        ),
        (zoo_bert, with_labels, r"BertForMaskedLM computes its loss itself.*take the loss cross_entropy"),
        (roberta, without_labels, r"cumsum along the tokens in roberta.embeddings"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_models_that_cannot_be_divided_are_refused_before_the_start(
    make: Callable[[], nn.Module], call: Any, reason: str
) -> None:
    tokens, labels = batches()[0]
    model = make()
    example = {next(iter(inspect.signature(model.forward).parameters)): tokens, "labels": labels}
    assert re.search(reason, "\n".join(examine(model, 2, example, call).reasons))


def test_samples_that_are_no_sequences_are_refused() -> None:
    image, label = torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.long)
    assert (
        "the batch has none: its first part should be tokens"
        in examine(gpt(), 2, (image, label), without_labels).reasons[0]
    )
    assert "is not one per token" in examine(gpt(), 2, (torch.zeros(2, 16), label), without_labels).reasons[0]
    assert (
        "cp=3 divides sequences of 16 tokens among 3 ranks: cp is one of 1, 2, 4, 8, 16, or sequences of 12 "
        "or 18 tokens"
    ) in examine(gpt(), 3, batches()[0], without_labels).reasons[0]
    mask = torch.ones(3, TOKENS, dtype=torch.long)
    assert (
        "have the dataset return dicts" in examine(llama(), 2, (batches()[0][0], mask, mask), without_labels).reasons[0]
    )
    with raises(PlanError, "plan.no_attention", plan="cp=2"):
        divide_context(NoPositions(), {}, Group(0, 2), batches()[0], without_labels)
