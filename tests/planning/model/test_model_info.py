"""The checks of a plan know a model by these facts; a wrong one refuses what works, or lets through what fails late."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from paceline.errors import JobError
from paceline.job.model import ModelSpec
from paceline.planning.model.model_info import ModelInfo, Sizes, model_info, model_info_of

BODY: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = BODY | {"vocab_size": 120}
FAMILIES: dict[str, tuple[Any, Any]] = {
    "Llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**TEXT, num_key_value_heads=2)),
    "GPT2": (transformers.GPT2LMHeadModel, transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=120)),
    "Bert": (transformers.BertForMaskedLM, transformers.BertConfig(**TEXT)),
    "T5": (
        transformers.T5ForConditionalGeneration,
        transformers.T5Config(d_model=32, num_layers=3, num_heads=4, d_ff=64, d_kv=8, vocab_size=120),
    ),
    "Mixtral": (
        transformers.MixtralForCausalLM,
        transformers.MixtralConfig(**TEXT, num_key_value_heads=2, num_local_experts=6),
    ),
    "ViT": (transformers.ViTForImageClassification, transformers.ViTConfig(**BODY, image_size=32, patch_size=8)),
    "ResNet": (
        transformers.ResNetForImageClassification,
        transformers.ResNetConfig(depths=[1, 2], hidden_sizes=[8, 16], embedding_size=8),
    ),
}


def of(family: str) -> ModelInfo:
    made, config = FAMILIES[family]
    with torch.device("meta"):
        return model_info_of(made(config))


@pytest.mark.parametrize(
    ("family", "blocks", "heads", "key_value_heads", "vocabulary", "experts", "takes_positions"),
    [
        ("Llama", 3, (4,), (2,), (120,), (), True),
        ("GPT2", 3, (4,), (), (120,), (), True),
        ("Bert", 3, (4,), (), (120,), (), True),
        ("T5", 6, (4,), (), (120,), (), False),
        ("Mixtral", 3, (4,), (2,), (120,), (6,), True),
        ("ViT", 3, (4,), (), (), (), False),
        ("ResNet", 3, (), (), (), (), False),
    ],
)
def test_what_must_divide_is_found_in_seven_families(
    family: str,
    blocks: int,
    heads: tuple[int, ...],
    key_value_heads: tuple[int, ...],
    vocabulary: tuple[int, ...],
    experts: tuple[int, ...],
    takes_positions: bool,
) -> None:
    found = of(family)
    assert len(found.blocks) == blocks
    assert set(found.blocks) < set(found.modules)
    assert (found.heads, found.key_value_heads, found.vocabulary, found.experts) == (
        heads,
        key_value_heads,
        vocabulary,
        experts,
    )
    assert found.takes_positions == takes_positions
    assert len(found.batch_norms) == (0 if family != "ResNet" else 11), found.batch_norms


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
    ("factory", "message"),
    [
        (f"{__file__}:Broken", r"the model .*:Broken could not be built to check the plan: KeyError: 'no such width'"),
        ("no_such_module:model", "no_such_module"),
    ],
)
def test_a_model_that_cannot_be_built_says_so(factory: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
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
