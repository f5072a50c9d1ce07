"""Jobs on files: the same training on any ranks, after kills, from any step, and clear errors for changed files."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
from PIL import Image
from rich.console import Console

from commands import (
    ended_well,
    events,
    in_a_process,
    kill_rank,
    losses,
    paceline,
    training,
    wait_for_events,
    wait_for_step,
    write_job,
)
from paceline.errors import LaunchError
from paceline.job.job import Job
from paceline.run.record.run import Run
from paceline.run.train import train
from refusals import raises
from storage.servers import BUCKET, fronted, reached_over, serving

ROWS, SHARDS = 30, 8
SMALL = Path(__file__).parent.parent / "small_jobs.py"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Eight JSONL files of 30 rows each."""
    return write_rows(tmp_path / "corpus", seed=3)


def write_rows(folder: Path, *, seed: int, shards: int = SHARDS) -> Path:
    folder.mkdir()
    draw = np.random.default_rng(seed)
    for shard in range(shards):
        points = draw.normal(size=(ROWS, 6)).round(3)
        rows = [{"x": point.tolist(), "y": int(point[:3].argmax()), "note": "n"} for point in points]
        (folder / f"part-{shard}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def job_on(files: Path, folder: Path, **changes: Any) -> Path:
    data = {"kind": "records", "path": str(files), "inputs": "x", "target": "y", "held_out": 0.1, "shuffle_window": 16}
    given = changes.pop("data", {})
    values: dict[str, Any] = {
        "model": {"factory": f"{SMALL}:plain"},
        "data": given if "kind" in given else data | given,
        "loss": "cross_entropy",
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
        "global_batch": 12,
        "stop": {"steps": 40},
    }
    return write_job(folder / "job.yaml", **(values | changes))


def trained(job: Path, run: Path, plan: str, **keys: Any) -> Run:
    return train(Job.load(job), plan=plan, run=run, console=Console(quiet=True), **keys)


def test_every_plan_trains_on_the_same_samples(files: Path, tmp_path: Path) -> None:
    job = job_on(files, tmp_path)
    found = {plan: trained(job, tmp_path / plan, plan).path for plan in ("dp=1", "dp=2", "dp=3", "fsdp=2")}
    for run in found.values():
        assert losses(run) == pytest.approx(losses(found["dp=1"]), rel=1e-5)
    assert events(found["dp=1"], "start")[0]["samples_per_epoch"] == ROWS * SHARDS - 24


def test_loader_processes_read_the_same(files: Path, tmp_path: Path) -> None:
    here = trained(job_on(files, tmp_path), tmp_path / "here", "dp=2").path
    processes = trained(job_on(files, tmp_path, data={"num_workers": 2}), tmp_path / "there", "dp=2").path
    assert losses(processes) == losses(here)


def test_a_run_continues_on_other_ranks_in_the_same_order(files: Path, tmp_path: Path) -> None:
    whole = losses(trained(job_on(files, tmp_path), tmp_path / "whole", "dp=1").path)
    run = tmp_path / "parts"
    trained(job_on(files, tmp_path, stop={"steps": 23}), run, "dp=3")
    trained(job_on(files, tmp_path), run, "dp=2", resume=True)
    assert [event["step"] for event in events(run, "resume")] == [23]
    assert losses(run) == pytest.approx(whole, rel=1e-5)


def test_a_killed_rank_costs_no_sample(files: Path, tmp_path: Path) -> None:
    slow = job_on(files, tmp_path, data={"map": f"{Path(__file__)}:slowly"}, stop={"steps": 80})
    undisturbed = losses(trained(slow, tmp_path / "undisturbed", "dp=2").path)
    with training(slow, tmp_path, "dp=2") as (process, run):
        for count, (rank, step) in enumerate([(1, 5), (0, 30)], 1):
            wait_for_step(step, run, process)
            kill_rank(rank, process)
            wait_for_events(run, "generation", 2 * count, process)
        ended_well(process)
    assert losses(run) == pytest.approx(undisturbed, rel=1e-4)


def slowly(row: dict[str, Any]) -> Any:
    import time

    import torch

    time.sleep(0.002)
    return torch.tensor(row["x"]), row["y"]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_row_that_is_not_a_sample_is_named_in_mid_epoch(num_workers: int, tmp_path: Path) -> None:
    rows = [{"x": [0.5] * 6, "y": None if row == 30 else 1} for row in range(48)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = job_on(tmp_path / "rows.jsonl", tmp_path, data={"held_out": 0, "num_workers": num_workers})
    with raises(LaunchError, "data.value_unsupported", name="y", where=f"{tmp_path / 'rows.jsonl'}, row 30"):
        trained(job, tmp_path / "run", "dp=2")


@pytest.mark.parametrize(("change", "named"), [("rewrite", "part-3"), ("remove", "part-5"), ("add", "part-9")])
def test_changed_files_are_refused_by_name_at_resume(change: str, named: str, files: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(job_on(files, tmp_path, stop={"steps": 5}), run, "dp=1")
    if change == "rewrite":
        file = files / "part-3.jsonl"
        file.write_text(file.read_text().replace('"y": 0', '"y": 1'))
    elif change == "remove":
        (files / "part-5.jsonl").unlink()
    else:
        (files / "part-9.jsonl").write_text((files / "part-0.jsonl").read_text())
    with raises(LaunchError, "data.changed") as caught:
        trained(job_on(files, tmp_path), run, "dp=1", resume=True)
    assert named in str(caught.value)


OTHER = ("a mixture's source", "the validation set", "the test set", "the validation set of a source")


@pytest.mark.parametrize("where", OTHER)
def test_changed_files_of_other_sets_are_refused_by_name_at_resume(where: str, files: Path, tmp_path: Path) -> None:
    other, run = write_rows(tmp_path / "other", seed=9, shards=3), tmp_path / "run"
    source = {"kind": "records", "path": str(files), "inputs": "x", "target": "y", "held_out": 0.1}
    second = {**source, "path": str(other)}
    sets: dict[str, dict[str, Any]] = {
        "a mixture's source": {"kind": "mixture", "sources": {"a": source, "b": second}},
        "the validation set": {**source, "held_out_path": str(other)},
        "the test set": {**source, "test": str(other)},
        "the validation set of a source": {
            "kind": "mixture",
            "sources": {"a": source, "b": {**source, "held_out_path": str(other)}},
        },
    }

    def job(steps: int) -> Path:
        return job_on(files, tmp_path, stop={"steps": steps}, data=sets[where])

    trained(job(5), run, "dp=1")
    for change, named in (("rewrite", "part-1"), ("cut", "part-0"), ("remove", "part-2"), ("add", "part-7")):
        file = other / f"{named}.jsonl"
        before = file.read_bytes() if file.exists() else None
        if change == "rewrite":
            file.write_bytes(file.read_bytes().replace(b'"y": 0', b'"y": 1'))
        elif change == "cut":
            file.write_bytes(file.read_bytes()[:900].rpartition(b"\n")[0] + b"\n")
        elif change == "remove":
            file.unlink()
        else:
            file.write_bytes((other / "part-0.jsonl").read_bytes())
        with raises(LaunchError, "data.changed") as caught:
            trained(job(9), run, "dp=1", resume=True)
        assert f"{named}.jsonl" in str(caught.value), change
        if before is None:
            file.unlink()
        else:
            file.write_bytes(before)
    trained(job(9), run, "dp=1", resume=True)
    assert len(losses(run)) == 9


def test_an_image_that_was_replaced_by_one_of_equal_size_is_refused_by_name_at_resume(tmp_path: Path) -> None:
    def image(value: int) -> bytes:
        content = io.BytesIO()
        Image.new("L", (28, 28), value).save(content, "BMP")
        return content.getvalue()

    for number in range(40):
        file = tmp_path / "photos" / "ab"[number % 2] / f"{number}.bmp"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(image(number))

    def job(steps: int) -> Path:
        data = {"kind": "records", "path": str(tmp_path / "photos"), "format": "images", "held_out": 0.1}
        return job_on(tmp_path, tmp_path, stop={"steps": steps}, model={"zoo": "mlp"}, data=data)

    trained(job(3), tmp_path / "run", "dp=1")
    (tmp_path / "photos" / "b" / "5.bmp").write_bytes(image(200))
    with raises(LaunchError, "data.changed") as caught:
        trained(job(6), tmp_path / "run", "dp=1", resume=True)
    assert "b/5.bmp" in str(caught.value)
    (tmp_path / "photos" / "b" / "5.bmp").write_bytes(image(5))
    trained(job(6), tmp_path / "run", "dp=1", resume=True)
    assert len(losses(tmp_path / "run")) == 6


def test_a_saved_model_measures_and_predicts_on_other_files(files: Path, tmp_path: Path) -> None:
    run = trained(job_on(files, tmp_path), tmp_path / "run", "dp=1").path
    other = write_rows(tmp_path / "other", seed=5, shards=1) / "part-0.jsonl"
    measured = paceline("evaluate", run, "--data", other, folder=tmp_path)
    assert measured.code == 0, measured.err
    rows = [json.loads(line) for line in other.read_text().splitlines()]
    other.write_text("".join(json.dumps({"x": row["x"]}) + "\n" for row in rows))
    predicted = paceline("predict", run, "--data", other, "--out", tmp_path / "out.parquet", folder=tmp_path)
    assert predicted.code == 0, predicted.err
    assert parquet.read_table(tmp_path / "out.parquet").num_rows == ROWS


def test_a_file_that_cannot_be_read_is_left_out_only_on_request(files: Path, tmp_path: Path) -> None:
    whole = gzip.compress((files / "part-2.jsonl").read_bytes())
    (files / "part-2.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (files / "part-2.jsonl").unlink()
    broken = (files / "part-4.jsonl").read_text().splitlines()
    broken[7] = broken[7][:20]
    (files / "part-4.jsonl").write_text("".join(f"{line}\n" for line in broken))
    with raises(LaunchError, "data.shard_damaged"):
        trained(job_on(files, tmp_path), tmp_path / "stops", "dp=1")
    run = trained(
        job_on(files, tmp_path, data={"on_bad_shard": "skip"}, stop={"epochs": 3}), tmp_path / "skips", "dp=2"
    ).path
    left_out = events(run, "shards_left_out")[0]
    assert left_out["shards"] == 1
    assert "part-2" in left_out["first"][0]["shard"]
    replaced = sum(line.get("data", {}).get("replaced", 0) for rank in (0, 1) for line in Run(run).steps(rank))
    assert replaced == 3, "one row, in each of three epochs"


def test_a_mixture_counts_its_sources_and_resumes(files: Path, tmp_path: Path) -> None:
    other = write_rows(tmp_path / "other", seed=9, shards=2)
    sources = {
        name: {"kind": "records", "path": str(path), "inputs": "x", "target": "y", "held_out": 0}
        for name, path in (("many", files), ("few", other))
    }

    def mixed(steps: int) -> Path:
        data = {
            "kind": "mixture",
            "sources": sources,
            "weights": {"many": 1, "few": 1},
            "schedule": [{"step": 20, "weights": {"many": 3, "few": 1}}],
        }
        return job_on(files, tmp_path, data=data, stop={"steps": steps})

    whole = trained(mixed(40), tmp_path / "whole", "dp=1").path
    assert events(whole, "sources")[-1]["sources"] == {
        "many": {"samples": 20 * 6 + 20 * 9, "epochs": 1.25},
        "few": {"samples": 20 * 6 + 20 * 3, "epochs": 3.0},
    }
    run = tmp_path / "parts"
    trained(mixed(13), run, "dp=2")
    trained(mixed(40), run, "dp=3", resume=True)
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)


def mixed_job(files: Path, folder: Path, *, steps: int, slow: bool = False, **keys: Any) -> Path:
    """A job on two sources; the second is smaller than its share of a batch, and begins in the second epoch."""
    few = folder / "few"
    if not few.exists():
        few.mkdir()
        rows = [{"x": [0.1 * n, 0.2, 0.3, 0.4, 0.5, 0.6], "y": n} for n in range(3)]
        (few / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "records", "path": str(files), "inputs": "x", "target": "y", "held_out": 0, "shuffle_window": 16}
    both = {"many": source, "few": {**source, "path": str(few)}}
    if slow:
        both = {name: {**each, "map": f"{Path(__file__)}:slowly"} for name, each in both.items()}
    schedule = [{"step": 25, "weights": {"many": 2, "few": 1}}]
    data = {"kind": "mixture", "sources": both, "weights": {"many": 1}, "schedule": schedule, "repeat": {"many": 0.7}}
    return job_on(files, folder, data=data, stop={"steps": steps}, **keys)


@pytest.mark.parametrize(
    ("plan", "keys"),
    [
        ("dp=1", {}),
        ("dp=2", {}),
        ("dp=3", {"partition": {"kind": "uniform", "weights": [1.0, 2.5, 1.0]}}),
        ("dp=2 sync=local:4", {}),
        ("dp=2", {"partition": {"kind": "uniform", "shuffle": False}}),
    ],
    ids=str,
)
def test_a_mixture_resumes_in_mid_epoch_bit_by_bit(
    plan: str, keys: dict[str, Any], files: Path, tmp_path: Path
) -> None:
    whole = losses(trained(mixed_job(files, tmp_path, steps=40, **keys), tmp_path / "whole", plan).path)
    for first, then in ((9, 27), (27, 40)):  # within an epoch, before and after the second source begins
        resume = (tmp_path / "parts").exists()
        trained(mixed_job(files, tmp_path, steps=first, **keys), tmp_path / "parts", plan, resume=resume)
        trained(mixed_job(files, tmp_path, steps=then, **keys), tmp_path / "parts", plan, resume=True)
    assert losses(tmp_path / "parts") == whole


def test_a_plan_computes_on_a_mixture_what_one_process_does(files: Path, tmp_path: Path) -> None:
    outcome = paceline("check", mixed_job(files, tmp_path, steps=4), "--plan", "dp=2", folder=tmp_path)
    assert outcome.code == 0, outcome.out + outcome.err


def test_a_killed_rank_costs_no_sample_of_a_mixture(files: Path, tmp_path: Path) -> None:
    job = mixed_job(files, tmp_path, steps=60, slow=True)
    undisturbed = losses(trained(job, tmp_path / "undisturbed", "dp=3").path)
    with training(job, tmp_path, "dp=3") as (process, run):
        wait_for_step(20, run, process)
        kill_rank(2, process)
        wait_for_events(run, "generation", 2, process)
        ended_well(process)
    assert losses(run) == pytest.approx(undisturbed, rel=1e-4)


def test_an_object_store_that_fails_now_and_then_gives_the_same_training(files: Path, tmp_path: Path) -> None:
    local = losses(trained(job_on(files, tmp_path), tmp_path / "local", "dp=2").path)
    upload = f"from paceline.storage.store import Store; store = Store('s3://{BUCKET}/corpus')\n" + "".join(
        f"store.write({file.name!r}, {file.read_bytes()!r})\n" for file in files.iterdir()
    )
    with serving(tmp_path) as server:
        subprocess.run([sys.executable, "-c", upload], env=os.environ | server.environment, check=True, timeout=120)
        # run by a command, because fsspec keeps a thread and its connections until its process ends
        with fronted(server, failing=0.05, latency_s=0.02) as front:
            job = job_on(files, tmp_path, data={"path": f"s3://{BUCKET}/corpus/*.jsonl", "num_workers": 1})
            environment = reached_over(front, server)
            arguments = ("train", job, "--plan", "dp=2", "--run", "remote")
            outcome = in_a_process(*arguments, folder=tmp_path, **environment)
            assert outcome.code == 0, outcome.err
            assert front.requests >= 8
    assert losses(tmp_path / "remote") == local
