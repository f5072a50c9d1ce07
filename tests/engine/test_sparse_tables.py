"""Sparse gradients of embedding tables: only rows that a batch looked up are summed, sent and stepped on."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.errors import JobError, NonFiniteError, SyncError
from paceline.planning.plan import Plan
from paceline.run.build import build_engine
from paceline.split.layout import hooked_parameters
from paceline.sync import AllReduce, Replica
from paceline.sync.rows import numbers_of
from ranks import Backend, Ranks
from refusals import raises
from small_jobs import small_job

ROWS, WIDTH, BATCH = 500, 4, 8


@pytest.fixture
def ranks(ranks: Ranks) -> Ranks:
    """Over shared memory."""
    return partial(ranks, backend="shm")


class Fields(nn.Module):
    """Tables of two widths, one of them of bags of words, one that no sample looks up, and a classifier."""

    def __init__(self, *, sparse: bool = True, tied: bool = False) -> None:
        super().__init__()
        self.users = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.items = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.words = nn.EmbeddingBag(ROWS, 2 * WIDTH, sparse=sparse)
        self.never = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.head = nn.Linear(4 * WIDTH, 3)
        self.out = nn.Linear(WIDTH, ROWS, bias=False)
        if tied:
            self.out.weight = self.items.weight

    def forward(self, rows: Tensor) -> Tensor:
        users, items = self.users(rows[:, 0]), self.items(rows[:, 1])
        logits: Tensor = self.head(torch.cat([users, items, self.words(rows)], 1))
        logits = logits + self.out(items)[:, :1]
        return logits


def data() -> TensorDataset:
    made = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 40, (64, 3), generator=made)  # rows are looked up again and again
    return TensorDataset(rows, torch.randint(0, 3, (64,), generator=made))


@contextmanager
def set_up(
    plan: str, optimizer: str, settings: dict[str, Any], *, clip_norm: float | None = 0.5, **model: Any
) -> Iterator[Any]:
    torch.manual_seed(1)
    made = Fields(**model).double()
    stepping = getattr(torch.optim, optimizer)(made.parameters(), **{"lr": 0.3} | settings)
    engine = paceline.setup(
        made,
        stepping,
        loss=F.cross_entropy,
        loader=DataLoader(data(), BATCH),
        plan=plan,
        precision="fp64",
        clip_norm=clip_norm,
    )
    try:
        yield engine
    finally:
        engine.close()


def trained(
    plan: str, optimizer: str, settings: dict[str, Any], clip_norm: float | None = 0.5, **model: Any
) -> dict[str, Any]:
    """Losses, norms, parameters and which gradients are sparse after a few steps."""
    with set_up(plan, optimizer, settings, clip_norm=clip_norm, **model) as engine:
        results = [engine.step(batch) for batch, _ in zip(engine.loader, range(5), strict=False)]
        held = dict(engine.model.named_parameters())
        return {
            "numbers": [(result.loss, result.grad_norm) for result in results],
            "parameters": {name: p.detach().clone() for name, p in held.items()},
            "sparse": sorted(name for name, p in held.items() if p.grad is not None and p.grad.is_sparse),
            "without": sorted(name for name, p in held.items() if p.grad is None),
            "sent": engine.replica.traffic.sent_bytes,
        }


TABLES = ["items.weight", "users.weight", "words.weight"]


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize(
    ("plan", "optimizer"),
    [("dp=1", "SGD"), ("dp=1 microbatches=2", "Adagrad"), ("dp=2", "SGD"), ("dp=2 microbatches=2", "Adagrad")],
)
def test_rows_train_as_dense_gradients_do(ranks: Ranks, plan: str, optimizer: str, clip_norm: float | None) -> None:
    dense = trained("dp=1", optimizer, {}, sparse=False, clip_norm=clip_norm)
    if "dp=1" in plan:
        found = [trained(plan, optimizer, {}, clip_norm=clip_norm)]
    else:
        found = ranks(2, trained, plan, optimizer, {}, clip_norm)
    for rank in found:
        assert rank["sparse"] == TABLES
        assert rank["without"] == dense["without"] == ["never.weight"]
        for (loss, norm), (expected_loss, expected_norm) in zip(rank["numbers"], dense["numbers"], strict=True):
            assert loss == pytest.approx(expected_loss, rel=1e-9)
            assert norm == pytest.approx(expected_norm, rel=1e-9)
        for name, expected in dense["parameters"].items():
            # Adagrad divides a gradient that is rounding alone by its size
            torch.testing.assert_close(rank["parameters"][name], expected, rtol=1e-9, atol=1e-6)
            assert torch.equal(rank["parameters"][name], found[0]["parameters"][name])


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad"])
def test_one_rank_trains_to_the_bit_as_a_plain_loop(optimizer: str) -> None:
    torch.manual_seed(1)
    model = Fields().double()
    stepping = getattr(torch.optim, optimizer)(model.parameters(), lr=0.3)
    losses = []
    for (rows, target), _ in zip(DataLoader(data(), BATCH), range(5), strict=False):
        stepping.zero_grad()
        loss = F.cross_entropy(model(rows), target)
        loss.backward()
        stepping.step()
        losses.append(loss.item())
    found = trained("dp=1", optimizer, {}, clip_norm=None)
    assert [loss for loss, _ in found["numbers"]] == losses
    for name, expected in model.named_parameters():
        assert torch.equal(found["parameters"][name], expected)


BAD = {"nan": float("nan"), "inf": float("inf"), "infinite sum": 3e37, "sum with an infinite norm": 1e18}


class OneBadRow(nn.Module):
    """Table whose gradient is `value` in the second step; loss and dense gradients stay finite."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(ROWS, WIDTH, sparse=True), nn.Linear(WIDTH, 3)
        self.value, self.passes = value, 0

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.table(torch.zeros_like(rows))  # all samples look up one row
        self.passes += 1
        if self.passes == 2:
            found.register_hook(lambda gradient: torch.full_like(gradient, self.value))
        logits: Tensor = self.head(found.mean(1))
        return logits


