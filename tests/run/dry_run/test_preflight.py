"""What keeps ranks from dividing a model is told before they start, with a plan that works.

Shapes that cannot tell refuse nothing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.cluster.discover import discover
from paceline.elastic.run_on_ranks import run_on_plan
from paceline.errors import PlanError
from paceline.job.job import Job
from paceline.job.loss import LossSpec
from paceline.job.zoo.models import GPT
from paceline.planning.check.plan_errors import plan_errors
from paceline.planning.plan import Plan
from paceline.run.dry_run import kept_file, refuse_what_cannot_divide
from paceline.run.dry_run.dry_run import dry_run_stage
from paceline.run.dry_run.preflight import Preflight, refused_of
from paceline.run.train import train
from refusals import assert_problem, raises

VOCAB, TOKENS = 32, 16


class Recurrent(nn.Module):
    """Goes through its tokens one after the other, so no rank can do with a part of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(VOCAB, 16), nn.LSTM(16, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.head(self.lstm(self.embedding(tokens))[0])
        return y


class OfWholeRows(nn.Module):
    """Insists on the length of its input, which cp changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = GPT(vocab=VOCAB, context=TOKENS, layers=2, hidden=16, heads=2)

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Any:
        if not tokens.is_meta and tokens.shape[1] != TOKENS:
            raise RuntimeError(f"expected {TOKENS} tokens")
        return self.inner(tokens, position_ids=position_ids)


class OfValues(nn.Module):
    """Decides by values how it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = (
            nn.Embedding(VOCAB, 16),
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, VOCAB)),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(tokens)
        torch.from_numpy(x.detach().numpy())  # as code that logs or plots does
        y: Tensor = self.blocks(x)
        return y


def job(model: str) -> Job:
    return Job(
        name="small",
        model={"factory": f"{__file__}:{model}"},
        data={"kind": "synthetic", "samples": 32, "shape": [TOKENS], "vocab": VOCAB, "held_out": 0},
        loss="cross_entropy",
        optimizer="adamw",
        global_batch=8,
        stop={"steps": 1},
    )


def test_a_division_that_ranks_would_refuse_is_refused_with_the_nearest_plan_that_works() -> None:
    assert plan_errors(job("Recurrent"), Plan.parse("dp=2 cp=2"), cluster=discover()) == [], (
        "else it is known without dividing the model"
    )
    refusal = Preflight(job("Recurrent")).refusal(Plan.parse("dp=2 cp=2"), discover())
    assert refusal is not None
    assert (refusal.problems[0].code, refusal.nearest) == ("plan.no_attention", Plan(dp=2))


def test_a_plan_that_is_proposed_was_itself_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    divided: list[Plan] = []

    def noted(job: Job, plan: Plan, *of: Any) -> Any:
        divided.append(plan)
        return dry_run_stage(job, plan, *of)

    monkeypatch.setattr("paceline.run.dry_run.preflight.dry_run_stage", noted)
    refusal = Preflight(job("Recurrent")).refusal(Plan.parse("cp=2 tp=2"), discover())
    assert refusal is not None
    assert refusal.nearest == Plan(tp=2)
    assert Plan.parse("tp=2") in divided


def test_a_step_that_fails_only_where_the_model_is_divided_is_refused() -> None:
    refusal = Preflight(job("OfWholeRows")).refusal(Plan.parse("cp=2"), discover())
    assert refusal is not None
    [problem] = refusal.problems
    assert problem.code == "plan.step_fails"
    assert f"expected {TOKENS} tokens" in problem.fields["error"], "it is the model's own text"


@pytest.mark.parametrize("plan", ["tp=2", "fsdp=2", "remat=block"])
def test_code_that_needs_values_is_left_to_the_ranks(plan: str) -> None:
    found = Preflight(job("OfValues")).reasons(Plan.parse(plan))
    assert {problem.code for problem in found} <= {"plan.no_blocks_to_recompute"}


