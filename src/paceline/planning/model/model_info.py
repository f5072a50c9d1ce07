"""Information about a model for checks and predictions: sizes, shapes and the trace."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from paceline.errors import JobError, PlanProblem
from paceline.job.adapter import AdapterSpec
from paceline.job.job import Job, base_precision
from paceline.job.model import Dimensions, ModelSpec
from paceline.job.parameters import ModelNames, float8_layers, matrix_shape, names_of
from paceline.job.quantize import Quantize, quantized_row_bytes
from paceline.planning.model.graph import (
    Layer,
    ModelTrace,
    encoder_layers,
    further_layers,
    layers,
    norm,
    vectors,
    weights,
)

if TYPE_CHECKING:
    from torch import nn

    from paceline.planning.model.forward_pass import Pass
    from paceline.planning.model.graph import Seen
    from paceline.planning.model.tensor.degrees import DividedWeights, TensorDegrees


_HEADS = ("heads", "num_heads", "n_heads", "n_head", "num_attention_heads")
_KEY_VALUE_HEADS = ("key_value_heads", "kv_heads", "num_kv_heads", "n_kv_heads", "num_key_value_heads")


@dataclass(frozen=True)
class ParameterShape:
    """Name and shape of a parameter, without its values.

    Attributes:
        block: name of the repeated block that contains the parameter; `""` outside of repeated blocks.
        expert: True if the parameter belongs to the experts of a mixture.
        quantized_bytes: bytes that the parameter takes in the format of the job's `quantize`; 0 if it keeps its type.
    """

    name: str
    sizes: tuple[int, ...]
    trainable: bool
    block: str
    expert: bool
    quantized_bytes: int = 0

    @property
    def numel(self) -> int:
        """Number of elements of the parameter."""
        return prod(self.sizes)


class Sizes(NamedTuple):
    """Numbers of elements in experts, in other matrices, and in vectors and scalars."""

    experts: int
    matrices: int
    vectors: int


@dataclass(frozen=True)
class ModelInfo:
    """Information about a model. All tuples are in the order in which the model registers its modules.

    Attributes:
        modules: names of all modules except the model itself.
        blocks: names of the repeated blocks, such as the layers of a transformer.
        parameters: all parameters. A tied parameter is listed once.
        tied: groups of names that refer to the same parameter.
        heads: distinct numbers of attention heads in the model.
        key_value_heads: distinct numbers of key-value heads that differ from `heads`, as in grouped-query attention
            (Ainslie et al., 2023, arXiv:2305.13245).
        vocabulary: distinct numbers of rows in the token embeddings.
        experts: distinct numbers of experts in mixtures that hold all their experts in one tensor.
        batch_norms: names of the batch norms that keep running statistics.
        takes_positions: True if the model's `forward` has the argument `position_ids`.
        normalises_batches: True if the model has batch norms, with or without running statistics.
        shaped, matrices: names of the parameters that consist of matrices, and those of hidden layers; see
            `ModelNames`.
        compares_samples: True if the model's own loss compares the samples of a batch, as in CLIP. Such models are
            recognised by the argument `return_loss`.
        float8_layers: names of the linear layers that multiply in float8 under `precision: fp8`.
    """

    modules: tuple[str, ...]
    blocks: tuple[str, ...]
    parameters: tuple[ParameterShape, ...]
    tied: tuple[tuple[str, ...], ...]
    heads: tuple[int, ...]
    key_value_heads: tuple[int, ...]
    vocabulary: tuple[int, ...]
    experts: tuple[int, ...]
    batch_norms: tuple[str, ...]
    takes_positions: bool
    normalises_batches: bool = False
    compares_samples: bool = False
    shaped: tuple[str, ...] = ()
    matrices: tuple[str, ...] = ()
    float8_layers: tuple[str, ...] = ()

    @property
    def names(self) -> ModelNames:
        """All names of each parameter. A tied parameter has several names."""
        tied = {names[0]: names for names in self.tied}
        found = {shape.name: tied.get(shape.name, (shape.name,)) for shape in self.parameters}
        return ModelNames(found, self.shaped, self.matrices)

    @property
    def takes_parts_of_sequences(self) -> bool:
        """True if the tokens of a sequence can be divided among `cp` ranks.

        If False, no plan with `cp` is proposed.
        """
        return bool(self.heads and self.vocabulary and self.takes_positions)

    @property
    def numel(self) -> int:
        """Total number of parameters."""
        return sum(self.total)

    @cached_property
    def total(self) -> Sizes:
        """Sizes of all parameters."""
        return _sizes(self.parameters)

    @cached_property
    def trained(self) -> Sizes:
        """Sizes of the parameters with gradients."""
        return _sizes(shape for shape in self.parameters if shape.trainable)

    @cached_property
    def held_part(self) -> float:
        """Bytes of all parameters as they are held, relative to 4 bytes each.

        The value is 1 without `quantize`.
        """
        held = sum(shape.quantized_bytes or 4 * shape.numel for shape in self.parameters)
        return held / max(4 * self.numel, 1)

    @cached_property
    def kinds_of_blocks(self) -> tuple[Sizes, ...]:
        """Distinct sizes of the repeated blocks."""
        by_block = sorted((shape for shape in self.parameters if shape.block), key=lambda shape: shape.block)
        return tuple(dict.fromkeys(_sizes(shapes) for _, shapes in groupby(by_block, key=lambda shape: shape.block)))


def model_info(spec: ModelSpec) -> ModelInfo:
    """Return information about the model that a job names. It is cached per process.

    The model is built on the meta device if its code allows that. A model given by its dimensions is not built, so
    torch is not needed.

    Raises:
        JobError: the model cannot be built.
    """
    return _model_info_of_json(spec.model_dump_json(), spec.adapter, spec.quantize)


def model_info_of(model: nn.Module) -> ModelInfo:
    """Return information about a model.

    No weight is read, so the parameters may be on the meta device.
    """
    from torch.nn.modules.batchnorm import _BatchNorm

    from paceline.job.zoo.quantized import marked
    from paceline.planning.model.forward_pass import find_blocks, mixtures

    blocks = tuple(find_blocks(model))
    quantized = {f"{name}.weight": kind for name, _, kind in marked(model)}
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    heads, key_value_heads = _numbers(model, _HEADS), _numbers(model, _KEY_VALUE_HEADS)
    by_shape = names_of(model)
    return ModelInfo(
        modules=tuple(name for name, _ in model.named_modules() if name),
        blocks=blocks,
        parameters=tuple(_shape(name, p, blocks, quantized.get(name)) for name, p in model.named_parameters()),
        tied=tuple(tuple(shared) for shared in names.values() if len(shared) > 1),
        heads=heads,
        key_value_heads=tuple(n for n in key_value_heads if n not in heads),
        vocabulary=_distinct(_token_embeddings(model)),
        experts=_distinct(module.num_experts for _, module in mixtures(model)),
        batch_norms=tuple(n for n, m in model.named_modules() if isinstance(m, _BatchNorm) and m.track_running_stats),
        takes_positions="position_ids" in inspect.signature(model.forward).parameters,
        compares_samples="return_loss" in inspect.signature(model.forward).parameters,
        normalises_batches=any(isinstance(m, _BatchNorm) for m in model.modules()),
        shaped=tuple(sorted(by_shape.shaped)),
        matrices=tuple(sorted(by_shape.matrices)),
        float8_layers=tuple(float8_layers(model)),
    )


def state_tensors(job: Job, info: ModelInfo) -> float:
    """Return `Job.state_tensors`; for Muon, the mean over the matrices and the parameters of AdamW."""
    trained = [shape for shape in info.parameters if shape.trainable]
    if job.optimizer.name != "muon" or not trained:
        return job.state_tensors
    matrices = sum(shape.numel for shape in _matrices(job, info))
    return job.state_tensors + 1 - matrices / sum(shape.numel for shape in trained)


def optimizer_bytes(job: Job, tensors: float, size: int) -> float:
    """Return the bytes of optimizer state and weight copies for each trained number.

    Args:
        tensors: the result of `state_tensors`.
        size: bytes of a number of the weights.
    """
    copies = job.weight_copies
    # `optimizer.state` sets the type of the moments, and `tensors` counts them in numbers of 4 bytes
    return size * copies + (4 if job.optimizer.state is not None else size) * (tensors - copies)


def matrix_work(job: Job, info: ModelInfo) -> tuple[float, float]:
    """Return Muon's FLOPs in a step and the number of elements of its matrices."""
    flops = numbers = 0
    for shape in _matrices(job, info):
        rows, columns = matrix_shape(shape.sizes)
        small, large = sorted((rows, columns))
        flops += shape.numel // (rows * columns) * (4 * small * small * large + 2 * small**3)
        numbers += shape.numel
    steps = job.optimizer.args.get("ns_steps", 5)
    return float(flops * steps) if isinstance(steps, int) else 0.0, float(numbers)


