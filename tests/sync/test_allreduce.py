"""The all-reduce rule.

Gradients travel in flat buckets, come back in the layout of their parameters, and nothing else is touched.
"""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline.planning.sync_info as transport_info
from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.planning.sync_info import bucket_bytes_between_hosts
from paceline.split.layout import hooked_parameters
from paceline.sync import AllReduce, Replica
from ranks import Backend, RankError, Ranks
from refusals import raises

SCALARS = 5


@pytest.fixture
def ranks(ranks: Ranks) -> Ranks:
    """Over shared memory, where a test names no other transport."""
    return partial(ranks, backend="shm")


class Mixed(nn.Module):
    """Parameters of many layouts.

    A matrix, its transpose, a slice with gaps, channels-last, one number, half precision, and one frozen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 3))
        self.transposed = nn.Parameter(torch.randn(5, 2).t())
        self.slice = nn.Parameter(torch.randn(4, 10)[:, :3])
        self.images = nn.Parameter(torch.randn(2, 3, 2, 2).contiguous(memory_format=torch.channels_last))
        self.number = nn.Parameter(torch.tensor(1.5))
        self.halves = nn.Parameter(torch.randn(6).bfloat16())
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("counts", torch.arange(4))


def loss_of(model: nn.Module, factor: float) -> Tensor:
    """Its gradient is `factor` · (1, 2, 3, …) in every parameter."""
    terms = [
        (p.double() * torch.arange(1, p.numel() + 1, dtype=torch.float64).view(p.shape)).sum()
        for p in model.parameters()
        if p.requires_grad
    ]
    return factor * torch.stack(terms).sum()


def summed(bucket_bytes: int | None) -> dict[str, Any]:
    """Sums of an agreement in which rank r has factor r + 1.

    With small buckets they travel during the backward pass.
    """
    with joined(deadline_s=30) as group:
        if bucket_bytes is not None:
            transport_info.BUCKET_BYTES_BETWEEN_HOSTS = bucket_bytes
            group.hosts = tuple(range(group.size))
        torch.manual_seed(group.rank)
        model, rule = Mixed(), AllReduce()
        replica = Replica(model, group, SCALARS)
        rule.attach(replica)
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        for _ in range(2):  # the second time the buffers hold the sums of the first
            for p in model.parameters():
                p.grad = None
            loss_of(model, group.rank + 1.0).backward()
            agreed = rule.after_backward(1, torch.full((SCALARS,), float(group.rank), dtype=torch.float64))
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        strides = {name: p.grad.stride() for name, p in model.named_parameters() if p.grad is not None}
        rule.detach()
        left = hooked_parameters(model)
        parts = [g.clone() for g in agreed.gradients]
        return {
            "start": start,
            "gradients": gradients,
            "strides": strides,
            "scalars": agreed.scalars.tolist(),
            "left": left,
            "parts": parts,
        }


@pytest.mark.parametrize(
    ("bucket_bytes", "backend"),
    [(None, "shm"), (None, "gloo"), (1, "gloo"), (64, "shm"), (2**20, "gloo")],
    ids=["in shared memory", "copied", "a bucket each", "several in a bucket", "one bucket between hosts"],
)
def test_every_gradient_is_the_sum_over_the_replicas_in_the_layout_of_its_parameter(
    ranks: Ranks, bucket_bytes: int | None, backend: Backend
) -> None:
    replicas = 3
    results = ranks(replicas, summed, bucket_bytes, backend=backend)
    factor = sum(range(1, replicas + 1))
    layouts = {name: p for name, p in Mixed().named_parameters() if p.requires_grad}
    for result in results:
        assert result["gradients"].keys() == layouts.keys()
        for name, gradient in result["gradients"].items():
            expected = factor * torch.arange(1.0, gradient.numel() + 1).view(gradient.shape)
            assert torch.equal(gradient.float(), expected), name
            assert result["strides"][name] == torch.empty_like(layouts[name]).stride(), name
        assert result["scalars"] == [sum(range(replicas))] * SCALARS
        assert result["left"] == {}
        total = sum(float(part.double().square().sum()) for part in result["parts"])
        assert total == pytest.approx(sum(float(g.double().square().sum()) for g in result["gradients"].values())), (
            "each gradient once"
        )


def test_replicas_start_from_the_weights_of_the_first(ranks: Ranks) -> None:
    first, second = ranks(2, summed, None)
    torch.manual_seed(0)
    for name, parameter in Mixed().named_parameters():
        assert torch.equal(first["start"][name], parameter)
        assert torch.equal(second["start"][name], parameter)


def test_one_replica_costs_nothing() -> None:
    model, rule, group = Mixed(), AllReduce(), Group()
    replica = Replica(model, group, SCALARS)
    rule.attach(replica)
    loss_of(model, 1.0).backward()
    own = [p.grad for p in model.parameters() if p.grad is not None]
    agreed = rule.after_backward(1, torch.zeros(SCALARS))
    assert [g is o for g, o in zip(agreed.gradients, own, strict=True)] == [True] * len(own)
    assert group.bytes_reduced == 0
    assert not hooked_parameters(model)


def second_gradient() -> None:
    with joined(deadline_s=30) as group:
        group.hosts = (0, 1)  # as between hosts, full buckets are sent at once
        transport_info.BUCKET_BYTES_BETWEEN_HOSTS = 1
        model, rule = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), AllReduce()
        rule.attach(Replica(model, group, SCALARS))
        x = torch.ones(1, 2)
        model(x).sum().backward()
        model(x).sum().backward()


def test_a_gradient_that_comes_after_its_bucket_was_sent_is_refused(ranks: Ranks) -> None:
    with raises(RankError, "ranks.second_gradient"):
        ranks(2, second_gradient)


def of_microbatches() -> list[float]:
    """Reduced gradients of two steps of three microbatches each; a bucket holds two parameters."""
    with joined(deadline_s=30) as group:
        group.hosts = (0, 1)  # as between hosts, full buckets are sent at once
        transport_info.BUCKET_BYTES_BETWEEN_HOSTS = 40
        model, rule = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), AllReduce()
        replica = Replica(model, group, SCALARS)
        rule.attach(replica)
        sums = []
        for _ in range(2):
            model.zero_grad()
            for microbatch in range(3):
                replica.backward.last = microbatch == 2
                loss_of(model, group.rank + 1.0).backward()
            rule.after_backward(1, torch.zeros(SCALARS))
            sums += [float(p.grad.sum()) for p in model.parameters() if p.grad is not None]
        assert len(rule.buckets) > 1
        rule.detach()
        return sums


def test_a_bucket_is_sent_when_the_last_microbatch_has_added_to_all_of_it(ranks: Ranks) -> None:
    of_a_microbatch = [1 + 2 + 3 + 4, 1 + 2] * 2
    assert ranks(2, of_microbatches) == [[3 * 3.0 * each for each in of_a_microbatch] * 2] * 2


def used_counts(bucket_bytes: int | None, steps: int) -> list[float]:
    """How many replicas used each parameter, as every bucket knows after the last of some steps."""
    with joined(deadline_s=30) as group:
        if bucket_bytes is not None:
            transport_info.BUCKET_BYTES_BETWEEN_HOSTS = bucket_bytes
            group.hosts = tuple(range(group.size))
        model, rule = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), AllReduce()
        rule.attach(Replica(model, group, SCALARS))
        for _ in range(steps):
            model.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            rule.after_backward(1, torch.zeros(SCALARS))
        rule.detach()
        return [count for bucket in rule.buckets for count in bucket.used.tolist()]


@pytest.mark.parametrize("bucket_bytes", [None, 64])
def test_the_count_of_users_starts_anew_at_every_step(ranks: Ranks, bucket_bytes: int | None) -> None:
    assert ranks(2, used_counts, bucket_bytes, 5) == [[2.0] * 4] * 2


def with_sparse_gradients() -> list[float]:
    """Row sums of the agreed gradient of an embedding.

    Every rank looks up a row of its own and one that both look up.
    """
    with joined(deadline_s=30) as group:
        model, rule = nn.Embedding(4, 2, sparse=True), AllReduce()
        rule.attach(Replica(model, group, SCALARS))
        model(torch.tensor([group.rank, 3])).sum().backward()
        rule.after_backward(1, torch.zeros(SCALARS))
        gradient = model.weight.grad
        assert gradient is not None
        rows: list[float] = gradient.sum(1).tolist()
        rule.detach()
        return rows


def test_a_sparse_gradient_is_summed_as_a_dense_one(ranks: Ranks) -> None:
    assert ranks(2, with_sparse_gradients) == [[2.0, 2.0, 0.0, 4.0]] * 2


def one_rule_after_another() -> list[int]:
    """How many pieces of shared memory are mapped after each."""
    mapped = []
    with joined(deadline_s=30) as group:
        for _ in range(3):
            model, rule = nn.Linear(100, 100), AllReduce()
            rule.attach(Replica(model, group, SCALARS))
            model(torch.ones(2, 100)).sum().backward()
            rule.after_backward(1, torch.zeros(SCALARS))
            rule.detach()
            del model, rule
            gc.collect()
            group.barrier()
            mapped.append(Path("/proc/self/maps").read_text().count("memfd:paceline-tensor"))
    return mapped


def test_a_rule_that_lets_go_of_the_model_lets_go_of_its_shared_memory(ranks: Ranks) -> None:
    """A trial of settings attaches one rule after another; a large model's gradients must not pile up."""
    assert ranks(2, one_rule_after_another) == [[0, 0, 0]] * 2


def test_a_small_model_between_hosts_has_several_buckets() -> None:
    """The last is sent when the backward pass is over: with one alone nothing would be sent meanwhile."""
    mib = 2**20
    assert [bucket_bytes_between_hosts(size * mib) / mib for size in (0.5, 2.5, 16, 400)] == [1, 1, 2, 4]
