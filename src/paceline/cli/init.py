"""`paceline init`: commented starter jobs, with the Python files that they need."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated, NamedTuple

import typer

Values = dict[str, str]
_TEXT = (".txt", ".md", ".rst", ".py")
_IMAGES, _TABLE = "images", "table.csv"  # default paths of the data, relative to the job's folder


class _Starter(NamedTuple):
    """One kind of starter job.

    `values` computes the template's values from the data path, the model path and the target folder. `place` is the
    default path of the data, relative to the job's folder; None if the starter uses example data.
    """

    about: str
    values: Callable[[Path | None, Path | None, Path], Values]
    python: bool = False
    takes_model: bool = False
    place: str | None = None


def command(
    kind: Annotated[
        str | None, typer.Argument(help="images, table, text, model or finetune.", show_default="lists them")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR|FILE.yaml", help="Where to write the job.", show_default="KIND.yaml here"),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Your data: a folder of images, a table, text.",
            show_default="images, table.csv, or an example text",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="For finetune: the folder of a Hugging Face model, or its config.json."),
    ] = None,
) -> None:
    """Write a commented starter job for a kind of task.

    Without a kind, list the kinds. Existing files are not overwritten.
    """
    from paceline.errors import JobError
    from paceline.text import nearest

    if kind is None:
        for name, known in _STARTERS.items():
            typer.echo(f"{name:<9} {known.about}")
        return
    if kind not in _STARTERS:
        raise JobError(
            "init.unknown_kind",
            "there is no starter job for {kind!r}. {hint}",
            kind=kind,
            hint=nearest(kind, _STARTERS),
        )
    starter = _STARTERS[kind]
    if model is not None and not starter.takes_model:
        raise typer.BadParameter(f"a job for {kind} has no model to name; leave it out", param_hint="--model")
    if data is not None and not data.exists():
        raise JobError("init.no_data", "--data {path}: no such file or folder", path=data)
    job = out if out is not None and out.suffix in (".yaml", ".yml") else (out or Path()) / f"{kind}.yaml"
    place = None if starter.place is None else job.with_name(starter.place)
    if data is None and place is not None and place.exists():
        data = place
    written = [job, *([job.with_name(f"{kind}.py")] if starter.python else [])]
    for file in written:
        if file.exists() or file.is_symlink():
            raise JobError(
                "init.exists",
                "{file} exists already and is not overwritten. Name another file with --out.",
                file=file,
            )
    texts = [_text(f"{kind}{file.suffix if file is not job else '.yaml'}") for file in written]
    texts[0] = Template(texts[0]).substitute(starter.values(data, model, job.parent), job=_shown(job))
    try:
        job.parent.mkdir(parents=True, exist_ok=True)
        for file, text in zip(written, texts, strict=True):
            with file.open("x", encoding="utf-8") as opened:
                opened.write(text)
    except OSError as error:
        raise JobError(
            "init.cannot_write",
            "{file} cannot be written: {reason}. Name another file with --out.",
            file=error.filename or job,
            reason=error.strerror,
        ) from error
    typer.echo(f"wrote {' and '.join(map(str, written))}")
    if data is None and place is not None:
        typer.echo(
            f"there is no data yet: put it at {place} and adapt the job; init --data PATH writes a job that fits"
        )
    typer.echo(f"train it: paceline train {_shown(job)}")


def _text(name: str) -> str:
    return files("paceline.cli.starters").joinpath(name).read_text(encoding="utf-8")


def _shown(path: Path) -> str:
    import shlex

    return shlex.quote(str(path))


def _relative(path: Path, folder: Path) -> str:
    """Return a path as YAML: relative to the job's folder if nearby, otherwise absolute."""
    found = os.path.relpath(path, folder)
    return json.dumps(str(path.resolve()) if found.startswith(os.path.join("..", "..")) else found)


def _absolute(path: Path) -> str:
    """Return an absolute path as YAML; the user's code does not know the job's folder."""
    return json.dumps(str(path.resolve()))


