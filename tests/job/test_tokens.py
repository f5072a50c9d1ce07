"""Text and folders of tokens as samples: every token is learned once, and nothing else."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from commands import paceline
from paceline.corpus.tokenizer import Tokenizer
from paceline.errors import DataError, JobError, StorageError
from paceline.job.job import Job
from paceline.job.samples import DataSets, digest_of
from refusals import raises
from small_tokenizers import END, MASK, PAD, SENTENCES, save_tokenizer

TEXTS = [f"{SENTENCES[n % 3] * (1 + n % 4)} {n}" for n in range(24)]
IGNORED = -100


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    names = {"eos_token": END, "mask_token": MASK, "pad_token": PAD}
    return Tokenizer.load(save_tokenizer(tmp_path_factory.mktemp("tokenizer"), names=names))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text", TEXTS[:10], TEXTS[10:])


@pytest.fixture
def folder(tmp_path: Path, text: Path, tokenizer: Tokenizer) -> Path:
    assert paceline("data", "tokenize", text, "tokens", "--tokenizer", tokenizer.path, folder=tmp_path).code == 0
    return tmp_path / "tokens"


def write_text(folder: Path, *shards: list[str]) -> Path:
    folder.mkdir()
    for number, texts in enumerate(shards):
        (folder / f"{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def job_of(path: Path, tokenizer: Tokenizer | None = None, *, loss: str = "cross_entropy", **data: Any) -> Job:
    named = {} if tokenizer is None else {"tokenizer": str(tokenizer.path)}
    return Job(
        model={"zoo": "gpt", "args": {"vocab": 320, "context": 512}},
        data={"kind": "tokens", "path": str(path), "held_out": 0, "context": 64, **named, **data},
        loss=loss,
        optimizer={"name": "sgd", "lr": 0.1},
        global_batch=4,
        stop={"steps": 2},
    )


def built(path: Path, tokenizer: Tokenizer | None = None, **data: Any) -> DataSets:
    return job_of(path, tokenizer, **data).data.build(input_shape=None, seed=0)


def samples(dataset: Any) -> list[Any]:
    columns = dataset.__getitems__(list(range(len(dataset)))).values
    if isinstance(columns, dict):
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return list(zip(*columns, strict=True))


def pairs(dataset: Any) -> list[tuple[int, int]]:
    """Every token and its label, over all samples."""
    found: list[tuple[int, int]] = []
    for sample in samples(dataset):
        ids, labels = (sample["input_ids"], sample["labels"]) if isinstance(sample, dict) else sample
        keep = labels != IGNORED
        found += zip(ids[keep].tolist(), labels[keep].tolist(), strict=True)
    return sorted(found)


def all_pairs(tokenizer: Tokenizer) -> list[tuple[int, int]]:
    documents = [tokenizer.encode(text).tolist() for text in TEXTS]
    return sorted(pair for document in documents for pair in pairwise(document))


def test_a_document_of_text_is_a_padded_sample_whose_target_is_the_next_token(text: Path, tokenizer: Tokenizer) -> None:
    train: Any = built(text, tokenizer, context=256).train
    assert len(train) == len(TEXTS)
    for document, (ids, target) in zip(TEXTS, samples(train), strict=True):
        tokens = tokenizer.encode(document).tolist()
        pad = [tokenizer.pad_token_id] * (256 - len(tokens))
        assert ids.tolist() == tokens + pad
        assert target.tolist() == tokens[1:] + [IGNORED] * (1 + len(pad))
    lengths = [len(tokenizer.encode(document)) for document in TEXTS]
    positions = 256 * len(TEXTS)
    expected = {"tokens": sum(lengths) - len(TEXTS), "padding": positions - sum(lengths), "positions": positions}
    assert train.counts == expected


def test_tokens_beyond_the_context_are_cut_and_counted(text: Path, tokenizer: Tokenizer) -> None:
    train: Any = built(text, tokenizer, context=16).train
    for document, (ids, target) in zip(TEXTS, samples(train), strict=True):
        tokens = tokenizer.encode(document).tolist()
        assert ids.tolist() == tokens[:16]
        assert target.tolist() == tokens[1:17]
    assert train.counts["cut"] == sum(len(tokenizer.encode(document)) - 17 for document in TEXTS)


@pytest.mark.parametrize(("source", "pack"), [("folder", False), ("folder", True), ("text", True)])
def test_every_token_is_learned_once_whatever_the_context(
    source: str, text: Path, tokenizer: Tokenizer, pack: bool, request: pytest.FixtureRequest
) -> None:
    path = text if source == "text" else request.getfixturevalue("folder")
    for context in (16, 61, 512):
        train: Any = built(path, tokenizer, context=context, pack=pack).train
        assert pairs(train) == all_pairs(tokenizer)
        assert train.counts["tokens"] == len(all_pairs(tokenizer))


def test_packed_documents_are_whole_with_positions_of_their_own(folder: Path, tokenizer: Tokenizer) -> None:
    train: Any = built(folder, pack=True, context=256).train
    found = []
    for sample in samples(train):
        ids, positions, labels = sample["input_ids"], sample["position_ids"], sample["labels"]
        starts = (positions == 0).nonzero().flatten().tolist()
        for start, end in zip(starts, [*starts[1:], 256], strict=True):
            assert positions[start:end].tolist() == list(range(end - start))
            assert labels[start : end - 1].tolist() in (ids[start + 1 : end].tolist(), [IGNORED] * (end - start - 1))
            assert labels[end - 1] == IGNORED
            if labels[start] != IGNORED:
                found.append(ids[start:end].tolist())
    assert sorted(found) == sorted(tokenizer.encode(document).tolist() for document in TEXTS)
    padded: Any = built(folder, context=256).train
    assert samples(padded)
    assert train.counts["padding"] / train.counts["positions"] < 0.2
    assert padded.counts["padding"] / padded.counts["positions"] > 0.5


@pytest.mark.parametrize("pack", [False, True])
def test_masked_samples_hide_tokens_but_no_ends_and_no_padding(folder: Path, tokenizer: Tokenizer, pack: bool) -> None:
    masked: Any = built(folder, objective="masked", pack=pack, context=256).train
    causal: Any = built(folder, pack=pack, context=256).train
    hidden = 0
    for sample, plain in zip(samples(masked), samples(causal), strict=True):
        original = plain["input_ids"] if pack else plain[0]
        chosen = sample["labels"] != IGNORED
        assert torch.equal(sample["labels"][chosen], original[chosen])
        assert torch.equal(sample["input_ids"][~chosen], original[~chosen])
        assert not (chosen & (original == tokenizer.end_token_id)).any()
        real = original != tokenizer.pad_token_id
        assert not (chosen & ~real).any()
        assert chosen.sum() == max(1, round(0.15 * int((real & (original != tokenizer.end_token_id)).sum())))
        hidden += int((sample["input_ids"][chosen] == tokenizer.mask_token_id).sum())
        if pack:
            assert torch.equal(sample["position_ids"], plain["position_ids"])
        else:
            assert torch.equal(sample["attention_mask"], real.long())
    assert 0.7 < hidden / masked.counts["tokens"] < 0.9
    first = masked[0]
    assert torch.equal(masked[0]["input_ids"], first["input_ids"])
    masked.set_epoch(1)
    assert not torch.equal(masked[0]["labels"], first["labels"])


def test_the_validation_set_has_the_same_documents_packed_or_not(
    folder: Path, text: Path, tokenizer: Tokenizer
) -> None:
    on_the_fly = built(text, tokenizer, held_out=0.25, context=512)
    packed = built(folder, pack=True, held_out=0.25, context=512)
    assert pairs(packed.held_out) == pairs(on_the_fly.held_out)
    assert sorted(pairs(packed.train) + pairs(packed.held_out)) == all_pairs(tokenizer)
    own = built(folder, pack=True, held_out_path=str(folder), limit=5)
    assert len(pairs(own.train)) == len(pairs(own.held_out)) < len(all_pairs(tokenizer))


def test_text_is_converted_once_for_packing(
    text: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_of(text, tokenizer, pack=True).fetch()
    made = list((tmp_path / "cache").rglob("*.arrow"))
    assert made

    def never(self: Tokenizer, text: str, *, end: bool = True) -> Any:
        raise AssertionError("converted again")

    monkeypatch.setattr(Tokenizer, "ids", never)
    assert len(built(text, tokenizer, pack=True).train)  # type: ignore[arg-type]
    assert list((tmp_path / "cache").rglob("*.arrow")) == made


def test_changed_text_is_converted_to_another_folder_because_a_job_may_use_the_first(
    text: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    before: Any = built(text, tokenizer, pack=True).train
    (text / "0.jsonl").write_text(json.dumps({"text": "another text"}) + "\n")
    assert len(pairs(built(text, tokenizer, pack=True).train)) < len(all_pairs(tokenizer))
    assert pairs(before) == all_pairs(tokenizer)


def test_a_cache_folder_that_cannot_be_made_is_named(
    text: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tokenizer.path))
    for pack in (False, True):
        with raises(StorageError, "storage.folder_unusable", folder=tokenizer.path / "paceline"):
            built(text, tokenizer, pack=pack)
    (tmp_path / "half" / "paceline").mkdir(parents=True)
    (tmp_path / "half" / "paceline" / "tokens").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "half"))
    with raises(StorageError, "storage.folder_unusable"):
        built(text, tokenizer, pack=True)


def test_a_token_beyond_the_vocabulary_is_named_with_its_document(folder: Path, tokenizer: Tokenizer) -> None:
    shard = sorted(folder.glob("*.arrow"))[1]
    with pa.memory_map(str(shard)) as source:
        table = pa.ipc.open_file(source).read_all()
    documents = table.column("tokens").to_pylist()
    for bad in (320, -1):
        documents[3][2] = bad
        with pa.OSFile(str(shard), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(pa.table({"tokens": documents}, schema=table.schema))
        with raises(DataError, "data.token_beyond_vocabulary", where=f"{shard}, row 3", last=319, token=bad):
            samples(built(folder).train)


def test_a_folder_whose_files_do_not_belong_together_is_refused(folder: Path, tmp_path: Path) -> None:
    first, second = sorted(folder.glob("*.arrow"))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    with raises(DataError, "data.not_of_folder", shard=first):
        built(folder)
    first.write_bytes(content)
    (folder / "tokens.json").write_text("{}")
    with raises(DataError, "data.description_invalid", file=folder / "tokens.json"):
        built(folder)


@pytest.mark.parametrize("content", [None, b"", b"no numbers"])
def test_lengths_that_cannot_be_read_are_named(folder: Path, content: bytes | None) -> None:
    (folder / "lengths.npy").unlink()
    if content is not None:
        (folder / "lengths.npy").write_bytes(content)
    for pack in (False, True):
        with raises(DataError, "data.lengths_unreadable", folder=folder):
            built(folder, pack=pack)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("change", [-1, 1, 100])
def test_documents_of_other_lengths_are_refused(folder: Path, pack: bool, change: int) -> None:
    """A file that was replaced by one with as many documents must not be read in part."""
    shard = sorted(folder.glob("*.arrow"))[1]
    with pa.memory_map(str(shard)) as source:
        table = pa.ipc.open_file(source).read_all()
    documents = [document[:-1] if change < 0 else document + [1] * change for document in table["tokens"].to_pylist()]
    with pa.OSFile(str(shard), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(pa.table({"tokens": documents}, schema=table.schema))
    with raises(DataError, "data.row_unreadable"):
        samples(built(folder, pack=pack).train)


def test_what_the_objective_or_the_source_needs_is_asked_for(
    text: Path, folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    plain = Tokenizer.load(save_tokenizer(tmp_path / "plain"))
    with raises(DataError, "data.no_tokenizer", path=text):
        built(text)
    with raises(DataError, "data.no_mask_token"):
        built(text, plain, objective="masked")
    with raises(DataError, "data.other_tokenizer", folder=folder):
        built(folder, plain)
    with raises(DataError, "data.text_and_tokens", tokens=folder, text=text):
        built(folder, tokenizer, held_out_path=str(text))
    with raises(DataError, "data.row_without_column", name="body"):
        built(text, tokenizer, column="body")


def test_a_loss_that_would_shift_the_labels_again_is_refused(text: Path, tokenizer: Tokenizer) -> None:
    with raises(JobError, "job.labels_shifted_twice"):
        job_of(text, tokenizer, loss="model")


def test_a_tokenizer_for_bytes_is_an_error_that_names_the_kind(text: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(JobError, match="kind: tokens"):
        job_of(text, tokenizer, kind="text")


def test_other_files_or_another_tokenizer_change_the_identity_of_the_data(
    text: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    def digest(path: Path, tokenizer: Tokenizer) -> Any:
        train: Any = built(path, tokenizer).train
        return train.digest

    larger = Tokenizer.load(save_tokenizer(tmp_path / "larger", vocab=330))
    assert digest(text, tokenizer) == digest(text, tokenizer) != digest(text, larger)
    assert digest(text, tokenizer) != digest(write_text(tmp_path / "other", TEXTS[:9], TEXTS[10:]), tokenizer)
    assert np.unique(digest(text, tokenizer)).size == 2


def mixture_of(**sources: dict[str, Any]) -> Any:
    job = job_of(Path("unused"))
    data = {name: {"kind": "tokens", "held_out": 0, "context": 256, **source} for name, source in sources.items()}
    return Job(**job.model_dump(exclude={"data"}), data={"kind": "mixture", "sources": data}).data.build(
        input_shape=None, seed=0
    )


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_a_mixture_has_the_samples_and_the_counts_of_its_sources(
    text: Path, folder: Path, tokenizer: Tokenizer, objective: str
) -> None:
    keys = {"tokenizer": str(tokenizer.path), "objective": objective}
    mixed = mixture_of(a={"path": str(text), **keys}, b={"path": str(folder), **keys}).train
    alone: list[Any] = [built(path, tokenizer, context=256, objective=objective).train for path in (text, folder)]
    digests = [digest_of(sample) for dataset in alone for sample in samples(dataset)]
    assert [digest_of(sample) for sample in samples(mixed)] == digests
    assert mixed.counts == {name: sum(one.counts[name] for one in alone) for name in alone[0].counts}
    assert [digest_of(mixed[number]) for number in range(len(mixed))] == digests


def test_sources_whose_tokens_mean_different_things_are_refused(
    text: Path, folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    first = {"path": str(text), "tokenizer": str(tokenizer.path)}
    larger = Tokenizer.load(save_tokenizer(tmp_path / "larger", vocab=330))
    for key, second in (
        ("context", {**first, "context": 128}),
        ("objective", {**first, "objective": "masked"}),
        ("pack", {**first, "pack": True}),
        ("tokenizer", {**first, "tokenizer": str(larger.path)}),
    ):
        with raises(DataError, "data.tokens_of_sources_differ", key=key, first="a", second="b"):
            mixture_of(a=first, b=second)
    assert len(mixture_of(a=first, b={"path": str(folder)}).train) == 2 * len(TEXTS)
