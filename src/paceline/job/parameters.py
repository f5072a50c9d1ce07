"""Selection of a model's parameters by name patterns, for parameter groups and frozen layers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import BeforeValidator

from paceline.errors import JobError

if TYPE_CHECKING:
    from torch import Tensor, nn


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


# `bias`, or `[bias, "*norm*"]`
Patterns: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(_listed)]
# for each parameter's name in a checkpoint, all names of the parameter; tied parameters have several
Names: TypeAlias = Mapping[str, Sequence[str]]


class ModelNames(dict[str, Sequence[str]]):
    """`Names` of a model, and which of its parameters consist of matrices.

    Attributes:
        shaped: parameters with two dimensions, filters of 2-D and 3-D convolutions, and stacks of experts' matrices.
        matrices: those of hidden layers, which Muon orthogonalizes by default. Embeddings, positions and the output
            layer are not among them, as in https://kellerjordan.github.io/posts/muon/.
    """

    def __init__(self, names: Names, shaped: Iterable[str], matrices: Iterable[str]) -> None:
        super().__init__(names)
        self.shaped, self.matrices = frozenset(shaped), frozenset(matrices)


def matching(key: str, patterns: Iterable[str], names: Names, *, what: str = "parameter of the model") -> list[str]:
    """Return the names of the parameters that at least one pattern matches.

    A plain pattern (`bias`, `encoder.norm`) matches one or more whole components of a dotted name. A pattern with
    `*`, `?` or `[` matches the whole name or one component.

    Args:
        key: the job's key with the patterns, for the error.
        what: noun for the named things, for the error.

    Raises:
        JobError: a pattern matches no parameter; the message names similar parameters.
    """
    found: dict[str, None] = {}
    for pattern in patterns:
        own = [name for name, aliases in names.items() if any(_matches(pattern, alias) for alias in aliases)]
        if not own:
            raise JobError(
                "job.pattern_unmatched",
                '{key}: no {what} matches "{pattern}". {hint}',
                key=key,
                what=what,
                pattern=pattern,
                hint=_like(pattern, names),
            )
        found |= dict.fromkeys(own)
    return [name for name in names if name in found]


def is_dense(tensor: Tensor) -> bool:
    """Return True if a tensor's memory has no gaps and no overlaps.

    The dimensions may be in any order, e.g. channels-last. torch's fused optimizer steps read memory in order, so they
    update other parameters wrongly.
    """
    expected = 1
    for stride, size in sorted((stride, n) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape of a parameter's matrices, such as the experts in a stack."""
    return (shape[-2], shape[-1]) if len(shape) < 4 else (shape[0], prod(shape[1:]))


def names_of(model: nn.Module) -> ModelNames:
    """Return all names of each parameter of an undivided model, and which parameters are matrices."""
    from torch import nn

    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    tables, stacks = set[int](), set[int]()
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            tables |= {id(p) for p in own}
        elif isinstance(count := getattr(module, "num_experts", None), int):
            stacks |= {id(p) for p in own if p.dim() == 3 and len(p) == count}
    shaped = {name: p for name, p in model.named_parameters() if p.dim() in (2, 4, 5) or id(p) in stacks}
    hidden = {
        name: p
        for name, p in shaped.items()
        if id(p) not in tables and not any(word in name.lower() for word in ("embed", "position"))
    }
    output = _output_layer(model, tables)
    if output is None and hidden:
        named = [p for name, p in hidden.items() if name.count(".") < 2 and _OUTPUT_LAYERS.intersection(_words(name))]
        output = (named or list(hidden.values()))[-1]
    matrices = (name for name, p in hidden.items() if p is not output)
    return ModelNames({names[0]: names for names in found.values()}, shaped, matrices)


def float8_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers that multiply in float8 under `precision: fp8`, by name.

    These are the trained layers whose sizes are multiples of 16, which the kernels need. Output layers, routers of
    experts and layers that share a weight are not among them, nor are subclasses, whose code may differ.
    """
    from torch import nn

    names = names_of(model)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and module.weight.requires_grad
        and module.in_features % 16 == module.out_features % 16 == 0
        and f"{name}.weight" in names.matrices
        and len(names[f"{name}.weight"]) == 1
        and name.rpartition(".")[2] not in _ROUTERS
    }


def _output_layer(model: nn.Module, tables: set[int]) -> Tensor | None:
    """Return the output layer's weight, if the model names or ties the layer."""
    from torch import nn

    with suppress(AttributeError, NotImplementedError):
        if (found := model.get_output_embeddings()) is not None:  # type: ignore[operator]
            return found.weight  # type: ignore[no-any-return]
    linear = (module.weight for module in model.modules() if isinstance(module, nn.Linear))
    return next((weight for weight in linear if id(weight) in tables), None)


_ROUTERS = {"gate", "router"}
_OUTPUT_LAYERS = {"head", "classifier", "fc", "logits", "output", "score"}


def _words(name: str) -> list[str]:
    return name.lower().replace("_", ".").split(".")


def _matches(pattern: str, name: str) -> bool:
    if any(letter in pattern for letter in "*?["):
        return fnmatchcase(name, pattern) or any(fnmatchcase(part, pattern) for part in name.split("."))
    return f".{pattern}." in f".{name}."


def _like(pattern: str, names: Names) -> str:
    """Return parameter names similar to the pattern, or the first names if none is similar."""
    plain = pattern.strip("*.")
    inside = [name for name in names if plain and plain.lower() in name.lower()]
    parts = dict.fromkeys(part for name in names for part in (name, *name.split(".")))
    close = inside or difflib.get_close_matches(plain, parts, n=3)
    if inside:
        return f'Names with "{plain}" in them: {_few(inside)}: "*{plain}*" matches them.'
    return f"Did you mean {_few(close)}?" if close else f"There are {_few(list(names))}."


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
