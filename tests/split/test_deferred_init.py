"""Models built without memory.

If this failed, ranks would start from other weights than one process, or each would need all of them.
"""

from __future__ import annotations

import copy
import random
import resource
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.errors import JobError
from paceline.job.model import ModelSpec
from paceline.split.deferred_init import DeferredModel, deferred_from, record
from ranks import Ranks
from refusals import raises

HF: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"num_key_value_heads": 2}),
    "gpt2": ("GPT2LMHeadModel", {}),
    "t5": ("T5ForConditionalGeneration", {"d_kv": 8, "d_ff": 48}),
    "vit": ("ViTForImageClassification", {"image_size": 16, "patch_size": 8}),
    "mixtral": ("MixtralForCausalLM", {"num_key_value_heads": 2, "num_local_experts": 4}),
    "mamba": ("MambaForCausalLM", {}),  # leaves part of its initialisation out for tensors on the meta device
    "swin": (
        "SwinForImageClassification",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4]},
    ),
}


def zoo(name: str, **args: Any) -> Callable[[], nn.Module]:
    return ModelSpec.model_validate({"zoo": name, "args": args}).build


def hugging_face(kind: str) -> Callable[[], nn.Module]:
    import transformers

    name, own = HF[kind]
    known = transformers.AutoConfig.for_model(kind).to_dict()
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    sizes |= {"n_embd": 32, "n_layer": 2, "n_head": 4, "d_model": 32, "num_layers": 2, "num_heads": 4}
    config = transformers.AutoConfig.for_model(kind, **{key: n for key, n in sizes.items() if key in known} | own)
    return lambda: getattr(transformers, name)(config)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())}


def replayed(recorded: DeferredModel, names: list[str] | None = None) -> dict[str, Tensor]:
    """All that a rank gets: real buffers, and what is handed out, each once."""
    got = {name: b for name, b in recorded.model.named_buffers() if not b.is_meta}

    def take(name: str, full: Tensor) -> None:
        assert name not in got
        got[name] = full.clone()

    recorded.replay(take, names)
    return got


def check_equal(build: Callable[[], nn.Module], *, recordable: bool = True) -> DeferredModel:
    """One process's weights and random state, and a replay's."""
    torch.manual_seed(3)
    expected = values(build())
    end = torch.get_rng_state()
    torch.manual_seed(3)
    start = torch.get_rng_state()
    recorded = record(build)
    assert (recorded.note is None) == recordable, recorded.note
    assert torch.equal(torch.get_rng_state(), start)
    assert all(p.is_meta for p in recorded.model.parameters())
    torch.manual_seed(99)  # the replay does not depend on what happens in between
    got = replayed(recorded)
    assert torch.equal(torch.get_rng_state(), end)
    assert got.keys() == expected.keys()
    assert [
        name for name, full in expected.items() if full.dtype != got[name].dtype or not torch.equal(full, got[name])
    ] == []
    return recorded


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(zoo("mlp", hidden=64), id="mlp"),
        pytest.param(zoo("cifar_cnn"), id="cifar_cnn"),
        pytest.param(zoo("gpt", layers=2, hidden=32), id="gpt"),
        pytest.param(zoo("bert", layers=2, hidden=32), id="bert"),
        pytest.param(zoo("resnet50"), id="resnet50", marks=pytest.mark.slow),
        *(pytest.param(hugging_face(kind), id=kind) for kind in HF),
        pytest.param(lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True), id="Transformer"),  # copies its layers
        pytest.param(lambda: nn.LSTM(4, 8, 2), id="LSTM"),
        pytest.param(lambda: nn.Embedding(20, 6, padding_idx=2), id="padding_idx"),
        pytest.param(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 6)), id="weight_norm"),
        pytest.param(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 6)), id="spectral_norm"),
    ],
)
def test_a_replay_gives_the_bits_of_a_plain_construction(build: Callable[[], nn.Module]) -> None:
    check_equal(build)


def test_a_tied_parameter_comes_once_and_stays_tied() -> None:
    recorded = check_equal(zoo("gpt", layers=1, hidden=32))
    assert recorded.model.get_parameter("head.weight") is recorded.model.get_parameter("tokens.weight")