@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_row_whose_gradient_is_not_finite_is_not_trained_on(policy: Any, own_loop: bool, value: float) -> None:
    """The gradient may be finite in each lookup of a row, but not in their sum."""
    model = OneBadRow(value)
    loss = None if own_loop else F.cross_entropy
    loader = DataLoader(data(), BATCH)
    engine = paceline.setup(model, torch.optim.SGD(model.parameters(), 0.1), loss=loss, loader=loader, nonfinite=policy)

    def step(batch: Any) -> paceline.StepResult:
        if not own_loop:
            return engine.step(batch)
        engine.backward(F.cross_entropy(model(batch[0]), batch[1]))
        return engine.update()

    with closing(engine):
        first, second = itertools.islice(engine.loader, 2)
        assert math.isfinite(step(first).grad_norm)
        before = [p.detach().clone() for p in model.parameters()]
        if policy == "stop":
            with raises(NonFiniteError, "nonfinite.stopped", kept="Nothing was updated."):
                step(second)
        else:
            result = step(second)
            assert result.problem is not None
            assert math.isfinite(result.loss)
            assert not math.isfinite(result.grad_norm)
            assert not result.is_spike
        assert all(map(torch.equal, model.parameters(), before))


def test_the_norm_of_sparse_gradients_can_be_read_after_later_steps_and_from_copies() -> None:
    dense = trained("dp=1", "SGD", {}, sparse=False, clip_norm=None)["numbers"]
    with set_up("dp=1", "SGD", {}, clip_norm=None) as engine:
        results = [engine.step(batch) for batch, _ in zip(engine.loader, range(5), strict=False)]
    copies = [pickle.loads(pickle.dumps(results[0])), copy.deepcopy(results[1]), replace(copy.copy(results[2]), step=9)]
    assert [result.grad_norm for result in [*copies, *results[3:]]] == pytest.approx([norm for _, norm in dense])
    assert repr(results[0]) == repr(copies[0])


def test_only_rows_are_sent(ranks: Ranks) -> None:
    few, all_rows = ranks(2, trained, "dp=2", "SGD", {})[0], ranks(2, trained, "dp=2", "Adam", {})[0]
    assert all_rows["sparse"] == []
    assert few["sent"] < 0.3 * all_rows["sent"]  # of the rest `out` is the most


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [("SGD", {"momentum": 0.9}), ("SGD", {"weight_decay": 0.1}), ("Adagrad", {"weight_decay": 0.1}), ("AdamW", {})],
)
def test_gradients_are_dense_where_the_update_is_of_all_rows(optimizer: str, settings: dict[str, Any]) -> None:
    dense, sparse = (trained("dp=1", optimizer, settings, sparse=sparse) for sparse in (False, True))
    assert sparse["sparse"] == []
    assert sparse["numbers"] == dense["numbers"]


def test_a_table_that_another_layer_uses_whole_has_dense_gradients() -> None:
    dense, sparse = (trained("dp=1", "SGD", {}, tied=True, sparse=sparse) for sparse in (False, True))
    assert sparse["sparse"] == ["users.weight", "words.weight"]
    for found, expected in zip(sparse["numbers"], dense["numbers"], strict=True):
        assert found == pytest.approx(expected, rel=1e-12)


