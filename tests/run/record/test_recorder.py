"""What a rank writes down.

Every step with its exact loss, the use of the machine, and events that TensorBoard reads.
"""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn, optim
from torch.utils.data import DataLoader

import paceline
import paceline.run.record.recorder as record_module
from paceline.cluster.probe import Counter, Energy
from paceline.comm import Group
from paceline.engine.engine import StepResult, step_result
from paceline.engine.meter import PARTS, Timing
from paceline.errors import RunError
from paceline.job.stop import Epochs
from paceline.run.record.recorder import Board, ResourceUse, StepInfo, StepRecorder, json_number
from paceline.run.record.run import read_lines
from paceline.run.trackers.services import TensorBoard
from paceline.sync.rows import LateNorm
from refusals import raises
from small_jobs import FEATURES, Points, points, small_job, train_here


def recorder(path: Path, board: Board | None = None) -> StepRecorder:
    (path / "steps").mkdir(parents=True, exist_ok=True)
    model = nn.Linear(FEATURES, 3)
    loader = DataLoader(Points(), batch_size=8)
    engine = paceline.setup(model, optim.SGD(model.parameters(), lr=0.1), loss=F.cross_entropy, loader=loader)
    return StepRecorder(path, engine, epochs=Epochs(9), board=board)


def result(step: int, *, loss: float = 1.0, timing: Timing | None = None) -> StepResult:
    return StepResult(step, loss, 8, 0.5, None, {}, timing)


def timing(step: int) -> Timing:
    return Timing(step, [0.125 * (part + 1) for part in range(len(PARTS))])


def written(path: Path) -> list[dict[str, Any]]:
    return list(read_lines(path / "steps" / "rank-0.jsonl"))


def tensorboard_of(run: Path) -> EventAccumulator:
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return events


def test_a_step_that_only_another_rank_took_is_written_at_once_and_once(tmp_path: Path) -> None:
    record = recorder(tmp_path)
    record.complete(StepInfo(result(10), 0, 4, 0.1))
    record.on_step(StepInfo(result(11, timing=timing(11)), 0, 4, 0.1))
    record.complete(StepInfo(result(11), 0, 4, 0.1))
    record.close()
    assert [line["step"] for line in written(tmp_path)] == [10, 11]


def test_a_step_is_one_line_with_what_it_did_and_where_its_time_went(tmp_path: Path) -> None:
    record = recorder(tmp_path)
    record.on_step(StepInfo(result(10, loss=0.25, timing=timing(10)), 0, 4, 0.1))
    record.close()
    (line,) = written(tmp_path)
    assert {k: line[k] for k in ("step", "epoch", "loss", "samples", "local_samples", "lr", "grad_norm")} == {
        "step": 10,
        "epoch": 1,
        "loss": 0.25,
        "samples": 8,
        "local_samples": 4,
        "lr": 0.1,
        "grad_norm": 0.5,
    }
    assert [line[f"{part}_s"] for part in PARTS] == timing(10).parts_s
    assert line["step_s"] == sum(timing(10).parts_s)


def test_times_that_are_known_one_step_later_stand_in_their_own_step(tmp_path: Path) -> None:
    """As on CUDA, where the times of a step are read while the next one runs."""
    record = recorder(tmp_path)
    record.on_step(StepInfo(result(1), 0, 8, 0.1))
    record.on_step(StepInfo(result(2, timing=timing(1)), 0, 8, 0.1))
    record.on_step(StepInfo(result(3, timing=timing(2)), 0, 8, 0.1))
    record.close()
    assert [(line["step"], line["step_s"] > 0) for line in written(tmp_path)] == [(1, True), (2, True), (3, False)]


def test_lines_with_readings_have_the_norm_of_sparse_gradients(tmp_path: Path) -> None:
    rows = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([[1.0], [2.0]]), (3, 1), check_invariants=True)
    record = recorder(tmp_path)
    known: dict[str, Any] = {"loss": 1.0, "samples": 8, "problem": None, "votes": {}}
    results = [step_result(LateNorm(4.0, [rows]), step=n, timing=timing(n), **known) for n in range(1, 50)]
    for each in results:
        record.on_step(StepInfo(each, 0, 8, 0.1))
    record.close()
    lines = written(tmp_path)
    assert [line["grad_norm"] for line in lines] == [5.0 if "use" in line else None for line in lines]
    assert lines[0]["grad_norm"] == 5.0
    assert tensorboard_of(tmp_path).Scalars("train/grad_norm")[0].value == 5.0
    info = StepInfo(results[1], 0, 8, 0.1)
    assert StepInfo.from_json(info.as_json()).result.grad_norm == 5.0


