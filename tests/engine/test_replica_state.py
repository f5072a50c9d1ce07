"""Replicas that differ are found before an update, and one that was corrupted is healed by the others."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.comm.backend import joined
from paceline.engine.replica_state import ReplicaState
from paceline.errors import JobError, PacelineError
from paceline.run.record.run import Run
from paceline.run.recovery.run import train_in
from paceline.split.layout import local
from paceline.state.reader import load_latest
from ranks import RankError, Ranks
from refusals import raises
from small_jobs import new_run, small_job

ROWS, WIDTH, CLASSES = 20, 4, 3


class Words(nn.Module):
    """An embedding of few words, its mean and a classifier."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH, **settings)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        y: Tensor = self.head(self.embedding(words).mean(1))
        return y


class Written(Words):
    """Its forward writes into its own state, from the samples that it sees."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.average: Tensor
        self.register_buffer("average", torch.zeros(WIDTH), persistent=kind != "a cache")
        self.seen = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, words: Tensor) -> Tensor:
        if self.training and self.kind in ("a buffer", "a cache"):
            self.average.lerp_(self.embedding(words).detach().mean((0, 1)), 0.1)
        if self.kind == "a parameter":
            self.seen.data += words.sum()
        if self.kind == "functional max_norm":
            words = F.embedding(words, self.embedding.weight, max_norm=0.5).mean(1)
            short: Tensor = self.head(words)
            return short
        return super().forward(words)


def trained(
    plan: str, make: Callable[[], nn.Module], optimizer: str = "SGD", steps: int = 4, **settings: Any
) -> dict[str, Any]:
    """Losses and parameters after a few steps, or what was said in place of them."""
    torch.manual_seed(1)
    model = make().double()
    data = TensorDataset(torch.randint(0, ROWS, (32, 2)), torch.randint(0, CLASSES, (32,)))
    stepping = getattr(torch.optim, optimizer)(model.parameters(), lr=0.5)
    engine = None
    try:
        loader = DataLoader(data, batch_size=8)
        engine = paceline.setup(
            model, stepping, loss=F.cross_entropy, loader=loader, plan=plan, precision="fp64", **settings
        )
        losses = [engine.step(batch).loss for batch, _ in zip(engine.loader, range(steps), strict=False)]
    except PacelineError as error:
        return {"said": str(error)}
    finally:
        if engine is not None:
            engine.close()
    return {"losses": losses, "parameters": {name: p.detach().clone() for name, p in model.named_parameters()}}


def short() -> nn.Module:
    return Words(max_norm=1.0)


def sparse() -> nn.Module:
    return Words(sparse=True)


def by_frequency() -> nn.Module:
    return Words(scale_grad_by_freq=True)


def assert_as_one(many: list[dict[str, Any]], one: dict[str, Any]) -> None:
    for rank in many:
        assert rank.get("losses") == pytest.approx(one["losses"], rel=1e-9), rank
        for name, expected in one["parameters"].items():
            torch.testing.assert_close(rank["parameters"][name], expected, rtol=1e-8, atol=1e-10)
            assert torch.equal(rank["parameters"][name], many[0]["parameters"][name])


def test_rows_that_an_embedding_shortens_are_shortened_on_every_rank(ranks: Ranks) -> None:
    assert_as_one(ranks(2, trained, "dp=2 microbatches=2", short, backend="shm"), trained("dp=1", short))


def losses_with_gaps(plan: str) -> list[float]:
    """Losses of a classifier in float32 whose weights are every second column of a table."""
    torch.manual_seed(1)
    model = nn.Linear(WIDTH, CLASSES)
    model.weight = nn.Parameter(torch.randn(CLASSES, 2 * WIDTH)[:, ::2])
    data = TensorDataset(torch.randn(32, WIDTH), torch.randint(0, CLASSES, (32,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine = paceline.setup(model, optimizer, loss=F.cross_entropy, loader=DataLoader(data, batch_size=8), plan=plan)
    try:
        return [engine.step(batch).loss for batch in engine.loader]
    finally:
        engine.close()


def test_replicas_are_compared_if_a_parameters_memory_has_gaps(ranks: Ranks) -> None:
    for losses in ranks(2, losses_with_gaps, "dp=2", backend="shm"):
        assert losses == pytest.approx(losses_with_gaps("dp=1"), rel=1e-5)


def exported(plan: str, folder: str) -> dict[str, dict[str, Tensor]]:
    """What `export` wrote after training and after an evaluation, and what the rank holds in the end."""
    torch.manual_seed(1)
    model = Words(max_norm=1.0).double()
    words, classes = torch.randint(0, ROWS, (12, 2)), torch.randint(0, CLASSES, (12,))
    train, held_out = TensorDataset(words[:8], classes[:8]), TensorDataset(words[8:], classes[8:])
    optimizer = torch.optim.SGD(model.parameters(), lr=20.0)
    loader = DataLoader(train, batch_size=4)
    engine = paceline.setup(model, optimizer, loss=F.cross_entropy, loader=loader, plan=plan, precision="fp64")
    try:
        for batch in engine.loader:
            engine.step(batch)
        engine.export(f"{folder}/trained-{plan}")
        engine.evaluate(DataLoader(held_out, batch_size=2))
        engine.export(f"{folder}/evaluated-{plan}")
        held = {name: p.detach().clone() for name, p in model.named_parameters()}
    finally:
        engine.close()
    return {kind: load_file(f"{folder}/{kind}-{plan}") for kind in ("trained", "evaluated")} | {"held": held}


def test_rows_that_an_evaluation_shortens_are_exported_as_by_one_process(ranks: Ranks, tmp_path: Path) -> None:
    alone = exported("dp=1", str(tmp_path))
    assert not torch.equal(alone["trained"]["embedding.weight"], alone["evaluated"]["embedding.weight"])
    for rank in ranks(2, exported, "dp=2", str(tmp_path), backend="shm"):
        for kind, tensors in alone.items():
            for name, expected in tensors.items():
                torch.testing.assert_close(rank[kind][name], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("plan", "optimizer"), [("dp=1", "SGD"), ("dp=2", "Adagrad"), ("fsdp=2", "SGD")])
def test_sparse_embeddings_train_as_dense_ones(ranks: Ranks, plan: str, optimizer: str) -> None:
    one = trained("dp=1", Words, optimizer)
    if plan == "dp=1":
        assert_as_one([trained(plan, sparse, optimizer)], one)
    else:
        many = ranks(2, trained, plan, sparse, optimizer, backend="shm")
        assert all(rank.get("losses") == pytest.approx(one["losses"], rel=1e-9) for rank in many), many


UNLIKE_ONE_PROCESS: list[tuple[str, Callable[[], nn.Module], str, str]] = [
    ("dp=2", by_frequency, "SGD", "scale_grad_by_freq, which divides by how often a rank uses a row"),
    ("fsdp=2", short, "SGD", '"embedding" has max_norm'),
    ("dp=2", sparse, "SparseAdam", "SparseAdam needs sparse gradients"),
]


def refused() -> list[str]:
    return [trained(plan, make, optimizer)["said"] for plan, make, optimizer, _ in UNLIKE_ONE_PROCESS]


def test_what_cannot_be_as_in_one_process_is_refused(ranks: Ranks) -> None:
    for said in ranks(2, refused, backend="shm"):
        for text, (*_, why) in zip(said, UNLIKE_ONE_PROCESS, strict=True):
            assert why in text


def written(cases: list[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """`trained` for each (what forward writes, plan, buffers)."""
    return [trained(plan, lambda kind=kind: Written(kind), buffers=buffers) for kind, plan, buffers in cases]  # type: ignore[misc]


def test_state_that_forward_writes_from_a_ranks_own_samples_ends_the_run_before_its_first_update(ranks: Ranks) -> None:
    cases = {
        ("a buffer", "dp=2", "same"): "buffer 'average'",
        ("a buffer", "fsdp=2", "same"): "buffer 'average'",
        ("a parameter", "dp=2", "same"): "parameter 'seen'",
        ("functional max_norm", "dp=2", "same"): "parameter 'embedding.weight'",
    }
    for rank in ranks(2, written, list(cases), backend="shm"):
        for found, what in zip(rank, cases.values(), strict=True):
            assert f"step 1: {what} differs between rank 1 and rank 0" in found["said"]
            assert "Nothing was updated" in found["said"]


def test_a_parameter_that_forward_writes_is_refused_under_fsdp_which_would_forget_it(ranks: Ranks) -> None:
    cases = [("a parameter", "fsdp=2", "same"), ("functional max_norm", "fsdp=2", "same")]
    for rank in ranks(2, written, cases, backend="shm"):
        assert all("fsdp: the model's forward pass changes its parameter" in found["said"] for found in rank)


def test_buffers_may_be_each_replicas_own_where_that_is_said(ranks: Ranks) -> None:
    for rank in ranks(2, written, [("a buffer", "dp=2", "local"), ("a cache", "dp=2", "same")], backend="shm"):
        assert all("losses" in found for found in rank)


def parted(at: int, plan: str) -> str:
    """Rank 1 changes one number of one weight by its last bit after some steps."""

    def change(self: Any, *_: Any) -> None:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == at and dist.get_rank() == 1:
            with torch.no_grad():
                weight = self.weight.view(-1)[:1]
                weight.copy_(torch.nextafter(weight, torch.ones_like(weight)))

    class Parted(Words):
        def __init__(self) -> None:
            super().__init__()
            self.head.register_forward_pre_hook(change)

    return str(trained(plan, Parted).get("said"))


def test_one_bit_of_one_weight_is_seen_and_named(ranks: Ranks) -> None:
    said = ranks(4, parted, 2, "dp=2 tp=2", backend="shm")
    assert any("parameter 'head.weight' differs between rank" in text for text in said)
    assert "None" not in said, "ranks that wait for one that has said so end, too"


class Normed(nn.Module):
    """Spectral norm and instance norm keep state in forward that is right as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH)
        self.norm = nn.InstanceNorm1d(2, track_running_stats=True)
        self.head = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, CLASSES))

    def forward(self, words: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.embedding(words)).mean(1))
        return y


