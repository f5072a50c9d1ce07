"""What the checks of a plan need to know of a model: its blocks, heads, vocabulary, experts and shapes. Found without running it."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from paceline.errors import JobError
from paceline.job.model import ModelSpec

if TYPE_CHECKING:
    from torch import nn

_HEADS = ("heads", "num_heads", "n_heads", "n_head", "num_attention_heads")
_KEY_VALUE_HEADS = ("key_value_heads", "kv_heads", "num_kv_heads", "n_kv_heads", "num_key_value_heads")


@dataclass(frozen=True)
class Shape:
    """A parameter without its values. `block` is the repeated block that holds it, `""` outside of all; `expert`: part of a mixture."""

    name: str
    sizes: tuple[int, ...]
    trainable: bool
    block: str
    expert: bool

    @property
    def numel(self) -> int:
        """How many numbers it holds."""
        return prod(self.sizes)


class Sizes(NamedTuple):
    """How many numbers there are in experts, in other matrices, and in what has fewer dimensions."""

    experts: int
    matrices: int
    vectors: int


@dataclass(frozen=True)
class Anatomy:
    """Facts of a model, all in the order in which it registers its modules.

    Attributes:
        modules: the names of all modules but the model itself.
        blocks: those of the repeated blocks, outermost first: the layers of a transformer.
        parameters: each tied one once.
        tied: names that share one parameter, together.
        heads: the different numbers of attention heads in it.
        key_value_heads: the different numbers of heads of keys and values, where these are fewer (Ainslie et al., 2023, arXiv:2305.13245).
        vocabulary: the different sizes of its token embeddings.
        experts: the different numbers of experts of those of its mixtures that hold them in one tensor.
        batch_norms: the names of the modules that keep running statistics of batches.
        takes_positions: whether `forward` takes `position_ids`.
        normalises_batches: whether it has batch norms, with running statistics or without.
        compares_samples: whether the loss that it computes compares the samples of a batch (CLIP and its kind take `return_loss`).
    """

    modules: tuple[str, ...]
    blocks: tuple[str, ...]
    parameters: tuple[Shape, ...]
    tied: tuple[tuple[str, ...], ...]
    heads: tuple[int, ...]
    key_value_heads: tuple[int, ...]
    vocabulary: tuple[int, ...]
    experts: tuple[int, ...]
    batch_norms: tuple[str, ...]
    takes_positions: bool
    normalises_batches: bool = False
    compares_samples: bool = False

    @property
    def takes_parts_of_sequences(self) -> bool:
        """Whether ranks of `cp` may each hold a part of the tokens, as far as the model's form shows. Only then `cp` is proposed."""
        return bool(self.heads and self.vocabulary and self.takes_positions)

    @property
    def numel(self) -> int:
        """How many numbers all parameters hold together."""
        return sum(self.total)

    @cached_property
    def total(self) -> Sizes:
        """What all parameters hold."""
        return _sizes(self.parameters)

    @cached_property
    def trained(self) -> Sizes:
        """What those hold that have gradients."""
        return _sizes(shape for shape in self.parameters if shape.trainable)

    @cached_property
    def kinds_of_blocks(self) -> tuple[Sizes, ...]:
        """What each repeated block holds; equal ones once."""
        by_block = sorted((shape for shape in self.parameters if shape.block), key=lambda shape: shape.block)
        return tuple(dict.fromkeys(_sizes(shapes) for _, shapes in groupby(by_block, key=lambda shape: shape.block)))


def anatomy(spec: ModelSpec) -> Anatomy:
    """The anatomy of the model that a job names. It is built once per process, on the meta device where its code allows that.

    One that is named by its dimensions is not built, and needs no torch.

    Raises:
        JobError: the model cannot be built.
    """
    return _anatomy_of_json(spec.model_dump_json())


