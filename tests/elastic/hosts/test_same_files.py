"""Hosts whose code or data differs are told so before a rank starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from commands import write_job
from host_processes import run_on
from paceline.elastic.hosts.files import digests
from paceline.elastic.hosts.messages import Look
from paceline.elastic.hosts.over_hosts import what_to_look_at
from small_jobs import small_job

MODEL = """
from torch import nn

def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, {outputs}))
"""


def digest(path: Path, *suffixes: str) -> str:
    """Digest of a file or folder."""
    return digests(Look([], [str(path)], list(suffixes)))[str(path)]


def test_a_digest_is_of_the_content_and_not_of_the_time(tmp_path: Path) -> None:
    file = tmp_path / "data.bin"
    file.write_bytes(bytes(3 * 2**20))
    before = digest(file)
    os.utime(file, (1, 1))
    assert digest(file) == before
    file.write_bytes(bytes(3 * 2**20 - 1) + b"1")
    assert len({before, digest(file), digest(tmp_path / "none")}) == 3
    assert digest(tmp_path / "none") == ""


def test_a_folder_differs_by_a_name_or_by_a_file_that_counts(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("one")
    (tmp_path / ".hidden").touch()
    before = digest(tmp_path, ".txt")
    (tmp_path / "b.log").touch()
    assert digest(tmp_path, ".txt") == before
    (tmp_path / "deep" / "a.txt").write_text("two")
    changed = digest(tmp_path, ".txt")
    (tmp_path / "b.txt").touch()
    assert len({before, changed, digest(tmp_path, ".txt")}) == 3


def test_a_module_is_found_where_ranks_import_it_and_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one_package" / "deep").mkdir(parents=True)
    (tmp_path / "one_package" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "one_package" / "deep" / "model.py").write_text("MODEL = 1")
    monkeypatch.chdir(tmp_path)
    found = digests(Look(["one_package", "one_package.deep.model", "one_package.none", "no_package"], [], []))
    assert found["one_package.deep.model"] == digest(tmp_path / "one_package" / "deep" / "model.py")
    assert [bool(digest) for digest in found.values()] == [True, True, False, False]


def test_code_and_files_that_a_job_names_are_looked_at_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "my model.py").write_text("def make(): ...")
    job = small_job(
        model={"factory": f"{tmp_path}/my model.py:make", "args": {"label": "other.module:name"}},
        data={"kind": "text", "path": [f"{tmp_path}/a.txt", "s3://bucket/b.txt"], "collate": "my.collate:batch"},
        loss="my.loss:function",
    )
    look = what_to_look_at(job)
    assert look.modules == [f"{tmp_path}/my model.py", "my.collate", "my.loss"]
    assert look.files == [f"{tmp_path}/a.txt"]
    assert ".txt" in look.suffixes


def test_files_that_each_host_has_for_itself_are_not_compared(tmp_path: Path) -> None:
    partition = {"kind": "hierarchical", "host_files": True}
    job = small_job(data={"kind": "arrays", "path": tmp_path / "own.npz"}, partition=partition)
    assert what_to_look_at(job).files == []


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_host_with_another_model_is_refused_and_named(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, outputs in ((first, 10), (second, 11)):
        folder.mkdir()
        (folder / "their_model.py").write_text(MODEL.format(outputs=outputs))
    job = write_job(first / "job.yaml", model="their_model:make")
    zero, one = run_on("train", job, "--plan", "dp=2", "--run", "run", folders=[first, second])
    assert (zero.code, one.code) == (1, 1), zero.err + one.err
    assert zero.says("(number 1) has another their_model.", "[hosts.code_differs]")
    assert not (first / "run").exists()