@given(st.floats(width=64))
def test_a_loss_reads_back_to_the_same_bits(loss: float) -> None:
    text = json_number(loss)
    if loss - loss == 0.0:
        assert struct.pack("d", float(json.loads(text))) == struct.pack("d", loss)
    else:
        assert json.loads(text) is None, "JSON has no NaN"


def test_the_use_of_the_machine_is_noted_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "USE_EVERY_S", 0.0)
    record = recorder(tmp_path)
    record.on_step(StepInfo(result(1, timing=timing(1)), 0, 8, 0.1))
    record.close()
    use = written(tmp_path)[0]["use"]
    network = {"network_sent_bytes", "network_received_bytes", "reduced_bytes", "wire_bytes", "saved_bytes"}
    assert use.keys() - {"energy_joules"} == {"cpu_cores", "memory_bytes", "peak_memory_bytes", "pss_bytes"} | network
    assert 10e6 < use["pss_bytes"] <= use["memory_bytes"] * 1.1
    assert use["memory_bytes"] <= use["peak_memory_bytes"] * 1.1, "the kernel counts the two at different moments"
    assert all(value >= 0 for value in use.values())


def test_what_the_rule_sent_is_noted_since_the_last_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "USE_EVERY_S", 0.0)
    record = recorder(tmp_path)
    traffic = record.engine.replica.traffic
    for step, (sent, plain, error, signal) in enumerate(
        [(100, 100, 0.0, 0.0), (25, 100, 4.0, 100.0), (25, 100, float("nan"), 1.0)], 1
    ):
        traffic.sent_bytes, traffic.plain_bytes = traffic.sent_bytes + sent, traffic.plain_bytes + plain
        traffic.error_square, traffic.signal_square = traffic.error_square + error, traffic.signal_square + signal
        record.on_step(StepInfo(result(step, timing=timing(step)), 0, 8, 0.1))
    record.close()
    uses = [line["use"] for line in written(tmp_path)]
    assert [(use["wire_bytes"], use["saved_bytes"]) for use in uses] == [(100, 0), (25, 75), (25, 75)]
    assert [use.get("compression_error") for use in uses] == [None, 0.2, None], "JSON has no NaN"


