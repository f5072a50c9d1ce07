"""Conversations as samples: only the assistant's tokens are labels, and every token is the template's own."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer

from paceline.errors import DataError, JobError
from paceline.job.job import Job
from refusals import raises
from small_tokenizers import CHAT_TEMPLATE, save_chat_tokenizer

IGNORED = -100
MARKED = CHAT_TEMPLATE.replace(
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}",
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' %}{%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}"
    "{%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}{{- '\\n' }}",
)
# removes the thoughts of all turns but the last, as many reasoning models do
FORGETFUL = CHAT_TEMPLATE.replace(
    "message.content +", "(message.content if loop.last else message.content.split('</think>')[-1]) +"
)
ENDLESS = CHAT_TEMPLATE.replace("<|im_end|>", "")
DATED = "{{- 'Today is ' + strftime_now('%d %b %Y') + '. ' }}" + CHAT_TEMPLATE


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


TWO_TURNS = [
    {"role": "system", "content": "Be brief."},
    user("Where were the boats?"),
    assistant("On the sand."),
    user("And the river — in summer?"),
    assistant("It was low: über 🚣 all."),
]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def job_of(path: Path, tokenizer: Path, *, task: str | None = "sft", loss: str | None = None, **data: Any) -> Job:
    return Job(
        model={"zoo": "gpt", "args": {"vocab": 360, "context": 512}},
        data={"kind": "chat", "path": str(path), "tokenizer": str(tokenizer), "held_out": 0, "context": 256, **data},
        optimizer={"name": "sgd", "lr": 0.1},
        global_batch=1,
        stop={"steps": 2},
        **({"loss": loss} if loss else {}),
        **({"task": task} if task else {}),
    )


def sample_of(tmp_path: Path, row: dict[str, Any], template: str | None = CHAT_TEMPLATE, **data: Any) -> Sample:
    folder = save_chat_tokenizer(tmp_path / "tokenizer", template)
    dataset = job_of(write(tmp_path / "rows.jsonl", [row]), folder, **data).data.build(input_shape=None, seed=0).train
    return Sample(dataset[0], folder)


class Sample:
    """The tokens of a sample without padding, and the texts that the model learns to write."""

    def __init__(self, columns: Any, folder: Path) -> None:
        ids, labels = (columns["input_ids"], columns["labels"]) if isinstance(columns, dict) else columns
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        used = max(i for i, token in enumerate(ids.tolist()) if token != self.tokenizer.pad_token_id) + 1
        self.ids, self.labels = ids[:used].tolist(), labels[:used].tolist()
        for i, label in enumerate(self.labels):
            assert label in (IGNORED, *self.ids[i + 1 : i + 2])

    @property
    def trained(self) -> list[str]:
        spans: list[list[int]] = [[]]
        for label in self.labels:
            if label == IGNORED:
                spans.append([])
            else:
                spans[-1].append(label)
        return [self.tokenizer.decode(span) for span in spans if span]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, MARKED])
@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_the_tokens_are_those_of_transformers_and_only_the_chosen_turns_are_labels(
    tmp_path: Path, template: str, train_on: str
) -> None:
    found = sample_of(tmp_path, {"messages": TWO_TURNS}, template, train_on=train_on)
    assert found.ids == found.tokenizer.apply_chat_template(TWO_TURNS, return_dict=False)
    end = "<|im_end|>" if template == MARKED else "<|im_end|>\n"
    answers = ["On the sand." + end, "It was low: über 🚣 all." + end]
    if train_on == "all":
        assert found.trained == [found.tokenizer.decode(found.ids[1:])]
    else:
        assert found.trained == (answers if train_on == "assistant" else answers[1:])


def test_labels_are_the_mask_that_transformers_makes_from_the_markers_of_a_template(tmp_path: Path) -> None:
    found = sample_of(tmp_path, {"messages": TWO_TURNS}, MARKED)
    theirs = found.tokenizer.apply_chat_template(TWO_TURNS, return_dict=True, return_assistant_tokens_mask=True)
    expected = [token if own else IGNORED for token, own in zip(found.ids, theirs["assistant_masks"], strict=True)]
    assert found.labels[:-1] == expected[1:]


@pytest.mark.parametrize(
    ("row", "trained"),
    [
        ({"prompt": "The river was", "completion": " low."}, " low.<|im_end|>"),
        ({"prompt": [user("And?")], "completion": [assistant("Low.")]}, "Low.<|im_end|>\n"),
        ({"conversations": [{"from": "human", "value": "And?"}, {"from": "gpt", "value": "Low."}]}, "Low.<|im_end|>\n"),
        ({"messages": json.dumps([user("And?"), assistant("Low.")])}, "Low.<|im_end|>\n"),
        ({"prompt": "[1, 2", "completion": ", 3]"}, ", 3]<|im_end|>"),
    ],
)
def test_rows_of_several_forms_teach_the_answer_and_its_end(tmp_path: Path, row: dict[str, Any], trained: str) -> None:
    assert sample_of(tmp_path, row).trained == [trained]


def test_columns_are_renamed_and_fields_that_a_table_fills_are_not_passed_to_the_template(tmp_path: Path) -> None:
    template = "{%- if messages[0].name is defined %}{{- 'named ' }}{%- endif %}" + CHAT_TEMPLATE
    folder = save_chat_tokenizer(tmp_path / "tokenizer", template)
    dialog = [user("And?"), {**assistant("Low."), "name": "bot"}]
    pq.write_table(pa.Table.from_pylist([{"dialog": dialog, "id": 1}]), tmp_path / "rows.parquet")
    job = job_of(tmp_path / "rows.parquet", folder, columns={"messages": "dialog"})
    found = Sample(job.data.build(input_shape=None, seed=0).train[0], folder)
    assert found.trained == ["Low.<|im_end|>\n"]
    assert "named" not in found.tokenizer.decode(found.ids)


def test_tools_and_arguments_reach_the_template(tmp_path: Path) -> None:
    template = "{%- for tool in tools or [] %}{{- tool.name + mood }}{%- endfor %}" + CHAT_TEMPLATE
    row = {"messages": TWO_TURNS, "tools": [{"name": "lookup"}]}
    found = sample_of(tmp_path, row, template, template_args={"mood": " gladly"})
    assert found.tokenizer.decode(found.ids).startswith("lookup gladly<|im_start|>")


def test_a_template_gets_the_jobs_date_in_place_of_today(tmp_path: Path) -> None:
    for day, text in ((None, "26 Jul 2024"), ("2031-02-03", "03 Feb 2031")):
        found = sample_of(tmp_path, {"messages": TWO_TURNS}, DATED, **({"date": day} if day else {}))
        assert found.tokenizer.decode(found.ids).startswith(f"Today is {text}. ")


@pytest.mark.parametrize(
    ("template", "row", "code"),
    [
        (FORGETFUL, {"messages": [user("a"), assistant("<think>b</think>c"), user("d"), assistant("e")]}, "rewritten"),
        (ENDLESS, {"messages": TWO_TURNS}, "turn_without_end"),
        (MARKED.replace("<|im_end|>' }}{%- endg", "' }}{%- endg"), {"messages": TWO_TURNS}, "turn_without_end"),
        (CHAT_TEMPLATE, {"prompt": "The ri", "completion": "ver"}, "turn_within_token"),
        (CHAT_TEMPLATE, {"question": "a", "answer": "b"}, "no_conversation"),
        (CHAT_TEMPLATE, {"messages": []}, "messages_invalid"),
        (CHAT_TEMPLATE, {"messages": [{"content": "a"}]}, "message_without_role"),
        (CHAT_TEMPLATE, {"conversations": [{"from": "narrator", "value": "a"}]}, "role_unknown"),
        ("{{- raise_exception('no') }}", {"messages": TWO_TURNS}, "conversation_refused"),
        ("{{- ().__class__.__base__.__subclasses__() }}", {"messages": TWO_TURNS}, "conversation_refused"),
        ("{%- for a in messages %}", {"messages": TWO_TURNS}, "conversation_refused"),
        (None, {"messages": TWO_TURNS}, "no_chat_template"),
        ("{{- [1, 2] | random }}" + CHAT_TEMPLATE, {"messages": TWO_TURNS}, "template_not_reproducible"),
        ("{{- strftime_now(a) }}" + CHAT_TEMPLATE, {"messages": TWO_TURNS}, "template_not_reproducible"),
    ],
)
def test_what_cannot_be_trained_exactly_is_refused(
    tmp_path: Path, template: str | None, row: dict[str, Any], code: str
) -> None:
    with raises(DataError, f"data.{'turns_' if code == 'rewritten' else ''}{code}"):
        sample_of(tmp_path, row, template)


def test_the_last_turn_of_a_forgetful_template_can_be_trained(tmp_path: Path) -> None:
    row = {"messages": [user("a"), assistant("<think>b</think>c"), user("d"), assistant("<think>e</think>f")]}
    found = sample_of(tmp_path, row, FORGETFUL, train_on="last")
    assert found.trained == ["<think>e</think>f<|im_end|>\n"]


@pytest.mark.parametrize("pack", [False, True])
def test_long_conversations_are_cut_and_rows_without_an_answer_are_counted(tmp_path: Path, pack: bool) -> None:
    folder = save_chat_tokenizer(tmp_path / "tokenizer")
    long = [user("And?"), assistant("The river was low that summer. " * 9)]
    rows = [{"messages": [user("Hello?")]}, {"messages": long}, {"messages": [user("And?"), assistant("Low.")]}]
    job = job_of(write(tmp_path / "rows.jsonl", rows), folder, context=32, pack=pack)
    dataset: Any = job.data.build(input_shape=None, seed=0).train
    dataset.__getitems__(list(range(len(dataset))))
    whole = len(AutoTokenizer.from_pretrained(folder).apply_chat_template(long, return_dict=False))
    assert dataset.counts["cut"] == whole - 32
    assert dataset.counts.get("untrained", 0) == (0 if pack else 1)
    assert len(dataset) == (2 if pack else 3)


@pytest.mark.parametrize("pack", [False, True])
def test_refused_conversations_are_counted_and_skipped_only_if_the_job_says_so(tmp_path: Path, pack: bool) -> None:
    folder = save_chat_tokenizer(tmp_path / "tokenizer")
    rows: list[dict[str, Any]] = [{"messages": [user(f"And {n}?"), assistant("Low. " * n)]} for n in range(1, 7)]
    whole = write(tmp_path / "whole.jsonl", [row for n, row in enumerate(rows) if n not in (2, 4)])
    rows[2], rows[4] = {"messages": []}, {"question": "a"}
    path = write(tmp_path / "rows.jsonl", rows)
    keys: dict[str, Any] = {"context": 64, "pack": pack}
    found: Any
    wanted: Any
    found, wanted = (
        job_of(file, folder, on_bad_shard=skips, **keys).data.build(input_shape=None, seed=0).train
        for file, skips in ((path, "skip"), (whole, "stop"))
    )
    read = found.__getitems__(list(range(len(found)))).values
    if pack:
        expected = wanted.__getitems__(list(range(len(wanted)))).values
        assert all(torch.equal(column, expected[name]) for name, column in read.items())
    else:
        assert found.counts["replaced"] == 2
        assert all(torch.equal(a[2], b[0]) for a, b in zip(read, found.__getitems__([2]).values, strict=True))
        others = [n for n in range(6) if n not in (2, 4)]
        assert torch.equal(read[0][others], wanted.__getitems__(list(range(4))).values[0])
    with raises(DataError, "data.messages_invalid", where=re.compile(r"rows\.jsonl, row 2")):
        stops: Any = job_of(path, folder, **keys).data.build(input_shape=None, seed=0).train
        stops.__getitems__(list(range(6)))


def test_conversations_without_any_answer_are_refused_before_they_are_packed(tmp_path: Path) -> None:
    folder = save_chat_tokenizer(tmp_path / "tokenizer")
    path = write(tmp_path / "rows.jsonl", [{"messages": [user("And?")]}] * 3)
    with raises(DataError, "data.no_answers", rows=3):
        job_of(path, folder, pack=True).data.build(input_shape=None, seed=0)


@pytest.mark.parametrize("pack", [False, True])
def test_a_mixture_draws_from_conversations_of_several_forms(tmp_path: Path, pack: bool) -> None:
    folder = save_chat_tokenizer(tmp_path / "tokenizer")
    chats = write(tmp_path / "chats.jsonl", [{"messages": TWO_TURNS}] * 4)
    pairs = write(tmp_path / "pairs.jsonl", [{"question": "The river was", "answer": " low."}] * 4)
    keys = {"kind": "chat", "tokenizer": str(folder), "context": 128, "held_out": 0, "pack": pack}
    values = job_of(chats, folder).model_dump(mode="json", exclude_defaults=True)
    columns = {"prompt": "question", "completion": "answer"}
    sources = {"a": {**keys, "path": str(chats)}, "b": {**keys, "path": str(pairs), "columns": columns}}
    job = Job(**{**values, "data": {"kind": "mixture", "sources": sources}})
    dataset: Any = job.data.build(input_shape=None, seed=0).train
    batch = dataset.__getitems__([0, len(dataset) - 1]).values
    labels = batch["labels"] if pack else batch[1]
    assert (labels != IGNORED).any(1).all()


def test_packed_conversations_have_the_labels_of_single_ones_and_positions_of_their_own(tmp_path: Path) -> None:
    folder = save_chat_tokenizer(tmp_path / "tokenizer")
    rows = [{"messages": [user(f"And {n}?"), assistant("Low " * (n % 5 + 1))]} for n in range(12)]
    path = write(tmp_path / "rows.jsonl", rows)
    single: Any
    packed: Any
    single, packed = (
        job_of(path, folder, context=64, pack=pack).data.build(input_shape=None, seed=0).train for pack in (False, True)
    )
    assert len(packed) < len(single)
    wanted = [(s.ids, s.labels) for s in (Sample(single[n], folder) for n in range(len(rows)))]
    found = []
    for n in range(len(packed)):
        columns = {name: column.tolist() for name, column in packed[n].items()}
        starts = [i for i, position in enumerate(columns["position_ids"]) if not position]
        for first, end in zip(starts, [*starts[1:], 64], strict=True):
            if columns["labels"][first:end] != [IGNORED] * (end - first):
                found.append((columns["input_ids"][first:end], columns["labels"][first:end]))
                assert columns["position_ids"][first:end] == list(range(end - first))
    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"task": "sft", "data": {"kind": "digits"}}, "job.task_of_other_data"),
        ({"task": "pretrain"}, "job.task_of_other_data"),
        ({"task": "sft", "loss": "mse"}, "job.task_of_other_loss"),
        ({"task": "sft", "model": "bert"}, "job.task_of_other_model"),
    ],
)
def test_a_task_refuses_what_belongs_to_another_one(tmp_path: Path, changes: dict[str, Any], code: str) -> None:
    path = write(tmp_path / "rows.jsonl", [{"messages": TWO_TURNS}])
    job = job_of(path, tmp_path).model_dump(mode="json", exclude_defaults=True)
    with raises(JobError, code):
        Job(**{**job, **changes})


def test_the_tokenizer_of_the_models_folder_is_the_default(tmp_path: Path) -> None:
    folder = save_chat_tokenizer(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 360}))
    path = write(tmp_path / "rows.jsonl", [{"messages": TWO_TURNS}])
    values = job_of(path, folder).model_dump(mode="json", exclude_defaults=True)
    del values["data"]["tokenizer"]
    job = Job(**{**values, "model": {"hf": str(folder / "config.json"), "task": "causal_lm"}})
    assert Sample(job.data.build(input_shape=None, seed=0).train[0], folder).trained
    assert "tokenizer:" not in job.to_yaml()


def pair_job(path: Path, tokenizer: Path, **changes: Any) -> Job:
    data = {"kind": "preferences", "path": str(path), "tokenizer": str(tokenizer), "held_out": 0, "context": 64}
    return Job(
        model={"zoo": "gpt", "args": {"vocab": 360, "context": 64}},
        optimizer={"name": "sgd", "lr": 0.1},
        global_batch=1,
        stop={"steps": 2},
        **{"data": data, "task": "dpo", **changes},
    )


def pair_of(tmp_path: Path, row: dict[str, Any]) -> list[Sample]:
    folder = save_chat_tokenizer(tmp_path / "tokenizer")
    job = pair_job(write(tmp_path / "pairs.jsonl", [row, row]), folder)
    train: Any = job.data.build(input_shape=None, seed=0).train
    ids, labels = train.__getitems__([0, 1]).values
    assert ids.shape == labels.shape == (2, 2, 64)
    return [Sample((ids[0, i], labels[0, i]), folder) for i in range(2)]


PROMPT = [user("Where were the boats?")]
SAND, RIVER = assistant("On the sand."), assistant("In the river, of course.")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": PROMPT, "chosen": [SAND], "rejected": [RIVER]},
        {"chosen": [*PROMPT, SAND], "rejected": [*PROMPT, RIVER]},
        {"prompt": PROMPT[0]["content"], "chosen": [*PROMPT, SAND], "rejected": [*PROMPT, RIVER]},
        {"prompt": PROMPT[0]["content"], "chosen": [SAND], "rejected": [RIVER]},
    ],
    ids=["explicit", "implicit", "repeated", "text"],
)
def test_a_pair_is_the_chosen_and_the_rejected_conversation_of_one_prompt(tmp_path: Path, row: dict[str, Any]) -> None:
    for sample, answer in zip(pair_of(tmp_path, row), (SAND, RIVER), strict=True):
        alone = sample_of(tmp_path, {"prompt": PROMPT, "completion": [answer]}, context=64)
        assert (sample.ids, sample.labels) == (alone.ids, alone.labels)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "The river was", "chosen": " low.", "rejected": " lost in the sand."},
        {"chosen": "The river was low.", "rejected": "The river was lost in the sand."},
    ],
)
def test_texts_share_a_prompt_of_whole_words(tmp_path: Path, row: dict[str, Any]) -> None:
    for sample, answer in zip(pair_of(tmp_path, row), (" low.", " lost in the sand."), strict=True):
        alone = sample_of(tmp_path, {"prompt": "The river was", "completion": answer}, context=64)
        assert (sample.ids, sample.labels) == (alone.ids, alone.labels)


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"prompt": "a", "chosen": " b"}, "data.no_preference"),
        ({"chosen": "a b", "rejected": "c d"}, "data.no_common_prompt"),
        ({"chosen": "a b", "rejected": [SAND]}, "data.preference_mixed"),
    ],
)
def test_rows_without_a_pair_are_refused(tmp_path: Path, row: dict[str, Any], code: str) -> None:
    with raises(DataError, code):
        pair_of(tmp_path, row)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"loss": "cross_entropy"}, "job.task_of_other_loss"),
        ({"loss": "cross_entropy", "task": None}, "job.pairs_without_loss"),
        ({"data": {"kind": "digits"}}, "job.task_of_other_data"),
        ({"data": {"kind": "digits"}, "task": None, "loss": "dpo"}, "job.loss_without_pairs"),
    ],
)
def test_pairs_and_their_loss_belong_together(tmp_path: Path, changes: dict[str, Any], code: str) -> None:
    folder = save_chat_tokenizer(tmp_path / "tokenizer")
    with raises(JobError, code):
        pair_job(tmp_path / "pairs.jsonl", folder, **changes)


def test_pairs_are_not_packed(tmp_path: Path) -> None:
    data = {"kind": "preferences", "path": "p.jsonl", "context": 64, "pack": True}
    with raises(JobError, "data.pairs_packed"):
        pair_job(tmp_path / "pairs.jsonl", tmp_path, data=data)
