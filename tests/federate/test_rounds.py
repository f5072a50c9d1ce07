"""Rounds with real clients come to what the simulation comes to, whatever clients do."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from federate.federation import DEADLINE_S, Behaviour, Federation, distance, simulated, small_job


def test_rounds_are_those_of_the_simulation(tmp_path: Path) -> None:
    job = small_job()
    with Federation(job, tmp_path) as federation:
        for outcome, agreed in federation.rounds(3):
            assert outcome.counted == list(range(6))
            assert agreed is not None
        assert distance(federation.server.weights, simulated(job, 3)) < 1e-12


def test_samples_that_clients_are_measured_on_are_not_trained(tmp_path: Path) -> None:
    job = small_job(held_out=0.3)
    with Federation(job, tmp_path) as federation:
        _, agreed = federation.round()
        assert agreed is not None
        assert agreed.samples == 6 * 14
        assert distance(federation.server.weights, simulated(job, 1)) < 1e-12


@pytest.mark.parametrize("rule", ["fedprox:0.1", "scaffold", "fedadam"])
def test_rules_with_their_own_tensors_and_state_do_as_in_the_simulation(tmp_path: Path, rule: str) -> None:
    job = small_job(rule=rule)
    with Federation(job, tmp_path) as federation:
        federation.rounds(3)
        assert distance(federation.server.weights, simulated(job, 3)) < 1e-12


def test_secure_rounds_are_the_simulation_to_the_rounding_of_fixed_point(tmp_path: Path) -> None:
    job = small_job(secure={"clip": 2.0, "most_samples": 40})
    with Federation(job, tmp_path) as federation:
        for _, agreed in federation.rounds(3):
            assert agreed is not None
            assert agreed.samples == 120
        assert distance(federation.server.weights, simulated(job, 3)) < 1e-6


def wrong(change: dict[str, Any]) -> Behaviour:
    return Behaviour(lambda kind, content: content | change)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"delta": torch.full((195,), float("nan"), dtype=torch.float64)}, "NaN"),
        ({"delta": torch.zeros(7, dtype=torch.float64)}, "another model"),
        ({"delta": torch.zeros(195)}, "another model"),
        ({"delta": "zeros"}, "another model"),
        ({"returned": {"control": torch.zeros(5)}}, "rule's tensors"),
        ({"samples": 10**9}, "joined with"),
        ({"samples": True}, "whole steps"),
        ({"steps": 0}, "trained 0 steps"),
        ({"loss": "low"}, "a loss"),
    ],
)
def test_a_wrong_update_is_refused_with_the_reason_and_the_others_count(
    tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    with Federation(small_job(), tmp_path, {2: wrong(change)}) as federation:
        outcome, agreed = federation.round()
        assert outcome.counted == [0, 1, 3, 4, 5]
        assert agreed is not None
        with pytest.raises(AssertionError, match=why):
            raise AssertionError(outcome.refused[2])


def test_who_drops_out_is_named_and_counts_in_no_round(tmp_path: Path) -> None:
    with Federation(small_job(), tmp_path, {1: Behaviour(gone_after="update")}) as federation:
        federation.round()
        outcome, agreed = federation.round()
        assert outcome.missing == [1]
        assert agreed is not None
        assert agreed.clients == 5


def test_a_repeated_answer_counts_once_and_gets_the_same_receipt(tmp_path: Path) -> None:
    with Federation(small_job(), tmp_path) as federation:
        twice: list[Any] = []
        original = federation.calls["deliver"]

        def repeated(caller: Any, round: int, kind: str, content: Any) -> Any:
            twice.append((original(caller, round, kind, content), original(caller, round, kind, content)))
            return twice[-1][0]

        federation.calls["deliver"] = repeated
        outcome, agreed = federation.round()
        assert all(first == second and first["receipt"] == "counted" for first, second in twice)
        assert agreed is not None
        assert agreed.clients == len(outcome.counted) == 6


def test_a_late_update_is_told_so_and_changes_nothing(tmp_path: Path) -> None:
    with Federation(small_job(), tmp_path) as federation:
        slow = federation.clients[0]
        kept: list[Any] = []

        def noted(kind: str, content: Any) -> Any:
            kept.append(content)
            return content

        slow.behaviour.change = noted
        federation.round()
        weights = federation.server.weights.clone()
        receipt = federation.calls["deliver"](slow.caller, 0, "update", kept[0])
        assert receipt["receipt"] == "late"
        assert torch.equal(weights, federation.server.weights)


@pytest.mark.parametrize("phase", ["keys", "shares", "vector"])
def test_secure_rounds_survive_drop_outs_in_every_phase(tmp_path: Path, phase: str) -> None:
    job = small_job(secure={"clip": 2.0, "phase_s": 1.5})
    with Federation(job, tmp_path, {4: Behaviour(gone_after=phase)}) as federation:
        outcome, agreed = federation.round()
        assert agreed is not None
        assert outcome.counted == ([0, 1, 2, 3, 5] if phase != "vector" else list(range(6)))


def test_a_poisoner_of_secure_sums_is_found_and_left_out(tmp_path: Path) -> None:
    def poison(kind: str, content: Any) -> Any:
        return content + 2**28 if kind == "vector" else content

    job = small_job(secure={"clip": 2.0})
    with Federation(job, tmp_path, {3: Behaviour(poison)}) as federation:
        outcome, agreed = federation.round()
        assert agreed is None
        assert "clipped to 2" in outcome.refused[0] or "weights" in outcome.refused[0]
        for _ in range(8):
            federation.round()
            if federation.gathering.suspects.found:
                break
        assert federation.gathering.suspects.found == {"3"}
        outcome, agreed = federation.round()
        assert outcome.counted == [0, 1, 2, 4, 5]
        assert agreed is not None


def test_an_asynchronous_rule_steps_when_its_buffer_is_full(tmp_path: Path) -> None:
    job = small_job(rule="fedbuff:3")
    with Federation(job, tmp_path) as federation:
        for _ in range(4):
            _, agreed = federation.round(enough=3)
            assert agreed is not None
            assert agreed.clients >= 3
        assert federation.server.version == 4


def test_an_update_that_comes_between_two_asynchronous_steps_counts_in_the_next(tmp_path: Path) -> None:
    with Federation(small_job(rule="fedbuff:2"), tmp_path) as federation:
        federation.round(enough=2)
        front, early = federation.gathering.front, federation.clients[0]
        task = federation.server.task(1)
        assert front.rounds.between
        front.between_s = DEADLINE_S
        front.rounds.begin(task, [0], 0.0, gathers=federation.server.aggregator(1), enough=1)
        answer = early.part.answer(federation.calls["work"](early.caller))
        front.rounds._outcome = None  # it ends with others' updates
        with ThreadPoolExecutor(1) as thread:
            receipt = thread.submit(federation.calls["deliver"], early.caller, *answer)
            front.round(federation.server.task(3), [], gathers=federation.server.aggregator(3), enough=1)
            assert receipt.result(DEADLINE_S)["receipt"] == "counted"