def test_state_that_is_the_same_on_every_rank_or_known_to_be_its_own_is_no_error(ranks: Ranks) -> None:
    assert_as_one(ranks(2, trained, "dp=2", Normed, backend="shm"), trained("dp=1", Normed))


def test_an_unknown_setting_is_refused() -> None:
    with raises(JobError, "setup.buffers_invalid"):
        paceline.setup(
            Words(),
            torch.optim.SGD(Words().parameters()),
            loss=F.cross_entropy,
            buffers="mine",  # type: ignore[arg-type]
        )


# (update with a comparison, rank, bit, False: of a weight, before it; True: of the optimizer's state, after it)
Flip = tuple[int, int, int, bool]


def train_with(path: Path, flips: list[Flip]) -> None:
    """Train a run as one rank; bits flip between a gradient and its update."""
    before_update = ReplicaState.before_update

    def flip(self: ReplicaState, update: int, *, in_optimizer: bool) -> None:
        for at, rank, bit, there in flips:
            if (at, rank, there) == (update, self.engine.group.rank, in_optimizer):
                parameter = next(iter(self.engine.named_parameters().values()))
                held = self.engine.optimizer.state[parameter]["exp_avg"] if in_optimizer else parameter
                local(held).detach().view(torch.int32).view(-1)[0] ^= 1 << bit

    def flipping(self: ReplicaState, update: int) -> None:
        flip(self, update, in_optimizer=False)
        before_update(self, update)
        flip(self, update, in_optimizer=True)

    ReplicaState.before_update = flipping  # type: ignore[method-assign]
    try:
        with joined(deadline_s=30) as group:
            train_in(Run(path), group)
    finally:
        ReplicaState.before_update = before_update  # type: ignore[method-assign]