@pytest.mark.filterwarnings("ignore:mean is more than 2 std")
@pytest.mark.parametrize(
    ("fill", "shape"),
    [
        (lambda w: nn.init.trunc_normal_(w, std=0.8), (40, 30)),  # draws again what lies outside
        (lambda w: nn.init.trunc_normal_(w, std=0.1, a=0.5, b=1), (6, 8)),
        (nn.init.orthogonal_, (6, 8)),
        (nn.init.orthogonal_, (8, 6)),
        (lambda w: nn.init.sparse_(w, 0.3), (6, 8)),
        (nn.init.dirac_, (6, 8, 3)),
        (nn.init.eye_, (6, 8)),
        (nn.init.kaiming_normal_, (300, 200)),
        (nn.init.xavier_uniform_, (300, 200)),
        (lambda w: nn.init.normal_(w[:4]), (6, 8)),  # the rest keeps the values from before
        (lambda w: nn.init.normal_(w.t()), (6, 8)),
    ],
)
def test_every_initialisation_of_torch_is_replayed(fill: Callable[[Tensor], object], shape: tuple[int, ...]) -> None:
    def build() -> nn.Module:
        model = nn.ParameterDict({"before": torch.rand(3), "w": torch.ones(shape), "after": torch.randn(5)})
        with torch.no_grad():
            fill(model["w"])
        return model

    check_equal(build)


class Odd(nn.Module):
    """All kinds of things that constructions do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)))
        self.register_buffer("drawn", torch.randn(3))
        self.register_buffer("rotary", 1.0 / 10_000 ** (torch.arange(0, 8, 2) / 8))
        table = torch.zeros(6, 4)
        table[:, 0::2] = torch.sin(torch.arange(6.0)[:, None] * torch.arange(2))
        self.register_buffer("table", table)
        self.log_scale = nn.Parameter(torch.tensor(0.07).log())
        self.scalar = nn.Parameter(torch.zeros(1))
        nn.init.normal_(self.scalar)
        self.reassigned = nn.Linear(3, 2)
        self.reassigned.weight.data = torch.randn(2, 3) * 0.1
        self.reassigned.weight.data[1].fill_(2)
        self.identity = nn.Linear(3, 3)
        self.identity.weight.data = torch.eye(3)
        self.identity.bias.data[1:] = torch.tensor([0.5, 0.25])
        self.in_half = nn.Linear(30, 30).half()
        self.in_double = nn.Linear(3, 3, dtype=torch.float64)
        self.order = nn.Parameter(torch.randperm(7).float())
        self.of_numpy = nn.Parameter(torch.from_numpy(np.random.rand(5)))
        self.of_python = nn.Parameter(torch.full((3,), random.random()))
        self.copied = copy.deepcopy(self.reassigned)
        self.copied_mask = copy.deepcopy(self.mask)
        self.constant = torch.ones(3) * 2  # neither parameter nor buffer, and needed in forward
        self.constants = {"halves": [torch.full((2,), 0.5)]}
        self.count = int(torch.ones(4).sum().item())
        self.drop = [x.item() for x in torch.linspace(0, 1, 4)]


def test_what_a_construction_may_do_besides_filling_parameters() -> None:
    def build() -> nn.Module:
        random.seed(5)
        np.random.seed(5)
        return Odd()

    recorded = check_equal(build)
    model: Any = recorded.model
    assert (model.count, model.drop) == (4, pytest.approx([0, 1 / 3, 2 / 3, 1]))
    assert (model.constant.tolist(), model.constants["halves"][0].tolist()) == ([2, 2, 2], [0.5, 0.5])
    assert {name for name, b in model.named_buffers() if not b.is_meta} >= {"rotary"}


def test_random_states_that_a_construction_sets_itself() -> None:
    own = torch.Generator()

    def build() -> nn.Module:
        own.manual_seed(4)
        model = nn.ParameterDict({"a": torch.randn(20), "b": torch.rand(4, generator=own)})
        with torch.random.fork_rng():
            torch.manual_seed(9)
            model["c"] = torch.randn(21)
        model["d"] = torch.randn(22)  # goes on where `a` ended
        torch.manual_seed(8)
        model["e"] = torch.randn(23)
        torch.manual_seed(8)
        model.update({"f": torch.randn(24), "g": torch.rand(4, generator=own)})
        return model

    check_equal(build)
    after = torch.rand(3, generator=own)
    build()
    assert torch.equal(after, torch.rand(3, generator=own))


class Reads(nn.Module):
    """Its construction depends on a random weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.largest = self.linear.weight.max().item()


