"""A loss in chunks is the loss of whole logits, with its gradients and metrics under every plan, or it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, TensorDataset

import paceline
from paceline.errors import DataError, JobError
from paceline.job.loss import build_metrics
from paceline.job.zoo.losses import CrossEntropy
from paceline.job.zoo.models import GPT
from paceline.split.cross_entropy import chunked_cross_entropy
from ranks import Ranks
from refusals import raises
from simulated.environment import Simulated

SAMPLES, TOKENS, VOCAB, WIDTH, BATCH = 20, 6, 10, 8, 7  # the last batch of an epoch has 6 samples
STEPS = 4


def padded(samples: int = SAMPLES) -> Dataset[Any]:
    """Sequences with labels of different numbers; those of the third sequence are all ignored."""
    drawn = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(0, VOCAB, (samples, TOKENS), generator=drawn) for _ in range(2))
    lengths = torch.randint(1, TOKENS + 1, (samples, 1), generator=drawn)
    lengths[2] = 0
    return TensorDataset(tokens, torch.where(torch.arange(TOKENS) < lengths, labels, -100))


class Decoder(GPT):
    """The zoo's GPT, whose head has the weight of its embedding; or a weight and a bias of its own (`untied`)."""

    def __init__(self, scale: float | None = None, untied: bool = False) -> None:
        super().__init__(vocab=VOCAB, context=TOKENS, layers=2, hidden=WIDTH, heads=2)
        self.scale = scale
        if untied:
            self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        logits = super().forward(input_ids, position_ids)
        return logits if self.scale is None else logits * self.scale


def engine_of(model: nn.Module, loss: Any, plan: str, data: Dataset[Any] | None = None) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(padded() if data is None else data, batch_size=BATCH)
    return paceline.setup(model, optimizer, loss=loss, loader=loader, plan=plan)


def losses(plan: str, loss: dict[str, Any], model: dict[str, Any] | None = None) -> list[float]:
    torch.manual_seed(4)
    engine = engine_of(Decoder(**(model or {})), CrossEntropy(**loss), f"{plan} precision=fp64")
    found: list[float] = []
    while len(found) < STEPS:
        found += [engine.step(batch).loss for batch in engine.loader]
    engine.close()
    return found[:STEPS]


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 9)),
    classes=st.integers(2, 33),
    chunk=st.none() | st.integers(1, 40),
    ignored=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    smoothing=st.sampled_from([0.0, 0.1]),
    weighted=st.booleans(),
    transposed=st.booleans(),
    skips=st.booleans(),
    frozen=st.booleans(),
    seed=st.integers(0, 999),
)
def test_value_and_gradients_are_those_of_whole_logits(
    shape: tuple[int, int],
    classes: int,
    chunk: int | None,
    ignored: float,
    smoothing: float,
    weighted: bool,
    transposed: bool,
    skips: bool,
    frozen: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    hidden = torch.randn(*shape, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(*(5, classes) if transposed else (classes, 5), dtype=torch.float64, requires_grad=not frozen)
    bias = torch.randn(classes, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, classes, shape).where(torch.rand(shape) >= ignored, -100)
    class_weight = torch.rand(classes, dtype=torch.float64) + 0.1 if weighted else None
    made = chunked_cross_entropy(
        hidden,
        weight,
        bias,
        target,
        chunk=chunk,
        label_smoothing=smoothing,
        class_weight=class_weight,
        loss_scale=8.0,
        transposed=transposed,
        skips=skips,
    )
    logits = F.linear(hidden, weight.T if transposed else weight, bias)
    expected = F.cross_entropy(
        logits.flatten(0, 1), target.flatten(), weight=class_weight, label_smoothing=smoothing, reduction="sum"
    )
    counted = target[target != -100]
    items = float(len(counted) if class_weight is None else class_weight[counted].sum())
    expected = expected / items if items else expected * 0
    inputs = [hidden, bias] if frozen else [hidden, bias, weight]
    torch.testing.assert_close(made.reshape(()), expected, rtol=1e-12, atol=1e-14)
    for own, reference in zip(
        torch.autograd.grad(made.sum() * 0.37, inputs), torch.autograd.grad(expected * 0.37, inputs), strict=True
    ):
        torch.testing.assert_close(own, reference, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_in_16_bits_it_is_as_accurate_as_whole_logits(narrow: torch.dtype, autocast: bool) -> None:
    torch.manual_seed(1)
    drawn = torch.randn(256, 32) * 2, torch.randn(500, 32) * 0.2
    target = torch.randint(0, 500, (256,))

    def errors(of: Any, dtype: torch.dtype, reference: list[Tensor]) -> list[Tensor]:
        inputs = [t.to(dtype).requires_grad_() for t in drawn]
        with torch.autocast("cpu", narrow, enabled=dtype != torch.float64 and autocast):
            loss = of(*inputs)
        found = [loss.detach().reshape(()), *torch.autograd.grad(loss.sum() * 1000, inputs)]
        return (
            [(a.double() - b).norm() / b.norm() for a, b in zip(found, reference, strict=True)] if reference else found
        )

    def whole(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight), target)

    def chunked(hidden: Tensor, weight: Tensor) -> Tensor:
        return chunked_cross_entropy(hidden, weight, None, target, loss_scale=1000.0)

    exact = errors(whole, torch.float64, [])
    dtype = torch.float32 if autocast else narrow
    for own, plain in zip(errors(chunked, dtype, exact), errors(whole, dtype, exact), strict=True):
        assert float(own) <= 1.1 * float(plain) + 1e-6


PLANS = {
    1: ["dp=1", "dp=1 microbatches=3", "dp=1 remat=block"],
    2: ["dp=2", "fsdp=2 microbatches=2", "tp=2", "pp=2 microbatches=2", "cp=2", "tp=2 sequence=on"],
    3: ["dp=3", "fsdp=3"],
    4: ["fsdp=2 tp=2", "dp=2 pp=2", "tp=2 pp=2 microbatches=2", "dp=2 pp=2 schedule=zero-bubble microbatches=4"],
}
OPTIONS: list[dict[str, Any]] = [{}, {"label_smoothing": 0.1, "weight": [0.5 + c / 4 for c in range(VOCAB)]}]


def all_losses(plans: list[str], chunk: int) -> list[list[float]]:
    return [losses(plan, options | {"chunk": chunk}) for plan in plans for options in OPTIONS]


def expected_losses(count: int) -> list[list[float]]:
    return [losses("dp=1", options | {"chunk": "off"}) for options in OPTIONS] * count


@pytest.mark.parametrize(
    "size", [1, 2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_training_is_that_of_one_process_with_whole_logits(ranks: Ranks, size: int) -> None:
    plans = PLANS[size]
    for of_rank in ranks(size, all_losses, plans, 4) if size > 1 else [all_losses(plans, 4)]:
        for own, expected in zip(of_rank, expected_losses(len(plans)), strict=True):
            assert own == pytest.approx(expected, rel=1e-12)


def test_a_head_with_a_bias_and_a_weight_of_its_own_is_trained_alike(ranks: Ranks) -> None:
    untied = {"untied": True}
    expected = losses("dp=1", {"chunk": "off"}, untied)
    for plan in ("fsdp=2", "tp=2"):
        for own in ranks(2, losses, plan, {"chunk": 3}, untied):
            assert own == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_accelerators_compute_the_same_loss(simulated: Simulated, plan: str) -> None:
    expected = losses("dp=1", {"chunk": "off"})
    for own in simulated.ranks(2, losses, plan, {"chunk": 4}):
        assert own == pytest.approx(expected, rel=1e-12)


def test_logits_that_the_model_changes_are_computed_whole_or_refused() -> None:
    with raises(JobError, "loss.chunk_impossible", chunk=3):
        losses("dp=1", {"chunk": 3}, {"scale": 0.5})
    expected = losses("dp=1", {"chunk": "off"}, {"scale": 0.5})
    assert losses("dp=1", {"chunk": "auto"}, {"scale": 0.5}) == expected


def test_a_hook_on_the_head_gets_whole_logits() -> None:
    model, shapes = Decoder(), []
    model.head.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape[-1]))
    with raises(JobError, "loss.chunk_impossible"):
        engine_of(model, CrossEntropy(chunk=3), "dp=1")
    later = Decoder()
    engine = engine_of(later, CrossEntropy(chunk=3), "dp=1")
    later.head.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape[-1]))
    shapes.clear()
    engine.step(next(iter(engine.loader)))
    engine.close()
    assert set(shapes) == {VOCAB}


