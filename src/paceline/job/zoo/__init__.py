"""Building of a job's model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from paceline.errors import JobError
from paceline.job.known import find_model
from paceline.job.spec import check_call, checked_args, load_object
from paceline.job.zoo.huggingface import SimCLR, bert, from_config, image_shape, resnet50
from paceline.job.zoo.models import GPT, MoE, cifar_cnn, mlp
from paceline.text import nearest

if TYPE_CHECKING:
    from paceline.job.model import ModelSpec

_MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "cifar_cnn": cifar_cnn,
    "resnet50": resnet50,
    "bert": bert,
    "gpt": GPT,
    "moe": MoE,
    "simclr": SimCLR,
}


def build_model(spec: ModelSpec) -> nn.Module:
    """Build the model that `spec` names, on the CPU, from torch's current random state.

    Raises:
        JobError: the model is unknown (the message names the nearest one), an import fails, the arguments are wrong, or
            the result is not an `nn.Module`.
    """
    if spec.zoo is not None:
        model = _built_in(spec.zoo)
        return model(**checked_args(f"model {spec.zoo}", model, spec.args))
    if spec.hf is not None:
        assert spec.task is not None, "a model with hf always has a task"
        return from_config(spec.config_file(), spec.task, spec.args, dtype=spec.dtype, attention=spec.attention)
    return _from_factory(str(spec.factory), spec.args)


def input_shape(spec: ModelSpec) -> tuple[int, ...] | None:
    """Return the sample shape (channels, height, width) that the model requires; None if it accepts any shape.

    Raises:
        JobError: the model is unknown, an import fails, or the arguments are wrong.
    """
    if spec.hf is not None and spec.task == "image_classification":
        return image_shape(spec.config_file(), spec.args)
    if spec.factory is not None:  # imported here so that a missing package is reported before errors in the data
        load_object(spec.factory)
    if spec.zoo is None:
        return None
    args = checked_args(f"model {spec.zoo}", _built_in(spec.zoo), spec.args)
    if spec.zoo == "mlp":
        return (1, 28, 28)
    if spec.zoo in ("cifar_cnn", "resnet50", "simclr"):
        size = args.get("image_size") or (224 if "resnet50" in (spec.zoo, args.get("encoder")) else 32)
        return (3, size, size)
    return None


def _built_in(name: str) -> Callable[..., nn.Module]:
    if name not in _MODELS:
        raise JobError(
            "model.unknown",
            'unknown zoo model "{name}". {hint} (Your own model: pkg.mod:name or file.py:name)',
            name=name,
            hint=_planned_as(name) or nearest(name, _MODELS),
        )
    return _MODELS[name]


def _planned_as(name: str) -> str:
    """Return how to plan a well-known model; "" if the name is none."""
    known = find_model(name)
    return f"To plan {known.name}, write model: {{transformer: {{name: {known.name}}}}}." if known else ""


def _from_factory(path: str, args: dict[str, Any]) -> nn.Module:
    factory = load_object(path)
    if isinstance(factory, nn.Module) or not callable(factory):
        raise JobError(
            "model.not_a_factory",
            "{path} is a {class_name}. Name a function or class that makes the model from the job's seed.",
            path=path,
            class_name=type(factory).__name__,
        )
    check_call(path, factory, **args)
    model = factory(**args)
    if not isinstance(model, nn.Module):
        raise JobError(
            "model.not_a_module",
            "{path} returned {found}, but a model must be a torch.nn.Module",
            path=path,
            found=_described(model),
        )
    return model


def _described(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__} itself, not an instance of it"
    return "None (is a return missing?)" if value is None else f"a {type(value).__module__}.{type(value).__qualname__}"
