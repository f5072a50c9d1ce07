"""Parts of a batch without items add exactly nothing to the loss and the gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import paceline
from paceline.job.zoo.losses import CrossEntropy
from paceline.job.zoo.models import GPT
from ranks import Ranks
from simulated.environment import Simulated

SAMPLES, TOKENS, VOCAB, BATCH = 20, 8, 8, 8
EMPTY = ("first half", "second half of each sample")


class Padded(Dataset[tuple[Tensor, Tensor]]):
    """Sequences without counted labels in a whole part of some plans; labels of 0 do not count."""

    def __init__(self, empty: str = EMPTY[0], ignored: int = 0) -> None:
        drawn = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(1, VOCAB, (SAMPLES, TOKENS), generator=drawn)
        self.labels = torch.randint(1, VOCAB, (SAMPLES, TOKENS), generator=drawn)
        self.labels[::3, 2:] = ignored
        if empty == EMPTY[0]:
            self.labels[torch.arange(SAMPLES) % BATCH < BATCH // 2] = ignored
        else:
            self.labels[:, TOKENS // 2 :] = ignored

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.tokens[i], self.labels[i]


def gpt() -> nn.Module:
    return GPT(vocab=VOCAB, context=TOKENS, layers=2, hidden=16, heads=2)


class Transposed(nn.Module):
    """Model with logits in the layout of torch's losses: classes on dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = gpt()

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.inner(tokens)
        return scores.transpose(1, 2)


def padded(output: Tensor, target: Tensor) -> Tensor:
    """The loss of docs/reference/job.md, "A loss of your own"."""
    each = F.cross_entropy(output.transpose(1, 2), target, reduction="none")
    return (each * (target != 0)).sum() / (target != 0).sum()


padded.items = lambda target: (target != 0).sum()  # type: ignore[attr-defined]


def added(output: Tensor, target: Tensor) -> Tensor:
    """A sum that divides by a number that can be 0, and multiplies by it again."""
    valid = (target != 0).sum()
    return padded(output, target) * valid


added.items, added.reduction = padded.items, "sum"  # type: ignore[attr-defined]

WEIGHTS = torch.linspace(0.5, 2.0, VOCAB, dtype=torch.float64)


def train(plan: str, loss: Any, model: Callable[[], nn.Module] = gpt, data: Any = None, precision: str = "fp32") -> Any:
    """Losses of the steps of two epochs, then the sums of all parameters."""
    torch.manual_seed(4)
    trained = model() if precision != "fp32" else model().double()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(Padded() if data is None else data, batch_size=BATCH)
    engine = paceline.setup(trained, optimizer, loss=loss, loader=loader, plan=plan)
    found = [engine.step(batch).loss for _ in range(2) for batch in engine.loader]
    engine.close()
    return found


LOSSES: dict[str, tuple[Any, Callable[[], nn.Module], int]] = {
    "docs": (padded, gpt, 0),
    "sum": (added, gpt, 0),
    "built in": (CrossEntropy(), gpt, -100),
    "torch": (nn.CrossEntropyLoss(), Transposed, -100),
    "weights": (nn.CrossEntropyLoss(weight=WEIGHTS), Transposed, -100),
    "function": (partial(F.cross_entropy, ignore_index=0), Transposed, 0),
    "torch's sum": (nn.CrossEntropyLoss(reduction="sum"), Transposed, -100),
}


@pytest.mark.parametrize("name", LOSSES)
def test_microbatches_without_items_add_nothing(name: str) -> None:
    loss, model, ignored = LOSSES[name]
    data = Padded(ignored=ignored)
    alone = train("dp=1", loss, model, data)
    for microbatches in (2, 8):
        assert train(f"dp=1 microbatches={microbatches}", loss, model, data) == pytest.approx(alone, rel=1e-9)


def train_by_each(plans: list[str]) -> list[list[float]]:
    """Losses of each plan, one after the other in the same processes."""
    return [train(plan, padded) for plan in plans]


