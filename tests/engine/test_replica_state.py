"""Replicas hold the same state, whatever a model's forward writes.

Where they cannot, training is refused before the first update.
"""

from __future__ import annotations

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
from paceline.errors import JobError, PacelineError
from ranks import Ranks

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
        engine = paceline.setup(model, stepping, F.cross_entropy, loader, plan=plan, precision="fp64", **settings)
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


def exported(plan: str, folder: str) -> dict[str, dict[str, Tensor]]:
    """What `export` wrote after training and after an evaluation, and what the rank holds in the end."""
    torch.manual_seed(1)
    model = Words(max_norm=1.0).double()
    words, classes = torch.randint(0, ROWS, (12, 2)), torch.randint(0, CLASSES, (12,))
    train, held_out = TensorDataset(words[:8], classes[:8]), TensorDataset(words[8:], classes[8:])
    optimizer = torch.optim.SGD(model.parameters(), lr=20.0)
    loader = DataLoader(train, batch_size=4)
    engine = paceline.setup(model, optimizer, F.cross_entropy, loader, plan=plan, precision="fp64")
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
    ("dp=2", by_frequency, "SGD", "scale_grad_by_freq, which divides by how often a rank sees a row"),
    ("fsdp=2", short, "SGD", '"embedding" has max_norm'),
    ("dp=2", sparse, "SparseAdam", "SparseAdam takes sparse gradients"),
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
            assert f"step 1: {what} is different on rank 1 than on rank 0" in found["said"]
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
    assert any("parameter 'head.weight' is different on rank" in text for text in said)
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
    with pytest.raises(JobError, match="there are same"):
        paceline.setup(Words(), torch.optim.SGD(Words().parameters()), F.cross_entropy, None, buffers="mine")
