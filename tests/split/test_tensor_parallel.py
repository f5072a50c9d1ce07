"""Tensor parallelism computes what one process computes, in float64, for unknown models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from model_families import hugging_face
from paceline.comm import Group
from paceline.errors import PlanError
from paceline.job.zoo.models import GPT, mlp
from paceline.planning.model.tensor import degrees as unpaired
from paceline.planning.model.tensor.degrees import prove
from paceline.split.layout import whole_parts
from paceline.split.tensor_parallel import shard_tensors
from ranks import Ranks
from refusals import raises
from tensor_parity import Made, call, compare_gradients, output_of, own_group, seeded

STEPS = 3
VOCAB, HIDDEN, HEADS, TOKENS = 32, 32, 4, 8
TRUNK: dict[str, Any] = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "intermediate_size": 48}


def words(length: int = TOKENS, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (2, length), generator=torch.Generator().manual_seed(seed))


def gpt() -> Made:
    return GPT(vocab=VOCAB, context=16, layers=2, hidden=HIDDEN, heads=HEADS), (words(), words(seed=2))


def multilayer() -> Made:
    return mlp(hidden=32), (torch.randn(4, 1, 28, 28, dtype=torch.float64), torch.tensor([0, 3, 4, 9]))


def of_words(kind: str, **settings: Any) -> Made:
    return hugging_face(kind, **TRUNK | settings), {"input_ids": words()}


def llama() -> Made:
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, 6:] = 0
    model, batch = of_words("LlamaForCausalLM", num_key_value_heads=2)
    return model, {**batch, "attention_mask": mask}  # type: ignore[dict-item]


def eager_llama() -> Made:
    return of_words("LlamaForCausalLM", attn_implementation="eager", tie_word_embeddings=True)


def qwen3() -> Made:
    """Norms over each head, whose weights every rank holds in full and sees a part of the gradient of."""
    return of_words("Qwen3ForCausalLM", num_key_value_heads=2, head_dim=8)


def phi3() -> Made:
    """Query, key and value in one matrix, in sections of unequal size; gate and up in one, too."""
    return of_words("Phi3ForCausalLM", num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def gpt2() -> Made:
    return of_words("GPT2LMHeadModel")


def bert() -> Made:
    return of_words("BertForMaskedLM")


def albert() -> Made:
    """One layer in use three times."""
    return of_words("AlbertForMaskedLM", num_hidden_layers=3, embedding_size=16)


def neox() -> Made:
    """Attention and MLP side by side; query, key and value interleaved by head."""
    return of_words("GPTNeoXForCausalLM")


def t5() -> Made:
    sizes = {"d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2}
    model, batch = of_words("T5ForConditionalGeneration", decoder_start_token_id=0, **sizes)
    return model, {**batch, "decoder_input_ids": words(6)}  # type: ignore[dict-item]


def of_pixels(kind: str, **settings: Any) -> Made:
    return hugging_face(kind, **TRUNK | settings), {"pixel_values": torch.randn(2, 3, 16, 16, dtype=torch.float64)}


def vit() -> Made:
    return of_pixels("ViTForImageClassification", image_size=16, patch_size=8, num_labels=5)


def resnet() -> Made:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
    return of_pixels("ResNetForImageClassification", **sizes, num_labels=6, layer_type="basic")


def mixtral() -> Made:
    eager = {"experts_implementation": "eager"}
    return of_words("MixtralForCausalLM", num_key_value_heads=2, num_local_experts=4, **eager)


class NanoAttention(nn.Module):
    """Causal attention as many write it.

    Sizes from the input's shape and from attributes, and `split` by one of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.n_head, self.n_embd = HEADS, HIDDEN

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = F.softmax((q @ k.transpose(-2, -1)) * (C // self.n_head) ** -0.5, dim=-1)
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        out: Tensor = self.c_proj(y)
        return out


class Nano(nn.Module):
    """A model with parallel attention and MLP, a sliced gated MLP and a learned temperature.

    The output of one norm is read twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.norm = nn.Embedding(VOCAB, HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention, self.gate_up, self.down = NanoAttention(), nn.Linear(HIDDEN, 96), nn.Linear(48, HIDDEN)
        self.temperature, self.width = nn.Parameter(torch.tensor(1.5)), 48
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        y = self.norm(x)
        both = self.gate_up(y)
        gated = F.silu(both[..., : self.width] * self.temperature) * both[:, :, self.width :]
        logits: Tensor = self.head(x + self.attention(y) + self.down(gated))
        return logits


def nano() -> Made:
    return Nano(), (words(), words(seed=2))


class Native(nn.Module):
    """torch's own encoder: its attention reads its matrices by hand, so it stays whole, in all tokens.

    Its MLP is divided.
    """

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, 64, dropout=0.0, batch_first=True)
        self.embed, self.encoder = nn.Embedding(VOCAB, HIDDEN), nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embed(tokens)))
        return logits


def native() -> Made:
    return Native(), (words(), words(seed=2))


class Odd(nn.Module):
    """What no rule can divide.

    A sort between two layers, weights read by hand, outputs of odd sizes, a layer in use twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 12)
        self.up, self.down, self.lone = nn.Linear(12, 24), nn.Linear(24, 12), nn.Linear(12, 14)
        self.read, self.twice, self.out = nn.Linear(14, 6), nn.Linear(6, 6), nn.Linear(6, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.down(self.up(self.embed(tokens)).sort(dim=-1).values)
        x = F.linear(self.lone(x), self.read.weight) + self.read.bias
        logits: Tensor = self.out(self.twice(torch.tanh(self.twice(x))))
        return logits


def odd() -> Made:
    return Odd(), (words(), words(seed=2))


def trained(make: Callable[[], Made], large: int, sequence: bool) -> dict[str, str]:
    """Train the whole model and its divided copy side by side; what was done to the layers."""
    unpaired.LARGE = large
    group = own_group()
    full, batch = seeded(make)
    own, _ = seeded(make)
    parts = whole_parts(own)
    report = shard_tensors(own, parts, group, batch, call, sequence=sequence)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.02) for m in (full, own)]
    for _ in range(STEPS):
        losses = []
        for model, optimizer in zip((full, own), optimizers, strict=True):
            optimizer.zero_grad()
            logits = output_of(model, batch)
            uneven = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits).sin()
            loss = (logits * uneven).square().mean()
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-10, atol=0)
        compare_gradients(own, full, parts, group)
        for optimizer in optimizers:
            optimizer.step()
    for name, p in own.named_parameters():
        torch.testing.assert_close(
            p, parts[name].layout.take(dict(full.named_parameters())[name]), rtol=1e-6, atol=1e-8
        )
    return {path: what.split(",")[0].split(":")[0] for path, what in report.done.items()}


