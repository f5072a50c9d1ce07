"""The table of predicted and measured memory shows the known parts of the rank that needs the most."""

from __future__ import annotations

from typing import Any

from paceline.planning.plan import Plan
from paceline.run.record.memory import PREDICTED, table_of

PLAN = Plan(dp=2)


def steps(weights: int, **further: Any) -> list[dict[str, Any]]:
    return [
        {"step": 1},
        {"step": 2, "use": {"weights_bytes": weights, "peak_memory_bytes": 900, **further}},
        {"step": 3},
    ]


def start(plan: Plan) -> dict[str, Any]:
    return {"event": "start", "plan": str(plan), PREDICTED: {"weights": 5, "cache": 3, "colour": 1}}


def test_on_a_device_the_fullest_rank_is_shown_beside_the_prediction_for_its_plan() -> None:
    ranks = {0: steps(4, activations_bytes=10, cache_bytes=1), 1: steps(4, activations_bytes=20, cache_bytes=2)}
    table = table_of(ranks, [start(PLAN)], PLAN)
    assert table is not None
    assert table.rows() == [
        ("weights", "5 B", "4 B"),
        ("activations", "", "20 B"),
        ("cache", "3 B", "2 B"),
        ("total", "8 B", "26 B"),
    ]
    assert len(table.lines()) == 5
    other = table_of(ranks, [start(Plan(dp=3))], PLAN)
    assert other is not None
    assert not other.predicted


def test_on_cpus_the_total_is_the_peak_of_the_process_and_activations_stay_empty() -> None:
    table = table_of({0: steps(4, gradients_bytes=4, memory_bytes=800, pss_bytes=700)}, [], PLAN, {"activations": 7})
    assert table is not None
    assert table.rows() == [
        ("weights", "", "4 B"),
        ("gradients", "", "4 B"),
        ("activations", "7 B", ""),
        ("total", "7 B", "800 B"),
    ]


def test_a_record_without_memory_or_with_nonsense_has_no_table() -> None:
    assert table_of({0: [{"step": 1, "use": {"memory_bytes": 3}}], 1: []}, [], PLAN) is None
    assert table_of({0: steps(-1)}, [], PLAN) is None
