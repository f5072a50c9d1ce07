"""Data-parallel training computes what one process computes, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.engine.engine import RankEngine
from paceline.job.loss import LossSpec
from ranks import Backend, Ranks

SAMPLES, FEATURES, CLASSES = 61, 12, 5  # 61 leaves a last batch of 13, or of 1 with a global batch of 20 or 12
STEPS = 8


@pytest.fixture
def ranks(ranks: Ranks) -> Ranks:
    """Over shared memory, as on one host; what differs between transports is held in tests/comm."""
    return partial(ranks, backend="shm")


class Tied(nn.Module):
    """An auto-encoder whose two layers share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(FEATURES, FEATURES)
        self.up = nn.Linear(FEATURES, FEATURES)
        self.up.weight = self.down.weight
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.up(torch.tanh(self.down(x))))


class Branches(nn.Module):
    """`never` takes part in no step.

    `sometimes` only where a sample's first feature is positive, so not on every replica.
    """

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(FEATURES, CLASSES)
        self.sometimes = nn.Linear(FEATURES, CLASSES)
        self.never = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.always(x)
        chosen = x[:, 0] > 1.0
        return y.index_add(0, chosen.nonzero().flatten(), self.sometimes(x[chosen])) if chosen.any() else y


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, CLASSES))


def images() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (3, 2, 2)),
        nn.Conv2d(3, 4, 2, padding=1),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(36, CLASSES),
    )


def frozen() -> nn.Module:
    model = plain()
    next(model.parameters()).requires_grad_(False)
    return model


def ignored(target: Tensor) -> Tensor:
    """Labels of which every third is not to be counted, so replicas weigh differently."""
    return torch.where(torch.arange(len(target)) % 3 == 0, -100, target)


def trained(
    make: Callable[[], nn.Module], plan: str, batch: int, settings: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Losses, gradient norms and weights of some steps; `make` builds the model from a fixed seed."""
    settings = dict(settings or {})
    ignore = settings.pop("ignore", False)
    torch.manual_seed(3)
    model = make()
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    target = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    data = DataLoader(TensorDataset(inputs, ignored(target) if ignore else target), batch_size=batch, shuffle=True)
    loss = LossSpec(name="cross_entropy").build() if ignore else F.cross_entropy
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    engine = paceline.setup(model, optimizer, loss=loss, loader=data, plan=plan, precision="fp64", **settings)
    losses, norms = run(engine)
    engine.close()
    return {
        "losses": losses,
        "norms": norms,
        "weights": {n: p.detach().clone() for n, p in model.named_parameters()},
        "buffers": {n: b.clone() for n, b in model.named_buffers()},
        "has_state": [n for n, p in model.named_parameters() if p in optimizer.state],
    }


def run(engine: RankEngine) -> tuple[list[float], list[float]]:
    losses: list[float] = []
    norms: list[float] = []
    while len(losses) < STEPS:
        for batch in engine.loader:
            result = engine.step(batch)
            losses.append(result.loss)
            norms.append(result.grad_norm)
            if len(losses) == STEPS:
                break
    return losses, norms


def assert_equal(one: dict[str, Any], many: dict[str, Any]) -> None:
    assert many["losses"] == pytest.approx(one["losses"], rel=1e-10)
    assert many["norms"] == pytest.approx(one["norms"], rel=1e-9)
    for kind in ("weights", "buffers"):
        for name, expected in one[kind].items():
            difference = (many[kind][name] - expected).abs().max().item()
            assert torch.allclose(many[kind][name], expected, rtol=1e-8, atol=1e-10), (
                f"{kind}: {name} differs by up to {difference:g}"
            )
    assert many["has_state"] == one["has_state"]


@pytest.mark.parametrize(
    ("replicas", "make", "batch", "plan", "settings"),
    [
        # shares of 7, 7 and 6 samples, and a last batch that leaves two of three replicas without any
        pytest.param(3, Tied, 20, "", {}, id="a shared weight"),
        pytest.param(3, Branches, 20, "", {}, id="layers that some replicas leave out"),
        pytest.param(3, frozen, 20, "", {}, id="a frozen weight"),
        pytest.param(2, Branches, 20, "sync=averaging", {}, id="the simplest rule"),
        pytest.param(4, plain, 12, "", {}, id="a last batch smaller than the replicas"),
        pytest.param(3, normalised, 16, "", {"batch_norm": "sync"}, id="synchronised batch norm"),
        pytest.param(3, images, 16, "", {"batch_norm": "sync"}, id="synchronised batch norm of images"),
        pytest.param(2, plain, 20, "", {"clip_norm": 0.05}, id="clipping by the norm of the whole gradient"),
        pytest.param(2, Tied, 20, "microbatches=3", {"ignore": True}, id="labels that do not count"),
    ],
)
def test_replicas_learn_what_one_process_learns(
    ranks: Ranks, replicas: int, make: Callable[[], nn.Module], batch: int, plan: str, settings: dict[str, Any]
) -> None:
    one = trained(make, "dp=1", batch, settings)
    assert min(one["norms"]) > settings.get("clip_norm", 0.0), "otherwise nothing is clipped here"
    for many in ranks(replicas, trained, make, f"dp={replicas} {plan}", batch, settings):
        assert_equal(one, many)


def reduced_bytes(plan: str) -> int:
    torch.manual_seed(0)
    model = plain()
    data = DataLoader(TensorDataset(torch.randn(40, FEATURES), torch.zeros(40, dtype=torch.long)), batch_size=20)
    engine = paceline.setup(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss=F.cross_entropy, loader=data, plan=plan
    )
    batches = iter(engine.loader)
    engine.step(next(batches))
    before = engine.group.bytes_reduced
    engine.step(next(batches))
    engine.close()
    return engine.group.bytes_reduced - before


def test_accumulation_communicates_once_a_step(ranks: Ranks) -> None:
    assert ranks(2, reduced_bytes, "dp=2 microbatches=5") == ranks(2, reduced_bytes, "dp=2")


def trained_overlapping(algorithm: str) -> dict[str, Any]:
    """As on two hosts, the first with two of three ranks: small buckets are sent while the backward pass goes on."""
    import paceline.planning.sync_info as transport_info
    from paceline.comm import Group

    def hosts(group: Group) -> tuple[int, ...]:
        found: tuple[int, ...] = group.__dict__["hosts"]
        return (0, 0, 1) if group.size == 3 else found

    transport_info.BUCKET_BYTES_BETWEEN_HOSTS = 600
    Group.hosts = property(hosts, lambda group, found: group.__dict__.update(hosts=found))  # type: ignore[assignment]
    return trained(Branches, f"dp=3 sync=allreduce:{algorithm}", 20)


@pytest.mark.parametrize(
    ("backend", "algorithm"),
    [("gloo", "flat"), ("shm", "flat"), ("shm", "ring"), ("shm", "hierarchical")],
)
def test_buckets_sent_during_the_backward_pass_carry_the_same_gradients(
    ranks: Ranks, backend: Backend, algorithm: str
) -> None:
    one = trained(Branches, "dp=1", 20)
    for many in ranks(3, trained_overlapping, algorithm, backend=backend):
        assert_equal(one, many)
