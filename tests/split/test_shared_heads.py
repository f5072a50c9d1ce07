"""Tensor parallelism over more ranks than heads of keys and values computes what one process computes, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_families import hugging_face
from paceline.comm import Group
from paceline.errors import PlanError
from paceline.planning.model.tensor.degrees import prove
from paceline.split.layout import whole_parts
from paceline.split.tensor_parallel import shard_tensors
from ranks import Ranks
from tensor_parity import Made, call, gradients_agree, output_of, own_group, seeded

VOCAB, HIDDEN, TOKENS, WIDTH = 32, 32, 8, 4


def words(seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(seed))


class Grouped(nn.Module):
    """Attention whose query heads share fewer heads of keys and values.

    `how` says which code brings the two numbers together.
    """

    def __init__(self, heads: int, keys: int, how: str) -> None:
        super().__init__()
        self.heads, self.keys, self.how = heads, keys, how
        self.query, self.out = nn.Linear(HIDDEN, heads * WIDTH), nn.Linear(heads * WIDTH, HIDDEN)
        self.key, self.value = nn.Linear(HIDDEN, keys * WIDTH), nn.Linear(HIDDEN, keys * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        q = self.query(x).view(n, t, self.heads, WIDTH).transpose(1, 2)
        k = self.norm(self.key(x).view(n, t, self.keys, WIDTH)).transpose(1, 2)
        v = self.value(x).view(n, t, self.keys, WIDTH).transpose(1, 2)
        if self.how == "groups":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        elif self.how == "repeat":
            k = k.repeat_interleave(self.heads // self.keys, dim=1)
            v = torch.repeat_interleave(v, repeats=self.heads // self.keys, dim=1)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.how == "expand":
            k = k[:, :, None].expand(n, self.keys, self.heads // self.keys, t, WIDTH).reshape(n, self.heads, t, WIDTH)
            v = v[:, :, None].expand(n, self.keys, self.heads // self.keys, t, WIDTH).reshape(n, self.heads, t, WIDTH)
            y = ((q @ k.transpose(-2, -1)) / WIDTH**0.5).softmax(-1) @ v
        else:
            y = ((q @ k.transpose(-2, -1)) / WIDTH**0.5).softmax(-1) @ v
        out: Tensor = self.out(y.transpose(1, 2).reshape(n, t, self.heads * WIDTH))
        return out


class PairedKeys(nn.Module):
    """Keys and values in one matrix, each in its own section, repeated by a function as often as an attribute says."""

    def __init__(self, heads: int, keys: int) -> None:
        super().__init__()
        self.n_rep = heads // keys
        self.query, self.out = nn.Linear(HIDDEN, heads * WIDTH, bias=False), nn.Linear(heads * WIDTH, HIDDEN)
        self.key_value = nn.Linear(HIDDEN, 2 * keys * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        k, v = (repeated(part, self.n_rep) for part in self.key_value(x).chunk(2, dim=-1))
        q = self.query(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
        out: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


def repeated(x: Tensor, times: int) -> Tensor:
    """Heads (n, heads, t, width) of (n, t, features), `times` each."""
    x = x.unflatten(-1, (-1, WIDTH)).transpose(1, 2)
    if times == 1:
        return x
    n, heads, t, width = x.shape
    return x[:, :, None].expand(n, heads, times, t, width).reshape(n, heads * times, t, width)


class Decoder(nn.Module):
    """A model of two such layers."""

    def __init__(self, attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCAB, HIDDEN), nn.ModuleList(attention() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        logits: Tensor = self.head(x)
        return logits


def decoder(attention: Callable[[], nn.Module]) -> Made:
    return Decoder(attention), (words(), words(seed=2))


def grouped(heads: int, keys: int, how: str) -> Made:
    return decoder(partial(Grouped, heads, keys, how))


def paired(heads: int, keys: int) -> Made:
    return decoder(partial(PairedKeys, heads, keys))


def llama(keys: int, *, masked: bool = False, family: str = "Llama", **more: Any) -> Made:
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": 8, "head_dim": WIDTH, "num_key_value_heads": keys}
    batch = {"input_ids": words()}
    if masked:
        batch["attention_mask"] = torch.ones(2, TOKENS, dtype=torch.long)
        batch["attention_mask"][1, 6:] = 0
    return hugging_face(f"{family}ForCausalLM", **sizes | more), batch


def all_agree(cases: list[tuple[Callable[[], Made], bool]]) -> list[dict[str, str]]:
    """`gradients_agree` for several models in the same processes; what was divided."""
    done = []
    for make, sequence in cases:
        try:
            done.append(gradients_agree(make, sequence=sequence).done)
        except Exception as error:
            raise AssertionError(f"{make}, sequence={sequence}: {error}") from error
    return done


def test_ranks_that_share_keys_and_values_learn_what_one_process_learns(ranks: Ranks) -> None:
    """Two heads of keys and values over four ranks."""
    cases = [(partial(grouped, 8, 2, how), False) for how in ("groups", "repeat", "expand")]
    cases += [(partial(paired, 4, 2), False), (partial(llama, 2), False), (partial(llama, 2, masked=True), True)]
    for done in ranks(4, all_agree, cases, backend="gloo", deadline_s=200):
        for each in done:
            layer = next(path.rpartition(".")[0] for path in each if path.rpartition(".")[2] in ("query", "q_proj"))
            ways = {path: what for path, what in each.items() if path.startswith(layer)}
            assert {what.partition(",")[0] for what in ways.values()} == {"column", "row"}
            assert any(what == "column, one of 2 parts on 2 ranks each" for what in ways.values())


def test_ranks_with_one_head_of_keys_and_values_learn_what_one_process_learns(ranks: Ranks) -> None:
    """Three ranks, which is no power of two, as PaLM's twelve."""
    cases = [(partial(grouped, 6, 1, how), False) for how in ("groups", "repeat", "expand", "broadcast")]
    cases += [
        (partial(llama, 1, hidden_size=36, num_attention_heads=6, masked=masked), False) for masked in (False, True)
    ]
    cases += [(partial(paired, 6, 1), False)]
    for done in ranks(3, all_agree, cases, backend="gloo", deadline_s=200):
        assert all("row" in {what.partition(",")[0] for what in each.values()} for each in done)
        assert all(any(path.endswith(("query", "q_proj")) for path in each) for each in done)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "keys"), [(2, 1), (4, 1), (4, 2)])
