"""`paceline check`: a plan that computes something else is told, and where it begins; one that only rounds is not."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from model_families import family_job
from paceline.errors import PlanError
from paceline.job.job import Job
from paceline.planning.plan import Plan
from paceline.run.parity.check import LargestDifference, Parity, StepParity, Tolerance, check_all
from paceline.run.parity.ranks import ModuleOutputs
from paceline.run.record.run import Run
from ranks import Ranks
from refusals import raises
from small_jobs import CHAOTIC, new_run, small_job, train_as_rank, train_here

ODD = '''
import os
import torch
from torch import nn


class Odd(nn.Module):
    """Computes something else on every rank, from its second layer on."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.second.register_forward_hook(lambda module, inputs, output: output * (1 + 0.01 * int(os.environ.get("RANK", 0))))

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
'''  # noqa: E501


IMAGINARY = '''
import torch
from torch import nn


class Imaginary(nn.Module):
    """The gradient of the imaginary part depends on how many samples a rank has, if `uneven`."""

    def __init__(self, uneven):
        super().__init__()
        self.weight, self.last, self.uneven = nn.Parameter(torch.ones(6, dtype=torch.cfloat)), nn.Linear(6, 3), uneven

    def forward(self, x):
        pair = torch.view_as_real(self.weight)
        imaginary = pair[:, 1]
        if self.uneven:
            imaginary = imaginary.detach() + (imaginary - imaginary.detach()) * len(x)
        return self.last(x * pair[:, 0] + imaginary)
'''


def own_job(folder: Path, code: str, name: str) -> Job:
    (folder / "own.py").write_text(code)
    data = {"kind": "synthetic", "samples": 64, "shape": [6], "classes": 3, "held_out": 0}
    return small_job(model={"factory": f"{folder}/own.py:{name}"}, data=data)


@pytest.mark.slow
def test_a_plan_that_computes_the_same_holds(tmp_path: Path) -> None:
    found = paceline.check(family_job("gpt", tmp_path), "fsdp=2", steps=2)
    assert found.holds
    assert len(found.steps) == 2
    assert found.first_module is None
    assert "blocks.3.mlp.2.weight" in found.parameters


def test_a_plan_that_computes_something_else_fails_and_names_the_module_where_it_begins(tmp_path: Path) -> None:
    found = paceline.check(own_job(tmp_path, ODD, "Odd"), "dp=2", steps=1)
    assert not found.holds
    assert found.first_module == "second"
    assert found.steps[0].loss_difference > 1e-5
    assert found.steps[0].gradient.name


@pytest.mark.slow
def test_rounding_that_a_job_magnifies_in_one_process_too_is_no_difference(tmp_path: Path) -> None:
    job = own_job(tmp_path, CHAOTIC, "Chaotic")
    found = paceline.check(job, "dp=2", steps=1)
    assert found.tolerance.gradient > 1e-4
    assert found.holds
    assert paceline.check(job, "dp=2", steps=2).verdict == "cannot tell", "by then a mistake would pass for rounding"


@pytest.mark.parametrize(
    ("loss", "gradient", "verdict"),
    [
        pytest.param(2.425, 1.1, "cannot tell", id="as rounding may"),
        pytest.param(2.3, 1.1, "differs", id="a loss beyond its cap"),
        pytest.param(2.453, 18.0, "differs", id="gradients beyond what rounding does"),
    ],
)
def test_a_loss_says_nothing_where_rounding_moves_gradients_at_will(loss: float, gradient: float, verdict: str) -> None:
    # measured: a ShuffleNet under fsdp=2, which agrees to 1e-11 in float64; one process in float32 is 176 % off in
    # gradients, and by chance only 0.08 % in the loss
    tolerance = Tolerance(7.8e-3, 17.6, 0.37, 3.8e-2)
    found = [LargestDifference(value, "w", 0) for value in (gradient, 0.02, 0.015)]
    assert Parity(Plan.parse("fsdp=2"), tolerance, [StepParity(loss, 2.453, *found)]).verdict == verdict


def test_a_plan_that_cannot_run_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with raises(PlanError, "plan.heads_not_divisible", heads=[4], what="attention heads (4)"):
        paceline.check(family_job("gpt", tmp_path), "tp=3")


@pytest.mark.slow
def test_every_legal_plan_of_two_ranks_holds(tmp_path: Path) -> None:
    seen: dict[str, object] = {}
    assert check_all(family_job("gpt", tmp_path), 2, steps=2, say=lambda plan, found: seen.update({str(plan): found}))
    assert {"dp=2", "fsdp=2", "tp=2", "cp=2"} <= seen.keys()
    assert any("pp=2" in plan for plan in seen)


def test_what_is_added_up_to_compare_is_not_compiled() -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    outputs = ModuleOutputs(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the compiler tells of what it cannot follow
        torch.compile(model, backend="eager")(torch.ones(4, 2))
    assert outputs.found["0"][0] == 12
    outputs.close()


DRAWS = """
import os, random
import torch
from torch.utils.data import Dataset


class Augmented(Dataset):
    def __len__(self):
        return 32

    def noise(self, index):
        return random.random() * torch.rand(6)

    def __getitem__(self, index):
        return torch.full((6,), float(index)) / 32 + self.noise(index), index % 3


class Unseeded(Augmented):
    def noise(self, index):
        return torch.full((6,), os.urandom(1)[0] / 256) * torch.rand(6)


class Still(Augmented):
    def noise(self, index):
        return 0.0


def net():
    return torch.nn.Linear(6, 3)


def mixup(samples):
    x, y = torch.utils.data.default_collate(samples)
    return x + 0.1 * torch.rand(()) * x.flip(0), y
"""


def drawing_job(folder: Path, name: str, **data: str) -> Job:
    (folder / "draws.py").write_text(DRAWS)
    source = {"kind": "dataset", "factory": f"{folder}/draws.py:{name}", "held_out": 0.25}
    data = {key: f"{folder}/draws.py:{value}" for key, value in data.items()}
    return small_job(model={"factory": f"{folder}/draws.py:net"}, data=source | data)


@pytest.mark.parametrize(
    ("name", "collate", "undecided"),
    [
        pytest.param("Augmented", {}, None, id="random augmentation is the same under every plan"),
        pytest.param("Unseeded", {}, "Unseeded", id="samples that differ between processes"),
        pytest.param("Still", {"collate": "mixup"}, "collate", id="a collate function that draws for parts"),
    ],
)
def test_random_inputs_are_the_same_or_named(
    tmp_path: Path, name: str, collate: dict[str, str], undecided: str | None
) -> None:
    found = paceline.check(drawing_job(tmp_path, name, **collate), "dp=2 precision=fp64", steps=2)
    assert found.verdict == ("holds" if undecided is None else "cannot tell")
    assert undecided is None or undecided in str(found.undecided)


@pytest.mark.parametrize("uneven", [False, True])
def test_the_imaginary_part_of_a_complex_parameter_is_compared(tmp_path: Path, uneven: bool) -> None:
    job = own_job(tmp_path, IMAGINARY, "Imaginary")
    job = job.model_copy(update={"model": job.model.model_copy(update={"args": {"uneven": uneven}})})
    found = paceline.check(job, "dp=2", steps=1)
    assert found.holds == (not uneven)
    if uneven:
        assert found.parameters["weight"] > 0.1


AMPLIFYING = '''
import os

