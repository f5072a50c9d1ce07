"""Low-rank adapters by the library `peft`, and the names of the base model's parameters."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from paceline.errors import JobError
from paceline.extensions import quiet_transformers
from paceline.job.adapter import ALL_LINEAR, LoraSpec
from paceline.job.parameters import matching, names_of

NAME = "default"  # peft's name of an adapter if there is only one
_MAGNITUDE = f"lora_magnitude_vector.{NAME}.weight"
# classes of layers that peft adapts with weights that are plain parameters
_ADAPTABLE = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_HEADS = ("lm_head", "score", "classifier", "classification_head", "head", "output")


def add_lora(model: nn.Module, spec: LoraSpec) -> nn.Module:
    """Add adapters to layers of a model, in place, and freeze all other parameters.

    The adapters' weights are drawn from torch's current random state, as `peft` draws them.

    Raises:
        JobError: `peft` is missing, a pattern matches no layer or parameter (the message names the nearest), or a layer
            is of a kind that cannot be adapted.
    """
    peft = _peft()
    names = names_of(model)
    whole = set(matching("adapter.lora.train", spec.train, names))
    targets = targets_of(model, spec)
    _refuse_unmergeable(model, spec, targets)
    if inside := next((name for name in whole for target in targets if name.startswith(f"{target}.")), None):
        raise JobError(
            "adapter.trained_twice",
            "adapter.lora.train matches {name}, but its layer also gets an adapter. Remove the layer from targets, or "
            "the parameter from train.",
            name=inside,
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tied weights, which are named in the documentation
        peft.inject_adapter_in_model(peft_config(model, spec, targets), model, NAME)
    peft.tuners.tuners_utils.cast_adapter_dtype(model, NAME)
    held = dict(model.named_parameters())
    for name in whole:
        held[name].requires_grad_(True)
    return model


def peft_config(model: nn.Module, spec: LoraSpec, targets: list[str]) -> Any:
    """Return peft's configuration of adapters for the layers `targets` of a model.

    The model may already have the adapters.
    """
    return _peft().LoraConfig(
        r=spec.r,
        lora_alpha=int(spec.alpha) if spec.alpha.is_integer() else spec.alpha,
        target_modules=_condensed(model, targets),
        lora_dropout=spec.dropout,
        use_dora=spec.dora,
        fan_in_fan_out=any(_is_transposed(model.get_submodule(name)) for name in targets),
    )


def targets_of(model: nn.Module, spec: LoraSpec) -> list[str]:
    """Return the names of the layers of a model without adapters that get one.

    Raises:
        JobError: a pattern matches no layer, or a layer of a kind that cannot be adapted.
    """
    layers = {name: module for name, module in model.named_modules() if name and _adaptable(module)}
    if spec.targets == (ALL_LINEAR,):
        head = _head(model)
        found = [name for name, m in layers.items() if _is_linear(m) and m is not head]
    else:
        named = {name: (name,) for name in layers}
        found = matching("adapter.lora.targets", spec.targets, named, what="layer that can get an adapter")
    if not found:
        raise JobError(
            "adapter.no_linear_layer",
            "adapter.lora.targets is {all_linear}, but the model has no linear layer besides its output head. Name the "
            "layers: targets: [PATTERN]",
            all_linear=ALL_LINEAR,
        )
    return found


def base_names(model: nn.Module) -> dict[str, str | None]:
    """Map names in a state dict to names without adapters; adapters map to None."""
    adapted = [f"{name}." for name, _ in lora_layers(model)]
    found: dict[str, str | None] = {}
    for name in model.state_dict(keep_vars=True):
        prefix = next((prefix for prefix in adapted if name.startswith(prefix)), None)
        if prefix is None:
            found[name] = name
        else:
            rest = name.removeprefix(prefix)
            found[name] = prefix + rest.removeprefix("base_layer.") if rest.startswith("base_layer.") else None
    return found


def magnitudes(names: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
    """Yield the name of each of DoRA's magnitudes, with the published name of its weight."""
    for name, published in names.items():
        if published is None and name.endswith(_MAGNITUDE):
            yield name, name.removesuffix(_MAGNITUDE) + "weight"


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name and module of each layer with an adapter."""
    if "peft" not in sys.modules:
        return
    layer: Any = _peft().tuners.lora.LoraLayer
    yield from ((name, module) for name, module in model.named_modules() if isinstance(module, layer))


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Fold all adapters into their base layers, in place, and restore the base model's names."""
    for name, layer in list(lora_layers(model)):
        layer.merge(safe_merge=True)
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, layer.get_base_layer())


def _refuse_unmergeable(model: nn.Module, spec: LoraSpec, targets: list[str]) -> None:
    names = {id(p): names for p, names in ((p, names_of(model)[n]) for n, p in model.named_parameters())}
    for target in targets:
        layer: Any = model.get_submodule(target)
        tied = names[id(layer.weight)]
        if len(tied) > 1:
            raise JobError(
                "adapter.tied_layer",
                "adapter.lora.targets matches {layer}, whose weight is tied: {names}. An adapter would change only one "
                "of these layers. Leave the layer out of targets.",
                layer=target,
                names=list(tied),
            )
        if spec.dora and type(layer) is not nn.Linear:
            raise JobError(
                "adapter.dora_of_layer",
                "adapter.lora.dora supports only nn.Linear, but {layer} is {kind}. Leave the layer out of targets, or "
                "remove dora.",
                layer=target,
                kind=type(layer).__name__,
            )


def _peft() -> Any:
    quiet_transformers()  # peft imports the same libraries
    try:
        import peft
    except ImportError as error:
        raise JobError(
            "adapter.peft_missing",
            "adapter needs the peft library. Run: pip install 'paceline[tune]' ({error})",
            error=error,
        ) from None
    return peft


def _adaptable(module: nn.Module) -> bool:
    return isinstance(module, _ADAPTABLE) or _is_transposed(module)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or _is_transposed(module)


def _is_transposed(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"  # of transformers, whose weight is (inputs, outputs)


def _head(model: Any) -> nn.Module | None:
    """Return the output head.

    It is the head of a transformers model, a layer with the name of a head, or the last linear layer.
    """
    if hasattr(model, "get_output_embeddings") and (found := model.get_output_embeddings()) is not None:
        return found  # type: ignore[no-any-return]
    if (named := next((n for n in _HEADS if isinstance(getattr(model, n, None), nn.Module)), None)) is not None:
        return getattr(model, named)  # type: ignore[no-any-return]
    return next((m for m in reversed(list(model.modules())) if _is_linear(m)), None)


def _condensed(model: nn.Module, targets: list[str]) -> list[str] | str:
    """Return short names of the layers if these are unambiguous, else a regular expression."""
    ends = sorted({name.rpartition(".")[2] for name in targets})
    adapted = {f"{name}." for name, _ in lora_layers(model)}
    names = [name for name, _ in model.named_modules() if not any(name.startswith(prefix) for prefix in adapted)]
    if {name for name in names if name.rpartition(".")[2] in ends} == set(targets):
        return ends
    return "|".join(map(re.escape, targets))
