"""Files beside the weights of a Hugging Face folder: tokenizer, settings and model card."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from paceline.errors import PacelineError
from paceline.files import read_text
from paceline.job.job import Job
from paceline.job.model import DCP
from paceline.run.record.run import Run
from paceline.storage.url import is_url
from paceline.text import printable
from paceline.units import count

T = TypeVar("T")
CARD = "README.md"
# Files of save_pretrained that hold a tokenizer, a processor or generation settings. Code (*.py) is never copied.
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
_SETTINGS = ("generation_config.json", "preprocessor_config.json", "processor_config.json")
_CHAT_TEMPLATES = "additional_chat_templates"
_TEXT_LIMIT = 2**20

_PIPELINES = {
    "causal_lm": "text-generation",
    "masked_lm": "fill-mask",
    "image_classification": "image-classification",
    "sequence_classification": "text-classification",
    "token_classification": "token-classification",
}


def settings_folder(job: Job) -> Path | None:
    """Return the local folder of the job's Hugging Face model, or None.

    The result is the folder of the model's configuration, or the folder of its weights if only that one has a
    tokenizer.
    """
    found = [path if path.is_dir() else path.parent for path in _local(job.model.folder, job.model.weights)]
    return next((path for path in found if _has_tokenizer(path)), found[0] if found else None)


def tokenizer_folder(job: Job) -> Path | None:
    """Return the local folder of the tokenizer that the job trains with, or None."""
    sources = getattr(job.data, "sources", {}).values()
    own = next((found for spec in (job.data, *sources) if (found := getattr(spec, "tokenizer_file", None))), None)
    if own is not None and own.exists():
        return Path(own.parent)
    folder = settings_folder(job)
    return folder if folder is not None and _has_tokenizer(folder) else None


def copy_settings(job: Job, out: Path) -> None:
    """Copy the files of the tokenizer and the generation settings into a folder.

    Raises:
        OSError: a file cannot be read or written.
    """
    tokenizer, settings = tokenizer_folder(job), settings_folder(job)
    for folder, names in ((tokenizer, _TOKENIZER), (settings, _SETTINGS)):
        for name in names:
            if folder is not None and (folder / name).is_file():
                shutil.copyfile(folder / name, out / name)
    if tokenizer is not None:
        for template in sorted((tokenizer / _CHAT_TEMPLATES).glob("*.jinja")):
            (out / _CHAT_TEMPLATES).mkdir(mode=0o700, exist_ok=True)
            shutil.copyfile(template, out / _CHAT_TEMPLATES / template.name)


def model_card(run: Run, step: int, weights: str) -> str:
    """Return the README.md of an exported model: what was trained, and what the run measured.

    Texts from the run are escaped. Of paths, only the last component is shown.

    Args:
        step: step of the exported checkpoint.
        weights: description of the exported weights.
    """
    job = run.job
    pipeline = _PIPELINES.get(job.model.task or "")
    front = {
        "library_name": "transformers",
        "license": "unknown",
        **({"pipeline_tag": pipeline} if pipeline else {}),
        "tags": ["paceline"],
    }
    return "\n".join(
        [
            "---",
            yaml.safe_dump(front, sort_keys=False).strip(),
            "---",
            "",
            f"# {_text(job.name)}",
            "",
            "This model was trained with paceline. The tables below were written from the record of its run.",
            "",
            "## Training",
            "",
            *_table(_training(run, step, weights)),
            "",
            "## Measured",
            "",
            *_measured(run, step),
            "",
            "## Environment",
            "",
            *_table(_environment(run)),
            "",
            "## License and use",
            "",
            *_license(job),
            "",
        ]
    )


def _training(run: Run, step: int, weights: str) -> Iterator[tuple[str, Any]]:
    job = run.job
    yield "base", _base(job)
    if job.quantize is not None:
        yield "frozen layers", f"in {job.quantize} during training, dequantized for the export"
    yield "data", ", ".join(_data(job.data))
    yield "steps", f"{step:,}"
    yield "global batch", count(job.global_batch, "sample")
    yield "loss function", job.loss.name
    yield "optimizer", f"{job.optimizer.name}, learning rate {job.optimizer.lr:g}"
    yield "seed", job.seed
    plan = _read(lambda: run.plan)
    yield "precision", (plan and plan.precision) or job.precision
    if plan is not None:
        yield "plan", plan
    yield "weights", weights


def _measured(run: Run, step: int) -> Iterator[str]:
    """Yield the numbers of the exported step; numbers of other steps are not listed."""
    rows: list[tuple[str, Any]] = []
    loss = next((line["loss"] for line in reversed(run.steps()) if line["step"] == step), None)
    if loss is not None:
        rows.append(("training loss of the last batch", f"{loss:.6g}"))
    for event, name in (("evaluation", "validation"), ("test", "test")):
        found = [e["metrics"] for e in run.events() if e["event"] == event and e.get("step") == step]
        rows += [(f"{name}: {metric}", f"{value:.6g}") for metric, value in (found[-1] if found else {}).items()]
    if speed := run.speed:
        tokens = f", {speed.tokens_per_s:,.0f} tokens/s" if speed.tokens_per_s else ""
        rows.append(("throughput, median step", f"{speed.throughput:,.1f} samples/s{tokens}"))
    yield from _table(rows) if rows else ["Nothing was recorded at the exported step."]


def _environment(run: Run) -> Iterator[tuple[str, Any]]:
    if cluster := _read(lambda: run.cluster):
        gpus = [gpu.name for host in cluster.hosts for gpu in host.gpus]
        devices = [f"{gpus.count(name)} × {name}" for name in dict.fromkeys(gpus)]
        cpus = ", ".join(dict.fromkeys(host.cpu for host in cluster.hosts))
        cores = [f"{sum(host.cores for host in cluster.hosts)} cores ({cpus})"]
        yield "hardware", ", ".join([count(len(cluster.hosts), "host"), *(devices or cores)])
    try:
        versions = json.loads(read_text(run.path / "environment.json", _TEXT_LIMIT))
    except (OSError, ValueError):
        return
    for name in ("paceline", "python", "torch", "transformers"):
        if isinstance(versions, Mapping) and versions.get(name):
            yield name, versions[name]


def _license(job: Job) -> list[str]:
    text = (
        "No license was stated for these weights. The licenses of the base model and of the data may restrict their "
        "use; check both, then set `license` at the top of this file."
    )
    folder = settings_folder(job)
    stated = None if folder is None else _stated_license(folder / CARD)
    more = [] if stated is None else ["", f"The base model's own card states the license {_text(stated)}."]
    return [text, *more, "", "Quality, biases and safety were not assessed beyond the numbers above."]


def _stated_license(card: Path) -> str | None:
    try:
        front = read_text(card, _TEXT_LIMIT).split("---", 2)
        found = yaml.safe_load(front[1]).get("license") if len(front) == 3 and not front[0].strip() else None
    except (OSError, ValueError, yaml.YAMLError, AttributeError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def _base(job: Job) -> str:
    model = job.model
    name = _last(model.zoo or model.factory or "transformer")
    if model.hf is not None:
        name = model.hf.name if model.hf.is_dir() else f"{model.hf.parent.name}/{model.hf.name}"
    if model.weights is not None:
        return f"{name}, weights of {_last(str(model.weights))}"
    return name if model.hf is not None and model.hf.is_dir() else f"{name}, randomly initialised"


def _data(spec: Any) -> Iterator[str]:
    """Yield the kind of data, with the names of files and factories."""
    sources = getattr(spec, "sources", None)
    if isinstance(sources, Mapping):
        for name, source in sources.items():
            yield f"{name}: {' '.join(_data(source))}"
        return
    path, factory = getattr(spec, "path", None), getattr(spec, "factory", None)
    paths = path if isinstance(path, tuple) else [path]
    names = ", ".join(_last(str(one)) for one in (*paths, factory) if one)
    yield f"{getattr(spec, 'kind', 'data')} ({names})" if names else str(getattr(spec, "kind", "data"))


def _last(path: str) -> str:
    """Return the last component of a path, import path or URL without its query."""
    return path.partition("?")[0].rstrip("/").rpartition("/")[2]


def _table(rows: Any) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {_text(name)} | {_text(value)} |" for name, value in rows)]


_MARKED = re.compile(r"([\\`*_{}\[\]<>#|!&~$@])")


def _text(value: Any) -> str:
    """Return text on one line, with the characters of Markdown and HTML escaped."""
    return _MARKED.sub(r"\\\1", printable(" ".join(str(value).split())))


def _read(file: Callable[[], T]) -> T | None:
    """Read a file of the run; a missing or damaged file gives None."""
    try:
        return file()
    except PacelineError:
        return None


def _local(*paths: Path | str | None) -> list[Path]:
    local = [Path(str(path).removeprefix(DCP)) for path in paths if path is not None and not is_url(path)]
    return [path for path in local if path.exists()]


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZER)
