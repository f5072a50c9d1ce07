"""Where ranks have all tokens and compute rows.

The same loss and gradients as one process, with its share of the work on each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from model_families import hugging_face
from paceline.comm import Group
from paceline.errors import PlanError
from paceline.job.batch import Batch
from paceline.planning.model.record import record_graph
from paceline.planning.plan import Plan
from paceline.split.apply import Split
from paceline.split.context_parallel import divide_context
from paceline.split.context_rows import tokenwise_modules
from paceline.split.deferred_init import DeferredModel, record
from paceline.split.layout import whole_parts
from paceline.split.mesh import Mesh
from ranks import Ranks

VOCAB, TOKENS, WIDTH = 32, 17, 16


class Biased(nn.Module):
    """Attention by softmax, with a bias for each head that an MLP makes of a buffer; 17 tokens do not divide by two."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.qkv, self.out = (
            nn.Embedding(VOCAB, WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.bias = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 2))
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.ReLU(inplace=True), nn.Linear(32, WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB)
        places = torch.arange(float(TOKENS))
        self.register_buffer("distance", (places[:, None] - places).unsqueeze(-1) / TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        n, t, c = x.shape
        qkv = self.qkv(x)
        qkv += 0.1  # into what was gathered
        q, k, v = qkv.reshape(n, t, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / 3 + self.bias(self.distance).permute(2, 0, 1)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(n, t, c))
        y: Tensor = self.head(x + self.mlp(x))
        return y


class TiedAndMasked(nn.Module):
    """Attention by torch's function with a learned mask, and the embedding's weight as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.q, self.kv = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mask = nn.Parameter(torch.randn(1, 1, TOKENS, TOKENS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, kv = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in (self.q(x), self.kv(x)))
        x = x + F.scaled_dot_product_attention(q, kv, kv, self.mask).transpose(1, 2).flatten(2)
        x = x + F.scaled_dot_product_attention(q, kv, kv, is_causal=True).transpose(1, 2).flatten(2)
        y: Tensor = self.head(x)
        return y


def windowed() -> nn.Module:
    return hugging_face("MistralForCausalLM", num_attention_heads=4, num_key_value_heads=2, sliding_window=4)


MODELS: dict[str, Callable[[], nn.Module]] = {"Biased": Biased, "TiedAndMasked": TiedAndMasked, "windowed": windowed}


def call(model: nn.Module, batch: Any) -> Any:
    return model(batch[0])


def batch() -> Batch:
    drawn = torch.randint(0, VOCAB, (2, 2, TOKENS), generator=torch.Generator().manual_seed(1))
    return drawn[0], drawn[1]


def all_learned(cp: int) -> dict[str, tuple[float, dict[str, Tensor], list[tuple[int, ...]]]]:
    """`learned` for each model."""
    return {kind: learned(kind, cp) for kind in MODELS}


def learned(kind: str, cp: int) -> tuple[float, dict[str, Tensor], list[tuple[int, ...]]]:
    """The loss, the gradients, and the shapes that the last Linear of the MLP was given."""
    torch.manual_seed(3)
    model, seen = MODELS[kind]().double(), list[tuple[int, ...]]()
    group = Group(dist.get_rank(), cp, dist.group.WORLD) if cp > 1 else Group()
    parts, example = whole_parts(model), batch()
    if kind == "Biased":
        model.mlp[3].register_forward_hook(lambda _module, given, _output: seen.append(tuple(given[0].shape)))  # type: ignore[index, union-attr]
    context = divide_context(model, parts, group, example, call) if cp > 1 else None
    assert context is None or context.whole
    seen.clear()
    output = call(model, example)
    loss = F.cross_entropy(getattr(output, "logits", output).flatten(0, 1), example[1].flatten())  # type: ignore[index]
    loss.backward()
    for name, p in model.named_parameters():
        if p.grad is not None and "cp" in parts[name].summed:
            group.all_reduce(p.grad)
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, seen


def test_ranks_that_compute_rows_learn_what_one_process_learns(ranks: Ranks) -> None:
    alone = all_learned(1)
    for of_rank in ranks(2, all_learned, 2):
        for kind, (loss, found, seen) in of_rank.items():
            expected, gradients, _ = alone[kind]
            assert loss == pytest.approx(expected, rel=1e-12), kind
            assert found.keys() == gradients.keys()
            for name, gradient in gradients.items():
                torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-13, msg=f"{kind}: {name}")
            assert seen == ([(2, 9, 32)] if kind == "Biased" else []), "9 of 17 tokens"


class MixesTokens(nn.Module):
    """Looks as if it treated tokens alone."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how, self.place = nn.Linear(WIDTH, WIDTH), how, nn.Parameter(torch.zeros(1, TOKENS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if self.how == "mean":
            return y - y.mean(1, keepdim=True)
        if self.how == "softmax":
            return y.softmax(1)
        if self.how == "sum of tokens":
            return y.cumsum(1)
        if self.how == "place":
            return y + self.place
        if self.how == "turned":
            return y.mT.contiguous().reshape(y.shape)
        if self.how == "number of tokens":
            return y / x.shape[1]
        if self.how == "write into the input":
            x.mul_(2)
        return y


@pytest.mark.parametrize(
    "how",
    ["mean", "softmax", "sum of tokens", "place", "turned", "number of tokens", "write into the input", "nothing"],
)
def test_a_module_is_divided_only_if_it_treats_each_token_alone(how: str) -> None:
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), MixesTokens(how))
    found = tokenwise_modules(record_graph(model, batch(), call), model)
    assert found == (["1"] if how == "nothing" else ["1.linear"])


def test_a_weight_that_is_used_elsewhere_too_keeps_its_module_whole() -> None:
    tied = TiedAndMasked()
    assert tokenwise_modules(record_graph(tied, batch(), call), tied) == ["q", "kv"]

    class ByUse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.linear = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, tokens: Tensor) -> Tensor:
            y: Tensor = F.linear(self.linear(self.embedding(tokens)), self.linear.weight)
            return y

    by_use = ByUse()
    assert tokenwise_modules(record_graph(by_use, batch(), call), by_use) == []


def refusal_of(plan: str) -> str:
    parsed = Plan.parse(plan)
    mesh = Mesh.of(parsed, Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD))
    try:
        made: DeferredModel = record(Biased)
        Split(made, parsed, mesh, batch(), call, precision="fp32")
    except PlanError as error:
        return str(error)
    return ""


def test_other_splits_of_such_a_model_are_refused(ranks: Ranks) -> None:
    [refused, *_] = ranks(2, refusal_of, "cp=2 compile=on")
    assert "cp of this model cannot be combined with compile" in refused
    assert "no position_ids" in refused