def test_a_label_out_of_range_is_named_with_its_sample() -> None:
    tokens = torch.zeros(BATCH, TOKENS, dtype=torch.int64)
    labels = tokens.clone()
    labels[2, 3] = VOCAB
    engine = engine_of(Decoder(), CrossEntropy(chunk=3), "dp=1", TensorDataset(tokens, labels))
    with raises(DataError, "loss.label_out_of_range", label=VOCAB, largest=VOCAB - 1):
        engine.step(next(iter(engine.loader)))
    engine.close()


class Largest(TorchDispatchMode):
    """Size of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        # a view of one number has no memory
        sizes = [t.untyped_storage().nbytes() // t.itemsize for t in tree_leaves(made) if isinstance(t, Tensor)]
        self.numel = max(self.numel, *sizes, 0)
        return made


class Packed(Dataset[Any]):
    """Sequences of two documents each."""

    packed = True

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.arange(index, index + 256)
        return {"input_ids": ids, "position_ids": torch.arange(256) % 128, "labels": ids + 1}


@pytest.mark.parametrize("chunk", [32, "off"])
def test_no_tensor_has_the_size_of_whole_logits(chunk: Any) -> None:
    classes, loss = 2000, CrossEntropy(chunk=chunk)
    model = GPT(vocab=classes, context=256, layers=1, hidden=8, heads=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = paceline.setup(model, optimizer, loss=loss, loader=DataLoader(Packed(), batch_size=4), plan="dp=1")
    with Largest() as largest:
        for batch in engine.loader:  # the first step also checks that documents do not mix
            engine.step(batch)
        engine.evaluate(DataLoader(Packed(), batch_size=4), build_metrics(["accuracy", "perplexity"], loss))
    engine.close()
    assert (largest.numel >= 256 * classes) == (chunk == "off")


def metrics_of(plan: str, chunk: Any) -> dict[str, float]:
    torch.manual_seed(4)
    loss = CrossEntropy(chunk=chunk)
    engine = engine_of(Decoder(), loss, f"{plan} precision=fp64")
    engine.step(next(iter(engine.loader)))
    metrics = build_metrics(["accuracy", "perplexity", "top5"], loss)
    found: dict[str, float] = engine.evaluate(DataLoader(padded(9), batch_size=3), metrics)
    engine.close()
    return found


def test_metrics_of_labels_are_computed_in_chunks(ranks: Ranks) -> None:
    expected = metrics_of("dp=1", "off")
    assert metrics_of("dp=1", 4) == pytest.approx(expected, rel=1e-6)
    for plan in ("tp=2", "fsdp=2"):
        for own in ranks(2, metrics_of, plan, 4):
            assert own == pytest.approx(expected, rel=1e-6)