def anatomy_of(model: nn.Module) -> Anatomy:
    """The anatomy of a model at hand; reads no weight, so that they may be on the meta device."""
    from torch.nn.modules.batchnorm import _BatchNorm

    from paceline.trace.blocks import find_blocks

    blocks = tuple(find_blocks(model))
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    heads, key_value_heads = _numbers(model, _HEADS), _numbers(model, _KEY_VALUE_HEADS)
    return Anatomy(
        modules=tuple(name for name, _ in model.named_modules() if name),
        blocks=blocks,
        parameters=tuple(_shape(name, p, blocks) for name, p in model.named_parameters()),
        tied=tuple(tuple(shared) for shared in names.values() if len(shared) > 1),
        heads=heads,
        key_value_heads=tuple(n for n in key_value_heads if n not in heads),
        vocabulary=_distinct(_token_embeddings(model)),
        experts=_distinct(_expert_counts(model)),
        batch_norms=tuple(n for n, m in model.named_modules() if isinstance(m, _BatchNorm) and m.track_running_stats),
        takes_positions="position_ids" in inspect.signature(model.forward).parameters,
        compares_samples="return_loss" in inspect.signature(model.forward).parameters,
        normalises_batches=any(isinstance(m, _BatchNorm) for m in model.modules()),
    )


@cache
def _anatomy_of_json(text: str) -> Anatomy:
    spec = ModelSpec.model_validate_json(text)
    if spec.transformer is not None:
        from paceline.trace.dimensions import anatomy_by_dimensions

        return anatomy_by_dimensions(spec.transformer)
    return anatomy_of(without_memory(spec))


def without_memory(spec: ModelSpec) -> nn.Module:
    """The model on the meta device; a real one where its code reads values while it builds. torch's random state stays as it was.

    Raises:
        JobError: the model cannot be built.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        with suppress(Exception), torch.device("meta"):  # whatever code raises that reads values while it builds; a real fault comes again
            return spec.build()
        try:
            return spec.build()
        except JobError:
            raise
        except Exception as error:
            name = spec.zoo or spec.factory or spec.hf
            raise JobError(f"the model {name} could not be built to check the plan: {type(error).__name__}: {error}") from error


def _shape(name: str, parameter: nn.Parameter, blocks: tuple[str, ...]) -> Shape:
    block = next((block for block in blocks if name.startswith(f"{block}.")), "")
    of_expert = any("expert" in word and "shared" not in word for word in name.lower().split("."))
    return Shape(name, tuple(parameter.shape), parameter.requires_grad, block, of_expert)


def _sizes(shapes: Iterable[Shape]) -> Sizes:
    found = {"experts": 0, "matrices": 0, "vectors": 0}
    for shape in shapes:
        found["experts" if shape.expert else "matrices" if len(shape.sizes) > 1 else "vectors"] += shape.numel
    return Sizes(**found)


def _numbers(model: nn.Module, names: tuple[str, ...]) -> tuple[int, ...]:
    """The different whole numbers that modules, or the Hugging Face configurations of modules, have under one of some names."""
    found = []
    for module in model.modules():
        for owner in (module, getattr(module, "config", None)):
            values = (getattr(owner, name, None) for name in names)
            found += [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    return _distinct(found)


def _token_embeddings(model: nn.Module) -> list[int]:
    """The sizes of what Hugging Face models name as their input; in others, of embeddings as large as one of the model's outputs."""
    from torch import nn

    named = [m for module in model.modules() if isinstance(m := _input_embeddings(module), nn.Embedding)]
    outputs = {module.out_features for module in model.modules() if isinstance(module, nn.Linear)}
    alike = [module for module in model.modules() if isinstance(module, nn.Embedding) and module.num_embeddings in outputs]
    return [embedding.num_embeddings for embedding in named or alike]


def _input_embeddings(module: nn.Module) -> object:
    """As transformers' models answer; those of images raise, for they have none."""
    try:
        found: object = module.get_input_embeddings()  # type: ignore[operator]
    except (NotImplementedError, AttributeError):
        return None
    return found


def _expert_counts(model: nn.Module) -> Iterator[int]:
    """Of modules that hold the parameters of all their experts, each in one tensor: lists of experts cannot be shared out."""
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        count = getattr(module, "num_experts", None)
        if isinstance(count, int) and count > 1 and any(p.dim() == 3 for p in own) and all(p.shape[:1] == (count,) for p in own):
            yield count


def _distinct(values: Iterator[int] | list[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(values))
