"""Packed documents are computed as if they were alone, under every plan; a model that mixes them is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import paceline
from paceline.errors import DataError, JobError, PacelineError
from paceline.job.loss import LossSpec
from paceline.job.zoo.huggingface import bert
from paceline.job.zoo.models import GPT, MoE
from paceline.planning.plan import Plan
from packed_documents import CONTEXT, VOCABULARY, Sequences, packed, packed_loss_difference, padded
from ranks import Ranks
from refusals import raises

SIZES: dict[str, Any] = {"vocab": VOCABULARY, "context": CONTEXT, "layers": 4, "hidden": 32, "heads": 4}


def gpt() -> nn.Module:
    return GPT(**SIZES)


def moe() -> nn.Module:
    return MoE(**SIZES, experts=4, capacity=0.6, balance=0.3)


class Mixing(GPT):
    """A model that takes positions, and does not use them."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return super().forward(input_ids)


def mixing() -> nn.Module:
    return Mixing(**SIZES)


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt": gpt, "moe": moe, "mixing": mixing}


def steps(model: nn.Module, plan: str, data: Dataset[Any], precision: str = "fp64", count: int = 3) -> dict[str, Any]:
    """Losses of steps over all documents, and this rank's parts of the weights after them."""
    engine = paceline.setup(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5),
        loss=LossSpec(name="cross_entropy").build(),
        loader=DataLoader(data, batch_size=len(data)),  # type: ignore[arg-type]
        plan=plan,
        precision=precision,  # type: ignore[arg-type]
    )
    try:
        losses: list[float] = []
        while len(losses) < count:
            losses += [engine.step(batch).loss for batch in engine.loader]
        parts = engine.parts
        weights = {
            name: (p.detach().clone(), parts[name].layout if parts else None)
            for name, p in engine.named_parameters().items()
        }
        return {"losses": losses, "weights": weights}
    finally:
        engine.close()


def trained(plan: str, name: str, data: Sequences) -> dict[str, Any]:
    torch.manual_seed(1)
    return steps(MODELS[name]().double(), plan, data)


def trained_on_packed(plan: str, name: str) -> dict[str, Any]:
    return trained(plan, name, packed())


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("gpt", "dp=2"),
        ("gpt", "tp=2"),
        ("gpt", "cp=2"),
        pytest.param("gpt", "fsdp=2", marks=pytest.mark.slow),
        pytest.param("gpt", "pp=2 microbatches=2", marks=pytest.mark.slow),
        pytest.param("gpt", "fsdp=2 tp=2", marks=pytest.mark.slow),
        pytest.param("gpt", "tp=2 pp=2 microbatches=2", marks=pytest.mark.slow),
        ("moe", "dp=1"),
        ("moe", "pp=2 microbatches=2"),
        pytest.param("moe", "fsdp=2", marks=pytest.mark.slow),
        pytest.param("moe", "ep=2", marks=pytest.mark.slow),
        pytest.param("moe", "pp=2 microbatches=2 remat=block", marks=pytest.mark.slow),
        pytest.param("moe", "cp=2", marks=pytest.mark.slow),
    ],
)
def test_packed_documents_give_the_losses_and_gradients_of_padded_ones(ranks: Ranks, name: str, plan: str) -> None:
    alone = trained("dp=1", name, padded())
    for rank in ranks(Plan.parse(plan).ranks, trained_on_packed, plan, name, backend="shm"):
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-9)
        for key, (own, layout) in rank["weights"].items():
            whole = alone["weights"][key][0]
            # the difference of the weights is the sum of three gradients, times 0.5
            assert torch.allclose(own, whole if layout is None else layout.take(whole), rtol=0, atol=1e-9), key


@pytest.mark.slow
def test_the_figure_of_packed_documents_is_rounding() -> None:
    assert packed_loss_difference(["dp=1", "dp=2"]) == {
        "dp=1": pytest.approx(0, abs=1e-9),
        "dp=2": pytest.approx(0, abs=1e-9),
    }


def refused(plan: str, precision: str) -> str | None:
    torch.manual_seed(1)
    try:
        steps(mixing(), plan, packed(), precision)
    except PacelineError as error:
        return error.code
    return None


@pytest.mark.parametrize(
    ("plan", "precision"),
    [
        ("tp=2", "fp32"),
        ("cp=2", "fp32"),
        ("dp=2", "bf16"),
        ("dp=2", "fp8"),
        pytest.param("fsdp=2", "bf16", marks=pytest.mark.slow),
        pytest.param("pp=2 microbatches=2", "fp32", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_mixes_documents_is_refused_on_every_rank(ranks: Ranks, plan: str, precision: str) -> None:
    assert ranks(2, refused, plan, precision, backend="shm") == ["model.documents_mix"] * 2


class OneHead(nn.Module):
    """Attention without positions, as a user may write it, after which a projection begins with zeros."""

    def __init__(self, *, zeros: bool = False) -> None:
        super().__init__()
        self.tokens, self.projected = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 48)
        self.mixed, self.out = nn.Linear(16, 16, bias=False), nn.Linear(16, VOCABULARY)
        if zeros:
            nn.init.zeros_(self.mixed.weight)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        query, key, value = (part.unsqueeze(1) for part in self.projected(x).chunk(3, -1))
        out: Tensor = self.out(x + self.mixed(self.attend(query, key, value, position_ids).squeeze(1)))
        return out

    def attend(self, query: Tensor, key: Tensor, value: Tensor, position_ids: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Confined(OneHead):
    """With the mask that the refusal shows."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, position_ids: Tensor) -> Tensor:
        d = (position_ids == 0).cumsum(1)
        mask = (d[:, :, None] == d[:, None]).tril()[:, None]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


class BothWays(OneHead):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, position_ids: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)


class AbsolutePositions(Confined):
    """Its attention is confined, but its positions are those in the whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(CONTEXT, 16)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        out: Tensor = super().forward(input_ids, position_ids) + self.out(self.positions.weight)
        return out


class WithoutPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = OneHead()

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.inner(input_ids, input_ids)
        return out


@pytest.mark.parametrize("make", [OneHead, BothWays, AbsolutePositions, WithoutPositions])
def test_a_users_own_model_that_mixes_documents_is_refused_before_the_first_update(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with raises(JobError, "model.documents_mix"):
        steps(model, "dp=1", packed(), "fp32")
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_model_whose_attention_has_no_effect_at_first_is_refused_once_it_has() -> None:
    with raises(JobError, "model.documents_mix"):
        steps(OneHead(zeros=True), "dp=1", packed(), "fp32")


def test_a_users_own_model_with_the_mask_of_the_refusal_trains() -> None:
    assert len(steps(Confined(), "dp=1", packed(), "fp32")["losses"]) == 3


def test_scales_of_float8_do_not_count_as_an_influence_between_documents() -> None:
    assert len(steps(gpt(), "dp=1", packed(), "fp8")["losses"]) == 3


def test_a_masked_model_of_the_zoo_confines_documents_as_well() -> None:
    model = bert(layers=2, hidden=16, heads=2, vocab=VOCABULARY, context=CONTEXT)
    assert len(steps(model, "dp=1", packed(), "fp32")["losses"]) == 3


def test_sequences_that_are_not_packed_are_not_checked() -> None:
    assert len(steps(OneHead(), "dp=1", padded(), "fp32")["losses"]) == 3


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    packed = True

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.arange(CONTEXT), torch.arange(CONTEXT)


def test_samples_without_documents_are_refused() -> None:
    with raises(DataError, "data.packed_form"):
        steps(gpt(), "dp=1", Pairs(), "fp32")
