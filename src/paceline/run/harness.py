"""Evaluation of a saved language model on tasks of EleutherAI's lm-evaluation-harness.

The tasks run in this process: their YAML files may name Python functions. Data sets come from local files or the local
cache of `datasets`; nothing is downloaded unless HF_HUB_OFFLINE=0 is set.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from paceline.errors import JobError, RunError
from paceline.run.generation import no_tokenizer
from paceline.run.model_folder import tokenizer_folder
from paceline.run.record.run import HARNESS, JsonLines, Run
from paceline.run.saved_model import whole_model
from paceline.state.reader import NEWEST, chosen_checkpoint

_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_EVALUATE_OFFLINE")
_MIXED = {"bf16": "bfloat16", "fp8": "bfloat16", "fp16": "float16"}


class Measured(NamedTuple):
    """A metric of a task, and its standard error if the harness has estimated one."""

    task: str
    metric: str
    value: float
    stderr: float | None


def run_harness(
    run: Run,
    tasks: Sequence[str],
    *,
    checkpoint: str = NEWEST,
    folder: Path | None = None,
    limit: int | None = None,
    batch: int | None = None,
) -> list[Measured]:
    """Evaluate a run's checkpoint on tasks, and append the results to `harness.jsonl` of the run.

    Args:
        tasks: names of tasks, groups or tags, which may have wildcards.
        folder: folder with YAML files of further tasks.
        limit: largest number of documents of each task; None evaluates all.
        batch: number of requests at a time; None takes the job's global batch.

    Raises:
        RunError: lm-eval is not installed, a task is unknown, or the harness fails.
        JobError: the model is not a causal language model of transformers, or there is no tokenizer.
    """
    tokenizer = _tokenizer_of(run)
    for name in _OFFLINE:  # huggingface_hub reads them when it is imported
        os.environ.setdefault(name, "1")
    harness = _lm_eval()
    known = harness.tasks.TaskManager(include_path=str(folder) if folder is not None else None)
    if unknown := [task for task in tasks if not known.match_tasks([task])]:
        raise RunError(
            "harness.task_unknown",
            "there is no task {tasks} in lm-eval {version}{folder}. List the tasks with: lm-eval ls tasks. Name the "
            "folder of your own tasks with --harness-path.",
            tasks=unknown,
            version=version("lm-eval"),
            folder=f" or in {folder}" if folder is not None else "",
        )
    step = chosen_checkpoint(run.path, checkpoint).step
    model = _model(run, checkpoint, tokenizer, batch or run.job.global_batch)
    try:
        found = harness.simple_evaluate(model, tasks=list(tasks), task_manager=known, limit=limit, log_samples=False)
    except Exception as error:  # tasks are programs, and their libraries raise errors of many classes
        raise RunError(
            "harness.failed",
            "lm-eval cannot evaluate {tasks}: {error}. If the data of a task is not on this machine, download it once "
            "with HF_HUB_OFFLINE=0 and HF_DATASETS_OFFLINE=0 set.",
            tasks=", ".join(tasks),
            error=f"{type(error).__name__}: {error}",
        ) from error
    results = list(_measured(found["results"]))
    record = JsonLines(run.path / HARNESS)
    record.write(
        json.dumps(
            {
                "time": round(time.time(), 3),
                "step": step,
                "tasks": list(tasks),
                "limit": limit,
                "lm_eval": version("lm-eval"),
                "n_shot": dict(found.get("n-shot", {})),
                "versions": dict(found.get("versions", {})),
                "results": [one._asdict() for one in results],
            },
            default=str,
        )
    )
    record.close()
    return results


def _lm_eval() -> ModuleType:
    try:
        import lm_eval
        import lm_eval.tasks
    except ImportError as error:
        raise RunError(
            "harness.not_installed",
            "--harness needs lm-eval, which cannot be imported ({error}). Run: pip install 'paceline[harness]'",
            error=error,
        ) from error
    module: ModuleType = lm_eval
    return module


def _tokenizer_of(run: Run) -> Path:
    """Return the folder of the run's tokenizer, if the harness can evaluate the model."""
    job = run.job
    if job.model.task != "causal_lm":
        raise JobError(
            "harness.not_a_language_model",
            "lm-eval evaluates causal language models of transformers, but the model of the run is {model}.",
            model=f"for the task {job.model.task}" if job.model.task else job.model.zoo or job.model.factory,
        )
    folder = tokenizer_folder(job)
    if folder is None:
        raise no_tokenizer()
    return folder


def _model(run: Run, checkpoint: str, tokenizer: Path, batch: int) -> Any:
    """Return the saved model in the form of the harness."""
    import transformers
    from lm_eval.models.huggingface import HFLM

    precision = _MIXED.get(run.plan.precision or run.job.precision)
    return HFLM(
        pretrained=whole_model(run, checkpoint).eval(),
        tokenizer=transformers.AutoTokenizer.from_pretrained(tokenizer, local_files_only=True, trust_remote_code=False),
        batch_size=batch,
        mixed_precision_dtype=precision,
    )


def _measured(results: Mapping[str, Mapping[str, Any]]) -> Iterator[Measured]:
    """Yield the numbers of the harness, whose keys are `metric,filter`."""
    for task, values in results.items():
        for key, value in values.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = values.get(f"{metric}_stderr,{filtered}")
            name = metric if filtered == "none" else f"{metric} ({filtered})"
            yield Measured(task, name, float(value), float(error) if isinstance(error, (int, float)) else None)