def test_ranks_without_items_add_nothing(ranks: Ranks) -> None:
    plans = ["dp=2", "fsdp=2", "tp=2 microbatches=2", "pp=2 microbatches=2", "dp=2 microbatches=2 sync=allreduce:ring"]
    alone = train("dp=1", padded)
    for found in ranks(2, train_by_each, plans):
        for plan, losses in zip(plans, found, strict=True):
            assert losses == pytest.approx(alone, rel=1e-9), plan


def test_ranks_whose_tokens_have_no_items_add_nothing(ranks: Ranks) -> None:
    data = Padded(EMPTY[1])
    alone = train("dp=1", padded, data=data)
    for found in ranks(2, train, "cp=2", padded, gpt, data):
        assert found == pytest.approx(alone, rel=1e-9)


def test_a_replica_without_items_does_not_spoil_local_steps(ranks: Ranks) -> None:
    for found in ranks(2, train_by_each, ["dp=2 sync=local:2", "dp=2 sync=diloco:2"]):
        assert all(math.isfinite(loss) for losses in found for loss in losses)


class LossInside(nn.Module):
    """A model that divides by the number of its labels."""

    def __init__(self, *, shows_logits: bool) -> None:
        super().__init__()
        self.inner, self.shows_logits = gpt(), shows_logits

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> dict[str, Tensor]:
        scores = self.inner(input_ids)
        each = F.cross_entropy(scores.transpose(1, 2), labels, reduction="none")
        loss = (each * (labels != 0)).sum() / num_items_in_batch.sum()
        return {"loss": loss, "logits": scores} if self.shows_logits else {"loss": loss}


class Named(Padded):
    def __getitem__(self, i: int) -> Any:
        tokens, labels = super().__getitem__(i)
        return {"input_ids": tokens, "labels": labels, "num_items_in_batch": (labels != 0).sum()}


def of_the_model(output: Any, _: Any) -> Tensor:
    loss: Tensor = output["loss"]
    return loss


@pytest.mark.parametrize("shows_logits", [True, False])
def test_a_models_own_loss_without_items_adds_nothing(shows_logits: bool) -> None:
    model = partial(LossInside, shows_logits=shows_logits)
    alone = train("dp=1", of_the_model, model, Named())
    assert train("dp=1 microbatches=2", of_the_model, model, Named()) == pytest.approx(alone, rel=1e-9)


# Loops of users' own


def own_loop(plan: str) -> list[float]:
    """Losses of a loop that computes its own loss; `items` is a number and a tensor in turn."""
    torch.manual_seed(4)
    model = gpt().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    engine = paceline.setup(model, optimizer, loader=DataLoader(Padded(), batch_size=BATCH), plan=plan)
    found = []
    for i, (tokens, labels) in enumerate(engine.loader):
        items = (labels != 0).sum()
        loss = padded(model(tokens), labels)
        engine.backward(loss, items=items if i % 2 else int(items), retain_graph=True)
        engine.backward(loss * 0.5, items=items)  # the graph is used again
        found.append(engine.update().loss)
    found += [float(p.detach().sum()) for p in model.parameters()] if engine.split is None else []
    engine.close()
    return found


@pytest.mark.parametrize("plan", ["dp=2", "fsdp=2"])
def test_a_loop_of_ones_own_may_have_no_items_on_a_rank(ranks: Ranks, plan: str) -> None:
    alone = own_loop("dp=1")
    for found in ranks(2, own_loop, plan):
        assert found == pytest.approx(alone[: len(found)], rel=1e-9)


def test_a_whole_batch_without_items_has_the_same_zero_loss_under_every_plan(ranks: Ranks) -> None:
    data = Padded()
    data.labels[:BATCH] = 0
    alone = train("dp=1", padded, data=data)
    assert alone[0] == 0.0
    for found in ranks(2, train, "dp=2", padded, gpt, data):
        assert found == pytest.approx(alone, rel=1e-9)


def on_an_accelerator() -> list[float]:
    loss = train("dp=1 microbatches=2", padded, gpt, precision="as it is")
    return [float(x) for x in loss]


def test_an_accelerator_does_not_wait_to_leave_out_a_part_without_items(simulated: Simulated) -> None:
    (found,) = simulated.ranks(1, on_an_accelerator)
    assert found == pytest.approx(train("dp=1", padded, gpt, precision="as it is"), rel=1e-4)
