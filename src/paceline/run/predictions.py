"""Predictions of a saved model, written batch by batch to Parquet or NumPy files."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from paceline.errors import JobError, RunError
from paceline.extensions import optional_package
from paceline.job.loss import Loss
from paceline.job.loss_items import ModelsOwn, logits_of
from paceline.job.zoo.outputs import OutputKind, kind_of, probabilities
from paceline.run.convert import new_folder_beside
from paceline.run.prediction_inputs import inputs_of
from paceline.run.record.run import Run
from paceline.run.saved_model import saved_model
from paceline.state.reader import NEWEST

OUTPUTS = ("classes", "probabilities", "logits")
_COLUMNS = {"classes": "class", "probabilities": "probability", "logits": "logits"}


def predict(
    run: Run,
    source: str,
    out: Path,
    *,
    checkpoint: str = NEWEST,
    outputs: Sequence[str] = (),
    columns: Sequence[str] = (),
    batch: int | None = None,
) -> int:
    """Write a model's predictions for all samples of a source, in their order.

    Only one batch is in memory at a time. The output has the row numbers, the predictions, and the chosen columns of a
    Parquet file. If the data has class names, the column `label` has the name of each predicted class.

    Args:
        source: a set of the job, or a file, folder or factory with data of the same kind; targets are optional.
        out: a `.parquet`, `.npz` or `.npy` file.
        outputs: names from `OUTPUTS`; if empty, the default output of the loss.
        columns: columns of a Parquet file to copy to the output.
        batch: number of samples per batch; None takes the job's global batch.

    Returns:
        The number of samples.

    Raises:
        RunError: the checkpoint does not exist, or `out` exists, cannot be written or has an unknown suffix.
        JobError: the job's loss does not support the requested outputs.
        DataError: the source cannot be read.
    """
    if out.suffix not in _WRITERS:
        raise RunError(
            "predict.unknown_ending",
            "{out}: use a file name that ends with {known}",
            out=str(out),
            known=list(_WRITERS),
        )
    if out.exists():
        raise RunError(
            "predict.exists", "{out} exists already and is not overwritten. Name another file.", out=str(out)
        )
    recorded = next((e.get("classes") for e in run.events() if e["event"] == "start"), None)
    inputs = inputs_of(run.job, source, columns, recorded)
    with saved_model(run, inputs.example, checkpoint) as model:
        kind = _kind(model.engine.loss, model.engine.model)
        wanted = list(outputs) or [{"classes": "classes", "yes_no": "probabilities"}.get(kind or "", "logits")]
        _must_fit(wanted, kind, run.job.loss.name)
        if out.suffix == ".npy" and len(wanted) > 1:
            raise RunError(
                "predict.one_array", "{out}: a .npy file can hold only one array. Name one output.", out=str(out)
            )
        held: list[dict[str, Any]] = []

        def batches() -> Iterator[Any]:
            for found, extra in inputs.batches(batch or run.job.global_batch):
                held.append(extra)
                yield found

        row = 0
        try:
            with new_folder_beside(out) as folder, ExitStack() as open_files:
                file = folder / f"predictions{out.suffix}"
                writer = open_files.enter_context(_WRITERS[out.suffix](file, inputs.samples))
                for output in model.outputs(batches()):
                    made = _made(wanted, output, model.engine.loss, kind, inputs.classes)
                    rows = len(next(iter(made.values())))
                    writer.write({"row": np.arange(row, row + rows), **held.pop(0), **made})
                    row += rows
                open_files.close()
                os.replace(file, out)
        except OSError as error:
            raise RunError(
                "predict.not_written",
                "{out} cannot be written: {error}",
                out=str(out),
                error=error.strerror or str(error),
            ) from error
    return row


def _kind(loss: Loss, model: nn.Module) -> OutputKind | None:
    """Return what the model's outputs mean; None for a custom loss."""
    if not isinstance(loss, ModelsOwn):
        return kind_of(loss)
    problem = getattr(getattr(model, "config", None), "problem_type", None)
    named = {"multi_label_classification": "yes_no", "regression": "values", "single_label_classification": "classes"}
    labels = getattr(getattr(model, "config", None), "num_labels", None)
    return cast("OutputKind", named.get(problem or "", "values" if labels == 1 else "classes"))


def _must_fit(wanted: Sequence[str], kind: OutputKind | None, loss: str) -> None:
    for name in wanted:
        if name not in OUTPUTS:
            raise RunError(
                "predict.unknown_output",
                "unknown output {name!r}. Known outputs are {known}.",
                name=name,
                known=list(OUTPUTS),
            )
        if kind == "values" and name != "logits":
            raise JobError(
                "predict.no_classes",
                "the loss {loss} works on values, so the model has no {name}. Leave --outputs out.",
                loss=loss,
                name=name,
            )


