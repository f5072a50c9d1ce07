"""Models of the transformers library: from a configuration file, and the zoo's ResNet-50 and BERT.

Nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from paceline.errors import JobError
from paceline.nearest import nearest

if TYPE_CHECKING:
    from transformers import PretrainedConfig

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
_EXPERTS = ("eager", "batched_mm", "grouped_mm")
_FETCHING = ("trust_remote_code", "use_kernels", "use_pretrained_backbone")


def from_config(file: Path, task: str, args: dict[str, Any]) -> nn.Module:
    """Freshly initialised fp32 model of a Hugging Face configuration file, for `task`.

    `args` override the file's values.

    Raises:
        JobError: no transformers, no such file, no configuration in it, an argument it does not have, or a task the
            model is not made for.
    """
    config = _config(file, args)
    auto_class = getattr(_transformers(), _AUTO_CLASSES[task])
    # transformers goes through them where a kind has several models for a task
    config.architectures = config.architectures or []
    try:
        # precision is the plan's matter
        model: nn.Module = auto_class.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except ValueError as error:
        fitting = [
            name
            for name, auto in _AUTO_CLASSES.items()
            if type(config) in getattr(_transformers(), auto)._model_mapping
        ]
        if task in fitting:
            raise JobError(f"{file}: {_first_line(error)}") from error
        raise JobError(
            f"{file}: a {config.model_type} is not made for {task}. Tasks that it has: {', '.join(fitting) or 'none'}"
        ) from None
    return model


def image_shape(file: Path, args: dict[str, Any]) -> tuple[int, ...] | None:
    """Image shape (channels, height, width) of a configuration; None where it is open."""
    config = _config(file, args)
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
    if isinstance(size, int):
        return (channels, size, size)
    return (channels, *size) if isinstance(size, (list, tuple)) else None


def resnet50(*, classes: PositiveInt = 1000, image_size: PositiveInt = 224) -> nn.Module:
    """ResNet-50 (He et al., 2016, arXiv:1512.03385); output `.logits` (n, classes).

    The data is resized to `image_size`.
    """
    transformers = _transformers()
    model: nn.Module = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=classes))
    return model


class ResNetEncoder(nn.Module):
    """ResNet-50 without its classifier: (n, 3, size, size) to (n, 2048)."""

    features = 2048

    def __init__(self) -> None:
        super().__init__()
        transformers = _transformers()
        self.resnet = transformers.ResNetModel(transformers.ResNetConfig())

    def forward(self, images: Tensor) -> Tensor:
        """(n, 3, size, size) to (n, 2048)."""
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
    """BERT with a masked-language head (Devlin et al., 2019, arXiv:1810.04805).

    Tokens (n, t) to `.logits` (n, t, vocab).

    The default is small and reads bytes: 256 of them and the mask. Dropout is 0 by default, so that every plan has the
    same losses.

    Raises:
        JobError: `hidden` is not a multiple of `heads`.
    """
    if hidden % heads:
        raise JobError(
            f"model bert: hidden ({hidden}) should be a multiple of heads ({heads}), such as "
            f"{heads * max(1, round(hidden / heads))}"
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
        pad_token_id=None,  # byte 0 is a byte as any other
    )
    model: nn.Module = transformers.BertForMaskedLM(config)
    return model


def _config(file: Path, args: dict[str, Any]) -> PretrainedConfig:
    values = _read_json(file)
    if refused := [*_asks_for_code(values), *_asks_for_code(args)]:
        raise JobError("\n".join(f"{file}: {text}" for text in dict.fromkeys(refused)))
    values.pop("auto_map", None)  # names code of others for this kind; transformers' own is taken
    transformers = _transformers()
    kind = values.pop("model_type", None)
    if kind is None:
        raise JobError(f'{file} has no "model_type", so it is not a Hugging Face model configuration')
    try:
        known = transformers.AutoConfig.for_model(kind)
    except ValueError:
        raise JobError(f'{file}: transformers {transformers.__version__} has no model_type "{kind}"') from None
    keys = {*known.to_dict(), *known.attribute_map, "num_labels"}  # num_labels is a property
    if unknown := [
        f'a {kind} configuration has no "{key}". {nearest(key, sorted(keys))}' for key in args if key not in keys
    ]:
        raise JobError("\n".join(f"model args for {file}: {text}" for text in unknown))
    try:
        config: PretrainedConfig = transformers.AutoConfig.for_model(
            kind, **_overridden(values, args, known.attribute_map)
        )
    except Exception as error:  # each kind of configuration has its own for values that it refuses
        raise JobError(f"{file}: {' '.join(str(error).split())}") from error
    return config


def _asks_for_code(values: Any, where: str = "") -> Iterator[str]:
    """Settings in a configuration that would fetch code or weights from the hub, as sentences.

    Such a file may be anybody's.
    """
    if isinstance(values, list):
        values = dict(enumerate(values))
    if not isinstance(values, dict):
        return
    for key, value in values.items():
        name = f"{where}{key}"
        if "_implementation" in str(key):
            kind, known = (
                ("experts_implementation", _EXPERTS)
                if "experts" in str(key)
                else ("attn_implementation", _known_attention())
            )
            for one in value.values() if isinstance(value, dict) else [value]:
                if one is not None and one not in known:
                    yield (
                        f'{name} "{one}" is not one of {", ".join(known)}: transformers may fetch code for it. '
                        f"Leave {kind} out, or name "
                        "one of these."
                    )
        elif key in _FETCHING and value:
            yield (
                f"{name} is set, which lets transformers fetch code or weights. Leave it out; `weights:` of the "
                "job's model names a file."
            )
        else:
            yield from _asks_for_code(value, f"{name}.")


def _known_attention() -> tuple[str, ...]:
    """Attention implementations of transformers and installed packages.

    For others transformers asks the hub if `kernels` is installed.
    """
    return (*_ATTENTION, *(name for name, package in _FLASH.items() if find_spec(package) is not None))


def _overridden(values: dict[str, Any], args: dict[str, Any], aliases: dict[str, str]) -> dict[str, Any]:
    """`values` with `args` in their place; a key and its alias (`n_layer`, `num_hidden_layers`) are one."""
    overridden = {aliases.get(key, key): value for key, value in values.items()} | {
        aliases.get(key, key): value for key, value in args.items()
    }
    if "num_labels" in args:  # else the file's names of the classes decide their number
        overridden.pop("id2label", None)
        overridden.pop("label2id", None)
    return overridden


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise JobError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:  # no JSON, or no UTF-8
        raise JobError(f"{file} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise JobError(
            f"{file} is not a Hugging Face model configuration: it holds a {type(values).__name__}, not "
            "keys with values"
        )
    return values


def _transformers() -> ModuleType:
    try:
        import transformers
    except ImportError as error:
        raise JobError(f"this model needs the transformers library: pip install 'paceline[hf]' ({error})") from None
    transformers.logging.set_verbosity_error()  # its remarks on token ids and weights concern pretrained models
    return transformers


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
