"""The models of `benchmarks/models.py`, each as a small job with its meaningful axes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import models_hf
import models_libraries
from models_data import CLASSES
from paceline.job.job import Job

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """A model with the data and the loss that it is trained on.

    Attributes:
        model: as the `model` of a job; a configuration of transformers under "hf" is written to a file first.
        tokens: it attends over the tokens of sequences, so `cp` means something. Attention over patches, frames or
            between an encoder and a decoder counts too.
        experts: it routes tokens to experts that each are a part of one tensor or a module of a list, so `ep` means
            something.
        whole_batch: its loss compares the samples of a batch with each other, so no axis that divides a batch means
            anything.
    """

    name: str
    model: dict[str, Any]
    data: dict[str, Any]
    loss: str = "cross_entropy"
    tokens: bool = False
    experts: bool = False
    whole_batch: bool = False
    changes: dict[str, Any] = field(default_factory=dict)

    def means(self, axis: str) -> bool:
        """Whether the axis can mean anything for this model, decided before it is tried."""
        if axis == "cp":
            return self.tokens
        if axis == "ep":
            return self.experts
        return axis == "tp" or not self.whole_batch

    def job(self, folder: Path) -> Job:
        """The job: a few steps of AdamW on batches of 8, in float32."""
        model = dict(self.model)
        if "hf" in model:
            file = folder / "config.json"
            file.write_text(json.dumps(model["hf"]))
            model["hf"] = file
        values: dict[str, Any] = {
            "name": re.sub(r"[^\w.-]+", "-", self.name),
            "model": model,
            "data": {"kind": "dataset", "factory": f"{HERE}/models_data.py:samples", "held_out": 0, "args": self.data},
            "loss": self.loss,
            # a large eps: where gradients vanish, Adam magnifies rounding
            "optimizer": {"name": "adamw", "lr": 1e-3, "eps": 1e-3},
            "global_batch": 8,
            "clip_norm": 1.0,
            "stop": {"steps": 5},
            "deadline_s": 60,
        }
        return Job(**(values | self.changes))


def cases() -> Iterator[Case]:
    """All of them, those of timm and torchvision where these are installed."""
    yield from _plain()
    yield from _hugging_face()
    if models_libraries.installed("timm"):
        yield from _timm()
    if models_libraries.installed("torchvision"):
        yield from _torchvision()


def _plain() -> Iterator[Case]:
    of_classes = {
        "mlp": "vectors",
        "Convolutions": "images",
        "ResidualNet": "images",
        "SeriesGRU": "series",
        "Mixer": "images",
        "Bare": "vectors",
        "Siamese": "two_vectors",
        "weight_normed": "vectors",
        "discriminator": "images",
        "Recommender": "table",
        "Temporal": "series",
        "Separable": "images",
        "OwnFunction": "vectors",
    }
    for name, kind in of_classes.items():
        yield _own("plain", name, {"kind": kind})
    yield _own("plain", "LanguageLSTM", {"kind": "next_token"})
    yield _own("plain", "TiedByUse", {"kind": "next_token"})
    yield _own("plain", "UNet", {"kind": "restored_images"}, loss="mse")
    yield _own("plain", "Autoencoder", {"kind": "restored_images"}, loss="mse")
    yield _own("plain", "NestedHeads", {"kind": "vectors"}, loss=f"{HERE}/models_plain.py:two_losses")
    yield _own("plain", "ListOfExperts", {"kind": "next_token"}, experts=True)
    yield _own("plain", "EncoderClassifier", {"kind": "labelled_text"}, tokens=True)
    yield _own("plain", "Translator", {"kind": "source_and_target"}, tokens=True)
    for name in ("PositionBias", "Patches"):
        yield _own("plain", name, {"kind": "images"}, tokens=True)
    for name in (
        "SmallGPT",
        "EinsumAttention",
        "RotaryGQA",
        "Universal",
        "TwicePlaced",
        "CausalMultihead",
        "Checkpointed",
    ):
        yield _own("plain", name, {"kind": "next_token"}, tokens=True)


def _hugging_face() -> Iterator[Case]:
    without_attention = ("mamba", "rwkv", "fnet")
    for kind, config in models_hf.CAUSAL.items():
        yield _hf(kind, config, "causal_lm", {"kind": "next_token"}, tokens=kind not in without_attention)
    for kind, config in models_hf.MIXTURES.items():
        yield _hf(kind, config, "causal_lm", {"kind": "next_token"}, tokens=True, experts=True)
    for kind, config in models_hf.MASKED.items():
        yield _hf(kind, config, "masked_lm", {"kind": "masked_token"}, tokens=kind not in without_attention)
    for kind, config in models_hf.SEQ2SEQ.items():
        yield _hf(kind, config, "seq2seq_lm", {"kind": "pairs"}, loss="model", tokens=True)
    for kind, config in models_hf.VISION.items():
        # others attend in windows or to a shrunken grid, or not at all
        attends = kind in ("vit", "deit", "beit", "dinov2")
        size = config.get("image_size", 16)
        yield _hf(kind, config, "image_classification", {"kind": "images", "size": size}, tokens=attends)
    for kind in ("llama", "gpt2"):  # as people train them: padded batches, and the model makes its loss
        padded = _hf(kind, models_hf.CAUSAL[kind], "causal_lm", {"kind": "padded"}, loss="model", tokens=True)
        yield Case(f"hf/{kind}, padded", padded.model, padded.data, padded.loss, tokens=True)
    yield _own("hf", "bert_classifier", {"kind": "labelled_text"}, tokens=True)
    yield _own("hf", "whisper", {"kind": "spoken"}, loss="model", tokens=True)
    for name in ("wav2vec2", "hubert"):
        yield _own("hf", name, {"kind": "sound"}, tokens=True)
    yield _own("hf", "audio_spectrogram_transformer", {"kind": "spectrogram"}, tokens=True)
    for name in ("clip", "siglip"):
        yield _own("hf", name, {"kind": "captioned"}, loss="model", whole_batch=True)


def _timm() -> Iterator[Case]:
    sizes: dict[str, dict[str, Any]] = {
        "test_vit": {"img_size": 32},
        "test_resnet": {},
        "test_efficientnet": {},
        "test_convnext": {},
        "test_nfnet": {},
        "test_byobnet": {},
        "xcit_nano_12_p8_224": {"depth": 2, "embed_dim": 32, "num_heads": 4, "img_size": 32},
    }
    for name, options in sizes.items():
        yield _of_library("timm", name, options, tokens=name == "test_vit")


def _torchvision() -> Iterator[Case]:
    for name in ("squeezenet1_1", "shufflenet_v2_x0_5", "mnasnet0_5", "mobilenet_v3_small"):
        yield _of_library("torchvision", name, {})


def _own(group: str, name: str, data: dict[str, Any], **facts: Any) -> Case:
    return Case(f"{group}/{name}", {"factory": f"{HERE}/models_{group}.py:{name}"}, data, **facts)


def _hf(kind: str, config: dict[str, Any], task: str, data: dict[str, Any], **facts: Any) -> Case:
    return Case(f"hf/{kind}", {"hf": {"model_type": kind, **config}, "task": task}, data, **facts)


def _of_library(library: str, name: str, options: dict[str, Any], *, tokens: bool = False) -> Case:
    model = {"factory": f"{HERE}/models_libraries.py:{library}", "args": {"name": name, **options}}
    return Case(f"{library}/{name}", model, {"kind": "images", "size": 32, "classes": CLASSES}, tokens=tokens)
