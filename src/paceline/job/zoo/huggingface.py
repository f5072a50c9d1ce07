"""Models of the transformers library, and the zoo's ResNet-50, BERT and SimCLR.

No code and no weights are downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from paceline.errors import JobError
from paceline.extensions import quiet_transformers
from paceline.job.zoo.models import CIFAR_FEATURES, cifar_convolutions
from paceline.job.zoo.packed import numbered
from paceline.text import nearest

if TYPE_CHECKING:
    from transformers import PretrainedConfig


quiet_transformers()

_AUTO_CLASSES = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "image_classification": "AutoModelForImageClassification",
    "sequence_classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
    "seq2seq_lm": "AutoModelForSeq2SeqLM",
}

_ATTENTION = ("eager", "sdpa", "flex_attention")
_FLASH = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_EXPERTS = ("eager", "batched_mm", "grouped_mm")
_FETCHING = ("trust_remote_code", "use_kernels", "use_pretrained_backbone")


def from_config(
    file: Path, task: str, args: dict[str, Any], *, dtype: str | None = None, attention: str | None = None
) -> nn.Module:
    """Build a randomly initialised model for `task` from a Hugging Face configuration.

    Args:
        args: values that override those of the file.
        dtype: type of the weights, `fp32` or `bf16`; None means `fp32`.
        attention: implementation of attention; None lets transformers choose.

    Raises:
        JobError: transformers or the file is missing, the file is not a configuration, an argument is unknown, or the
            model does not support the task.
    """
    config = _config(file, args)
    auto_class = getattr(_transformers(), _AUTO_CLASSES[task])
    # transformers follows this list if a model type has several classes for a task
    config.architectures = config.architectures or []
    chosen = {} if attention is None else {"attn_implementation": attention}
    try:
        # the plan determines the precision of the computation
        model: nn.Module = auto_class.from_config(
            config, dtype=_DTYPES[dtype or "fp32"], trust_remote_code=False, **chosen
        )
    except ValueError as error:
        tasks = _AUTO_CLASSES.items()
        fitting = [t for t, auto in tasks if type(config) in getattr(_transformers(), auto)._model_mapping]
        if task in fitting:
            raise JobError("model.not_built", "{file}: {error}", file=file, error=_first_line(error)) from error
        raise JobError(
            "model.task_unsupported",
            "{file}: a {model_type} model does not support the task {task}. It supports these tasks: {fitting}",
            file=file,
            model_type=config.model_type,
            task=task,
            fitting=", ".join(fitting) or "none",
        ) from None
    return model


def image_shape(file: Path, args: dict[str, Any]) -> tuple[int, ...] | None:
    """Return the image shape (channels, height, width) of a configuration; None if it sets none."""
    config = _config(file, args)
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
    if isinstance(size, int):
        return (channels, size, size)
    return (channels, *size) if isinstance(size, (list, tuple)) else None


def resnet50(*, classes: PositiveInt = 1000, image_size: PositiveInt = 224) -> nn.Module:
    """Build ResNet-50 (He et al., 2016, arXiv:1512.03385), whose output has `.logits` (n, classes).

    The images are resized to `image_size`.
    """
    transformers = _transformers()
    model: nn.Module = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=classes))
    return model


class ResNetEncoder(nn.Module):
    """ResNet-50 without its classifier; the model maps (n, 3, size, size) to (n, 2048)."""

    features = 2048

    def __init__(self) -> None:
        super().__init__()
        transformers = _transformers()
        self.resnet = transformers.ResNetModel(transformers.ResNetConfig())

    def forward(self, images: Tensor) -> Tensor:
        """Map images (n, 3, size, size) to features (n, 2048)."""
        pooled: Tensor = self.resnet(images).pooler_output
        return pooled.flatten(1)


def bert(
    *,
    layers: PositiveInt = 4,
    hidden: PositiveInt = 256,
    heads: PositiveInt = 4,
    vocab: PositiveInt = 257,
    context: PositiveInt = 128,
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0,
) -> nn.Module:
    """Build BERT with a masked-language head (Devlin et al., 2019, arXiv:1810.04805).

    The model maps tokens (n, t) to `.logits` (n, t, vocab).

    The default model is small. Its vocabulary has the 256 bytes and the mask. Dropout is 0 by default, so every plan
    has the same losses.

    Raises:
        JobError: `hidden` is not a multiple of `heads`.
    """
    if hidden % heads:
        raise JobError(
            "model.hidden_not_multiple",
            "model {name}: hidden ({hidden}) should be a multiple of heads ({heads}), such as {fitting}",
            name="bert",
            hidden=hidden,
            heads=heads,
            fitting=heads * max(1, round(hidden / heads)),
        )
    transformers = _transformers()
    config = transformers.BertConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        max_position_embeddings=context,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        pad_token_id=None,  # no padding token, because 0 is an ordinary byte
    )
    model: nn.Module = transformers.BertForMaskedLM(config)
    model.register_forward_pre_hook(_within_documents, with_kwargs=True)
    return model


def _within_documents(model: Any, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """Confine attention to the documents of packed sequences, which BERT itself does not look for."""
    positions = given.get("position_ids")
    if positions is None or given.get("attention_mask") is not None:
        return args, given
    documents = numbered(positions)
    return args, given | {"attention_mask": (documents.unsqueeze(2) == documents.unsqueeze(1)).unsqueeze(1)}


def _config(file: Path, args: dict[str, Any]) -> PretrainedConfig:
    values = _read_json(file)
    if refused := [*_asks_for_code(values), *_asks_for_code(args)]:
        raise JobError(
            "model.asks_for_code", "{reasons}", reasons="\n".join(f"{file}: {text}" for text in dict.fromkeys(refused))
        )
    if (quantized := values.get("quantization_config")) is not None:
        method = quantized.get("quant_method", "an unknown method") if isinstance(quantized, dict) else quantized
        raise JobError(
            "model.quantized",
            "the weights of {folder} are quantized ({method}), so they cannot be trained. Name the folder of the "
            "unquantized model; `quantize: nf4` in the job then quantizes the weights as they are read.",
            folder=file.parent,
            method=method,
        )
    # the file names third-party code for this type; the class of transformers is used instead
    own_code = values.pop("auto_map", None)
    transformers = _transformers()
    kind = values.pop("model_type", None)
    if kind is None:
        raise JobError(
            "model.no_model_type",
            '{file} has no "model_type", so it is not a Hugging Face model configuration',
            file=file,
        )
    try:
        known = transformers.AutoConfig.for_model(kind)
    except ValueError:
        if isinstance(own_code, dict) and own_code:
            raise JobError(
                "model.needs_own_code",
                '{file}: transformers {version} has no model_type "{model_type}", and the folder\'s own code '
                "({classes}) is never run. Update transformers, or write a function that builds the model from code "
                "that you trust, and name it: model: {{factory: file.py:function, weights: {folder}}}",
                file=file,
                version=transformers.__version__,
                model_type=kind,
                classes=sorted({str(name) for name in own_code.values()}),
                folder=file.parent,
            ) from None
        raise JobError(
            "model.type_unknown",
            '{file}: transformers {version} has no model_type "{model_type}"',
            file=file,
            version=transformers.__version__,
            model_type=kind,
        ) from None
    keys = {*known.to_dict(), *known.attribute_map, "num_labels"}  # num_labels is a property and not a field
    if unknown := [key for key in args if key not in keys]:
        texts = (f'a {kind} configuration has no "{key}". {nearest(key, sorted(keys))}' for key in unknown)
        raise JobError(
            "model.configuration_key_unknown",
            "{problems}",
            problems="\n".join(f"model args for {file}: {text}" for text in texts),
        )
    overridden = _overridden(values, args, known.attribute_map)
    try:
        config: PretrainedConfig = transformers.AutoConfig.for_model(kind, **overridden)
    except Exception as error:  # each configuration class raises different errors for rejected values
        raise JobError(
            "model.configuration_refused", "{file}: {error}", file=file, error=" ".join(str(error).split())
        ) from error
    return config


def _asks_for_code(values: Any, where: str = "") -> Iterator[str]:
    """Yield a message for each setting that would download code or weights."""
    if isinstance(values, list):
        values = dict(enumerate(values))
    if not isinstance(values, dict):
        return
    for key, value in values.items():
        name = f"{where}{key}"
        if "_implementation" in str(key):
            of_experts = "experts" in str(key)
            kind = "experts_implementation" if of_experts else "attn_implementation"
            known = _EXPERTS if of_experts else _known_attention()
            for one in value.values() if isinstance(value, dict) else [value]:
                if one is not None and one not in known:
                    yield (
                        f'{name} "{one}" is not one of {", ".join(known)}: transformers may fetch code for it. '
                        f"Leave {kind} out, or name one of these."
                    )
        elif key in _FETCHING and value:
            yield (
                f"{name} is set, which lets transformers fetch code or weights. Leave it out; `weights:` of the "
                "job's model names a file."
            )
        else:
            yield from _asks_for_code(value, f"{name}.")


def _known_attention() -> tuple[str, ...]:
    """Return the attention implementations that work without a download.

    For any other implementation, transformers may contact the hub.
    """
    return (*_ATTENTION, *(name for name, package in _FLASH.items() if find_spec(package) is not None))


def _overridden(values: dict[str, Any], args: dict[str, Any], aliases: dict[str, str]) -> dict[str, Any]:
    """Merge `args` into `values`; a key and its alias (`n_layer`, `num_hidden_layers`) are the same key."""
    overridden = {aliases.get(key, key): value for given in (values, args) for key, value in given.items()}
    if "num_labels" in args:  # otherwise the class names in the file would determine the number of classes
        overridden.pop("id2label", None)
        overridden.pop("label2id", None)
    return overridden


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise JobError("file.unreadable", "{file} cannot be read: {reason}", file=file, reason=error.strerror) from None
    except ValueError as error:  # invalid JSON or UTF-8
        raise JobError("model.configuration_not_json", "{file} is not JSON: {error}", file=file, error=error) from None
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise JobError(
            "model.configuration_invalid",
            "{file} is not a Hugging Face model configuration: it contains a {kind} instead of keys with values",
            file=file,
            kind=kind,
        )
    return values


def _transformers() -> ModuleType:
    try:
        import transformers
    except ImportError as error:
        raise JobError(
            "model.transformers_missing",
            "this model needs the transformers library. Run: pip install 'paceline[hf]' ({error})",
            error=error,
        ) from None
    # the warnings of transformers about token ids and weights concern pretrained models
    transformers.logging.set_verbosity_error()
    return transformers


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


class SimCLR(nn.Module):
    """A model that projects two random views of each image to vectors of length 1.

    Images (n, 3, size, size) become projections (n, 2, dim), which the loss `contrastive` compares.

    The views of an image depend on its pixels and the number of earlier training steps, but not on the rank. Every plan
    therefore trains on the same views, and so does a resumed run. Evaluations also use random views, because the task
    is to find the two views of the same image; these views are the same in every evaluation. The images are resized to
    `image_size`, which is 224 by default for `resnet50`. `cifar_cnn` supports only 32.

    Raises:
        JobError: the encoder does not support this `image_size`.
    """

    steps: Tensor

    def __init__(
        self,
        *,
        encoder: Literal["cifar_cnn", "resnet50"] = "cifar_cnn",
        dim: PositiveInt = 128,
        image_size: PositiveInt | None = None,
    ) -> None:
        super().__init__()
        if encoder == "cifar_cnn" and image_size not in (None, 32):
            raise JobError(
                "model.image_size",
                "model simclr: the encoder cifar_cnn takes images of 32 x 32, not {image_size}. Leave image_size "
                "out, or use resnet50.",
                image_size=image_size,
            )
        features = CIFAR_FEATURES if encoder == "cifar_cnn" else ResNetEncoder.features
        self.encoder = cifar_convolutions() if encoder == "cifar_cnn" else ResNetEncoder()
        self.projection = nn.Sequential(nn.Linear(features, features // 4), nn.ReLU(), nn.Linear(features // 4, dim))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, images: Tensor) -> Tensor:
        """Map images (n, 3, size, size) to projections (n, 2, dim)."""
        if self.training:
            self.steps += 1
        time = self.steps if self.training else torch.zeros_like(self.steps)
        views = torch.cat([random_view(images, time, number) for number in (0, 1)])
        projected = F.normalize(self.projection(self.encoder(views)), dim=-1)
        return projected.view(2, len(images), -1).transpose(0, 1)


@torch.no_grad()
def random_view(images: Tensor, time: Tensor, number: int) -> Tensor:
    """Randomly crop and flip images (n, c, h, w), and change their contrast and brightness.

    The crop keeps 40 to 100 % of each side and is resized to the original shape. `time` and `number` determine the view
    of an image.
    """
    drawn = _uniform(images, 2 * time + number)
    scale = 0.4 + 0.6 * drawn[:, 0]
    shift = (2 * drawn[:, 1:3] - 1) * (1 - scale)[:, None]  # the crop stays within the image
    flip = torch.where(drawn[:, 3] < 0.5, -1, 1)
    crop = images.new_zeros(len(images), 2, 3, dtype=torch.float32)
    crop[:, 0, 0], crop[:, 1, 1], crop[:, :, 2] = scale * flip, scale, shift
    grid = F.affine_grid(crop, list(images.shape), align_corners=False).to(images.dtype)
    view = F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
    of_each = drawn[:, :, None, None, None]
    contrast, brightness = (0.6 + 0.8 * of_each[:, 4]), 0.8 * of_each[:, 5] - 0.4
    mean = view.mean(dim=(1, 2, 3), keepdim=True)
    # the brightness is scaled by the image's own spread, so it suits any normalization
    spread = view.std(dim=(1, 2, 3), keepdim=True)
    return ((view - mean) * contrast + mean + brightness * spread).to(images.dtype)


_DRAWS = 6
_GOLDEN = -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed number


def _uniform(images: Tensor, key: Tensor) -> Tensor:
    """Return float32 numbers (n, 6) from 0 to 1 that depend only on the pixels and `key`.

    Numbers from torch's generators would depend on the order of a rank's samples.
    """
    # integers, which are equal for every precision of the images
    pixels = (images.flatten(1).to(torch.float32) * 2**16).to(torch.int32)
    place = torch.arange(pixels.shape[1], device=images.device)
    odd = (_mixed(place * _GOLDEN) & 2**31 - 1 | 1).to(torch.int32)
    of_image = (pixels * odd).sum(1, dtype=torch.int64)
    streams = torch.arange(1, _DRAWS + 1, device=images.device) * _GOLDEN
    mixed = _mixed(_mixed(of_image + _mixed(key * _GOLDEN))[:, None] + streams)
    return (mixed >> 40 & 0xFFFFFF).float() / 2**24


def _mixed(x: Tensor) -> Tensor:
    """Apply the finalizer of SplitMix64 (Steele, Lea and Flood, 2014) to int64 values."""
    x = (x ^ (x >> 30 & 2**34 - 1)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & 2**37 - 1)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & 2**33 - 1)
