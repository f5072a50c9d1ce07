"""Suggestions correct a misspelling, but not a name that means something else."""

from __future__ import annotations

import pytest

from paceline.text import closest

KNOWN = ["fp32", "fp64", "bf16", "metric_above", "loss_below", "adam", "adamw", "sgd", "accuracy"]


@pytest.mark.parametrize(
    ("given", "meant"), [("adamm", "adam"), ("metric_abov", "metric_above"), ("Acuracy", "accuracy"), ("SGD", "sgd")]
)
def test_a_misspelled_name_is_suggested(given: str, meant: str) -> None:
    assert closest(given, KNOWN) == meant


@pytest.mark.parametrize("given", ["fp16", "metric_below", "radam", "nadam", "loss_above"])
def test_a_name_with_another_meaning_is_not_suggested(given: str) -> None:
    assert closest(given, KNOWN) is None
