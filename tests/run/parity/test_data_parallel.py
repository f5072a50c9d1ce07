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
from paceline.engine.engine import Engine
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
    make: Callable[[], nn.Module], plan: str, batch: int, *, ignore: bool = False, **settings: Any
) -> dict[str, Any]:
    """Losses, gradient norms and weights of some steps; `make` builds the model from a fixed seed."""
    torch.manual_seed(3)
    model = make()
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    target = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    data = DataLoader(TensorDataset(inputs, ignored(target) if ignore else target), batch_size=batch, shuffle=True)
    loss = LossSpec(name="cross_entropy").build() if ignore else F.cross_entropy
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    engine = paceline.setup(model, optimizer, loss, data, plan=plan, precision="fp64", **settings)
    losses, norms = run(engine)
    engine.close()
    return {
        "losses": losses,
        "norms": norms,
        "weights": {n: p.detach().clone() for n, p in model.named_parameters()},
        "buffers": {n: b.clone() for n, b in model.named_buffers()},
        "has_state": [n for n, p in model.named_parameters() if p in optimizer.state],
    }


def run(engine: Engine) -> tuple[list[float], list[float]]:
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


@pytest.mark.parametrize("make", [Tied, Branches, frozen], ids=lambda f: f.__name__)
def test_replicas_learn_what_one_process_learns(ranks: Ranks, make: Callable[[], nn.Module]) -> None:
    """Three ranks: shares of 7, 7 and 6 samples, and a last batch that leaves two of them without any."""
    one = trained(make, "dp=1", 20)
    for many in ranks(3, trained, make, "dp=3", 20):
        assert_equal(one, many)


def test_the_simplest_rule_computes_what_one_process_does(ranks: Ranks) -> None:
    one = trained(Branches, "dp=1", 20)
    for many in ranks(2, trained, Branches, "dp=2 sync=averaging", 20):
        assert_equal(one, many)


def test_a_last_batch_smaller_than_the_replicas_is_weighed_exactly(ranks: Ranks) -> None:
    one = trained(plain, "dp=1", 12)
    for many in ranks(4, trained, plain, "dp=4", 12):
        assert_equal(one, many)


@pytest.mark.parametrize("make", [normalised, images], ids=lambda f: f.__name__)
def test_synchronised_batch_norm_sees_the_global_batch(ranks: Ranks, make: Callable[[], nn.Module]) -> None:
    one = trained(make, "dp=1", 16, batch_norm="sync")
    for many in ranks(3, trained_with_sync, make):
        assert_equal(one, many)


def trained_with_sync(make: Callable[[], nn.Module]) -> dict[str, Any]:
    return trained(make, "dp=3", 16, batch_norm="sync")


def trained_with_clipping(plan: str) -> dict[str, Any]:
    return trained(plain, plan, 20, clip_norm=0.05)


def test_clipping_uses_the_norm_of_the_whole_gradient(ranks: Ranks) -> None:
    one = trained_with_clipping("dp=1")
    assert min(one["norms"]) > 0.05, "otherwise nothing is clipped here"
    for many in ranks(2, trained_with_clipping, "dp=2"):
        assert_equal(one, many)


def trained_with_ignored_labels(plan: str) -> dict[str, Any]:
    return trained(Tied, plan, 20, ignore=True)


def test_labels_that_do_not_count_weigh_neither_on_a_replica_nor_in_a_microbatch(ranks: Ranks) -> None:
    one = trained_with_ignored_labels("dp=1")
    for many in ranks(2, trained_with_ignored_labels, "dp=2 microbatches=3"):
        assert_equal(one, many)


def reduced_bytes(plan: str) -> int:
    torch.manual_seed(0)
    model = plain()
    data = DataLoader(TensorDataset(torch.randn(40, FEATURES), torch.zeros(40, dtype=torch.long)), batch_size=20)
    engine = paceline.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, data, plan=plan)
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