def all_trained(cases: list[tuple[Callable[[], Made], int, bool]]) -> list[dict[str, str]]:
    """`trained` for several models in the same processes, as the start of these takes longest."""
    done = []
    for make, large, sequence in cases:
        try:
            done.append(trained(make, large, sequence))
        except Exception as error:
            raise AssertionError(f"{make.__name__}, sequence={sequence}: {error}") from error
    return done


NEVER = 1 << 40


def test_divided_models_learn_what_whole_ones_learn(ranks: Ranks) -> None:
    cases = [(make, NEVER, False) for make in (gpt, multilayer, nano, odd, native)]
    cases += [(gpt, NEVER, True), (native, NEVER, True), (gpt, 0, False), (odd, 0, False)]
    for done in ranks(2, all_trained, cases, backend="shm", deadline_s=120):
        attention = {"attention.c_attn": "column", "attention.c_proj": "row", "gate_up": "column", "down": "row"}
        assert attention.items() <= done[2].items()
        assert {done[5][f"blocks.{i}.{layer}"] for i in (0, 1) for layer in ("attention.query_key_value", "mlp.0")} == {
            "column"
        }
        assert {done[6][f"encoder.layers.{i}.linear1"] for i in (0, 1)} == {"column"}
        assert done[0]["tokens"] == "vocabulary"
        assert done[8]["out"] == "gathered"


def test_hugging_face_models_learn_what_whole_ones_learn(ranks: Ranks) -> None:
    cases = [(llama, NEVER, True), (gpt2, NEVER, False), (t5, NEVER, True)]
    for done in ranks(2, all_trained, cases, backend="shm", deadline_s=120):
        assert all(set(each.values()) == {"column", "row", "vocabulary", "gathered"} for each in done)