def test_families_with_few_heads_of_keys_and_values_learn_what_one_process_learns(
    count: int, keys: int, ranks: Ranks
) -> None:
    cases = [
        (partial(llama, keys, family=family, masked=masked, attn_implementation=kernel), sequence)
        for family, sequence in (("Llama", False), ("Llama", True), ("Mistral", False))
        for kernel in ("sdpa", "eager")
        for masked in (False, True)
    ]
    cases += [(partial(llama, keys, family="Qwen2"), False)]
    for done in ranks(count, all_agree, cases, backend="gloo", deadline_s=400):
        assert all(each["model.layers.1.self_attn.q_proj"].startswith("column") for each in done)


def padded_agree() -> None:
    """Divide models by an example of one kind of batch, and compare them on the other kind."""
    for masked in (False, True):
        for keys in (1, 2):
            full, example = seeded(partial(llama, keys, masked=masked))
            own, _ = seeded(partial(llama, keys))
            _, batch = llama(keys, masked=not masked)
            shard_tensors(own, whole_parts(own), own_group(), example, call, vocabulary=False)
            torch.testing.assert_close(output_of(own, batch), output_of(full, batch), rtol=1e-9, atol=1e-12)


def test_padding_that_the_example_did_not_have_changes_no_result(ranks: Ranks) -> None:
    """Hugging Face models repeat heads themselves where there is a mask, and let the kernel where there is none."""
    ranks(4, padded_agree, backend="gloo", deadline_s=100)


def test_heads_that_neither_divide_nor_are_shared_evenly_are_refused_with_degrees_that_work() -> None:
    model, batch = grouped(12, 4, "groups")
    (problem,) = prove(model, 6, batch, call).refused
    assert (problem.code, problem.fields["choices"]) == ("plan.heads_not_divisible", [1, 2, 4, 12])
    assert "layers.0 and 1 more" in problem.fields["what"]
    assert prove(model, 12, batch, call).refused == []
    with pytest.raises(PlanError) as error:
        shard_tensors(model, whole_parts(model), Group(0, 6), batch, call)
    assert error.value.problems == (problem,)


class Fused(nn.Module):
    """Queries, keys and values in one matrix, in sections of unequal size."""

    def __init__(self) -> None:
        super().__init__()
        self.everything, self.out = nn.Linear(HIDDEN, 8 * WIDTH), nn.Linear(4 * WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        sections = self.everything(x).split((4 * WIDTH, 2 * WIDTH, 2 * WIDTH), dim=-1)
        q, k, v = (section.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for section in sections)
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


def test_a_matrix_of_queries_and_shared_keys_is_refused_rather_than_cut_through_a_head() -> None:
    model, batch = decoder(Fused)
    (problem,) = prove(model, 4, batch, call).refused
    assert problem.fields["choices"] == [1, 2]
    assert prove(model, 2, batch, call).refused == []
