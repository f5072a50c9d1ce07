"""A document of a packed sequence is computed as if it were alone."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.job.batch import Batch
from paceline.job.loss import LossSpec
from paceline.job.loss_items import call
from paceline.job.zoo import packed
from paceline.job.zoo.huggingface import from_config
from paceline.job.zoo.models import GPT, MoE
from packed_documents import CONTEXT, VOCABULARY, sequence

SIZES: dict[str, Any] = {"vocab": VOCABULARY, "context": CONTEXT, "layers": 2, "hidden": 16, "heads": 2}


def zoo(name: str, **args: Any) -> nn.Module:
    torch.manual_seed(0)
    if name == "gpt":
        return GPT(**SIZES, **args).double().eval()
    return MoE(**SIZES, experts=4, capacity=0.6, **args).double().eval()


def batch(*rows: list[Tensor]) -> dict[str, Tensor]:
    found = [sequence(row) for row in rows]
    return {key: torch.stack([one[key] for one in found]) for key in found[0]}


def logits(model: nn.Module, given: Batch) -> Tensor:
    output = call(model, given, loss=LossSpec(name="cross_entropy").build())
    found: Tensor = getattr(output, "logits", output)
    return found


lengths = st.lists(st.integers(1, 7), min_size=3, max_size=3)  # with one more token, three fill the context


@pytest.mark.parametrize("name", ["gpt", "moe"])
@settings(max_examples=30, deadline=None)
@given(lengths=lengths, others=lengths, seed=st.integers(0, 2**16))
def test_a_documents_loss_and_gradients_do_not_depend_on_its_neighbours(
    name: str, lengths: list[int], others: list[int], seed: int
) -> None:
    model, draw = zoo(name), torch.Generator().manual_seed(seed)

    def drawn(length: int) -> Tensor:
        return torch.randint(1, VOCABULARY, (length,), generator=draw)

    kept = drawn(lengths[1] + 1)
    found = []
    for before, after in ((lengths[0], lengths[2]), (others[0], others[2])):
        given = batch([drawn(before), kept, drawn(after)])
        rows = slice(before, before + len(kept) - 1)
        loss = F.cross_entropy(logits(model, given)[0, rows], kept[1:])
        found.append((loss, torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)))
    alone = F.cross_entropy(model(kept[None])[0, :-1], kept[1:])
    assert [float(loss.detach()) for loss, _ in found] == pytest.approx([float(alone.detach())] * 2, abs=1e-12)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        # a gradient of 0 and none at all are the same: another expert's token is a neighbour's
        zero = torch.zeros(())
        assert torch.allclose(zero if one is None else one, zero if other is None else other, atol=1e-12)


def test_a_sequence_of_one_document_is_computed_as_without_positions() -> None:
    model, ids = zoo("gpt"), torch.randint(VOCABULARY, (3, CONTEXT))
    whole = model(ids, position_ids=torch.arange(CONTEXT).expand(3, CONTEXT))
    assert torch.allclose(model(ids), whole, atol=1e-12)


def test_attention_of_variable_length_gets_the_documents_and_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernel needs a GPU, so a loop over the documents takes its place."""
    bounds_seen: list[list[int]] = []

    def loop(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, *_: Any, window_size: tuple[int, int]) -> Tensor:
        assert window_size == (-1, 0), "causal attention"
        bounds_seen.append(bounds.tolist())
        made = []
        for start, stop in itertools.pairwise(bounds.tolist()):
            query, key, value = (x[start:stop].transpose(0, 1) for x in (q, k, v))
            made.append(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(0, 1))
        return torch.cat(made)

    model = zoo("gpt")
    given = batch([torch.arange(1, 6), torch.arange(7, 17)], [torch.arange(20, 40)])
    expected = logits(model, given)
    monkeypatch.setattr(packed, "has_variable_lengths", lambda *_: True)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", loop)
    assert torch.allclose(logits(model, given), expected, atol=1e-12)
    assert bounds_seen == [[0, 5, 15, 24, 44, 48]] * SIZES["layers"]


def test_attention_with_dropout_uses_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernel for variable lengths has no dropout."""
    monkeypatch.setattr(packed, "has_variable_lengths", lambda *_: True)
    model = zoo("gpt", dropout=0.5).train()
    given = batch([torch.arange(1, 6), torch.arange(7, 17)])
    torch.manual_seed(1)
    first = logits(model, given)
    torch.manual_seed(1)
    assert torch.equal(logits(model, given), first)
    assert not torch.equal(logits(model, given), first)


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "intermediate_size": 32},
    "qwen3": {"num_key_value_heads": 2, "intermediate_size": 32, "head_dim": 4},
    # a window that is shorter than the documents
    "mistral": {"num_key_value_heads": 2, "intermediate_size": 32, "sliding_window": 4},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_causal_models_of_transformers_confine_documents(tmp_path: Path, kind: str, attention: str) -> None:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": kind, "attn_implementation": attention} | sizes | CONFIGURATIONS[kind]))
    torch.manual_seed(0)
    model = from_config(file, "causal_lm", {}).double().eval()
    kept = torch.arange(7, 17)
    found = logits(model, batch([torch.arange(1, 6), kept, torch.arange(30, 37)]))[0, 5:15]
    changed = logits(model, batch([torch.arange(41, 46), kept, torch.arange(50, 57)]))[0, 5:15]
    assert torch.equal(found, changed)
    # eager attention computes its softmax in float32
    alone = model(input_ids=kept[None], use_cache=False).logits[0]
    assert torch.allclose(found, alone, atol=1e-12 if attention == "sdpa" else 1e-6)