class WithANumber(Recurrent):
    """A model with a 0-d parameter of its own.

    torch cannot swap such a one for one without values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.scale


def test_what_only_tensors_without_values_raise_refuses_nothing() -> None:
    assert Preflight(job("WithANumber")).reasons(Plan.parse("fsdp=2")) == []


def test_of_several_plans_those_are_named_that_cannot_divide_the_model() -> None:
    cp, tp = Plan.parse("cp=2"), Plan.parse("tp=2")
    assert refused_of(job("Recurrent"), [Plan(dp=2), cp, tp], 60) == {cp}
    assert refused_of(job("Recurrent"), [cp], 0) == set(), "there was no time to ask"


def test_training_is_refused_before_there_is_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with raises(PlanError, "plan.no_attention"):
        train(job("Recurrent"), plan="cp=2", run=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "cache").exists(), "a refusal is not kept: code that the job does not name may be mended"


@pytest.mark.slow
def test_a_plan_that_was_divided_once_is_not_asked_about_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked: list[Any] = []

    def run(function: Any, request: Any, **where: Any) -> list[Any]:
        asked.append(request)
        return run_on_plan(function, request, **where)

    monkeypatch.setattr("paceline.run.dry_run.run_on_plan", run)
    for plan in ("tp=2", "tp=2", "dp=2"):
        refuse_what_cannot_divide(job("Recurrent"), Plan.parse(plan), discover())
    assert len(asked) == 1


class TablesAndMeasures(nn.Module):
    """A model that begins with the first of its repeated modules.

    So one stage cannot begin where half of them begin.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(
            nn.Embedding(VOCAB, 16), nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Sequential(nn.Linear(16, 16))
        )
        self.top = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, VOCAB))

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.top(self.bottom(tokens))
        return y


def test_only_a_cut_that_the_plan_names_refuses_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    preflight, plan = Preflight(job("TablesAndMeasures")), Plan.parse("pp=2 microbatches=2")
    # as for a large model, which is cut by number first
    monkeypatch.setattr("paceline.run.dry_run.preflight._SMALL", 0)
    monkeypatch.setattr("paceline.run.dry_run.dry_run.find_blocks", lambda _model: ("bottom.0", "bottom.0"))
    assert preflight.reasons(plan) == []
    named = Plan.parse("pp=2 microbatches=2 cut=bottom.0")
    assert "nothing is computed before bottom.0" in preflight.reasons(named)[0].text


# losses that cannot be computed in parts


class Pairs(Dataset[dict[str, Tensor]]):
    """Samples of a model that computes its own loss."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        return {"x": torch.randn(4, generator=drawn), "labels": torch.randint(3, (), generator=drawn)}


class Contrasting(nn.Module):
    """Its loss compares the samples of a batch with each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.layers(x)
        return {"loss": nn.functional.cross_entropy(y @ y.T, torch.arange(len(y)))}


class Classifying(Contrasting):
    """Its loss is a mean over samples."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layers(x), labels)}


def summed(output: Tensor, target: Tensor) -> Tensor:
    """A sum that does not say that it is one."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def averaged(output: Tensor, target: Tensor) -> Tensor:
    """A mean over samples."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def own_job(model: str) -> Job:
    factory = {"factory": f"{__file__}:{model}"}
    return Job(
        model=factory, data=f"{__file__}:Pairs", loss="model", optimizer="sgd", global_batch=8, stop={"steps": 1}
    )


@pytest.mark.parametrize(
    ("plan", "nearest"), [("dp=2", "dp=1"), ("fsdp=2", "dp=1"), ("tp=2 microbatches=2", "tp=2"), ("dp=2 tp=2", "tp=2")]
)
def test_a_models_loss_over_the_samples_together_is_refused_where_a_plan_parts_them(plan: str, nearest: str) -> None:
    refusal = Preflight(own_job("Contrasting")).refusal(Plan.parse(plan), discover())
    assert refusal is not None
    assert f"plan {plan} computes a batch in" in refusal.problems[0].text
    assert refusal.nearest == Plan.parse(nearest)


@pytest.mark.parametrize("plan", ["dp=2", "fsdp=2", "dp=1 microbatches=4"])
def test_a_models_mean_over_samples_is_refused_nowhere(plan: str) -> None:
    assert Preflight(own_job("Classifying")).refusal(Plan.parse(plan), discover()) is None


@pytest.mark.parametrize("plan", ["dp=2", "dp=1 microbatches=2"])
def test_a_loss_of_ones_own_that_is_no_mean_is_refused_before_ranks_start(plan: str) -> None:
    own = {
        name: job("Recurrent").model_copy(update={"loss": LossSpec(name=f"{__file__}:{name}")})
        for name in ("summed", "averaged")
    }
    refused = Preflight(own["summed"]).refusal(Plan.parse(plan), discover())
    assert refused is not None
    assert_problem(refused, "plan.loss_not_the_mean", explanation=re.compile(r"reduction = 'sum'"))
    assert Preflight(own["averaged"]).refusal(Plan.parse(plan), discover()) is None


def test_an_answer_is_not_kept_beyond_an_edit_of_paceline_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    before = kept_file(job("Recurrent"), Plan.parse("tp=2"))
    monkeypatch.setattr("paceline.run.dry_run._newest_source", lambda: 1)
    assert kept_file(job("Recurrent"), Plan.parse("tp=2")) != before
