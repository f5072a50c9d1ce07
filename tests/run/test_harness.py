"""Tasks of lm-eval measure the saved model, offline, and their results are kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from commands import in_a_process, paceline
from language_runs import GPT2, hugging_face_run, text_job, trained, writing_run
from paceline.errors import JobError
from paceline.report.run_page import write_run_page
from paceline.run.harness import run_harness
from paceline.run.record.run import HARNESS, Run
from paceline.run.saved_model import whole_model
from refusals import raises

CHOICES = [" sand", " river", " summer"]
QUESTIONS = ["The boats lay on the", "The river was low that", "A tokenizer turns", "and the boats"]
TASK = """
task: lines_here
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: {choices}
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def task_folder(folder: Path) -> Path:
    (folder / "tasks").mkdir()
    rows = [{"question": question, "answer": i % 3} for i, question in enumerate(QUESTIONS)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "tasks" / "lines.yaml").write_text(TASK.format(file=folder / "rows.jsonl", choices=json.dumps(CHOICES)))
    return folder / "tasks"


def expected_accuracy(run: Run) -> float:
    """The share of questions whose most likely choice is right, computed without the harness."""
    import transformers

    model = whole_model(run).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.path.parent / "base", local_files_only=True)
    right = 0
    for i, question in enumerate(QUESTIONS):
        scores = []
        for choice in CHOICES:
            context, whole = tokenizer(question).input_ids, tokenizer(question + choice).input_ids
            with torch.inference_mode():
                chances = F.log_softmax(model(torch.tensor([whole])).logits[0].float(), -1)
            scores.append(sum(float(chances[at - 1, whole[at]]) for at in range(len(context), len(whole))))
        right += scores.index(max(scores)) == i % 3
    return right / len(QUESTIONS)


@pytest.mark.slow
def test_a_task_from_local_files_measures_the_saved_model(tmp_path: Path) -> None:
    run, tasks = hugging_face_run(tmp_path, GPT2), task_folder(tmp_path)
    (run.path / "steps").mkdir()
    command = ("evaluate", "run", "--harness", "lines_here", "--harness-path", str(tasks), "--json")
    outcome = in_a_process(*command, folder=tmp_path)
    assert outcome.code == 0, outcome.err
    results = {one["metric"]: one for one in json.loads(outcome.out.splitlines()[-1])["results"]}
    assert results["acc"]["value"] == expected_accuracy(run)
    assert results["acc"]["stderr"] > 0
    outcome = in_a_process(*command[:-1], "--limit", "2", folder=tmp_path)
    assert outcome.says("lines_here  acc")
    first, second = (json.loads(line) for line in (run.path / HARNESS).read_text().splitlines())
    assert first["results"] == list(results.values())
    assert (first["step"], first["limit"], second["limit"]) == (1, None, 2)
    outcome = in_a_process("evaluate", "run", "--harness", "no_such_task", folder=tmp_path)
    assert "harness.task_unknown" in outcome.codes


def test_results_are_shown_escaped_on_the_page(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The boats lay on the sand. " * 40)
    run: Run = trained(text_job(tmp_path, evaluate={}), "dp=1")
    one = {"task": "<b>lines", "metric": "acc", "value": 0.75, "stderr": 0.125}
    lines: list[Any] = [{"step": 6, "limit": 8, "results": [one, None, {"value": "x"}]}, 7, {"results": 3}]
    (run.path / HARNESS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_run_page(run).read_text()
    assert "&lt;b&gt;lines" in page
    assert "0.750 ± 0.125 (first 8 documents)" in page


def test_what_the_harness_cannot_measure_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_EVALUATE_OFFLINE"):
        monkeypatch.setenv(name, "1")  # the harness sets them for the whole process
    with raises(JobError, "harness.not_a_language_model"):
        run_harness(writing_run(tmp_path, "abc"), ["lines_here"])
    (tmp_path / "gpt2").mkdir()
    run = hugging_face_run(tmp_path / "gpt2", GPT2)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    outcome = paceline("evaluate", str(run.path), "--harness", "x", folder=tmp_path)
    outcome.fails_with("harness.not_installed")
    (tmp_path / "gpt2" / "base" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    (tmp_path / "gpt2" / "base" / "tokenizer_config.json").unlink()
    with raises(JobError, "generate.no_tokenizer"):
        run_harness(run, ["x"])