def _matrices(job: Job, info: ModelInfo) -> list[ParameterShape]:
    others = job.optimizer.beside_matrices(info.names)
    return [shape for shape in info.parameters if shape.trainable and shape.name not in others]


@cache
def _model_info_of_json(text: str, adapter: AdapterSpec | None, quantize: Quantize | None) -> ModelInfo:
    spec = ModelSpec.model_validate_json(text).adapting(adapter).quantizing(quantize)
    if spec.transformer is not None:
        return model_info_by_dimensions(spec.transformer, quantize)
    return model_info_of(without_memory(spec))


def without_memory(spec: ModelSpec) -> nn.Module:
    """Build a model on the meta device, without memory for its weights.

    If the model's code reads values during construction, the model is built with memory instead. The random state of
    torch is restored.

    Raises:
        JobError: the model cannot be built.
    """
    import torch

    from paceline.own_random import kept_random

    with kept_random():
        # code that reads values may raise anything; a genuine error is raised again below
        with suppress(Exception), torch.device("meta"):
            return spec.build()
        try:
            return spec.build()
        except JobError:
            raise
        except Exception as error:
            name = spec.zoo or spec.factory or spec.hf
            raise JobError(
                "model.not_built_for_check",
                "the model {name} could not be built to check the plan: {kind}: {error}",
                name=name,
                kind=type(error).__name__,
                error=error,
            ) from error