def trained_with_corruption(
    path: Path, ranks: Ranks, *flips: Flip, size: int = 3, plan: str = "dp=3 balance=off", **changes: object
) -> Run:
    job = small_job(optimizer={"name": "adamw", "lr": 0.01}, global_batch=12, stop={"steps": 12}, **changes)
    new_run(path, job, plan)
    ranks(size, train_with, path, list(flips))
    return Run(path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Run:
    return trained_with_corruption(tmp_path_factory.mktemp("runs") / "undisturbed", ranks)


def corruptions(run: Run) -> list[dict[str, Any]]:
    return [e for e in run.events() if e["event"] == "corruption"]


def state_of(run: Run) -> dict[str, torch.Tensor]:
    """Weights and optimizer state at the end, of which every rank has saved a part."""
    found = load_latest(run.checkpoints, rank=0, world=1, report=lambda *_: None)
    assert found is not None
    return dict(found.shared)


def assert_same_end(run: Run, other: Run) -> None:
    ours, theirs = state_of(run), state_of(other)
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_the_odd_one_out_is_named_and_healed_and_the_run_is_as_an_undisturbed_one(
    tmp_path: Path, ranks: Ranks, undisturbed: Run
) -> None:
    run = trained_with_corruption(tmp_path / "run", ranks, (4, 1, 20, False), (8, 0, 30, False))
    assert corruptions(undisturbed) == []
    first, second = corruptions(run)
    assert (first["rank"], first["step"], first["healed_from"], first["tensors"]) == (1, 4, 0, ["0.weight"])
    assert (second["rank"], second["step"], second["healed_from"]) == (0, 8, 1)
    assert first["host"] == socket.gethostname()
    assert [found["device"] for found in (first, second)] == [{"wrong_numbers": 0, "wrong_words": 0}] * 2
    assert run.losses == undisturbed.losses
    assert_same_end(run, undisturbed)


def test_a_flip_in_the_optimizers_state_is_healed_with_what_came_of_it(
    tmp_path: Path, ranks: Ranks, undisturbed: Run
) -> None:
    run = trained_with_corruption(tmp_path / "run", ranks, (4, 2, 22, True), compare_every=7)
    (found,) = corruptions(run)
    assert (found["rank"], found["step"], found["tensors"]) == (2, 7, ["0.weight"])
    assert run.losses[:4] == undisturbed.losses[:4]
    assert run.losses == pytest.approx(undisturbed.losses, rel=0.2)
    assert run.reason == "steps: 12 done"


def test_the_third_time_ends_the_run_and_names_the_host(tmp_path: Path, ranks: Ranks) -> None:
    with pytest.raises(RankError) as raised:
        trained_with_corruption(tmp_path / "run", ranks, *((at, 1, 20, False) for at in (2, 4, 8)))
    said = f"on rank 1 (host {socket.gethostname()}) differ from those on most ranks, for the 3rd"
    assert said in str(raised.value)
    assert "Check the memory of that host" in str(raised.value)
    assert len(corruptions(Run(tmp_path / "run"))) == 2


@pytest.mark.parametrize(("size", "flips"), [(2, [(4, 1, 20, False)]), (3, [(4, 1, 20, False), (4, 2, 21, False)])])
def test_without_a_majority_the_difference_ends_the_run(
    tmp_path: Path, ranks: Ranks, size: int, flips: list[Flip]
) -> None:
    with raises(RankError, "ranks.state_differs", step=4, what="parameter", name="0.weight"):
        trained_with_corruption(tmp_path / "run", ranks, *flips, size=size, plan=f"dp={size} balance=off")


@pytest.mark.slow
def test_a_part_of_a_divided_replica_is_healed_from_that_part_of_another(tmp_path: Path, ranks: Ranks) -> None:
    undisturbed = trained_with_corruption(tmp_path / "undisturbed", ranks, size=6, plan="dp=3 fsdp=2 balance=off")
    run = trained_with_corruption(tmp_path / "run", ranks, (4, 3, 20, False), size=6, plan="dp=3 fsdp=2 balance=off")
    (found,) = corruptions(run)
    assert (found["rank"], found["step"]) == (3, 4), "also where the first rank has another part"
    assert run.losses == undisturbed.losses
    assert_same_end(run, undisturbed)