import torch
from torch import nn
from torch.utils.data import TensorDataset


class Normed(nn.Module):
    """Many batch norms over few samples, which amplify rounding; `mistake` changes the outputs of rank 1."""

    def __init__(self, mistake):
        super().__init__()
        self.mistake = mistake
        layers = [nn.Sequential(nn.Linear(12 if i else 6, 12), nn.BatchNorm1d(12), nn.Tanh()) for i in range(24)]
        self.layers, self.last = nn.Sequential(*layers), nn.Linear(12, 3)

    def forward(self, x):
        return self.last(self.layers(x) * (1 + self.mistake * int(os.environ.get("RANK", 0))))


class Words(nn.Module):
    def __init__(self, mistake):
        super().__init__()
        self.mistake = mistake
        self.table, self.last = nn.Embedding(200, 8, max_norm=1.0), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.table(x).mean(1) * (1 + self.mistake * int(os.environ.get("RANK", 0))))


def words():
    random = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randint(0, 200, (64, 2), generator=random), torch.randint(0, 3, (64,), generator=random))
'''


def amplifying_job(folder: Path, name: str, mistake: float, **changes: object) -> Job:
    (folder / "amplifying.py").write_text(AMPLIFYING)
    model = {"factory": f"{folder}/amplifying.py:{name}", "args": {"mistake": mistake}}
    return small_job(model=model, **changes)


@pytest.mark.parametrize(("mistake", "verdict"), [(0.0, "cannot tell"), (1e-5, "differs")])
def test_amplified_rounding_is_no_failure_and_hides_no_mistake(tmp_path: Path, mistake: float, verdict: str) -> None:
    data = {"kind": "synthetic", "samples": 64, "shape": [6], "classes": 3, "held_out": 0}
    optimizer = {"name": "sgd", "lr": 10.0}
    job = amplifying_job(tmp_path, "Normed", mistake, data=data, global_batch=4, batch_norm="sync", optimizer=optimizer)
    found = paceline.check(job, "dp=2 precision=fp64", steps=6)
    assert found.largest.gradient > found.tolerance.gradient
    assert found.verdict == verdict
    assert (found.undecided is None) == (verdict == "differs")


@pytest.mark.parametrize(("mistake", "verdict"), [(0.0, "holds"), (1e-3, "differs")])
def test_rows_that_an_embedding_shortens_are_compared_at_one_moment(
    tmp_path: Path, mistake: float, verdict: str
) -> None:
    data = {"kind": "dataset", "factory": f"{tmp_path}/amplifying.py:words", "held_out": 0}
    found = paceline.check(amplifying_job(tmp_path, "Words", mistake, data=data), "dp=2 precision=fp64", steps=3)
    assert found.verdict == verdict


SIMCLR = {"model": {"zoo": "simclr", "args": {"dim": 8}}, "loss": "contrastive", "metrics": ["contrastive_accuracy"]}


def test_a_contrastive_job_trains_and_is_measured_alike_under_every_plan(ranks: Ranks, tmp_path: Path) -> None:
    """The views are the same; a loss over the batch is measured on batches of one size: smaller ones are easier."""
    data = {"kind": "digits", "limit": 90, "held_out": 0.4}  # 36 held out: batches of 16, 16 and 4
    job = small_job(**SIMCLR, data=data, optimizer={"name": "sgd", "lr": 1e-3}, global_batch=16, stop={"steps": 5})
    alone = train_here(tmp_path / "alone", job)
    run = new_run(tmp_path / "two", job, plan="dp=2")
    ranks(2, train_as_rank, run.path)
    assert Run(run.path).losses == pytest.approx(alone.losses, rel=1e-5)
    assert Run(run.path).metrics == pytest.approx(alone.metrics, rel=1e-5)