class Refuses(nn.Module):
    """Takes another way where an operation fails."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        try:
            self.indices = self.linear.weight.detach().gt(0).nonzero()
        except NotImplementedError:
            self.indices = torch.zeros(0)


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (Reads, r"reads random numbers \(.item\(\).*test_deferred_init.py:\d+"),
        (Refuses, "nonzero"),
        (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)), "random numbers|allclose"),
        (lambda: nn.ParameterList([torch.from_numpy(torch.randn(3).numpy() * 2)]), "numpy"),
        (lambda: nn.ParameterList([torch.tensor([1.0, 2.0]).normal_()]), "knows already"),
        (lambda: nn.ParameterList([torch.randn(3, 2)[[2, 0]]]), "no recording sees"),
        (lambda: nn.ParameterList([torch.zeros(2), torch.empty(2, device="meta")])[:1], "meta device"),
        # the old one, of plain attributes
        (lambda: nn.utils.spectral_norm(nn.Linear(8, 6)), "keeps random numbers in weight"),
    ],
)
def test_what_cannot_be_recorded_is_built_whole_and_said(build: Callable[[], nn.Module], why: str) -> None:
    recorded = check_equal(build, recordable=False)
    assert recorded.note is not None
    with pytest.raises(AssertionError, match=f"(?s)every rank held the whole model at first.*({why})"):
        raise AssertionError(recorded.note)


def test_a_construction_that_is_run_again_draws_the_same_numbers_of_python_and_numpy() -> None:
    def build() -> nn.Module:
        model = Reads()
        model.of_python = nn.Parameter(torch.tensor([random.random(), np.random.rand()]))
        return model

    random.seed(1)
    np.random.seed(1)
    expected = [random.random(), np.random.rand()]
    random.seed(1)
    np.random.seed(1)
    assert replayed(record(build))["of_python"].tolist() == pytest.approx(expected)


def test_weights_that_a_construction_brings_along_are_said() -> None:
    weights = nn.Linear(64, 64).state_dict()

    def build() -> nn.Module:
        model = nn.Linear(64, 64)
        model.load_state_dict(weights)
        return model

    recorded = record(build)
    assert "16,640 bytes that the model's construction brings along" in (recorded.note or "")
    assert torch.equal(replayed(recorded)["weight"], weights["weight"])


def test_only_wanted_names_come_and_the_random_state_is_the_same() -> None:
    build = zoo("gpt", layers=2, hidden=32)
    torch.manual_seed(3)
    expected = values(build())
    end = torch.get_rng_state()
    torch.manual_seed(3)
    names = ["blocks.1.mlp.0.weight", "norm.bias"]
    got = replayed(record(build), names)
    assert sorted(got) == names
    assert all(torch.equal(got[name], expected[name]) for name in names)
    assert torch.equal(torch.get_rng_state(), end)


def test_the_number_of_threads_does_not_change_the_weights() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        recorded = record(zoo("mlp"))
        one = replayed(recorded)
        torch.set_num_threads(2)
        assert all(torch.equal(full, one[name]) for name, full in replayed(recorded).items())
    finally:
        torch.set_num_threads(threads)


def test_a_real_model_gives_its_weights_away() -> None:
    untouched = zoo("gpt", layers=1, hidden=32)()
    model: Any = untouched
    model.tokens.weight.mark = "kept"
    expected = values(model)
    recorded = deferred_from(model)
    assert recorded.model is untouched
    assert model.head.weight is model.tokens.weight
    assert model.tokens.weight.is_meta
    assert model.tokens.weight.mark == "kept"
    got = replayed(recorded)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], full) for name, full in expected.items())
    recorded.replay(lambda name, full: pytest.fail(f"{name} was still there"))


def test_an_error_of_the_construction_is_its_own() -> None:
    with raises(JobError, "model.hidden_not_multiple"):
        record(zoo("gpt", hidden=31))


def test_parameters_without_values_or_shapes_are_named() -> None:
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    with raises(JobError, "model.parameter_on_meta", name="weight"):
        deferred_from(empty)
    with raises(JobError, "model.parameter_on_meta", name="weight"):
        record(lambda: nn.Linear(2, 2, device="meta"))
    with raises(JobError, "model.lazy_parameter", name="weight"):
        record(lambda: nn.LazyLinear(2))


def grown_in_a_replay() -> tuple[int, int]:
    """By how much the peak of a process grows, and the bytes of the model."""

    def build() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(40)))
        for p in model.parameters():  # as libraries do: all layers again, at the end
            nn.init.normal_(p, std=0.02)
        return model

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    record(lambda: nn.Linear(2, 2)).replay(lambda name, full: None)  # what torch loads for it
    recorded = record(build)
    before = peak()
    recorded.replay(lambda name, full: None)
    return peak() - before, sum(p.nbytes for p in recorded.model.parameters())


def test_a_replay_holds_one_parameter_at_a_time(ranks: Ranks) -> None:
    """In a process of its own, whose memory nothing else has raised."""
    [(grown, model)] = ranks(1, grown_in_a_replay)
    assert model == 40 * (1024 + 1) * 1024 * 4  # 168 MB
    assert grown < model / 10, f"{grown / 1e6:.0f} of {model / 1e6:.0f} MB"
