"""Mistakes in a user's own loop (losses, batches, setups) end in a paceline error that says what to write."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import LBFGS, SGD
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import BatchError, DataError, JobError, PacelineError
from ranks import Ranks
from refusals import raises

FEATURES, CLASSES, SAMPLES = 4, 3, 16


def step(
    loss: Callable[..., Any] = F.cross_entropy,
    *,
    inputs: Tensor | None = None,
    target: Tensor | None = None,
    more: tuple[Tensor, ...] = (),
    optimizer: Callable[..., Any] = SGD,
    dtype: torch.dtype = torch.float32,
) -> None:
    model = nn.Linear(FEATURES, CLASSES, dtype=dtype)
    x = torch.randn(SAMPLES, FEATURES) if inputs is None else inputs
    y = torch.arange(SAMPLES) % CLASSES if target is None else target
    loader = DataLoader(TensorDataset(x, y, *more), batch_size=8)
    engine = paceline.setup(model, optimizer(model.parameters(), lr=0.1), loss=loss, loader=loader)
    engine.step(next(iter(engine.loader)))


class Squared(nn.Module):
    """Blocks that `tp`, `fsdp` and `pp` divide."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(FEATURES, 8), nn.Linear(8, FEATURES)) for _ in range(2))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


_BATCHES = {
    "float64": (torch.randn(SAMPLES, FEATURES, dtype=torch.float64), torch.arange(SAMPLES) % CLASSES),
    "whole numbers": (torch.randint(0, 9, (SAMPLES, FEATURES)), torch.arange(SAMPLES) % CLASSES),
    "too many features": (torch.randn(SAMPLES, FEATURES + 1), torch.arange(SAMPLES) % CLASSES),
    "weights of samples": (torch.randn(SAMPLES, FEATURES), torch.arange(SAMPLES) % CLASSES, torch.ones(SAMPLES)),
}


def test_a_loss_and_a_loader_without_their_names_are_refused() -> None:
    model = nn.Linear(FEATURES, CLASSES)
    loader = DataLoader(TensorDataset(*_BATCHES["whole numbers"]), batch_size=8)
    optimizer = SGD(model.parameters(), lr=0.1)
    with raises(JobError, "setup.not_by_keyword"):
        paceline.setup(model, optimizer, F.cross_entropy, loader)  # type: ignore[call-arg]


def under_divided_plans() -> list[str]:
    """Names of the errors that the batches end in, in order."""
    found = []
    for plan in ("tp=2", "fsdp=2", "pp=2 microbatches=2"):
        for tensors in _BATCHES.values():
            model = Squared()
            loader = DataLoader(TensorDataset(*tensors), batch_size=8)
            try:
                engine = paceline.setup(
                    model, SGD(model.parameters(), lr=0.1), loss=F.cross_entropy, loader=loader, plan=plan
                )
                engine.step(next(iter(engine.loader)))
            except Exception as error:  # noqa: BLE001 - that it is paceline's own is what the test looks at
                found.append(type(error).__name__)
    return found


def test_a_batch_that_no_plan_can_compute_is_refused_alike_by_plans_that_divide_the_model(ranks: Ranks) -> None:
    assert ranks(2, under_divided_plans) == [["BatchError"] * 3 * len(_BATCHES)] * 2


def an_update_by_lbfgs() -> None:
    model = nn.Linear(FEATURES, CLASSES)
    engine = paceline.setup(model, LBFGS(model.parameters()))
    engine.backward(model(torch.randn(8, FEATURES)).square().mean())
    engine.update()


def text() -> None:
    model = nn.Linear(FEATURES, CLASSES)
    loader: DataLoader[Any] = DataLoader([("a word", i % CLASSES) for i in range(SAMPLES)], batch_size=8)  # type: ignore[arg-type]
    engine = paceline.setup(model, SGD(model.parameters(), lr=0.1), loss=F.cross_entropy, loader=loader)
    engine.step(next(iter(engine.loader)))


def steps(*arguments: Any, **changes: Any) -> Callable[[], None]:
    return partial(step, *arguments, **changes)


