"""`compress=auto`: a codec is used only where it pays, the same on all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch

import paceline.sync.compress.choice as choice_module
from hosts import Hosts
from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.errors import PlanError
from paceline.planning.sync_info import CODECS, CodecInfo, CompressSpec, auto_candidates
from paceline.sync.compress.choice import CodecChooser, measure_sums
from ranks import Ranks
from refusals import raises

STEPS = 6  # calls until the first time is known: one to start the clock, two to warm up, three to measure
PredictionOf = Callable[..., None]


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> PredictionOf:
    """`predicted(plain_s, bf16=…, int8=…)`: what timed sums say, in seconds per step."""

    def of(plain_s: float, **coded_s: float) -> None:
        monkeypatch.setattr(choice_module, "measure_sums", lambda *_: (plain_s, coded_s))

    return of


def run(step_s: dict[str, float], group: Group | None = None) -> tuple[CodecChooser, list[str]]:
    """The choice of a run whose steps take `step_s` by codec, and the codec of each of its first 40 steps."""
    now, used = 0.0, []
    made = CodecChooser(group or Group(), group or Group(), [])
    made.clock = lambda: now
    for _ in range(40):
        used.append(made.codec)
        now += step_s[made.codec]
        assert made.step_done() == made.codec
    return made, used


def test_nothing_is_tried_that_is_not_predicted_to_save_enough(predicted: PredictionOf) -> None:
    predicted(0.010, bf16=0.009, int8=0.012)
    choice, used = run({"none": 0.285})
    assert set(used) == {"none"}
    assert choice.decided
    assert choice.message == (
        "compress=auto: none. Of 285 ms a step, prediction: bf16 saves 1.00 ms, int8 costs 2.00 ms (exact "
        "sums 10.0 ms); "
        "it is asked to save 5 % of the step"
    )


def test_a_codec_that_saves_as_predicted_is_taken_after_few_steps(predicted: PredictionOf) -> None:
    predicted(2.0, bf16=1.0, int8=0.5, **{"powersgd:16+int8": 0.1})
    choice, used = run({"none": 2.2, "int8": 0.7, "powersgd:16+int8": 0.3})
    runs = [(codec, len(list(same))) for codec, same in itertools.groupby(used)]
    assert runs == [
        ("none", STEPS),
        ("powersgd:16+int8", STEPS - 1),
        ("int8", STEPS - 1),
        ("powersgd:16+int8", 40 - 3 * STEPS + 2),
    ]
    assert choice.message.startswith(
        "compress=auto: powersgd:16+int8. A step takes 2.20 s without and 300 ms with powersgd:16+int8, 700 ms"
    )


def test_a_codec_that_does_not_save_what_was_predicted_is_left(predicted: PredictionOf) -> None:
    predicted(0.2, bf16=0.1)
    choice, used = run({"none": 0.25, "bf16": 0.245})
    assert used.count("bf16") == STEPS - 1
    assert (choice.codec, choice.decided) == ("none", True)
    assert "250 ms without and 245 ms with bf16" in choice.message


def test_of_codecs_about_equally_fast_the_one_that_loses_least_is_taken(predicted: PredictionOf) -> None:
    predicted(1.0, bf16=0.51, int8=0.50)
    assert run({"none": 1.1, "bf16": 0.62, "int8": 0.6})[0].codec == "bf16"
    assert run({"none": 1.1, "bf16": 0.70, "int8": 0.6})[0].codec == "int8"


def test_a_resumed_run_keeps_what_was_decided(predicted: PredictionOf) -> None:
    predicted(1.0, bf16=0.5)
    made = CodecChooser(Group(), Group(), [])
    made.decide("bf16", "As before the run was resumed")
    assert [made.step_done() for _ in range(20)] == ["bf16"] * 20


def with_times_of_its_own() -> list[str]:
    """Rank 1 is slowed down by every codec."""
    with joined(deadline_s=30) as group:
        setattr(choice_module, "measure_sums", lambda *_: (1.0, {"bf16": 0.5}))  # noqa: B010 - in this process only
        choice, used = run({"none": 1.0, "bf16": 0.5 if group.rank == 0 else 1.5}, group)
        return [*used, choice.message]


def test_all_ranks_decide_alike_on_the_slowest_one(ranks: Ranks) -> None:
    first, second = ranks(2, with_times_of_its_own, backend="shm")
    assert first == second
    assert "1.50 s with bf16" in first[-1]
    assert first[-2] == "none"


def measured(dtype: torch.dtype, numbers: int, transport: str = "auto") -> dict[str, Any]:
    """The timed sums of a rank, and their side effects: they must leave random numbers and gradients alone."""
    with joined(deadline_s=30, transport=transport) as group:
        flat = torch.zeros(numbers + 300, dtype=dtype)
        buckets = [(flat, [flat[:numbers].view(numbers // 300, 300), flat[numbers:]])]
        before = torch.random.get_rng_state()
        plain_s, coded_s = measure_sums(group, group, buckets, auto_candidates()[0])
        untouched = torch.equal(before, torch.random.get_rng_state()) and not flat.any()
        return {"plain_s": plain_s, "coded_s": coded_s, "untouched": bool(untouched)}


def test_the_timed_sums_are_the_same_on_every_rank_and_change_nothing(ranks: Ranks) -> None:
    first, second = ranks(2, measured, torch.float32, 1_800_000, backend="shm")
    assert first == second
    assert first["untouched"]
    assert list(first["coded_s"]) == list(auto_candidates()[0])
    assert all(s > 0 for s in (first["plain_s"], *first["coded_s"].values()))


@pytest.mark.needs_root
@pytest.mark.needs_iproute2
@pytest.mark.slow
def test_over_a_slow_link_the_sums_of_a_codec_take_less_time(hosts: Hosts) -> None:
    """1.2 MB take 0.48 s at 20 Mbit/s, half of it in bf16, a quarter in int8."""
    found, other = hosts(2, rate="20mbit").run(measured, torch.float32, 300_000, "tcp")
    assert found == other
    assert found["plain_s"] > found["coded_s"]["bf16"] > found["coded_s"]["int8"]


def test_gradients_that_no_codec_takes_are_left_as_they_are(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ranks(2, measured, torch.float64, 60_000, backend="shm")[0]
    assert found["coded_s"] == {}
    monkeypatch.setattr(choice_module, "measure_sums", lambda *_: (0.1, {}))
    assert (
        run({"none": 1.0})[0].message
        == "compress=auto: none. Of 1.00 s a step, there is nothing to save: no codec takes these gradients"
    )


NOT_EVERYWHERE = CodecInfo("paceline.sync.compress.codecs:bf16", lambda _: 2.0, tried_by_auto="extra", order=3)


def choices_beside_broken_packages() -> list[str]:
    """Two packages' codecs: one whose class no rank can import, and one that rank 1 cannot load."""
    with joined(deadline_s=30) as group:
        home = __name__ if group.rank == 0 else "a_package_that_is_not_here"
        CODECS.installed["extra"] = EntryPoint("extra", f"{home}:NOT_EVERYWHERE", CODECS.group)
        CODECS.installed["light"] = EntryPoint("light", f"{__name__}:WITHOUT_CLASS", CODECS.group)
        flat = torch.zeros(6000)
        made = CodecChooser(group, group, [(flat, [flat.view(60, 100)])])
        made.decide("none", "Nothing is gained")
        return made.message.splitlines()


WITHOUT_CLASS = CodecInfo("a_class_that_is_not_here:Codec", lambda _: 2.0, tried_by_auto="light", order=4)


def test_a_package_that_one_rank_cannot_load_is_left_out_on_all_and_named(ranks: Ranks) -> None:
    first, second = ranks(2, choices_beside_broken_packages, backend="shm")
    assert first == second
    [message] = first
    assert message.startswith("compress=auto: none. Nothing is gained. Left out: ")
    assert 'the codec "extra" that a package registers under paceline.codecs' in message
    assert "No module named 'a_package_that_is_not_here'" in message
    assert "the codec light: a_class_that_is_not_here:Codec: cannot import 'a_class_that_is_not_here'" in message


def test_a_codec_that_a_plan_names_is_still_an_error_if_it_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("extra", "a_package_that_is_not_here:INFO", CODECS.group)
    monkeypatch.setitem(CODECS.installed, "extra", broken)
    with raises(PlanError, "plan.compress_refused", text="extra"):
        CompressSpec.parse("extra")