@pytest.mark.slow
def test_many_families_learn_what_whole_ones_learn(ranks: Ranks) -> None:
    families = (llama, eager_llama, qwen3, phi3, gpt2, bert, albert, neox, t5, vit, resnet, mixtral)
    cases = [(make, large, False) for make in families for large in (NEVER, 0)]
    cases += [(make, 0, True) for make in (qwen3, phi3, gpt2, bert, neox, mixtral)]
    ranks(2, all_trained, cases, backend="shm", deadline_s=300)


@pytest.mark.slow
def test_four_ranks_learn_what_one_learns(ranks: Ranks) -> None:
    cases = [
        (make, 0, sequence)
        for make in (gpt, eager_llama, gpt2, t5)
        for sequence in (False, True)
        if not (make is t5 and sequence)
    ]
    ranks(4, all_trained, cases, backend="gloo", deadline_s=200)


def test_heads_that_do_not_divide_are_refused_with_the_degrees_that_do() -> None:
    model, batch = gpt()
    before = [(name, id(p), p.shape) for name, p in model.named_parameters()]
    (problem,) = prove(model, 3, batch, call).refused
    assert (problem.code, problem.fields["tp"]) == ("plan.heads_not_divisible", 3)
    assert (problem.fields["heads"], problem.fields["choices"]) == ([4], [1, 2, 4])
    assert "blocks.0.attention and 1 more" in problem.fields["what"]
    assert before == [(name, id(p), p.shape) for name, p in model.named_parameters()], "asking changes nothing"
    assert not any("forward" in module.__dict__ for module in model.modules())
    with pytest.raises(PlanError) as error:
        shard_tensors(model, whole_parts(model), Group(0, 3), batch, call)
    assert error.value.problems == (problem,)
    assert prove(model, 4, batch, call).refused == []
    model, batch = llama()
    assert prove(model, 4, batch, call).refused == [], "two ranks share each head of keys and values"
    assert prove(model, 3, batch, call).refused[0].fields["choices"] == [1, 2, 4]


def test_sequences_that_do_not_divide_are_refused_with_a_length_that_does() -> None:
    model, _ = gpt()
    batch = (words(7), words(7))
    with raises(PlanError, "plan.sequence_refused", ranks=2):
        shard_tensors(model, whole_parts(model), Group(0, 2), batch, call, sequence=True)
    model, image = multilayer()
    with raises(PlanError, "plan.sequence_refused"):
        shard_tensors(model, whole_parts(model), Group(0, 2), image, call, sequence=True)


def test_a_batch_of_another_length_is_never_cut_silently() -> None:
    model, batch = gpt()
    shard_tensors(model, whole_parts(model), Group(0, 2), batch, call, sequence=True, vocabulary=False)
    with raises(
        PlanError,
        "plan.tokens_not_divisible",
        choices=[1, 7],
        degree=2,
        key="tp",
        parts=2,
        tokens=7,
        works="tp is one of 1, 7",
    ):
        model(words(7))


def test_a_call_with_other_arguments_than_the_example_never_loses_a_gradient() -> None:
    model, batch = gpt()
    shard_tensors(model, whole_parts(model), Group(0, 2), batch, call)
    with raises(PlanError, "plan.call_changed", argument=0, class_name="Attention"):
        model.get_submodule("blocks.0.attention")(x=torch.randn(2, TOKENS, HIDDEN))


def test_a_model_on_meta_is_divided_without_memory_for_its_weights() -> None:
    """Sizes of a 70-billion-parameter Llama, of which no rank can hold a copy."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    with torch.device("meta"):
        model = hugging_face("LlamaForCausalLM", **sizes, vocab_size=128256, max_position_embeddings=64)
    parts = whole_parts(model)
    report = shard_tensors(
        model, parts, Group(5, 8), {"input_ids": torch.zeros(1, 16, dtype=torch.long, device="meta")}, call
    )
    assert parts["model.layers.1.self_attn.k_proj.weight"].layout.kept == (((640, 768),), ((0, 8192),))
    assert parts["model.layers.1.mlp.down_proj.weight"].layout.kept == (((0, 8192),), ((17920, 21504),))
    assert report.done["model.layers.0.self_attn.o_proj"] == "row, as in the model's own tp_plan"
    assert report.vocabulary_head is not None
    assert (report.vocabulary_head.start, report.vocabulary_head.stop) == (80160, 96192)
    assert all(p.is_meta for p in model.parameters())


class Deceptive(nn.Module):
    """Scales by a number that it takes from a shape.

    On a rank's part, all shapes would be right and the result wrong.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        result: Tensor = self.down(torch.relu(y) / y.shape[-1])
        return result


