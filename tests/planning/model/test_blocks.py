"""The repeated blocks of models of many shapes.

What sharding, recomputation, compilation and pipelines take as one piece.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.job.zoo.models import GPT, cifar_cnn
from paceline.planning.model.forward_pass import find_blocks, submodules

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
IMAGES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}


def names(prefix: str, n: int) -> list[str]:
    return [f"{prefix}.{i}" for i in range(n)]


@pytest.mark.parametrize(
    ("family", "config", "blocks"),
    [
        ("LlamaForCausalLM", {**SMALL, "num_key_value_heads": 2}, names("model.layers", 3)),
        ("MixtralForCausalLM", {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4}, names("model.layers", 3)),
        ("BertForMaskedLM", SMALL, names("bert.encoder.layer", 3)),
        ("ViTForImageClassification", IMAGES, names("vit.layers", 3)),
        (
            "GPT2LMHeadModel",
            {
                "n_embd": 32,
                "n_layer": 3,
                "n_head": 4,
                "vocab_size": 64,
                "n_positions": 16,
                "bos_token_id": 1,
                "eos_token_id": 1,
            },
            names("transformer.h", 3),
        ),
        (
            "T5ForConditionalGeneration",
            {
                "d_model": 32,
                "d_kv": 8,
                "d_ff": 64,
                "num_layers": 2,
                "num_decoder_layers": 1,
                "num_heads": 4,
                "vocab_size": 64,
            },
            [*names("encoder.block", 2), "decoder.block.0"],
        ),
        (
            "ResNetForImageClassification",
            {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 1], "layer_type": "basic"},
            [*names("resnet.encoder.stages.0.layers", 2), "resnet.encoder.stages.1.layers.0"],
        ),
        (
            "ResNetForImageClassification",
            {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "bottleneck"},
            ["resnet.encoder.stages.0.layers.0", "resnet.encoder.stages.1.layers.0"],
        ),
    ],
)
def test_the_layers_of_hugging_face_s_models_are_found_and_nothing_inside_them(
    family: str, config: dict[str, Any], blocks: list[str]
) -> None:
    import transformers

    model_class = getattr(transformers, family)
    with torch.device("meta"):
        model = model_class(model_class.config_class(**config))

    assert find_blocks(model) == blocks


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
