"""Differential privacy: updates are clipped, the sum is noised, and ε is the accountant's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from opacus.accountants import RDPAccountant

from federated_jobs import federated_job
from paceline.errors import JobError
from paceline_federated.client import Layout
from paceline_federated.rules import FederatedRule
from paceline_federated.section import FederateSpec
from paceline_federated.server import Aggregator, Cohort
from paceline_federated.simulation import simulate
from refusals import raises

PRIVATE: dict[str, Any] = {"clients": 20, "per_round": 10, "privacy": {"clip": 0.5, "noise": 1.0}}


def test_without_its_accountant_privacy_is_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    monkeypatch.setitem(sys.modules, "opacus", None)
    with raises(JobError, "federate.opacus_missing"):
        simulate(federated_job(PRIVATE), tmp_path / "run")


def test_the_sum_of_clipped_updates_is_divided_by_the_expected_number_and_noised() -> None:
    numbers = 20_000
    layout = Layout(("w",), ((numbers,),), 1, (), torch.float64)
    spec = FederateSpec(clients=4, privacy={"clip": 2.0, "noise": 0.5})
    taking = Aggregator(spec, layout, FederatedRule(), chosen=4.0, noise=torch.Generator().manual_seed(1))
    deltas = torch.zeros(2, numbers, dtype=torch.float64)
    deltas[:, 0] = torch.tensor([100.0, 1.0])
    taking.add_cohort(Cohort([0, 1], deltas, {}, [10, 1000], [1, 1], [1.0, 1.0]))
    found = taking.aggregate()
    assert found is not None
    assert found.clipped == 1
    assert float(found.delta[1:].std()) == pytest.approx(0.5 * 2.0 / 4, rel=0.03)
    assert float(found.delta[0]) == pytest.approx((2.0 + 1.0) / 4, abs=4 * 0.25)  # samples do not weigh


def test_epsilon_grows_with_rounds_and_is_that_of_opacus(tmp_path: Path) -> None:
    run = simulate(federated_job(PRIVATE, stop={"steps": 6}), tmp_path / "run")
    spent = [line["epsilon"] for line in run.steps()]
    assert spent == sorted(spent)
    assert spent[0] > 0
    accountant = RDPAccountant()
    for _ in range(6):
        accountant.step(noise_multiplier=1.0, sample_rate=0.5)
    assert spent[-1] == pytest.approx(accountant.get_epsilon(1e-5))
    chosen = [line["chosen"] for line in run.steps()]
    assert len(set(chosen)) > 1  # each client is chosen for itself


def test_rules_that_send_more_than_one_clipped_update_are_refused(tmp_path: Path) -> None:
    for rule in ("scaffold", "fedbuff:2"):
        with raises(JobError, "federate.privacy_of_rule"):
            simulate(federated_job({**PRIVATE, "rule": rule}), tmp_path / "run")