class Unusual(nn.Module):
    """A table that the output uses whole by a function, and one whose sparse gradient has single numbers."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.sparse = sparse
        self.table = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.gathered = nn.Parameter(torch.randn(ROWS, 3))

    def forward(self, rows: Tensor) -> Tensor:
        found = torch.gather(self.gathered, 0, rows, sparse_grad=self.sparse)
        out = F.linear(self.table(rows[:, 0]), self.table.weight)
        logits: Tensor = out[:, :3] + found
        return logits


def trained_unusual(plan: str, sparse: bool) -> list[tuple[float, float]]:
    torch.manual_seed(1)
    model = Unusual(sparse=sparse).double()
    loader = DataLoader(data(), BATCH)
    engine = paceline.setup(
        model,
        torch.optim.SGD(model.parameters(), 0.3),
        loss=F.cross_entropy,
        loader=loader,
        plan=plan,
        precision="fp64",
    )
    try:
        results = [engine.step(batch) for batch, _ in zip(engine.loader, range(4), strict=False)]
    finally:
        engine.close()
    return [(result.loss, result.grad_norm) for result in results]


def test_tables_used_whole_by_a_function_and_sparse_numbers_train_as_dense_ones(ranks: Ranks) -> None:
    dense = [pytest.approx(numbers, rel=1e-9) for numbers in trained_unusual("dp=1", False)]
    assert trained_unusual("dp=1", True) == dense
    assert ranks(2, trained_unusual, "dp=2", True) == [dense] * 2


def test_a_fused_update_which_takes_no_rows_is_unfused(ranks: Ranks) -> None:
    expected = trained("dp=1", "SGD", {}, sparse=False)["numbers"]
    for rank in ranks(2, trained, "dp=2 fused=on", "SGD", {}):
        assert rank["sparse"] == TABLES
        assert rank["numbers"] == [pytest.approx(numbers, rel=1e-9) for numbers in expected]


def trained_job(args: dict[str, Any], *, sparse: bool = True) -> tuple[list[float], list[bool]]:
    """Losses of a job with Adagrad, and whether the groups of the tables and of the other parameters are fused."""
    job = small_job(
        model={"factory": f"{__name__}:Fields", "args": {"sparse": sparse}},
        data={"kind": "dataset", "factory": f"{__name__}:data"},
        optimizer={"name": "Adagrad", "lr": 0.1, "args": args, "groups": [{"match": ["head", "out"], "lr": 0.2}]},
    )
    torch.manual_seed(1)
    samples = job.data.build(input_shape=None, seed=0)
    with closing(build_engine(job, Plan(), job.model.build(), samples, Group())) as engine:
        losses = [engine.step(batch).loss for batch in engine.loader]
        return losses, [bool(group["fused"]) for group in engine.optimizer.param_groups]


def test_a_job_fuses_the_groups_without_tables() -> None:
    found, fused = trained_job({})
    assert fused == [False, True]
    for args, sparse in (({"fused": False}, True), ({}, False)):
        expected, fused = trained_job(args, sparse=sparse)
        assert fused == [not sparse] * 2
        assert found == pytest.approx(expected, rel=1e-5)


# Torch's way: SparseAdam for the tables, Adam for the rest


def optimizers_of(model: Fields) -> list[torch.optim.Optimizer]:
    tables = [model.users.weight, model.items.weight, model.words.weight]
    rest = [*model.head.parameters(), *model.out.parameters()]
    return [torch.optim.SparseAdam(tables, lr=0.1), torch.optim.Adam(rest, lr=0.01)]


def plain() -> list[float]:
    torch.manual_seed(1)
    model = Fields()
    optimizers = optimizers_of(model)
    losses = []
    for _ in range(2):
        for rows, target in DataLoader(data(), BATCH):
            loss = F.cross_entropy(model(rows), target)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def own_loop(folder: str, epochs: range, clip_norm: float | None = None) -> tuple[list[float], list[float]]:
    """Return losses and norms of the same loop with paceline's calls.

    If the first epoch is not 0, the loop resumes from the state in the folder.
    """
    torch.manual_seed(1)
    model = Fields()
    optimizers = optimizers_of(model)
    engine = paceline.setup(model, optimizers, loader=DataLoader(data(), BATCH))
    losses, norms = [], []
    try:
        if epochs[0]:
            engine.load(folder)
        for _ in epochs:
            for rows, target in engine.loader:
                losses.append(float(engine.backward(F.cross_entropy(model(rows), target))))
                result = engine.update(clip_norm=clip_norm)
                assert result.reduced
                norms.append(result.grad_norm)
        engine.save(folder)
    finally:
        engine.close()
    return losses, norms


def test_sparse_adam_trains_as_in_one_process_and_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    expected = plain()
    first = ranks(2, own_loop, str(tmp_path / "state"), range(1))
    then = ranks(2, own_loop, str(tmp_path / "state"), range(1, 2))
    for (one, _), (two, _) in zip(first, then, strict=True):
        assert one + two == pytest.approx(expected, rel=1e-5)


def test_norms_of_sparse_gradients_are_the_same_on_all_ranks_and_where_nothing_needs_them(
    ranks: Ranks, tmp_path: Path
) -> None:
    clipped = own_loop(str(tmp_path / "clipped"), range(1), clip_norm=1e9)
    alone = own_loop(str(tmp_path / "alone"), range(1))
    first, second = ranks(2, own_loop, str(tmp_path / "two"), range(1))
    assert first == second
    for losses, norms in (alone, first):
        assert losses == pytest.approx(clipped[0], rel=1e-5)
        assert norms == pytest.approx(clipped[1], rel=1e-5)


def test_sparse_adam_is_refused_for_dense_gradients() -> None:
    with raises(JobError, "optimizer.no_sparse_gradients", parameters=3):
        trained("dp=1", "SparseAdam", {})  # the classifiers are dense


# The rule alone


def unlike_ranks() -> dict[str, Any]:
    """A table that one rank alone looks up, one that none does, and a plain backward pass."""
    with joined(deadline_s=30) as group:
        tables = nn.ModuleList(nn.Embedding(6, 2, sparse=True) for _ in range(3))
        rule = AllReduce()
        rule.attach(Replica(tables, group, 1, rows=set(tables.parameters())))
        with pytest.raises(SyncError, match=r"engine\.backward"):
            _refused(rule, tables)
        rule.replica.backward.gradients = "collected"
        tables.zero_grad()
        loss = tables[0](torch.tensor([group.rank, 5, 5])).sum()
        if group.rank == 1:
            loss = loss + tables[1](torch.tensor([], dtype=torch.int64)).sum()
        loss.backward()
        rule.after_backward(1, torch.zeros(1))
        found = [None if t.weight.grad is None else t.weight.grad.to_dense().sum(1).tolist() for t in tables]  # type: ignore[operator]
        rule.detach()
        return {"found": found, "hooks": hooked_parameters(tables)}


def _refused(rule: AllReduce, tables: nn.ModuleList) -> None:
    rule.replica.backward.gradients = "refused"
    tables[0](torch.tensor([0])).sum().backward()


@pytest.mark.parametrize("backend", ["shm", "tcp", "gloo"])
def test_every_rank_gets_the_rows_of_all(ranks: Ranks, backend: Backend) -> None:
    expected = {"found": [[2.0, 2.0, 0.0, 0.0, 0.0, 8.0], [0.0] * 6, None], "hooks": {}}
    assert ranks(2, unlike_ranks, backend=backend) == [expected] * 2


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=5),
    st.integers(0, 2**31),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_the_numbers_of_gradients_have_their_norm_and_are_changed_with_them(
    shapes: list[tuple[int, int]], seed: int, dtype: torch.dtype
) -> None:
    made = torch.Generator().manual_seed(seed)
    tables = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for table in tables:
        looked_up = torch.randint(0, len(table), (int(torch.randint(0, 12, (), generator=made)),), generator=made)
        values = torch.randn(len(looked_up), table.shape[1], generator=made, dtype=dtype)
        table.grad = torch.sparse_coo_tensor(looked_up[None], values, table.shape)
    dense = [table.grad.to_dense() for table in tables if table.grad is not None]
    numbers = numbers_of(tables)
    norm = torch.linalg.vector_norm(torch.cat([n.flatten() for n in numbers]).double())
    torch.testing.assert_close(norm, torch.linalg.vector_norm(torch.cat([d.flatten() for d in dense]).double()))
    torch._foreach_mul_(numbers, 0.5)
    for table, whole in zip(tables, dense, strict=True):
        assert table.grad is not None
        assert table.grad.is_coalesced()
        torch.testing.assert_close(table.grad.to_dense(), whole * 0.5)


def test_a_norm_that_is_read_late_is_that_of_its_step_after_gradients_were_zeroed() -> None:
    norms = []
    for reads_at_once in (True, False):
        torch.manual_seed(0)
        model = nn.EmbeddingBag(50, 4, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = DataLoader(TensorDataset(torch.arange(24).view(8, 3) % 7, torch.ones(8, 4)), batch_size=8)
        engine = paceline.setup(model, optimizer, loss=F.mse_loss, loader=data)
        (batch,) = engine.loader
        result = engine.step(batch)
        if reads_at_once:
            assert result.grad_norm > 0
        optimizer.zero_grad(set_to_none=False)
        norms.append(result.grad_norm)
        engine.close()
    assert norms[0] == norms[1]
