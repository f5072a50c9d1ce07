"""Runs on text with a tokenizer: equal losses for any number of ranks, and counts of tokens in record and report."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from commands import Outcome, in_a_process, losses, paceline
from paceline.corpus.tokenizer import Tokenizer
from paceline.run.record.run import Run
from small_tokenizers import SENTENCES, save_tokenizer
from storage.servers import S3, serving

TEXTS = [f"{SENTENCES[n % 3] * (1 + n % 3)} {n}" for n in range(40)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_tokenizer(tmp_path)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return tmp_path


def write_job(folder: Path, *, vocab: int = 320, **data: Any) -> Path:
    values = {
        "model": {"zoo": "gpt", "args": {"vocab": vocab, "context": 64, "layers": 1, "hidden": 16, "heads": 2}},
        "data": {"kind": "tokens", "path": "texts.jsonl", "tokenizer": "tokenizer.json", "context": 64, **data},
        "loss": "cross_entropy",
        "optimizer": {"name": "sgd", "lr": 0.1},
        "global_batch": 4,
        "stop": {"steps": 8},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(values))
    return folder / "job.yaml"


def test_two_ranks_train_like_one_and_count_the_same_tokens(folder: Path) -> None:
    job, runs = write_job(folder), []
    for plan in ("dp=1", "dp=2"):
        outcome = paceline("train", job, "--plan", plan, "--run", plan, folder=folder)
        assert outcome.code == 0, outcome.err
        assert outcome.says("tokens/s that count")
        runs.append(Run(folder / plan))
    alone, both = runs
    assert both.losses == pytest.approx(alone.losses, rel=1e-4)
    counts = [json.loads(line)["data"] for line in (folder / "dp=1" / "steps" / "rank-0.jsonl").open()]
    shares = [
        [json.loads(line)["data"] for line in (folder / "dp=2" / "steps" / f"rank-{rank}.jsonl").open()]
        for rank in (0, 1)
    ]
    for whole, first, second in zip(counts, *shares, strict=True):
        assert whole["positions"] <= 4 * 64
        # each rank computes its microbatch up to the last label
        one, both_ranks = (
            {
                "used": sum(counts["positions"] - counts["padding"] for counts in each),
                **{name: sum(counts.get(name, 0) for counts in each) for name in ("tokens", "cut", "shortened")},
            }
            for each in ([whole], [first, second])
        )
        assert one == both_ranks
    tokenizer = Tokenizer.load(folder)
    assert max(whole["tokens"] for whole in counts) <= 4 * max(len(tokenizer.encode(text)) - 1 for text in TEXTS)
    assert alone.speed is not None
    assert alone.speed.tokens_per_s == pytest.approx(
        alone.throughput * sum(c["tokens"] for c in counts[5:]) / (4 * len(counts[5:]))
    )
    assert alone.speed.padding == pytest.approx(
        sum(c["padding"] for c in counts[5:]) / sum(c["positions"] for c in counts[5:])
    )
    assert paceline("report", "dp=2", folder=folder).code == 0
    assert "token throughput" in next((folder / "dp=2").glob("*.html")).read_text()


def test_a_tokenizer_with_more_ids_than_the_model_has_embeddings_is_refused_before_the_start(folder: Path) -> None:
    outcome = paceline("train", write_job(folder, vocab=300), "--plan", "dp=2", "--run", "run", folder=folder)
    outcome.fails_with("data.vocabulary_too_large", ids=320, rows=300)
    assert not (folder / "run" / "steps").exists()


def upload(server: S3, folder: Path, **files: bytes) -> None:
    """Write all files of a folder of tokens to the server, or other contents of some of them."""
    contents = {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.startswith(".")} | files
    program = (
        "import pickle, sys; from paceline.storage.store import Store; "
        f"store = Store('s3://bucket/{folder.name}'); store.delete(store.list()); "
        "[store.write(*pair) for pair in pickle.load(sys.stdin.buffer).items()]"
    )
    subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps(contents),
        env=os.environ | server.environment,
        check=True,
        timeout=120,
    )


def test_folders_at_a_url_train_like_local_folders_and_folders_that_are_not_whole_are_refused(folder: Path) -> None:
    for name, texts in (("one", TEXTS[:25]), ("two", TEXTS[25:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        arguments = ("data", "tokenize", f"{name}.jsonl", f"tokens_{name}", "--tokenizer", "tokenizer.json")
        assert paceline(*arguments, folder=folder).code == 0
    names = ["tokens_one", "tokens_two"]
    remote = [f"s3://bucket/{name}" for name in names]
    with serving(folder) as server:

        def train(run: str, path: list[str], **data: Any) -> Outcome:
            job = write_job(folder, path=path, tokenizer=None, **data)
            return in_a_process("train", job, "--plan", "dp=2", "--run", run, folder=folder, **server.environment)

        for name in names:
            upload(server, folder / name)
        for pack in (False, True):
            for run, path in ((f"local{pack}", names), (f"remote{pack}", remote)):
                outcome = train(run, path, pack=pack)
                assert outcome.code == 0, outcome.err
            assert losses(folder / f"remote{pack}") == losses(folder / f"local{pack}")

        first, second = (next((folder / name).glob("*.arrow")) for name in names)
        upload(server, folder / "tokens_one", **{first.name: second.read_bytes()})
        train("changed", remote).fails_with("data.not_of_folder")
        upload(server, folder / "tokens_one", **{"lengths.npy": b"no numbers"})
        train("damaged", remote).fails_with("data.lengths_unreadable")
        (folder / "tokens_one" / "lengths.npy").unlink()
        upload(server, folder / "tokens_one")
        train("absent", remote).fails_with("storage.object_absent")