def _shape(name: str, parameter: nn.Parameter, blocks: tuple[str, ...], quantize: Quantize | None) -> ParameterShape:
    block = next((block for block in blocks if name.startswith(f"{block}.")), "")
    of_expert = any("expert" in word and "shared" not in word for word in name.lower().split("."))
    sizes = tuple(parameter.shape)
    return ParameterShape(name, sizes, parameter.requires_grad, block, of_expert, _quantized_bytes(sizes, quantize))


def _quantized_bytes(sizes: tuple[int, ...], kind: Quantize | None) -> int:
    return 0 if kind is None or len(sizes) != 2 else sizes[0] * quantized_row_bytes(kind, sizes[1])


def _sizes(shapes: Iterable[ParameterShape]) -> Sizes:
    found = {"experts": 0, "matrices": 0, "vectors": 0}
    for shape in shapes:
        found["experts" if shape.expert else "matrices" if len(shape.sizes) > 1 else "vectors"] += shape.numel
    return Sizes(**found)


def _numbers(model: nn.Module, names: tuple[str, ...]) -> tuple[int, ...]:
    """Return the distinct integers in attributes with the given names.

    Attributes of all modules and of their Hugging Face configurations are searched.
    """
    found = []
    for module in model.modules():
        for owner in (module, getattr(module, "config", None)):
            values = (getattr(owner, name, None) for name in names)
            found += [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    return _distinct(found)


def _token_embeddings(model: nn.Module) -> list[int]:
    """Return the numbers of rows in the model's token embeddings.

    If no module names its input embeddings, all embeddings with as many rows as a linear layer has outputs are used.
    """
    from torch import nn

    named = [m for module in model.modules() if isinstance(m := _input_embeddings(module), nn.Embedding)]
    outputs = {module.out_features for module in model.modules() if isinstance(module, nn.Linear)}
    alike = [
        module for module in model.modules() if isinstance(module, nn.Embedding) and module.num_embeddings in outputs
    ]
    return [embedding.num_embeddings for embedding in named or alike]


def _input_embeddings(module: nn.Module) -> object:
    """Return the input embeddings of a transformers model, or None.

    Image models raise an exception here, for which the result is also None.
    """
    try:
        found: object = module.get_input_embeddings()  # type: ignore[operator]
    except (NotImplementedError, AttributeError):
        return None
    return found


def _distinct(values: Iterator[int] | list[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(values))


_Sizes = tuple[tuple[str, tuple[int, ...], bool], ...]


def model_info_by_dimensions(d: Dimensions, quantize: Quantize | None = None) -> ModelInfo:
    """Return the information for a model that is given by its dimensions.

    The model is like GPT-2 or, if `gated`, like Llama, which has no biases. The layers are named `layers.0`,
    `layers.1`, …, and the layers of an encoder `encoder.0`, `encoder.1`, ….
    """
    stacks = {"encoder": encoder_layers(d), "layers": layers(d), "further": further_layers(d)}
    blocks = {f"{stack}.{n}": layer for stack, found in stacks.items() for n, layer in enumerate(found)}
    parameters = {layer: _layer(d, layer) for layer in dict.fromkeys(blocks.values())}
    outside = dict(_outside(d))
    inside = [
        ParameterShape(
            f"{block}.{name}",
            sizes,
            True,
            block,
            expert,
            _quantized_bytes(sizes, quantize),
        )
        for block, layer in blocks.items()
        for name, sizes, expert in parameters[layer]
    ]
    before, after = ("tokens", "positions", "segments", "embedding_norm", "encoder_norm"), ("norm", "head", "pooler")
    first, last = (_shapes(outside, names) for names in (before, after))
    return ModelInfo(
        modules=(
            "tokens",
            *(("positions",) if d.positions else ()),
            *(stack for stack, found in stacks.items() if found),
            *(name for block, layer in blocks.items() for name in _modules(block, parameters[layer])),
            "norm",
            "head",
        ),
        blocks=tuple(blocks),
        parameters=(*first, *inside, *last),
        tied=(("tokens.weight", "head.weight"),) if d.tied else (),
        heads=tuple(dict.fromkeys((d.heads, *((d.mamba.heads,) if d.mamba else ())))),
        key_value_heads=(d.key_value_heads,) if d.key_value_heads != d.heads else (),
        vocabulary=(d.vocab,),
        experts=(d.experts,) if d.experts > 1 else (),
        batch_norms=(),
        takes_positions=True,
        shaped=tuple(shape.name for shape in (*first, *inside, *last) if len(shape.sizes) > 1),
        matrices=tuple(shape.name for shape in inside if len(shape.sizes) > 1),
        float8_layers=tuple(
            shape.name.removesuffix(".weight")
            for shape in inside
            if len(shape.sizes) == 2 and not any(size % 16 for size in shape.sizes)
        ),
    )


def _layer(d: Dimensions, layer: Layer) -> _Sizes:
    own = weights(d, layer)
    return (
        *((name, (size,), False) for name, size in vectors(d, layer)),
        *(
            (f"{weight.name}.weight", (*((weight.experts,) if weight.experts else ()), weight.out, weight.into), True)
            if weight.experts
            else (f"{weight.name}.weight", (weight.out, weight.into), False)
            for weight in own
        ),
    )


def _outside(d: Dimensions) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "tokens.weight", (d.vocab, d.hidden)
    if d.positions:
        yield "positions.weight", (d.table, d.hidden)
    if d.segments:
        yield "segments.weight", (d.segments, d.hidden)
        yield from ((name, (size,)) for name, size in norm("embedding_norm", d))
    if d.encoder_layers:
        yield from ((name, (size,)) for name, size in norm("encoder_norm", d))
    yield from ((name, (size,)) for name, size in norm("norm", d))
    if not d.tied:
        yield "head.weight", (d.vocab, d.hidden)
    if d.predicted is not None:
        yield "head.bias", (d.vocab,)
        yield "head.dense.weight", (d.hidden, d.hidden)
        yield "head.dense.bias", (d.hidden,)
    if d.pooled:
        yield "pooler.weight", (d.hidden, d.hidden)
        yield "pooler.bias", (d.hidden,)


def _shapes(outside: dict[str, tuple[int, ...]], modules: tuple[str, ...]) -> Iterator[ParameterShape]:
    return (
        ParameterShape(name, sizes, True, "", False)
        for name, sizes in outside.items()
        if name.partition(".")[0] in modules
    )


def _modules(block: str, parameters: _Sizes) -> Iterator[str]:
    yield block
    yield from (f"{block}.{name}" for name in dict.fromkeys(part for name, *_ in parameters for part in _parents(name)))


def _parents(name: str) -> Iterator[str]:
    words = name.split(".")[:-1]
    return (".".join(words[: n + 1]) for n in range(len(words)))


# number of samples in a trace without values
SAMPLES = 4
# number of samples in a trace with values; batch norms need more than one
REAL_SAMPLES = 2
# largest number of parameters of a model that is built and run with values for a trace; for sequences longer than 200
# tokens, the limit is lower
MOST_REAL = 100_000_000
# maps the job fields that determine the trace, as JSON, to traces
_MODELS: dict[str, TracedModel] = {}


def trace(job: Job, precision: str | None = None, tp: int | None = None) -> ModelTrace:
    """Return the trace of a job's model and loss. It is cached per process.

    The cache key consists of the model, the data, the loss, whether autocast is used, and the weights that `tp`
    divides.

    Args:
        precision: compute precision. With `bf16`, `fp8` or `fp16`, the casts of autocast are traced as well, and
            activations are counted in two-byte elements. None is the same as `fp32`.
        tp: degree of tensor parallelism by which the blocks are divided; None uses the smallest degree that works.

    Raises:
        JobError: the model cannot be built, or the model's code fails on the job's samples; the error names the module.
        DataError: the shape of a sample is known only from the data, and no sample can be read.
    """
    if job.model.transformer is not None:
        from paceline.planning.model.transformer import transformer

        return transformer(job.model.transformer, tp or 1)
    return _traced(job).trace(base_precision(precision or "fp32") in ("bf16", "fp16"), tp)


def undivided_attention(job: Job, tp: int) -> PlanProblem | None:
    """Check that the attention of a job's model can be divided over `tp` ranks.

    The model is traced. A model given by its dimensions has no code and always passes. Raises the same errors as
    `trace`.
    """
    return None if job.model.transformer is not None else _traced(job).undivided_attention(tp)


def _traced(job: Job) -> TracedModel:
    return _MODELS.setdefault(job.model_dump_json(include={"model", "adapter", "data", "loss"}), TracedModel(job))


class TracedModel:
    """Traces of one job's model for each precision and degree of tensor parallelism.

    Each forward pass is run only once. Equal traces share one object.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._passes: dict[bool, Seen | ModelTrace] = {}
        self._traces: dict[tuple[bool, DividedWeights], ModelTrace] = {}

    def trace(self, autocast: bool, tp: int | None) -> ModelTrace:
        """Return the trace, divided by tensor parallelism over `tp` ranks.

        Raises the errors of the function `trace`.
        """
        if autocast not in self._passes:
            self._passes[autocast] = _observed(self._job, autocast)
        seen = self._passes[autocast]
        # estimated from the parameters alone
        if isinstance(seen, ModelTrace):
            return seen
        key = autocast, self._degrees.at(self._degrees.least if tp is None else tp)
        if key not in self._traces:
            from paceline.planning.model.block_graphs import assembled

            made = assembled(seen, model_info(self._job.model), self._job.loss.name, key[1])
            self._traces[key] = replace(made, plain_head=self._degrees.has_plain_head)
        return self._traces[key]

    def undivided_attention(self, tp: int) -> PlanProblem | None:
        """Return the reason why attention cannot be divided over `tp` ranks.

        Raises the errors of the function `trace`.
        """
        return next(iter(self._degrees.refusals(tp)), None)

    @cached_property
    def _degrees(self) -> TensorDegrees:
        """Return the weights divided at each tensor-parallel degree.

        The split's own search finds these weights in a model without memory.
        """
        from paceline.job.loss_items import call
        from paceline.own_random import kept_random
        from paceline.planning.model.forward_pass import batch_of
        from paceline.planning.model.tensor.degrees import TensorDegrees

        loss = self._job.loss.build()
        with kept_random():
            model = without_memory(self._job.model)
            return TensorDegrees(
                model, batch_of(self._job, SAMPLES), lambda model, batch: call(model, batch, loss=loss)
            )


def _observed(job: Job, autocast: bool) -> Seen | ModelTrace:
    """Observe the forward pass of a job's model.

    If the pass cannot run without values, return a trace estimated from the parameters instead.
    """
    from paceline.own_random import kept_random
    from paceline.planning.model.block_graphs import estimated
    from paceline.planning.model.forward_pass import tokens_of

    found = model_info(job.model)
    with kept_random():
        forward = _forward(job, autocast)
        tokens = tokens_of(forward.batch)
        if forward.error is not None and found.numel <= MOST_REAL / max(1.0, tokens / 200):
            forward = _forward_with_values(job, autocast)
            if forward.error is not None:
                raise JobError(
                    "model.forward_failed", "{reason}", reason=_described(forward.error, forward)
                ) from forward.error
    if forward.error is None:
        return forward.seen
    if not _needs_values(forward.error, forward):
        raise JobError("model.forward_failed", "{reason}", reason=_described(forward.error, forward)) from forward.error
    why = (
        f"{forward.module_of(forward.error)} cannot be traced without the values of tensors "
        f"({type(forward.error).__name__})"
    )
    return estimated(found, tokens, why)


def _forward(job: Job, autocast: bool) -> Pass:
    """Run the forward pass on tensors without data.

    The tensors are on the meta device. Under autocast, which the meta device does not support, they are fake CPU
    tensors.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from paceline.planning.model.forward_pass import Pass, batch_of, go_forward
    from paceline.planning.model.recorder import without_logs

    batch = batch_of(job, SAMPLES)
    model = without_memory(job.model)
    if not all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return Pass(
            model,
            batch,
            SAMPLES,
            autocast,
            error=NotImplementedError("the constructor of the model reads values of tensors"),
        )
    if not autocast:
        with torch.device("meta"):
            return go_forward(Pass(model, batch, SAMPLES, autocast), job)
    with without_logs(), FakeTensorMode(allow_non_fake_inputs=True) as without_values:
        model = _of_the_cpu(model)
        batch = batch_of(job, SAMPLES, device="cpu")
        del without_values
        return go_forward(Pass(model, batch, SAMPLES, autocast), job)


def _of_the_cpu(model: nn.Module) -> nn.Module:
    """Replace the meta tensors of a model with fake CPU tensors. Tied tensors stay tied."""
    import torch

    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None and id(tensor) not in made:
                    empty = torch.empty_like(tensor, device="cpu")
                    made[id(tensor)] = (
                        torch.nn.Parameter(empty, tensor.requires_grad) if own is module._parameters else empty
                    )
                if tensor is not None:
                    own[name] = made[id(tensor)]  # type: ignore[assignment]
    return model


def _forward_with_values(job: Job, autocast: bool) -> Pass:
    from paceline.planning.model.forward_pass import Pass, batch_of, go_forward, with_values

    return go_forward(Pass(job.model.build(), with_values(batch_of(job, REAL_SAMPLES)), REAL_SAMPLES, autocast), job)


def _needs_values(error: Exception, forward: Pass) -> bool:
    """True if the forward pass probably failed because tensors have no values."""
    return isinstance(error, NotImplementedError) or bool(forward.seen.asked) or "meta" in str(error).lower()


def _described(error: Exception, forward: Pass) -> str:
    first = next(iter(str(error).splitlines()), "")
    return f"{forward.module_of(error)} fails on the job's samples: {type(error).__name__}: {first}"
