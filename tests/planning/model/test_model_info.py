"""The checks of a plan know a model by these facts; a wrong one refuses what works, or lets through what fails late."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

import paceline
from paceline.cluster.discover import discover
from paceline.comm import Group
from paceline.engine.model_loss import random_module
from paceline.errors import JobError
from paceline.job.job import Job
from paceline.job.model import ModelSpec
from paceline.job.zoo.models import GPT, cifar_cnn
from paceline.planning.model.forward_pass import find_blocks, submodules
from paceline.planning.model.model_info import Sizes, model_info, model_info_of
from paceline.planning.model.record import record_graph
from paceline.planning.model.recorder import restored
from paceline.planning.model.tensor.degrees import TensorDegrees
from paceline.planning.plan import Plan
from paceline.run.build import build_engine
from paceline.run.dry_run.preflight import Preflight
from paceline.split.context_parallel import examine
from paceline.split.fsdp import watched
from paceline.split.record_forward import trace_forward
from refusals import raises
from small_jobs import small_job

BODY: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = BODY | {"vocab_size": 120}


def names(prefix: str, n: int) -> list[str]:
    return [f"{prefix}.{i}" for i in range(n)]


@pytest.mark.parametrize(
    ("family", "config", "blocks", "numbers"),
    [
        (
            "LlamaForCausalLM",
            TEXT | {"num_key_value_heads": 2},
            names("model.layers", 3),
            {"heads": (4,), "key_value_heads": (2,), "vocabulary": (120,), "takes_positions": True},
        ),
        (
            "GPT2LMHeadModel",
            {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 120},
            names("transformer.h", 3),
            {"heads": (4,), "vocabulary": (120,), "takes_positions": True},
        ),
        (
            "BertForMaskedLM",
            TEXT,
            names("bert.encoder.layer", 3),
            {"heads": (4,), "vocabulary": (120,), "takes_positions": True},
        ),
        (
            "T5ForConditionalGeneration",
            {"d_model": 32, "num_layers": 2, "num_decoder_layers": 1}
            | {"num_heads": 4, "d_ff": 64, "d_kv": 8, "vocab_size": 120},
            [*names("encoder.block", 2), "decoder.block.0"],
            {"heads": (4,), "vocabulary": (120,)},
        ),
        (
            "MixtralForCausalLM",
            TEXT | {"num_key_value_heads": 2, "num_local_experts": 6},
            names("model.layers", 3),
            {"heads": (4,), "key_value_heads": (2,), "vocabulary": (120,), "experts": (6,), "takes_positions": True},
        ),
        (
            "ViTForImageClassification",
            BODY | {"image_size": 32, "patch_size": 8},
            names("vit.layers", 3),
            {"heads": (4,)},
        ),
        (
            "ResNetForImageClassification",
            {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 1], "layer_type": "basic"},
            [*names("resnet.encoder.stages.0.layers", 2), "resnet.encoder.stages.1.layers.0"],
            {},
        ),
        (
            "ResNetForImageClassification",
            {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "bottleneck"},
            ["resnet.encoder.stages.0.layers.0", "resnet.encoder.stages.1.layers.0"],
            {},
        ),
    ],
)
def test_blocks_and_what_must_divide_are_found_in_seven_families(
    family: str, config: dict[str, Any], blocks: list[str], numbers: dict[str, Any]
) -> None:
    made = getattr(transformers, family)
    with torch.device("meta"):
        model = made(made.config_class(**config))
    found = model_info_of(model)
    assert list(found.blocks) == blocks
    assert set(found.blocks) < set(found.modules)
    nothing: dict[str, Any] = dict.fromkeys(("heads", "key_value_heads", "vocabulary", "experts"), ())
    nothing |= {"takes_positions": False}
    assert {name: getattr(found, name) for name in nothing} == nothing | numbers
    assert found.batch_norms == tuple(n for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d))
    assert bool(found.batch_norms) == family.startswith("ResNet")


@pytest.mark.parametrize(
    ("zoo", "heads", "vocabulary", "experts", "tied"),
    [
        ("gpt", (4,), (256,), (), (("tokens.weight", "head.weight"),)),
        ("moe", (4,), (256,), (8,), (("tokens.weight", "head.weight"),)),
        ("mlp", (), (), (), ()),
        ("cifar_cnn", (), (), (), ()),
    ],
)
def test_the_zoo_is_known_too(
    zoo: str,
    heads: tuple[int, ...],
    vocabulary: tuple[int, ...],
    experts: tuple[int, ...],
    tied: tuple[tuple[str, ...], ...],
) -> None:
    found = model_info(ModelSpec(zoo=zoo))
    assert (found.heads, found.vocabulary, found.experts, found.tied) == (heads, vocabulary, experts, tied)


def test_sizes_are_those_of_the_model_with_tied_parameters_once() -> None:
    spec = ModelSpec(zoo="moe", args={"layers": 2, "hidden": 16, "heads": 2, "experts": 4})
    found, real = model_info(spec), spec.build()
    assert found.numel == sum(p.numel() for p in real.parameters())
    assert found.total.experts == sum(p.numel() for name, p in real.named_parameters() if "experts" in name)
    assert found.total == found.trained
    assert len(found.kinds_of_blocks) == 1  # both are alike
    outside = sum(shape.numel for shape in found.parameters if not shape.block)
    assert outside + 2 * sum(found.kinds_of_blocks[0]) == found.numel


def test_parameters_without_gradients_are_told_apart() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    model[0].requires_grad_(False)
    found = model_info_of(model)
    assert (found.total, found.trained) == (Sizes(0, 36, 8), Sizes(0, 12, 2))


def test_a_model_is_built_once_and_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    spec = ModelSpec(factory=f"{__file__}:ReadsItsValues")
    assert model_info(spec) is model_info(spec.model_copy())
    assert model_info(spec).modules == ("linear",)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("factory", "code"),
    [
        (f"{__file__}:Broken", "model.not_built_for_check"),
        ("no_such_module:model", "job.import_failed"),
    ],
)
def test_a_model_that_cannot_be_built_says_so(factory: str, code: str) -> None:
    with raises(JobError, code):
        model_info(ModelSpec(factory=factory))


class ReadsItsValues(nn.Module):
    """Cannot be built without memory: it reads a value."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 4) to (n, 4)."""
        y: Tensor = self.linear(x)
        return y


