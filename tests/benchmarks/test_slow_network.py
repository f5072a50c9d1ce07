"""The benchmark of slow networks.

Its target, times and figures are what its head says they are, and a rule is held to the work of DDP.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

import slow_network as slow


def falling(steps: int, *, slowness: float = 1.0) -> list[float]:
    """Losses from 3 towards 1; with a slowness of 2, each comes after twice as many steps."""
    return [1 + 2 * 0.99 ** (step / slowness) for step in range(steps)]


@pytest.fixture
def found() -> Any:
    """At the slowest rate two rules were waited for and bf16 was not; at loopback only steps were timed."""
    reference = falling(150)
    diloco = falling(300, slowness=1.5)
    timings = {
        "25mbit": {
            slow.DDP: slow.Timing(8.0, 20e6),
            slow.DDP_16: slow.Timing(4.0, 10e6),
            slow.LIMIT: slow.Timing(0.25, None),
            slow.EXACT: slow.Timing(7.5, 20e6),
            "bf16": slow.Timing(4.0, 10e6),
            "int8": slow.Timing(2.0, 5e6, ended_s=[2.1 * (i + 1) for i in range(150)]),
            "DiLoCo": slow.Timing(0.3, 0.5e6, ended_s=[0.32 * (i + 1) for i in range(300)]),
            slow.AUTO: slow.Timing(2.2, 5e6, said=["compress=auto: int8"]),
        },
        "loopback": {
            slow.DDP: slow.Timing(0.4, None),
            slow.LIMIT: slow.Timing(0.3, None),
            "DiLoCo": slow.Timing(0.5, 0.5e6),
        },
    }
    learnt = {
        "bf16": slow.Learnt(list(reference), 1.4),
        "int8": slow.Learnt([loss * 1.01 for loss in reference], 1.41),
        "DiLoCo": slow.Learnt(diloco, 1.42),
    }
    return slow.Comparison(reference, timings, learnt)


def test_the_loss_is_smoothed_over_the_last_steps_and_reached_only_where_all_of_them_count() -> None:
    losses = [10.0] * 25 + [0.0] * 25
    means = slow.smoothed(losses)
    assert means[0] == means[24] == 10.0
    assert means[29] == pytest.approx(8.0)
    assert slow.reached(losses, 8.0) == 30
    assert slow.reached([0.0] * 24, 8.0) is None, "the first step is one lucky batch"
    assert slow.reached(losses[:40], 1.0) is None


def test_synchronous_training_reaches_its_own_target_at_the_step_that_defines_it(found: Any) -> None:
    assert slow.reached(found.reference, found.target) == 150
    assert found.time_to_target_s("25mbit", slow.DDP) == pytest.approx(150 * 8.0)
    assert found.time_to_target_s("25mbit", slow.EXACT) == pytest.approx(150 * 7.5)


def test_figures_compare_times_to_the_target_and_losses_after_as_many_steps(found: Any) -> None:
    steps = slow.reached(found.learnt["DiLoCo"].losses, found.target) or 0
    assert 150 < steps < 300
    assert found.figures() == pytest.approx(
        {
            "ddp_step_s": 8.0,
            "limit_speedup": 32.0,
            "fp16_ddp_speedup": 2.0,
            "bf16_speedup": 2.0,  # not waited for: as many steps as it needs x its step
            "diloco_speedup": 1200 / (steps * 0.32),  # what its own run took
            "worst_compressed_loss_ratio": 1.01,
            "auto_to_best_25mbit": 1.1,
        }
    ), "int8 never reached the target, so it has no figure"


def test_other_rates_take_the_steps_from_the_run_that_was_waited_for(found: Any) -> None:
    steps = slow.reached(found.learnt["DiLoCo"].losses, found.target) or 0
    assert found.time_to_target_s("loopback", "DiLoCo") == pytest.approx(steps * 0.5)
    lines = list(found.lines())
    assert sum("*" in line for line in lines if line.startswith("  ")) == 2, "bf16 at 25mbit, DiLoCo on loopback"
    assert any("compress=auto: int8" in line for line in lines)


def test_the_page_has_every_rate_with_the_losses_of_every_rule(found: Any) -> None:
    shown = {rate: {rule.name: rule for rule in rules} for rate, rules in found.page().at.items()}
    assert shown.keys() == {"25mbit", "loopback"}
    assert shown["25mbit"]["DiLoCo"].seconds[-1] == pytest.approx(96.0)
    assert shown["loopback"]["DiLoCo"].seconds[-1] == pytest.approx(150.0)
    assert shown["25mbit"]["DiLoCo"].plan.startswith("dp=4")
    assert shown["25mbit"][slow.AUTO].losses == []


def test_losses_other_than_those_of_one_process_stop_the_benchmark() -> None:
    slow.must_agree("DDP", [2.0, 1.0001], [2.0, 1.0, 0.9])
    with pytest.raises(
        SystemExit, match=r"DDP does not do the work of one process: their losses differ by up to 1\.0e-02"
    ):
        slow.must_agree("DDP", [2.0, 1.01], [2.0, 1.0])


class Answers:
    """Two ranks of which the second ends each step later; every step takes a second and sends 100 bytes."""

    def __init__(self) -> None:
        self.steps = 0

    def ask(self, question: dict[str, Any]) -> list[dict[str, Any]]:
        if "begin" in question:
            return [{"begun": question["begin"]}] * 2
        first, self.steps = self.steps, self.steps + question["steps"]
        ended = [50.0 + step for step in range(first + 1, self.steps + 1)]
        losses = [float(step) for step in range(first + 1, self.steps + 1)]
        of_ranks: Sequence[tuple[float, float]] = ((0.0, 0.0), (0.25, 2.0))
        return [
            {
                "began": 50.0 + first + late / 2,
                "ended": [end + late for end in ended],
                "losses": [loss + more for loss in losses],
                "sent_bytes": 100 * self.steps,
                "said": [f"step {self.steps}", *(["compress=auto: none"] if self.steps >= 6 else [])],
            }
            for late, more in of_ranks
        ]


def test_a_course_takes_the_last_rank_s_times_the_mean_loss_and_the_busiest_link(tmp_path: Path) -> None:
    readings = iter([[1000, 2000], [2000, 5600]])
    course = slow.Course(cast("Any", Answers()), "int8", tmp_path, lambda: next(readings))
    timing = course.timed(9)
    assert course.losses == [step + 1.0 for step in range(1, 12)]
    assert course.ended_s == [step + 0.25 for step in range(1, 12)]
    assert (timing.step_s, timing.link_bytes, timing.said) == (1.0, 400.0, ["step 11", "compress=auto: none"])
    assert slow.Course(cast("Any", Answers()), "int8", tmp_path).timed(9).link_bytes == 100.0, (
        "as the rule counts where there is no link"
    )


def test_a_course_goes_on_to_the_target_but_no_less_than_as_many_steps_as_define_it(tmp_path: Path) -> None:
    class Falling(Answers):
        def ask(self, question: dict[str, Any]) -> list[dict[str, Any]]:
            if "held_out" in question:
                return [{"loss": 1.0}, {"loss": 2.0}]
            answers = super().ask(question)
            return (
                [answer | {"losses": [-loss for loss in answer["losses"]]} for answer in answers]
                if "steps" in question
                else answers
            )

    slow_start = slow.Course(cast("Any", Falling()), "int8", tmp_path)
    learnt = slow_start.to_target(-160.0)
    assert (len(learnt.losses), learnt.held_out) == (180, 1.5), (
        "the mean of 25 steps is there after 173, seen after a block of 10"
    )
    assert len(slow.Course(cast("Any", Falling()), "int8", tmp_path).to_target(-20.0).losses) == 150
    assert len(slow.Course(cast("Any", Falling()), "int8", tmp_path).to_target(-1e6).losses) == slow.MAX_STEPS


def test_the_choice_of_auto_is_waited_for_before_its_steps_are_timed(tmp_path: Path) -> None:
    course = slow.Course(cast("Any", Answers()), slow.AUTO, tmp_path)
    course.timed(3)
    assert len(course.losses) == 6 + 3


@pytest.mark.needs_root
@pytest.mark.needs_iproute2
@pytest.mark.slow
def test_on_emulated_hosts_ddp_and_a_rule_do_the_work_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, few in {"TARGET_STEPS": 4, "SMOOTHED": 2, "TIMED": 2, "WARM_UP": 1, "MAX_STEPS": 4}.items():
        monkeypatch.setattr(slow, name, few)
    found = slow.Comparison.made(tmp_path, ["1gbit"], [slow.EXACT])
    at = found.timings["1gbit"]
    parameters = 3_257_856
    wire_bytes = 2 * 3 / 4 * 4 * parameters
    for name in (slow.DDP, slow.EXACT):
        assert at[name].link_bytes == pytest.approx(wire_bytes, rel=0.15), (
            "headers, acknowledgements and votes included"
        )
    assert at[slow.DDP_16].link_bytes == pytest.approx(wire_bytes / 2, rel=0.15)