def test_a_run_of_any_length_has_a_reading_from_its_second_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every step of 1/64 s."""
    now = 100.0
    clock = SimpleNamespace(monotonic=lambda: now, time=time.time, process_time=time.process_time)
    monkeypatch.setattr(record_module, "time", clock)
    record = recorder(tmp_path)
    for step in range(1, 257):
        now += 1 / 64
        record.on_step(StepInfo(result(step, timing=timing(step)), 0, 8, 0.1))
    record.close()
    read_at = [line["step"] for line in written(tmp_path) if "use" in line]
    assert read_at == [1, 2, 4, 8, 16, 32, 64, 128, 192, 256], "at twice its age, and then every second"


def test_what_costs_milliseconds_is_read_only_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "USE_EVERY_S", 0.0)
    record = recorder(tmp_path)
    for step in range(1, 6):
        record.on_step(StepInfo(result(step, timing=timing(step)), 0, 8, 0.1))
    record.close()
    uses = [line["use"] for line in written(tmp_path)]
    assert ["pss_bytes" in use for use in uses] == [True, False, False, False, False]
    assert all("memory_bytes" in use for use in uses)


def test_energy_is_what_was_used_since_the_last_reading_and_only_where_there_is_a_counter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_module, "USE_EVERY_S", 0.0)
    readings = iter([100_000_000, 107_500_000, 110_000_000])  # microjoules; the first when the counter is found
    monkeypatch.setattr(record_module, "cpu_energy", lambda: Energy([Counter(lambda: next(readings), 10**12)]))
    record = recorder(tmp_path)
    for step in range(1, 5):
        if step == 3:
            record.use.energy = []
        record.on_step(StepInfo(result(step, timing=timing(step)), 0, 8, 0.1))
    record.close()
    assert [line["use"].get("energy_joules") for line in written(tmp_path)] == [7.5, 2.5, None, None]


def test_the_hosts_energy_does_not_stand_for_that_of_an_accelerator_without_a_counter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_module, "cpu_energy", lambda: Energy([Counter(lambda: 0, 10**12)]))
    engine = recorder(tmp_path).engine
    assert ResourceUse(engine).energy
    monkeypatch.setattr(record_module, "is_accelerator", lambda device: True)
    assert not ResourceUse(engine).energy


def test_only_one_rank_of_a_host_notes_the_hosts_energy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "cpu_energy", lambda: Energy([Counter(lambda: 0, 10**12)]))
    engine = recorder(tmp_path).engine
    counting = []
    for rank, hosts in [(0, (0, 0, 1, 1)), (1, (0, 0, 1, 1)), (2, (0, 0, 1, 1)), (3, (0, 0, 1, 1))]:
        engine.group = Group(rank=rank, size=4, hosts=hosts)
        counting.append(len(ResourceUse(engine).energy))
    assert counting == [1, 0, 1, 0]


def test_tensorboard_reads_the_steps_and_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "USE_EVERY_S", 0.0)
    run = train_here(tmp_path / "run", small_job(stop={"epochs": 2}, metrics=["accuracy"], data=points(held_out=0.25)))
    events = tensorboard_of(run.path)
    losses = events.Scalars("train/loss")
    assert [scalar.step for scalar in losses] == list(range(1, 15))
    assert [scalar.value for scalar in losses] == pytest.approx(run.losses, rel=1e-6)
    assert [(s.step, s.value) for s in events.Scalars("held_out/accuracy")][-1] == (
        14,
        pytest.approx(run.metrics["accuracy"]),
    )
    assert {
        "train/lr",
        "train/grad_norm",
        "speed/samples_per_s",
        "held_out/loss",
        *(f"step_s/{p}" for p in PARTS),
    } <= set(events.Tags()["scalars"])


def test_even_a_short_run_has_a_step_in_tensorboard(tmp_path: Path) -> None:
    run = train_here(tmp_path / "run", small_job(stop={"steps": 2}))
    events = tensorboard_of(run.path)
    assert events.Scalars("train/loss")[0].step == 1


def test_tensorboard_waits_until_the_run_is_not_short_and_its_events_keep_their_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To import it in the first steps would take as long as many of them."""
    record = recorder(tmp_path)
    began = time.time()
    record.on_step(StepInfo(result(1, timing=timing(1)), 0, 8, 0.1))
    record.on_evaluation(1, {"accuracy": 0.5})
    assert not (tmp_path / "tensorboard").exists()
    until = time.time()
    monkeypatch.setattr(record_module, "_FIRST_EVENTS_S", 0.0)
    record.on_evaluation(2, {"accuracy": 0.75})
    assert (tmp_path / "tensorboard").exists(), "a long run shows them while it trains"
    record.close()
    events = tensorboard_of(tmp_path)
    accuracy = events.Scalars("held_out/accuracy")
    assert [(event.step, event.value) for event in accuracy] == [(1, 0.5), (2, 0.75)]
    assert began <= accuracy[0].wall_time <= until
    assert [event.step for event in events.Scalars("train/loss")] == [1]


def test_a_board_takes_the_numbers_of_all_generations_of_a_process(tmp_path: Path) -> None:
    """To write it when a generation ends early in a run would import TensorBoard in the pause of a recovery."""
    board = Board(tmp_path)
    for step, accuracy in ((1, 0.5), (2, 0.75)):
        generation = recorder(tmp_path, board)
        generation.on_evaluation(step, {"accuracy": accuracy})
        generation.close()
    assert not (tmp_path / "tensorboard").exists()
    board.close()
    events = tensorboard_of(tmp_path)
    assert [(event.step, event.value) for event in events.Scalars("held_out/accuracy")] == [(1, 0.5), (2, 0.75)]


def test_tensorboard_reads_every_scalar_with_its_step(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path / "tensorboard")
    board.scalars(1, {"train/loss": 2.5, "train/lr": 0.1})
    board.scalars(2, {"train/loss": 1.25})
    board.close()
    events = tensorboard_of(tmp_path)
    assert events.Tags()["scalars"] == ["train/loss", "train/lr"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 2.5), (2, 1.25)]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with raises(RunError, "tracker.unwritable", reason="Not a directory"):
        TensorBoard(tmp_path / "file" / "tensorboard")