class Broken(nn.Module):
    """Raises something that is not a JobError."""

    def __init__(self) -> None:
        super().__init__()
        raise KeyError("no such width")


def test_the_zoo_s_transformer_is_found_and_with_one_layer_there_is_nothing_that_repeats() -> None:
    assert find_blocks(GPT(layers=3, hidden=16)) == names("blocks", 3)
    assert find_blocks(GPT(layers=1, hidden=16)) == []
    assert find_blocks(nn.Linear(4, 4)) == []


def test_a_plain_sequence_of_layers_can_be_cut_at_the_layers_that_hold_weights() -> None:
    mlp = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))

    assert find_blocks(mlp) == ["0", "2", "5"]
    assert find_blocks(cifar_cnn()) == ["0", "3", "7", "9"]


class Expert(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


class Mixture(nn.Module):
    """A block without norms, whose experts are most of it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Expert()
        self.experts = nn.ModuleList(Expert() for _ in range(4))


def test_experts_are_part_of_their_block() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(Mixture() for _ in range(2)), "head": nn.Linear(4, 4)})

    assert find_blocks(model) == names("layers", 2)
    assert find_blocks(Mixture()) == []


def test_lists_that_cannot_run_are_no_blocks_but_what_they_hold_is() -> None:
    levels = nn.ModuleList(nn.ModuleList([Expert(), Expert(), nn.Linear(4, 4)]) for _ in range(2))

    assert find_blocks(nn.ModuleDict({"down": levels})) == ["down.0.0", "down.0.1", "down.1.0", "down.1.1"]


def test_children_with_numbers_in_their_names_are_a_list_and_a_shared_block_is_one_block() -> None:
    model = nn.Module()
    model.layer1, model.layer2, model.layer3 = Expert(), Expert(), Expert()
    model.layer4 = model.layer1

    assert find_blocks(model) == ["layer1", "layer2", "layer3"]
    assert submodules(model, ["layer3", "layer1"]) == [model.layer3, model.layer1]


CPU = torch.device("cpu")
CODE = '''
import random

import numpy as np
import torch
from torch import nn


class Counting(nn.Module):
    """A model that draws random numbers, and counts its calls in buffers, in a tensor and in attributes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 3)])
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("changed", torch.zeros(()))
        self.register_buffer("past_autograd", torch.zeros(()))
        self.tensor, self.number, self.numbers = torch.zeros(()), 0, []

    def forward(self, x):
        self.replaced = self.replaced + 1
        self.changed += 1
        self.past_autograd.data += 1
        self.tensor += 1
        self.number += 1
        self.numbers.append(self.number)
        for layer in self.layers:
            x = torch.relu(layer(x + 0 * torch.rand(()) + 0 * (random.random() + np.random.rand())))
        return x