MISTAKES: dict[str, tuple[Callable[[], None], type[PacelineError], str]] = {
    "a tuple": (steps(lambda output, target: (F.cross_entropy(output, target), output)), JobError, "metrics"),
    "a dict": (steps(lambda output, target: {"loss": F.cross_entropy(output, target)}), JobError, "metrics"),
    "a Python number": (steps(lambda output, target: F.cross_entropy(output, target).item()), JobError, ".item()"),
    "no gradient": (steps(lambda output, target: F.cross_entropy(output, target).detach()), JobError, "detach()"),
    "a loss of every sample": (steps(nn.CrossEntropyLoss(reduction="none")), JobError, "reduction='mean'"),
    "a function of every sample": (steps(partial(F.cross_entropy, reduction="none")), JobError, "reduction='mean'"),
    "a step by L-BFGS": (steps(optimizer=LBFGS), JobError, "optimizer.step(closure)"),
    "an update by L-BFGS": (an_update_by_lbfgs, JobError, "optimizer.step(closure)"),
    "weights of samples": (steps(more=(torch.ones(SAMPLES),)), BatchError, "for x, y, w in engine.loader"),
    "float64 data": (steps(inputs=torch.ones(SAMPLES, FEATURES, dtype=torch.float64)), BatchError, "x.float()"),
    "whole numbers": (steps(inputs=torch.ones(SAMPLES, FEATURES, dtype=torch.int64)), BatchError, "x.float()"),
    "a float64 model": (steps(dtype=torch.float64), BatchError, "precision=fp64"),
    "a model of half precision": (steps(dtype=torch.float16), BatchError, "precision=bf16"),
    "text": (text, BatchError, "collate"),
    "too many features": (steps(inputs=torch.ones(SAMPLES, FEATURES + 1)), BatchError, str(FEATURES + 1)),
    "a target of another shape": (steps(target=torch.zeros(SAMPLES, 2, dtype=torch.int64)), DataError, "int64"),
    "a label without a class": (steps(target=torch.full((SAMPLES,), CLASSES)), DataError, str(CLASSES)),
}


def outcomes() -> list[tuple[str, str]]:
    """Class and text of the errors that MISTAKES raise, one after the other."""
    found = []
    for make, _, _ in MISTAKES.values():
        torch.manual_seed(0)
        try:
            make()
        except Exception as error:  # noqa: BLE001 - that it is paceline's own is what the tests look at
            found.append((type(error).__name__, str(error)))
        else:
            found.append(("", ""))
    return found


def verify(found: list[tuple[str, str]]) -> None:
    for (kind, text), (name, (_, expected, line)) in zip(found, MISTAKES.items(), strict=True):
        assert kind == expected.__name__, f"{name}: {kind}: {text}"
        assert line in text, name


def test_a_mistake_on_one_process_ends_in_one_line_with_what_to_write() -> None:
    verify(outcomes())


def test_a_mistake_on_two_ranks_ends_in_one_line_with_what_to_write(ranks: Ranks) -> None:
    for found in ranks(2, outcomes):
        verify(found)


def second_setups() -> tuple[str, int]:
    """Error of a second setup without `close`, and the steps of a third setup after it."""
    model = nn.Linear(FEATURES, CLASSES)
    x, y = torch.randn(SAMPLES, FEATURES), torch.arange(SAMPLES) % CLASSES

    def begin() -> Any:
        loader = DataLoader(TensorDataset(x, y), batch_size=8)
        return paceline.setup(model, SGD(model.parameters(), lr=0.1), loss=F.cross_entropy, loader=loader)

    first = begin()
    try:
        begin()
    except JobError as error:
        said = str(error)
    else:
        said = ""
    first.close()
    again = begin()
    again.step(next(iter(again.loader)))
    return said, again.step_count


def test_a_second_setup_of_a_model_asks_for_close_and_works_after_it(ranks: Ranks) -> None:
    for said, steps in ranks(2, second_setups):
        assert "engine.close()" in said
        assert steps == 1
