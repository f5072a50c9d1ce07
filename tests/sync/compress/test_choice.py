"""`compress=auto`: a codec is used only where it pays, the same on all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import paceline.sync.compress.choice as choice_module
from paceline.cluster.doctor.link_speed import GroupLinks, LinkSpeed
from paceline.comm import Group
from paceline.comm.allreduce.algorithms import BackendAllReduce
from paceline.comm.backend import joined
from paceline.plans.codec_info import auto_candidates
from paceline.sync.compress.choice import CodecChooser, predict
from paceline.sync.compress.codec_cost import CodecCost, measure_codec
from ranks import Ranks

STEPS = 6  # calls until the first time is known: one to start the clock, two to warm up, three to measure
PredictionOf = Callable[..., None]


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> PredictionOf:
    """`predicted(plain_s, bf16=…, int8=…)`: what the reckoning says, in seconds per step."""

    def of(plain_s: float, **coded_s: float) -> None:
        monkeypatch.setattr(choice_module, "predict", lambda *_: (plain_s, coded_s))

    return of


def run(step_s: dict[str, float], group: Group | None = None) -> tuple[CodecChooser, list[str]]:
    """The choice of a run whose steps take `step_s` by codec, and the codec of each of its first 40 steps."""
    now, used = 0.0, []
    made = CodecChooser(BackendAllReduce(group or Group(), "flat", ""), [])
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
    made = CodecChooser(BackendAllReduce(Group(), "flat", ""), [])
    made.decide("bf16", "As before the run was resumed")
    assert [made.step_done() for _ in range(20)] == ["bf16"] * 20


def with_times_of_its_own() -> list[str]:
    """Rank 1 is slowed down by every codec."""
    with joined(deadline_s=30) as group:
        setattr(choice_module, "predict", lambda *_: (1.0, {"bf16": 0.5}))  # noqa: B010 - in this process only
        choice, used = run({"none": 1.0, "bf16": 0.5 if group.rank == 0 else 1.5}, group)
        return [*used, choice.message]


def test_all_ranks_decide_alike_on_the_slowest_one(ranks: Ranks) -> None:
    first, second = ranks(2, with_times_of_its_own, backend="shm")
    assert first == second
    assert "1.50 s with bf16" in first[-1]
    assert first[-2] == "none"


def buckets(dtype: torch.dtype = torch.float32) -> list[Any]:
    flat = torch.zeros(2 * 200 * 300 + 300, dtype=dtype)
    return [(flat, [flat[:60000].view(200, 300), flat[60000:60300], flat[60300:].view(300, 200)])]


def reckoned(dtype: torch.dtype, slow: bool) -> dict[str, Any]:
    """The estimate on one host, or over a link of 1 MB/s, and its side effects.

    It must leave random numbers and tensors alone.
    """
    with joined(deadline_s=30) as group:
        of, links = buckets(dtype), None
        if slow:
            group.hosts = (0, 1)
            fast, link = LinkSpeed(1e-5, 1e10), LinkSpeed(1e-3, 1e6)
            links = GroupLinks(hosts=group.hosts, between=link, inside=fast, memory=fast, step_s=1e-3, flat_step_s=1e-3)
            # in this process only
            for name, measured in (
                ("measure_links", lambda group: links),
                ("measure_codec", lambda *of: CodecCost(0.01, measure_codec(*of).sent_bytes)),
            ):
                setattr(choice_module, name, measured)
        before = torch.random.get_rng_state()
        plain_s, coded_s = predict(BackendAllReduce(group, "flat", "", links), of)
        untouched = torch.equal(before, torch.random.get_rng_state()) and not of[0][0].any()
        return {"plain_s": plain_s, "coded_s": coded_s, "untouched": untouched}


@pytest.mark.parametrize("slow", [False, True])
def test_the_reckoning_is_the_same_on_every_rank_and_changes_nothing(ranks: Ranks, slow: bool) -> None:
    first, second = ranks(2, reckoned, torch.float32, slow, backend="shm")
    assert first == second
    assert first["untouched"]
    assert list(first["coded_s"]) == list(auto_candidates())


def test_over_a_slow_link_the_time_follows_the_bytes(ranks: Ranks) -> None:
    """481 kB take 0.48 s, half of it in bf16, a quarter in int8.

    A message takes 1 ms, and coding is said to take 10.
    """
    found = ranks(2, reckoned, torch.float32, True, backend="shm")[0]
    assert found["plain_s"] == pytest.approx(0.4812 + 2e-3, rel=0.01)
    assert found["coded_s"]["bf16"] == pytest.approx(0.4812 / 2 + 2e-3 + 0.01, rel=0.01)
    assert found["coded_s"]["int8"] == pytest.approx(0.4812 * 8.125 / 32 + 2e-3 + 0.01, rel=0.01)
    factors_bytes, vector_bytes = 2 * 16 * (200 + 300) * 8.125 / 8, 300 * 4
    assert found["coded_s"]["powersgd:16+int8"] == pytest.approx(
        (factors_bytes + vector_bytes) / 1e6 + 4e-3 + 0.01, rel=0.02
    )


def test_gradients_that_no_codec_takes_are_left_as_they_are(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ranks(2, reckoned, torch.float64, False, backend="shm")[0]
    assert found["coded_s"] == {}
    monkeypatch.setattr(choice_module, "predict", lambda *_: (0.1, {}))
    assert (
        run({"none": 1.0})[0].message
        == "compress=auto: none. Of 1.00 s a step, there is nothing to save: no codec takes these gradients"
    )
