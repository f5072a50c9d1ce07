"""`paceline data tokenize`: text of any format becomes a folder of tokens, and errors name the file and the option."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import paceline
from paceline.corpus.tokens import read_about
from small_tokenizers import SENTENCES, save_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer")) / "tokenizer.json"


def test_a_folder_of_text_becomes_a_folder_of_tokens(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "source").mkdir()
    rows = [{"body": text} for text in (*SENTENCES, "")]
    (tmp_path / "source" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ("data", "tokenize", "source", "out", "--tokenizer", tokenizer)

    where = f"{tmp_path}/source/a.jsonl, row 0"
    paceline(*command, folder=tmp_path).fails_with("data.row_without_column", name="text", where=where)
    outcome = paceline(*command, "--column", "body", "--workers", 1, folder=tmp_path)
    assert outcome.says("out: 3 documents", "1 row without text was left out")
    assert read_about(tmp_path / "out").documents == 3

    other = save_tokenizer(tmp_path / "other", vocab=330)
    again = paceline("data", "tokenize", "source", "out", "--tokenizer", other, "--column", "body", folder=tmp_path)
    again.fails_with("data.other_tokenizer", folder=tmp_path / "out")


def test_a_cache_folder_that_cannot_be_made_is_named(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tokenizer))
    outcome = paceline("data", "tokenize", "a.jsonl", "out", "--tokenizer", tokenizer, folder=tmp_path)
    outcome.fails_with("storage.folder_unusable", folder=tokenizer / "paceline")


def test_a_url_as_output_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    outcome = paceline("data", "tokenize", "a.jsonl", "s3://bucket/out", "--tokenizer", tokenizer, folder=tmp_path)
    outcome.fails_with("data.tokens_at_url", url="s3://bucket/out")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.jsonl"]