def _made(
    wanted: Sequence[str], output: Any, loss: Loss, kind: OutputKind | None, names: list[str] | None
) -> dict[str, npt.NDArray[Any]]:
    made: dict[str, npt.NDArray[Any]] = {}
    for what in wanted:
        if what == "logits":
            found = logits_of(output)
        elif what == "probabilities":
            found = probabilities(loss, output, kind)
        elif kind == "yes_no":
            found = (probabilities(loss, output, kind) > 0.5).long()
        else:
            values = logits_of(output)
            found = values.argmax(2 if values.dim() == 3 else 1)
        if kind != "classes" and found.dim() == 2 and found.shape[1] == 1:
            found = found[:, 0]
        made["prediction" if kind == "values" else _COLUMNS[what]] = _array(found)
    if names and "class" in made and kind == "classes":
        made["label"] = np.array(names)[made["class"]]
    return made


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    host = tensor.detach().cpu()
    array: npt.NDArray[Any] = (host.float() if host.dtype.itemsize == 2 else host).numpy()
    return array


class _Writer(Protocol):
    def __init__(self, file: Path, samples: int) -> None: ...
    def __enter__(self) -> _Writer: ...
    def __exit__(self, *_: object) -> None: ...
    def write(self, columns: dict[str, Any]) -> None: ...


class _Parquet:
    def __init__(self, file: Path, samples: int) -> None:
        self.file, self._writer = file, cast("Any", None)
        self._arrow: Any = optional_package("pyarrow", "pyarrow")

    def __enter__(self) -> _Parquet:
        return self

    def write(self, columns: dict[str, Any]) -> None:
        table = self._arrow.table({name: self._column(values) for name, values in columns.items()})
        if self._writer is None:
            parquet: Any = optional_package("pyarrow.parquet", "pyarrow")
            self._writer = parquet.ParquetWriter(self.file, table.schema)
        self._writer.write_table(table)

    def _column(self, values: Any) -> Any:
        if not isinstance(values, np.ndarray) or values.ndim == 1:
            return values if not isinstance(values, np.ndarray) else self._arrow.array(values)
        column = self._arrow.array(values.reshape(-1))
        for length in reversed(values.shape[1:]):
            column = self._arrow.FixedSizeListArray.from_arrays(column, length)
        return column

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


_TEXT = 256  # maximum number of characters of a string in a NumPy array


class _Npz:
    """Writer of an .npz archive; each array is first written to its own file."""

    def __init__(self, file: Path, samples: int) -> None:
        self.file, self.samples, self._arrays = file, samples, dict[str, Any]()
        self._row = 0

    def __enter__(self) -> _Npz:
        return self

    def write(self, columns: dict[str, Any]) -> None:
        rows = len(columns["row"])
        for name, values in columns.items():
            array = np.asarray(values)
            # give every string the maximum width, because later batches may have longer strings
            if array.dtype.kind == "U":
                if max(map(len, array.ravel().tolist()), default=0) > _TEXT:
                    raise RunError(
                        "predict.text_too_long",
                        "{file}: column {name} has texts of more than {most} characters, which only .parquet can hold",
                        file=self.file.name,
                        name=name,
                        most=_TEXT,
                    )
                array = array.astype(f"U{_TEXT}")
            if name not in self._arrays:
                shape = (self.samples, *array.shape[1:])
                self._arrays[name] = np.lib.format.open_memmap(
                    self.file.with_name(f"{name}.npy"), mode="w+", dtype=array.dtype, shape=shape
                )
            self._arrays[name][self._row : self._row + rows] = array
        self._row += rows

    def _paths(self) -> dict[str, Path]:
        for array in self._arrays.values():
            array.flush()
        return {name: self.file.with_name(f"{name}.npy") for name in self._arrays}

    def __exit__(self, *_: object) -> None:
        if not self.file.exists():
            with zipfile.ZipFile(self.file, "w", allowZip64=True) as archive:
                for name, path in self._paths().items():
                    archive.write(path, f"{name}.npy")


class _Npy(_Npz):
    """Writer of an .npy file with one array, in row order."""

    def write(self, columns: dict[str, Any]) -> None:
        kept: dict[str, Any] = {
            name: columns[name] for name in ("class", "probability", "logits", "prediction") if name in columns
        }
        super().write({"row": columns["row"], **kept})

    def __exit__(self, *_: object) -> None:
        for name, path in self._paths().items():
            if name != "row":
                os.replace(path, self.file)


_WRITERS: dict[str, type[_Writer]] = {".parquet": _Parquet, ".npz": _Npz, ".npy": _Npy}
