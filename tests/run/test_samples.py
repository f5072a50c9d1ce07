"""Texts at evaluations: the same under every plan, equal to those of `paceline generate`, and safe on the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commands import paceline, write_job
from language_runs import PROMPTS, text_job, trained
from paceline.errors import JobError
from paceline.job.job import Job
from paceline.report.run_page import write_run_page
from paceline.run.generation import Sampling, TextModel
from paceline.run.record.run import Run
from refusals import raises
from small_tokenizers import save_chat_tokenizer


def samples_of(run: Run) -> list[Any]:
    return [event["samples"] for event in run.events() if event["event"] == "evaluation"]


def test_the_texts_of_an_evaluation_are_those_of_the_saved_model(tmp_path: Path) -> None:
    run = trained(text_job(tmp_path, stop={"steps": 6}), "dp=1")
    found = samples_of(run)
    assert len(found) == 2
    assert [sample["prompt"] for sample in found[-1]] == PROMPTS
    model = TextModel.of_run(run)
    texts = [model.write(model.form.encode(prompt), Sampling(12)) for prompt in PROMPTS]
    assert [sample["text"] for sample in found[-1]] == texts
    assert all(texts)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=2", "fsdp=2", "tp=2", "pp=2 microbatches=2", "dp=2 sync=local:2"])
def test_every_plan_writes_the_same_texts(tmp_path: Path, plan: str) -> None:
    """A tiny learning rate, so that rounding does not change the most likely token."""
    optimizer = {"name": "sgd", "lr": 1e-30}
    alone = samples_of(trained(text_job(tmp_path / "one", optimizer=optimizer), "dp=1"))
    divided = samples_of(trained(text_job(tmp_path / "two", optimizer=optimizer), plan))
    assert divided == alone


def test_prompts_of_a_chat_are_messages(tmp_path: Path) -> None:
    base = save_chat_tokenizer(tmp_path / "base")
    config = {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    (base / "config.json").write_text(json.dumps(config))
    rows = [
        {"messages": [{"role": "user", "content": f"Is {i} even?"}, {"role": "assistant", "content": "Yes."}]}
        for i in range(20)
    ]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for pack in (False, True):
        job = write_job(
            tmp_path / "job.yaml",
            model={"hf": str(base / "config.json"), "task": "causal_lm"},
            task="sft",
            data={"kind": "chat", "path": "chat.jsonl", "context": 64, "pack": pack},
            optimizer={"name": "adamw", "lr": 0.01},
            global_batch=4,
            stop={"steps": 2},
            evaluate={"prompts": ["Is 3 even?"], "max_new_tokens": 5},
        )
        run = trained(job, "dp=1", f"run-{pack}")
        model = TextModel.of_run(run)
        tokens = model.form.encode_chat([{"role": "user", "content": "Is 3 even?"}])
        assert samples_of(run)[-1] == [{"prompt": "Is 3 even?", "text": model.write(tokens, Sampling(5))}]


def test_texts_are_escaped_on_the_page(tmp_path: Path) -> None:
    run = trained(text_job(tmp_path), "dp=1")
    events = run.path / "events.jsonl"
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    evaluation = next(line for line in reversed(lines) if line["event"] == "evaluation")
    evaluation["samples"] = [{"prompt": "<script>1</script>", "text": "<img src=x>\x1b[2J"}, None, 3]
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_run_page(run).read_text()
    assert "&lt;script&gt;1&lt;/script&gt;" in page
    assert "<img src=x>" not in page
    assert "\x1b" not in page


@pytest.mark.parametrize(
    "changed",
    [
        {"data": {"kind": "text", "path": "text.txt", "context": 32, "held_out": 0}},
        {"data": {"kind": "text", "path": "text.txt", "context": 32, "objective": "masked"}},
        {"data": "digits", "model": "mlp"},
    ],
)
def test_prompts_that_no_model_continues_are_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    with raises(JobError, "job.prompts_impossible"):
        Job.load(text_job(tmp_path, **changed))


def test_a_prompt_that_fills_the_context_is_refused(tmp_path: Path) -> None:
    job = text_job(tmp_path, evaluate={"prompts": ["x" * 32]})
    outcome = paceline("train", job, "--plan", "dp=1", "--run", "run", folder=tmp_path)
    outcome.fails_with("evaluate.prompt_too_long")
    job = text_job(tmp_path, evaluate={"prompts": ["x"]})
    outcome = paceline("train", job, "--plan", "cp=2", "--run", "other", folder=tmp_path)
    outcome.fails_with("plan.prompts_with_cp")


def test_prompts_are_continued_with_a_mixture_of_texts(tmp_path: Path) -> None:
    base = save_chat_tokenizer(tmp_path / "base")
    (tmp_path / "one.txt").write_text("The boats lay on the sand.\n" * 30)
    source = {"kind": "tokens", "path": "one.txt", "format": "lines", "tokenizer": str(base), "context": 16}
    job = text_job(
        tmp_path,
        model={"zoo": "gpt", "args": {"layers": 1, "hidden": 16, "heads": 2, "context": 16, "vocab": 512}},
        data={"kind": "mixture", "sources": {"one": source, "two": source}},
        evaluate={"prompts": ["The"], "max_new_tokens": 3},
        stop={"steps": 2},
    )
    run = trained(job, "dp=1")
    model = TextModel.of_run(run)
    assert samples_of(run)[-1] == [{"prompt": "The", "text": model.write(model.form.encode("The"), Sampling(3))}]
    records = {"kind": "records", "path": "one.txt", "format": "lines", "inputs": "text"}
    with raises(JobError, "job.prompts_impossible"):
        Job.load(text_job(tmp_path, data={"kind": "mixture", "sources": {"one": source, "two": records}}))
