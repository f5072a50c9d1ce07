"""Servers sum what all replicas push: every replica gets what one process computes, and the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from model_families import family_job
from paceline.errors import PlanError
from ranks import Backend, Ranks
from refusals import raises


def trained(
    replicas: int, sync: str, precision: str = "fp64", width: int = 16, epochs: int = 3
) -> tuple[list[float], list[Tensor], int]:
    """Losses, weights and bytes sent of 3 steps of SGD an epoch."""
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(12, width), nn.Tanh(), nn.Linear(width, 5))
    inputs = torch.randn(60, 12, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(inputs, torch.arange(60) % 5), batch_size=20, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    engine = paceline.setup(
        model, optimizer, loss=F.cross_entropy, loader=loader, plan=f"dp={replicas} precision={precision} sync={sync}"
    )
    losses = [engine.step(batch).loss for _ in range(epochs) for batch in engine.loader]
    engine.close()
    return losses, [p.detach().clone() for p in model.parameters()], engine.replica.traffic.sent_bytes


BACKENDS: tuple[Backend, ...] = ("gloo", "shm")  # servers in threads, and in shared memory


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("replicas", "sync"), [(2, "server"), (3, "server:servers=2")])
def test_sums_of_servers_are_those_of_one_process_to_rounding(
    ranks: Ranks, replicas: int, sync: str, backend: Backend
) -> None:
    losses, weights, _ = trained(1, "allreduce")
    first, *others = ranks(replicas, trained, replicas, sync, backend=backend)
    assert first[0] == pytest.approx(losses, rel=1e-12)
    for one, other in zip(first[1], weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    for found_losses, found_weights, sent_bytes in others:
        assert found_losses == first[0]
        assert all(map(torch.equal, found_weights, first[1]))
        assert sent_bytes >= 9 * sum(weight.nbytes for weight in weights), "each replica pushes all of its gradients"


def test_deltas_that_servers_sum_are_those_of_diloco(ranks: Ranks) -> None:
    by_server = ranks(2, trained, 2, "server:period=3,lr=0.5,momentum=0.4")
    by_ranks = ranks(2, trained, 2, "diloco:3,lr=0.5,momentum=0.4")
    for (losses, weights, _), (other_losses, other_weights, _) in zip(by_server, by_ranks, strict=True):
        assert losses == pytest.approx(other_losses, rel=1e-12)
        for one, other in zip(weights, other_weights, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("compress", ["", " compress=int8"])
def test_sums_of_wide_buckets_have_the_same_bits_in_shared_memory(ranks: Ranks, compress: str) -> None:
    how = (3, f"server{compress}", "fp32", 4096)  # above the size up to which every rank sums whole tensors
    by_threads, in_memory = (ranks(3, trained, *how, backend=backend)[0] for backend in BACKENDS)
    assert in_memory[0] == by_threads[0]
    assert all(map(torch.equal, in_memory[1], by_threads[1]))
    assert in_memory[2] == by_threads[2], "bytes"


@pytest.mark.parametrize("sync", ["server:servers=2", "server:period=3,lr=1,momentum=0"])
def test_coded_pushes_are_smaller_and_learn_as_much_and_all_replicas_stay_alike(ranks: Ranks, sync: str) -> None:
    how = ("fp32", 128, 10)  # wide enough for int8 to gain
    plain, *_ = ranks(2, trained, 2, sync, *how)
    first, second = ranks(2, trained, 2, f"{sync} compress=int8", *how)
    assert all(map(torch.equal, first[1], second[1]))
    assert first[0][-1] == pytest.approx(plain[0][-1], rel=0.03)
    assert first[2] < 0.3 * plain[2]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=2 tp=2", "dp=2 fsdp=2", "dp=2 pp=2 microbatches=2"])
def test_servers_sum_the_parts_of_a_divided_model(plan: str, tmp_path: Path) -> None:
    assert paceline.check(family_job("gpt", tmp_path), f"{plan} sync=server:servers=2", steps=2).holds


def test_a_staleness_in_a_loop_of_ones_own_is_refused_with_what_works() -> None:
    with raises(PlanError, "server.staleness_without_servers"):
        trained(1, "server:staleness=inf")
