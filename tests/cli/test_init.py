"""Each starter job of `paceline init` trains as it was written, on tiny data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from commands import Outcome, losses, paceline
from paceline.job.job import Job
from small_tokenizers import END, PAD, save_tokenizer

KINDS = ("images", "table", "text", "model", "finetune")


def images(folder: Path) -> list[object]:
    for name in ("cat", "dog"):
        (folder / "photos" / name).mkdir(parents=True)
        for i in range(12):
            pixels = np.random.default_rng(i).integers(0, 255, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / name / f"{i}.png")
    return ["--data", "photos"]


def table(folder: Path) -> list[object]:
    rows = [f"{i},{i % 7},{'yes' if i % 2 else 'no'}" for i in range(40)]
    (folder / "rows.csv").write_text("\n".join(["size,weekday,bought", *rows]))
    return ["--data", "rows.csv"]


def text(folder: Path) -> list[object]:
    (folder / "story.txt").write_text("once upon a time. " * 300)
    return ["--data", "story.txt"]


def model(folder: Path) -> list[object]:
    return []


def finetune(folder: Path) -> list[object]:
    text(folder)
    (folder / "llama").mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "max_position_embeddings": 128,
    }
    (folder / "llama" / "config.json").write_text(json.dumps(config))
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}"
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": PAD}
    save_tokenizer(folder / "llama", names={**names, "chat_template": template})
    (folder / "story.txt").write_text("once upon a time. " * 5000)
    return ["--model", "llama", "--data", "story.txt"]


EXAMPLES: dict[str, Callable[[Path], list[object]]] = dict(
    zip(KINDS, (images, table, text, model, finetune), strict=True)
)


def wrote(outcome: Outcome) -> Outcome:
    assert outcome.code == 0, outcome.err
    return outcome


@pytest.mark.parametrize("kind", KINDS)
def test_each_starter_trains_as_it_was_written(kind: str, tmp_path: Path) -> None:
    options = EXAMPLES[kind](tmp_path)
    wrote(paceline("init", kind, *options, folder=tmp_path))
    words = ("train", f"{kind}.yaml", "--plan", "dp=1", "--run", "run", "--set", "stop={steps: 2}")
    outcome = paceline(*words, folder=tmp_path)
    assert outcome.code == 0, outcome.err
    assert sorted(losses(tmp_path / "run")) == [1, 2]


TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
ROWS: dict[str, dict[str, object]] = {
    "sft": {"messages": TURNS},
    "dpo": {"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": [{"role": "assistant", "content": "No."}]},
    "pretrain": {"text": "once upon a time. " * 40},
}


@pytest.mark.parametrize("task", ROWS)
def test_the_rows_decide_the_task_of_a_finetuning(task: str, tmp_path: Path) -> None:
    finetune(tmp_path)
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(ROWS[task])}\n" * 2000)
    wrote(paceline("init", "finetune", "--model", "llama", "--data", "rows.jsonl", folder=tmp_path))
    assert Job.load(tmp_path / "finetune.yaml").task == task
    words = ("train", "finetune.yaml", "--plan", "dp=1", "--run", "run", "--set", "stop={steps: 2}")
    outcome = paceline(*words, folder=tmp_path)
    assert outcome.code == 0, outcome.err
    assert sorted(losses(tmp_path / "run")) == [1, 2]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "finetune"])
def test_each_starter_loads_without_data(kind: str, tmp_path: Path) -> None:
    wrote(paceline("init", kind, "--out", "new/mine.yaml", folder=tmp_path))
    assert Job.load(tmp_path / "new" / "mine.yaml").name == kind


def test_data_that_are_in_their_place_already_are_read(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / "images" / name).mkdir(parents=True)
    wrote(paceline("init", "images", folder=tmp_path))
    assert Job.load(tmp_path / "images.yaml").model.args["classes"] == 3


def test_a_parquet_table_with_a_quantity_is_a_regression(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    columns = {"size": list(range(40)), "price": [i / 3 for i in range(40)]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "houses.parquet")
    wrote(paceline("init", "table", "--data", "houses.parquet", "--out", "jobs", folder=tmp_path))
    job = Job.load(tmp_path / "jobs" / "table.yaml")
    assert (job.loss.name, job.model.args["inputs"], job.model.args["outputs"]) == ("mse", 1, 1)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("mine")
    outcome = paceline("init", "model", folder=tmp_path)
    assert outcome.code == 1
    assert "model.py" in outcome.error
    assert "[init.exists]" in outcome.error
    assert [file.name for file in tmp_path.iterdir()] == ["model.py"]
    assert (tmp_path / "model.py").read_text() == "mine"


def test_without_a_kind_the_kinds_are_listed(tmp_path: Path) -> None:
    outcome = wrote(paceline("init", folder=tmp_path))
    assert [line.split()[0] for line in outcome.out.splitlines()] == list(KINDS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["image"], "init.unknown_kind"),
        (["images", "--data", "nowhere"], "init.no_data"),
        (["finetune"], "init.no_model"),
    ],
)
def test_what_is_missing_is_named(words: list[str], code: str, tmp_path: Path) -> None:
    outcome = paceline("init", *words, folder=tmp_path)
    assert outcome.code == 1
    assert f"[{code}]" in outcome.error
