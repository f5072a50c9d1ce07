"""`paceline data show`: what the model gets, for every kind of data, on the terminal and on a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import paceline, write_job
from paceline.comm import Group
from paceline.job.job import Job
from paceline.job.partition import Partition
from paceline.planning.plan import Plan
from paceline.run.build import loader_of
from paceline.run.data_view import DataView, view_data
from paceline.run.token_view import histogram
from paceline.split.mesh import Mesh
from shown_data import HERE, own, photos
from small_tokenizers import SENTENCES, save_chat_tokenizer, save_tokenizer


@pytest.fixture
def job(tmp_path: Path) -> Any:
    """Writer of a job with these data into the folder of the test."""

    def written(data: dict[str, Any], **keys: Any) -> Path:
        return write_job(tmp_path / "job.yaml", data=data, **{"global_batch": 4, **keys})

    return written


def view(job_file: Path, samples: int = 4) -> DataView:
    return view_data(Job.load(job_file), samples)


TEXTS = [(n, SENTENCES[n % 3]) for n in range(12)]
GPT = {"zoo": "gpt", "args": {"vocab": 320, "context": 64}}
KINDS = {
    "digits": {"kind": "digits"},
    "arrays": {"kind": "arrays", "path": "table.npz"},
    "text": {"kind": "text", "path": "text.txt", "context": 16},
    "masked text": {"kind": "text", "path": "text.txt", "context": 16, "objective": "masked"},
    "synthetic": {"kind": "synthetic", "samples": 50, "shape": [3, 8, 8], "classes": 4},
    "synthetic tokens": {"kind": "synthetic", "samples": 50, "shape": [12], "vocab": 30},
    "dataset": own("Packed"),
    "images": {"kind": "images", "path": "photos", "shape": [3, 8, 8]},
    "iterable": {**own("Numbers"), "kind": "iterable"},
    "records": {"kind": "records", "path": "photos", "shape": [3, 8, 8]},
    "mixture": {
        "kind": "mixture",
        "sources": {name: {"kind": "records", "path": "photos", "shape": [3, 8, 8]} for name in "ab"},
        "weights": {"a": 3, "b": 1},
        "repeat": {"b": 2.5},
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_data_shows_its_sets_tensors_and_samples(kind: str, job: Any, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("It was a bright cold day in April.\n" * 40)
    np.savez(tmp_path / "table.npz", x=np.random.default_rng(0).normal(size=(40, 3)), y=np.arange(40) % 2)
    photos(tmp_path / "photos")
    outcome = paceline("data", "show", job(KINDS[kind]), "--samples", 2, folder=tmp_path)
    assert outcome.code == 0, outcome.err
    found = view(tmp_path / "job.yaml", 2)
    assert len(found.samples) == 2
    for one in found.sets:
        assert outcome.says(
            one.name,
            "unknown" if one.samples is None else f"{one.samples:,}",
            *(column.dtype for column in one.columns.values()),
        )
    numbers = ("of the stream" if sample.index is None else sample.index for sample in found.samples)
    assert outcome.says(*(f"sample {number}" for number in numbers))


def test_samples_come_in_the_order_of_training(job: Any) -> None:
    file = job({"kind": "digits"}, global_batch=32, seed=3)
    what = Job.load(file)
    data = what.data.build(input_shape=what.model.input_shape(), seed=what.seed)
    loader = loader_of(what, Mesh.of(Plan(), Group()), data)
    assert isinstance(loader.partition, Partition)
    batch = next(iter(loader))
    shown = view(file, 8).samples
    assert [sample.label for sample in shown] == batch[1][:8].tolist()
    loader.close()


def test_packed_documents_have_boundaries_masks_and_padding(job: Any) -> None:
    found = view(job(own("Packed")), 1)
    [sample] = found.samples
    assert sample.reading is not None
    stretches = [(one.text, one.document, one.counted) for one in sample.reading.stretches]
    assert stretches == [
        ("the cat sat </s>", 1, True),
        ("\x1b[31mred <script>alert(1)</script> </s>", 2, True),
    ]
    assert (sample.reading.documents, sample.reading.padding, sample.reading.counted) == ([4, 3], 2, 5)
    tokens = found.sets[0].tokens
    assert tokens.padding_share == pytest.approx(2 / 9)
    assert tokens.uncounted_share == pytest.approx(2 / 7)
    assert set(tokens.documents.tolist()) == {3, 4}


def test_tokens_of_a_mixture_are_shown_as_text(job: Any, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": f"{text} {n}"}) + "\n" for n, text in TEXTS))
    source = {"kind": "tokens", "path": "texts.jsonl", "tokenizer": "tokenizer.json", "context": 64, "held_out": 0.3}
    found = view(job({"kind": "mixture", "sources": {"a": source, "b": source}}, model=GPT), 3)
    assert all(sample.reading is not None and sample.reading.text.strip() for sample in found.samples)
    alone = view(job(source, model=GPT), 3)
    for mixed, one in zip(found.sets, alone.sets, strict=True):
        assert (mixed.name, mixed.samples) == (one.name, 2 * (one.samples or 0))
        assert mixed.tokens.padding_share == pytest.approx(one.tokens.padding_share)


def test_the_assistants_tokens_are_marked_and_cut_ones_are_named(job: Any, tmp_path: Path) -> None:
    save_chat_tokenizer(tmp_path / "tokenizer")
    chat = [{"role": role, "content": SENTENCES[0]} for role in ("user", "assistant", "user", "assistant")]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 8)
    data = {"kind": "chat", "path": "chats.jsonl", "tokenizer": "tokenizer", "context": 512}
    found = view(job(data, model=GPT), 1)
    assert found.samples[0].reading is not None
    stretches = [(one.text, one.counted) for one in found.samples[0].reading.stretches]
    asked = f"<|im_start|>user\n{SENTENCES[0]}<|im_end|>\n<|im_start|>assistant\n"
    assert stretches == [(asked, False), (f"{SENTENCES[0]}<|im_end|>\n", True)] * 2
    whole = found.samples[0].reading.tokens
    for pack in (False, True):
        short = view(job({**data, "context": 32, "pack": pack}, model=GPT), 1)
        assert [one.cut for one in short.sets] == [(one.samples or 0) * (whole - 32) for one in short.sets]
        assert len(short.notes) >= 2


def test_labels_of_another_sequence_are_decoded(job: Any) -> None:
    reading = view(job(own("Translation")), 1).samples[0].reading
    assert reading is not None
    assert reading.target == "sat </s>"


def test_a_collate_function_pads_and_lengths_have_a_histogram(job: Any, tmp_path: Path) -> None:
    file = job(own("Uneven", collate=f"{HERE}:pad", held_out=0))
    [train] = view(file).sets
    assert sorted(train.tokens.lengths.tolist()) == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    assert train.tokens.padding > 0
    assert dict(train.classes) == {0: 6, 1: 6}
    assert [(one.first, one.number) for one in histogram(train.tokens.lengths)] == [(1, 3), (2, 3), (3, 3), (4, 3)]
    assert paceline("data", "show", file, folder=tmp_path).code == 0


def test_hidden_tokens_are_told_from_shifted_labels(job: Any, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("It was a bright cold day in April.\n" * 40)
    causal, masked = (
        view(job({"kind": "text", "path": "text.txt", "context": 16, "objective": objective})).sets[0].tokens
        for objective in ("causal", "masked")
    )
    assert causal.uncounted_share == 0
    assert masked.uncounted_share > 0.8
    assert causal.relation != masked.relation


def test_nan_and_its_set_are_named(job: Any, tmp_path: Path) -> None:
    file = job(own("Broken", held_out=0))
    column = view(file).sets[0].columns["input"]
    assert (column.nan, column.inf, column.low, column.high) == (1, 0, 0, 7)
    assert paceline("data", "show", file, folder=tmp_path).says("train: input has 1 NaN")


def test_a_large_set_is_read_in_part_and_the_output_says_so(job: Any, tmp_path: Path) -> None:
    file = job(own("Many"))
    train = view(file, 3000).sets[0]
    assert train.read < 10_000
    assert train.samples == 9_000
    assert train.classes_of == train.read
    outcome = paceline("data", "show", file, folder=tmp_path)
    assert outcome.says("2,048 samples, evenly spread", "30 classes")


def test_text_from_files_cannot_control_the_terminal(job: Any, tmp_path: Path) -> None:
    outcome = paceline("data", "show", job(own("Packed")), folder=tmp_path)
    assert "\x1b" not in outcome.out
    assert outcome.says(r"\x1b[31mred")


@pytest.mark.parametrize(
    ("data", "code"),
    [
        ({"kind": "images", "path": "none"}, "data.unreadable"),
        ({"kind": "text", "path": "empty.txt"}, "data.text_too_short"),
        (own("Raises", held_out=0), "data.sample_raised"),
        (own("Absent"), "job.object_missing"),
    ],
)
def test_bad_data_gives_the_errors_of_training(data: dict[str, Any], code: str, job: Any, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    paceline("data", "show", job(data), folder=tmp_path).fails_with(code)


def test_a_page_in_a_missing_folder_is_refused_before_the_data_is_read(job: Any, tmp_path: Path) -> None:
    outcome = paceline("data", "show", job({"kind": "digits"}), "--page", "none/page.html", folder=tmp_path)
    assert outcome.code == 2
