"""Tiny jobs of every model family that the splits are held to, and the size of one large model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.job.job import Job
from paceline.job.model import Dimensions

VOCAB, TOKENS = 48, 16
LLAMA_70B = Dimensions(
    layers=80,
    hidden=8192,
    ffn=28672,
    heads=64,
    kv_heads=8,
    seq=4096,
    vocab=128256,
    gated=True,
    tied=False,
    positions=False,
)

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {  # family: (task, configuration)
    "llama": (
        "causal_lm",
        {
            "model_type": "llama",
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 64,
        },
    ),
    "gpt2": (
        "causal_lm",
        {"model_type": "gpt2", "vocab_size": VOCAB, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64},
    ),
    "bert": (
        "masked_lm",
        {
            "model_type": "bert",
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "pad_token_id": None,
        },
    ),
    "mixtral": (
        "causal_lm",
        {
            "model_type": "mixtral",
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 64,
        },
    ),
    "vit": (
        "image_classification",
        {
            "model_type": "vit",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
            "num_labels": 10,
        },
    ),
    "resnet": (
        "image_classification",
        {
            "model_type": "resnet",
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [2, 2],
            "layer_type": "basic",
            "num_labels": 10,
            "image_size": 16,
        },
    ),
    "t5": (
        "seq2seq_lm",
        {
            "model_type": "t5",
            "vocab_size": VOCAB,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
}
ZOO: dict[str, dict[str, Any]] = {
    "gpt": {"vocab": VOCAB, "context": TOKENS, "layers": 4, "hidden": 32, "heads": 4},
    "moe": {"vocab": VOCAB, "context": TOKENS, "layers": 4, "hidden": 32, "heads": 4, "experts": 4, "top_k": 2},
    "mlp": {},
    "cifar_cnn": {},
}
FAMILIES = (*CONFIGS, *ZOO)


def hugging_face(kind: str, **settings: Any) -> nn.Module:
    """A small model of transformers without dropout. `kind` is its class, such as `LlamaForCausalLM`."""
    import transformers  # here, as every rank that imports this file would wait for it

    transformers.logging.set_verbosity_error()
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 16}
    drops = ("hidden_dropout_prob", "attention_probs_dropout_prob", "attn_pdrop", "resid_pdrop", "embd_pdrop")
    family = re.split("For|LMHead", kind)[0]
    config = getattr(transformers, f"{family}Config")
    model: nn.Module = getattr(transformers, kind)(
        config(**sizes | dict.fromkeys((*drops, "dropout_rate"), 0.0) | settings)
    )
    return model


class Pairs(Dataset[dict[str, Tensor]]):
    """Random token sequences and their targets, as Hugging Face models take them."""

    def __init__(self, samples: int = 64) -> None:
        draw = torch.Generator().manual_seed(5)
        self.inputs = torch.randint(1, VOCAB, (samples, TOKENS), generator=draw)
        self.labels = torch.randint(1, VOCAB, (samples, TOKENS // 2), generator=draw)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.inputs[index], "labels": self.labels[index]}


def family_job(family: str, folder: Path, **changes: Any) -> Job:
    """A job of 64 samples in batches of 16 that trains a model of the family.

    Its configuration is written into `folder`.
    """
    values: dict[str, Any] = {
        "name": family,
        "model": _model(family, folder),
        "data": _data(family),
        "loss": "model" if family == "t5" else "cross_entropy",
        # a large eps: where gradients vanish, Adam magnifies rounding
        "optimizer": {"name": "adamw", "lr": 1e-3, "eps": 1e-3},
        "global_batch": 16,
        "clip_norm": 1.0,
        "stop": {"steps": 5},
        "deadline_s": 60,
    }
    return Job(**(values | changes))


def _model(family: str, folder: Path) -> dict[str, Any]:
    if family in ZOO:
        return {"zoo": family, "args": ZOO[family]}
    task, config = CONFIGS[family]
    file = folder / f"{family}.json"
    file.write_text(json.dumps(config))
    return {"hf": file, "task": task}


def _data(family: str) -> dict[str, Any]:
    if family == "t5":
        return {"kind": "dataset", "factory": "model_families:Pairs", "held_out": 0}
    data: dict[str, Any] = {"kind": "synthetic", "samples": 64, "held_out": 0}
    if family in ("vit", "resnet", "cifar_cnn", "mlp"):
        shapes = {"cifar_cnn": [3, 32, 32], "mlp": [1, 28, 28]}
        return {**data, "shape": shapes.get(family, [3, 16, 16]), "classes": 10}
    return {**data, "shape": [TOKENS], "vocab": VOCAB}
