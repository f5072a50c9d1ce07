"""Models with published dimensions, from `known.yaml`, and their lookup by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from paceline.errors import InvalidValue
from paceline.text import nearest

# words that describe a training run, a framework or a variant of a model, but not the dimensions
_OTHER = re.compile(
    r"instruct|chat|base|hf|it|pt|pretrain\w*|finetune\w*|sft|lora|release|nightly|sm|mcore|megatron|maxtext|nemo|te|text"
    r"|dropless|tokendrop|alltoall|allgather|flex|mlperf|thinking|uncased|cased|multilingual|en|preview"
    r"|(?:tp|pp|ep|cp|dp|vpp|etp|emp)\d[\da-z]*|dgx|[hab]\d00|gb|gb[23]00|g?[23]00|fp8|bf16|fp16|mxfp8|nvfp4|\dn\dg|v0\.\d|\d{4}"
)
_MAKERS = re.compile(r"meta|nvidia|google|mistralai|qwen|openai|microsoft|deepseek|facebook|mosaicml")
_FURTHER = re.compile(r"w/?o\s*mtp|without mtp|no mtp", re.IGNORECASE)


class KnownModel(NamedTuple):
    """A model with published dimensions.

    Attributes:
        name: usual name of the model.
        family: model family in the documentation's table.
        source: publication that gives the dimensions.
        dimensions: values of `Dimensions`; `seq` is the sequence length of the published training.
        parameters: published number of parameters in billions, without layers for multi-token prediction; None if
            unpublished.
        also: other names of the model.
    """

    name: str
    family: str
    source: str
    dimensions: Mapping[str, Any]
    parameters: float | None
    also: tuple[str, ...] = ()


@cache
def models() -> tuple[KnownModel, ...]:
    """Return all known models."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found = []
    for entry in yaml.load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"), loader):
        keys = entry["of_each"]
        for name, row in entry["models"].items():
            values, (parameters, *also) = row[: len(keys)], row[len(keys) :]
            own = {key: value for key, value in zip(keys, values, strict=True) if value is not None}
            found.append(
                KnownModel(name, entry["family"], entry["source"], {**entry["of_all"], **own}, parameters, tuple(also))
            )
    return tuple(found)


def find_model(name: str) -> KnownModel | None:
    """Return the known model with that name; None if there is none.

    The lookup ignores case, separators, the organization before a slash, and words such as `instruct`.
    """
    by_name = _by_name()
    for words in candidates(name):
        if found := by_name.get("".join(words)):
            return found._replace(dimensions={**found.dimensions, "mtp": 0}) if _FURTHER.search(name) else found
    return None


def must_find_model(name: str) -> KnownModel:
    """Return the known model with that name.

    Raises:
        ValueError: there is no such model; the message names the nearest one.
    """
    if found := find_model(name):
        return found
    raise InvalidValue(
        "model.dimensions_unknown",
        'the dimensions of a model "{name}" are not known. {hint}',
        name=name,
        hint=nearest(name, [m.name for m in models()]),
    )


def candidates(name: str) -> list[list[str]]:
    """Return the parts of a text that may name a model, longest first.

    Organizations and words that do not describe dimensions are omitted.
    """
    plain = re.sub(r"\([^)]*\)", " ", name.lower())
    found = []
    for part in dict.fromkeys((plain, plain.rsplit("/", 1)[-1])):
        words = re.findall(r"[a-z0-9.]+", part)
        starts = [words, *([words[1:]] if len(words) > 1 and _MAKERS.fullmatch(words[0]) else [])]
        for start in starts:
            while start:
                found.append(start)
                if not _OTHER.fullmatch(start[-1]):
                    break
                start = start[:-1]
    return found


def key(name: str) -> str:
    """Return a name without separators."""
    return "".join(re.findall(r"[a-z0-9.]+", name.lower()))


@cache
def _by_name() -> dict[str, KnownModel]:
    return {key(name): model for model in models() for name in (model.name, *model.also)}