class Averaging(nn.Module):
    """A model with a running average of its activations' range in a buffer, as in quantization-aware training."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 24), nn.Linear(24, 6)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        h = torch.relu(self.up(x))
        self.largest = 0.9 * self.largest + 0.1 * h.data.max()
        return x + self.down(h)


def averaging():
    return nn.Sequential(Averaging(), Averaging(), nn.Linear(6, 3))


class WithLoss(Counting):
    """A model that computes its own loss."""

    def forward(self, x):
        return {"loss": super().forward(x).square().mean()}
'''


def counting(kind: str = "Counting") -> nn.Module:
    names: dict[str, Any] = {}
    exec(CODE, names)
    model: nn.Module = names[kind]()
    return model


def call(model: nn.Module, batch: Any) -> Tensor:
    output: Tensor = model(batch[0])
    return output


def run(model: nn.Module, batch: tuple[Tensor, ...]) -> None:
    with restored(model):
        call(model, batch)


def random_states() -> list[object]:
    state = np.random.get_state(legacy=False)
    return [torch.get_rng_state().tolist(), random.getstate(), str(state)]


LOOKS: dict[str, Callable[[nn.Module, tuple[Tensor, ...]], object]] = {
    "a forward pass": run,
    "the trace of fsdp and pp": lambda model, batch: trace_forward(model, batch, call, CPU, whole={""}),
    "the trace of tp and the planner": lambda model, batch: record_graph(model, batch, call),
    "the degrees of tp": lambda model, batch: TensorDegrees(model, batch, call),
    "the choice of fsdp's units": lambda model, batch: watched(model, batch, call, CPU),
    "the examination for cp": lambda model, batch: examine(model, 2, batch, call),
}


def marks(model: Any) -> list[object]:
    names = ("replaced", "changed", "past_autograd", "tensor", "number")
    return [*(float(getattr(model, name)) for name in names), list(model.numbers), set(vars(model))]


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_at_a_model_leaves_no_mark_on_it(look: str) -> None:
    model, batch = counting(), (torch.ones(4, 6), torch.zeros(4))
    before, states = marks(model), random_states()
    LOOKS[look](model, batch)
    assert marks(model) == before
    assert random_states() == states


def job(folder: Path, kind: str = "Counting", **changes: Any) -> Job:
    (folder / "counting.py").write_text(CODE)
    data = {"kind": "synthetic", "samples": 64, "shape": [6], "classes": 3, "held_out": 0}
    return small_job(model={"factory": f"{folder}/counting.py:{kind}"}, data=data, **changes)


def test_looks_of_an_engine_leave_no_mark(tmp_path: Path) -> None:
    for kind, loss in (("Counting", "cross_entropy"), ("WithLoss", "model")):
        own, model = job(tmp_path, kind, loss=loss), counting(kind)
        engine = build_engine(own, Plan(), model, own.data.build(input_shape=None, seed=0), Group())
        before, states = marks(model), random_states()
        random_module(engine.compute, engine.loader.example(4))
        engine.compute.normalization.prepare()
        assert marks(model) == before
        assert model.training
        assert random_states() == states
        engine.close()


@pytest.mark.parametrize("loss", ["cross_entropy", "model"])
def test_a_plan_is_checked_without_drawing_from_the_random_states(tmp_path: Path, loss: str) -> None:
    own = job(tmp_path, "WithLoss" if loss == "model" else "Counting", loss=loss)
    states = random_states()
    for plan in ("tp=2", "pp=2 microbatches=2", "dp=2"):
        Preflight(own).refusal(Plan.parse(plan), discover())
    assert random_states() == states


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("Counting", "tp=2"),
        pytest.param("Counting", "fsdp=2", marks=pytest.mark.slow),
        pytest.param("averaging", "tp=2", marks=pytest.mark.slow),
        ("averaging", "pp=2 microbatches=2"),
    ],
)
def test_buffers_that_forward_replaces_are_those_of_one_process(tmp_path: Path, kind: str, plan: str) -> None:
    found = paceline.check(job(tmp_path, kind), f"{plan} precision=fp64", steps=2)
    assert found.holds
    assert found.largest.buffer < 1e-9