class TiedTransposed(nn.Module):
    """A linear layer, and torch's linear function with its weight the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 64)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(self.up(x)), self.up.weight.t())


def test_a_linear_function_between_divided_tokens_is_followed() -> None:
    model, batch = gpt()
    model.get_submodule("blocks.0").mlp = TiedTransposed()
    report = shard_tensors(model, whole_parts(model), Group(0, 2), batch, call, sequence=True)
    assert report.done["blocks.1.mlp.0"] == "column"
    assert "blocks.0.mlp.up" not in report.done


class DataDependent(nn.Module):
    """Looks at what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        result: Tensor = self.down(y * 2 if y.sum() > 0 else y)
        return result


def test_what_cannot_be_proven_stays_whole_and_says_why() -> None:
    batch = (torch.randn(2, 8), torch.randn(2, 8))
    for model, why in (
        (Deceptive(), "behaves differently on a rank's part than on the whole tensor"),
        (DataDependent(), "not in a pair of layers"),
    ):
        parts = whole_parts(model)
        report = shard_tensors(model, parts, Group(0, 2), batch, call)
        assert not any(part.sharded for part in parts.values())
        assert why in report.whole["up"]
        assert "use dp or fsdp instead" in str(report)
    assert "cannot be traced without data" in str(report)


def test_only_the_divided_module_gets_changed_code() -> None:
    model, batch = nano()
    shard_tensors(model, whole_parts(model), Group(0, 2), batch, call)
    changed = model.get_submodule("attention").__dict__["forward"].__func__
    assert changed is not NanoAttention.forward
    assert changed.__code__.co_firstlineno == NanoAttention.forward.__code__.co_firstlineno, (
        "tracebacks show the source"
    )
    assert NanoAttention()(torch.randn(2, TOKENS, HIDDEN)).shape == (2, TOKENS, HIDDEN)


def logits_in_parts(make: Callable[[], Made]) -> tuple[Tensor, Tensor]:
    full, batch = seeded(make)
    own, _ = seeded(make)
    report = shard_tensors(own, whole_parts(own), own_group(), batch, call)
    assert report.vocabulary_head is not None
    report.vocabulary_head.gather = False
    columns = slice(report.vocabulary_head.start, report.vocabulary_head.stop)
    return output_of(own, batch).detach(), output_of(full, batch)[..., columns].detach()


def test_the_head_can_leave_the_logits_divided(ranks: Ranks) -> None:
    for own, expected in ranks(2, logits_in_parts, gpt, backend="shm"):
        torch.testing.assert_close(own, expected)


def test_the_vocabulary_can_stay_whole() -> None:
    model, batch = gpt()
    report = shard_tensors(model, whole_parts(model), Group(0, 2), batch, call, vocabulary=False)
    assert report.vocabulary_head is None
    assert report.whole["head"] == "dividing the vocabulary is turned off" or "vocabulary" in report.whole["tokens"]
    assert report.done["blocks.1.mlp.2"] == "row"


def compiled(sequence: bool) -> int:
    full, batch = seeded(gpt)
    own, _ = seeded(gpt)
    parts, group = whole_parts(own), own_group()
    shard_tensors(own, parts, group, batch, call, sequence=sequence)
    counters.clear()
    for model in (full, torch.compile(own, backend="aot_eager")):
        assert isinstance(model, nn.Module)
        output_of(model, batch).square().mean().backward()
    compare_gradients(own, full, parts, group)
    return len(counters["graph_break"])


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
def test_a_divided_model_compiles_as_one_graph(ranks: Ranks, sequence: bool) -> None:
    assert ranks(2, compiled, sequence, backend="gloo") == [0, 0]
