"""`paceline bench data`: real measurements of loaders, and what they conclude."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commands import paceline, write_job
from shown_data import own, photos


def measured(job: Path, *options: object) -> tuple[str, dict[str, Any]]:
    """The screen and the JSON of a short measurement."""
    outcome = paceline("bench", "data", job, "--seconds", 0.2, *options, "--json", folder=job.parent)
    assert outcome.code == 0, outcome.err
    *screen, last = outcome.out.splitlines()
    return "\n".join(screen), json.loads(last)


def test_images_are_measured_against_the_files_and_the_decoder(tmp_path: Path) -> None:
    photos(tmp_path / "photos")
    data = {"kind": "images", "path": "photos", "shape": [3, 8, 8], "held_out": 0, "num_workers": 1}
    screen, found = measured(
        write_job(tmp_path / "job.yaml", data=data, global_batch=4), "--num-workers", "0,2", "--step-ms", 1
    )
    figures, report = found["figures"], found["environment"]["loading"]
    assert [one["num_workers"] for one in report["settings"]] == [0, 1, 2]
    for workers in (0, 1, 2):
        assert figures[f"samples_per_s_workers_{workers}"] > 0
        assert figures[f"read_bytes_per_s_workers_{workers}"] > 0
        assert 0 < figures[f"waiting_share_workers_{workers}"] <= 1
    # bytes of a batch's tensors: 3 x 8 x 8 floats and a label for each sample
    ratio = figures["decoded_bytes_per_s_workers_0"] / figures["samples_per_s_workers_0"]
    assert ratio == pytest.approx(3 * 8 * 8 * 4 + 8, rel=0.5)
    assert figures["decoder_samples_per_s"] > 0
    assert figures["disk_samples_per_s"] > 0
    assert report["verdict"] in " ".join(screen.split())
    low, middle, high = report["settings"][0]["samples_per_s"]
    assert low <= middle <= high


def test_a_mixture_is_measured_with_the_files_of_its_sources(tmp_path: Path) -> None:
    sources = {}
    for name in "ab":
        photos(tmp_path / name)
        sources[name] = {"kind": "records", "path": name, "shape": [3, 8, 8], "held_out": 0}
    data = {"kind": "mixture", "sources": sources, "weights": {"a": 1, "b": 2}, "repeat": {"a": 1.5}, "num_workers": 1}
    _, found = measured(write_job(tmp_path / "job.yaml", data=data, global_batch=4), "--num-workers", "0,1")
    for workers in (0, 1):
        assert found["figures"][f"samples_per_s_workers_{workers}"] > 0
    assert found["figures"]["decoder_samples_per_s"] > 0
    assert found["figures"]["disk_samples_per_s"] > 0


def test_tokens_are_counted_without_padding(tmp_path: Path) -> None:
    _, found = measured(
        write_job(tmp_path / "job.yaml", data=own("Packed", held_out=0), global_batch=4), "--num-workers", 0
    )
    [setting] = found["environment"]["loading"]["settings"]
    assert setting["tokens_per_sample"] == 7
    assert "tokens_per_s_workers_0" in found["figures"]


def test_data_in_memory_has_no_limit_of_the_disk(tmp_path: Path) -> None:
    screen, found = measured(write_job(tmp_path / "job.yaml"), "--num-workers", 0)
    assert "disk_samples_per_s" not in found["figures"]
    assert "not measured" in screen


def test_a_list_that_is_none_is_refused(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml")
    assert paceline("bench", "data", job, "--num-workers", "two", folder=tmp_path).code == 2


def test_a_sample_that_cannot_be_read_is_the_error_of_training(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", data=own("Raises", held_out=0), global_batch=4)
    outcome = paceline("bench", "data", job, "--seconds", 0.2, "--num-workers", "0", folder=tmp_path)
    outcome.fails_with("data.sample_raised")
