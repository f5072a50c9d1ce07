"""What keeps ranks from dividing a model is told before they start, with a plan that works; shapes that cannot tell refuse nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.cluster.discover import discover
from paceline.errors import PlanError
from paceline.job.job import Job
from paceline.job.zoo.gpt import GPT
from paceline.launch.look import launch_to_look
from paceline.launch.preflight import refuse_what_cannot_divide
from paceline.launch.train import train
from paceline.plan.plan import Plan
from paceline.train.preflight import Preflight, refused_of

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
        self.first, self.blocks = nn.Embedding(VOCAB, 16), nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, VOCAB))

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
    assert Plan.parse("dp=2 cp=2").check(job("Recurrent"), discover()) == [], "else it is known without dividing the model"
    *reasons, nearest = Preflight(job("Recurrent")).refusal(Plan.parse("dp=2 cp=2"), discover())
    assert "no attention" in reasons[0]
    assert nearest == "Nearest plan that works: dp=2."


def test_a_plan_that_is_proposed_was_itself_divided() -> None:
    preflight = Preflight(job("Recurrent"))
    *_, nearest = preflight.refusal(Plan.parse("cp=2 tp=2"), discover())
    assert nearest == "Nearest plan that works: tp=2."
    assert preflight._known[Plan.parse("tp=2")] == []


def test_a_step_that_fails_only_where_the_model_is_divided_is_refused() -> None:
    [reason, _] = Preflight(job("OfWholeRows")).refusal(Plan.parse("cp=2"), discover())
    assert f"expected {TOKENS} tokens" in reason


@pytest.mark.parametrize("plan", ["tp=2", "fsdp=2", "remat=block"])
def test_code_that_needs_values_is_left_to_the_ranks(plan: str) -> None:
    found = Preflight(job("OfValues")).reasons(Plan.parse(plan))
    assert found == [] or "no repeated blocks" in found[0]


class WithANumber(Recurrent):
    """Has a parameter of no dimensions on the model itself, which torch cannot swap for one without values."""

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
    with pytest.raises(PlanError, match=r"(?s)no attention.*Nearest plan that works: dp=1\."):
        train(job("Recurrent"), plan="cp=2", run=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "cache").exists(), "a refusal is not kept: code that the job does not name may be mended"


def test_a_plan_that_was_divided_once_is_not_asked_about_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked: list[str] = []

    def launch(arguments: list[str], *others: Any) -> None:
        asked.append(arguments[0])
        launch_to_look(arguments, *others)

    for plan in ("tp=2", "tp=2", "dp=2"):
        refuse_what_cannot_divide(job("Recurrent"), Plan.parse(plan), discover(), launch=launch)
    assert len(asked) == 1


class TablesAndMeasures(nn.Module):
    """Begins with the first of its repeated modules, so that one stage cannot begin where half of them begin."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Embedding(VOCAB, 16), nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Sequential(nn.Linear(16, 16)))
        self.top = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, VOCAB))

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.top(self.bottom(tokens))
        return y


def test_only_a_cut_that_the_plan_names_refuses_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    preflight, plan = Preflight(job("TablesAndMeasures")), Plan.parse("pp=2 microbatches=2")
    monkeypatch.setattr("paceline.train.preflight._SMALL", 0)  # as for a large model, which is cut by number first
    monkeypatch.setattr("paceline.train.rehearse.find_blocks", lambda _model: ("bottom.0", "bottom.0"))
    assert preflight.reasons(plan) == []
    named = Plan.parse("pp=2 microbatches=2 cut=bottom.0")
    assert "nothing is computed before bottom.0" in preflight.reasons(named)[0]