def _batch(samples: int | None) -> str:
    """Return the global batch: 64, or less if an epoch had fewer than 8 steps."""
    return str(64 if samples is None else min(64, 2 ** max(0, (samples // 8).bit_length() - 1)))


def _images(data: Path | None, model: Path | None, folder: Path) -> Values:
    classes = [entry for entry in data.iterdir() if entry.is_dir()] if data and data.is_dir() else []
    images = sum(1 for one in classes for _ in one.iterdir()) if classes else None
    return {
        "data": _relative(data or folder / _IMAGES, folder),
        "classes": str(len(classes) or 10),
        "batch": _batch(images),
    }


def _table(data: Path | None, model: Path | None, folder: Path) -> Values:
    from paceline.errors import DataError

    path, target, inputs, classes, rows = data or folder / _TABLE, "target", 8, 2, None
    if data is not None:
        try:
            import pyarrow.csv
            import pyarrow.parquet

            from paceline.cli.starters.table import Rows

            of_parquet = data.suffix == ".parquet"
            schema = pyarrow.parquet.read_schema(data) if of_parquet else pyarrow.csv.open_csv(data).schema
            target = schema.names[-1]
            table = Rows(str(data), target)
        except ImportError as error:
            raise DataError(
                "init.no_pyarrow", "reading a table needs pyarrow: pip install 'paceline[data]' ({error})", error=error
            ) from error
        except Exception as error:
            raise DataError(
                "init.unreadable_table",
                "--data {path} cannot be read as a table of numbers: {error}",
                path=data,
                error=error,
            ) from error
        inputs, rows = table.inputs.shape[1], len(table)
        classes = 0 if table.targets.is_floating_point() else len(table.classes)
    return {
        "path": _absolute(path),
        "target": json.dumps(target),
        "inputs": str(inputs),
        "outputs": str(classes or 1),
        "loss": "cross_entropy" if classes else "mse",
        "metric": "accuracy" if classes else "mae",
        "batch": _batch(rows),
    }


def _text_values(data: Path | None, model: Path | None, folder: Path) -> Values:
    return {"data": _relative(data, folder) if data else '"{stdlib}/pydoc_data"'}


def _model_values(data: Path | None, model: Path | None, folder: Path) -> Values:
    return {}


def _finetune(data: Path | None, model: Path | None, folder: Path) -> Values:
    from paceline.errors import JobError

    if model is None or not (config := model / "config.json" if model.is_dir() else model).is_file():
        raise JobError(
            "init.no_model",
            "a job for fine-tuning needs --model: the folder of a Hugging Face model on this machine, or its "
            "config.json. paceline downloads nothing; `hf download NAME --local-dir DIR` does",
        )
    has_weights = model.is_dir() and any(model.glob("*.safetensors"))
    found = f"{{hf: {_relative(model if has_weights else config, folder)}, task: causal_lm}}"
    if not has_weights:
        found += "  # there are no weights (*.safetensors) beside the configuration, so the weights are random"
    columns = _columns(data)
    task = "dpo" if "chosen" in columns else "sft" if columns & {"messages", "prompt", "conversations"} else "pretrain"
    values = {"model": found, "task": task, "lr": "0.0000005" if task == "dpo" else "0.00002"}
    if not config.with_name("tokenizer.json").is_file():
        if task != "pretrain":
            raise JobError(
                "init.no_tokenizer",
                "{folder} has no tokenizer.json, which conversations need. Save the model's tokenizer there with its "
                "method save_pretrained.",
                folder=config.parent,
            )
        text = _relative(data, folder) if data else '"{stdlib}/pydoc_data"'
        note = "  # there is no tokenizer.json beside the configuration, so the text is read as bytes"
        return {**values, "data": f"{{kind: text, path: {text}, context: 128}}{note}"}
    if task != "pretrain":
        assert data is not None
        kind, keys = {"sft": ("chat", ", pack: true"), "dpo": ("preferences", "")}[task]
        return {**values, "data": f"{{kind: {kind}, path: {_relative(data, folder)}, context: 1024{keys}}}"}
    path, form = _text_files(data)
    tokenizer = _relative(config.parent, folder)
    keys = f"path: {_relative(path, folder)}{form}, tokenizer: {tokenizer}, context: 128, pack: true"
    return {**values, "data": f"{{kind: tokens, {keys}}}"}


def _columns(data: Path | None) -> set[str]:
    """Return the keys of the first row of a JSONL or Parquet file."""
    try:
        if data is not None and data.suffix in (".jsonl", ".ndjson"):
            with data.open(encoding="utf-8") as rows:
                return set(json.loads(next(rows)))
        if data is not None and data.suffix == ".parquet":
            import pyarrow.parquet

            return set(pyarrow.parquet.read_schema(data).names)
    except (OSError, ValueError, TypeError, StopIteration, ImportError):
        pass  # the run explains what is wrong with the file
    return set()


def _text_files(data: Path | None) -> tuple[Path, str]:
    """Return the path of text files, and further keys.

    A text file is one document, so nothing can be held out of a few files.
    """
    if data is None:
        import sysconfig

        return Path(sysconfig.get_path("stdlib"), "pydoc_data", "*.py"), ", format: text, held_out: 0"
    if not data.is_dir():
        return data, ", format: text, held_out: 0" if data.suffix in _TEXT else ""
    suffixes = [file.suffix for file in data.iterdir() if file.suffix in _TEXT]
    if not suffixes:
        return data, ""
    most = max(_TEXT, key=suffixes.count)
    return data / f"*{most}", ", format: text" + (", held_out: 0" if suffixes.count(most) < 10 else "")


_STARTERS = {
    "images": _Starter("classify images: a folder for each class", _images, place=_IMAGES),
    "table": _Starter("predict a column of a table (CSV or Parquet)", _table, python=True, place=_TABLE),
    "text": _Starter("a small GPT that learns to write from text files", _text_values),
    "model": _Starter("your own nn.Module and Dataset", _model_values, python=True),
    "finetune": _Starter("tune a language model on conversations, preferences or text", _finetune, takes_model=True),
}
