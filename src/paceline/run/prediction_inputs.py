"""Inputs of predictions, read in batches from files, folders or the job's data sets."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from paceline.data.samples import held_out_batches
from paceline.errors import DataError
from paceline.extensions import optional_package
from paceline.job.batch import Batch
from paceline.job.data import Arrays, Custom, Images, Records, Streamed
from paceline.job.job import Job
from paceline.job.samples import in_users_data
from paceline.job.spec import load_object
from paceline.job.streams import kept_whole
from paceline.job.zoo import arrays, images
from paceline.run.saved_model import SETS, data_of, resolved_source


class Inputs(NamedTuple):
    """Inputs of a model for predictions.

    Attributes:
        samples: number of samples.
        batches: function that yields batches of a given size, each with the columns to copy to the output.
        example: data set from which to build an example batch for the model.
        classes: names of the classes, if the data has them.
    """

    samples: int
    batches: Callable[[int], Iterator[tuple[Batch, dict[str, Any]]]]
    example: Dataset[Any]
    classes: list[str] | None = None


def inputs_of(job: Job, source: str, columns: Sequence[str], classes: list[str] | None) -> Inputs:
    """Open a source of inputs.

    Args:
        source: a set of the job, or a file, folder or factory with data of the same kind; targets are optional.
        columns: columns of a Parquet file to copy to the output.
        classes: names of the classes that the run has recorded.

    Raises:
        DataError: the source cannot be read, or its kind differs from the job's data.
    """
    spec = job.data
    if columns and not (isinstance(spec, Arrays) and source not in SETS and source.endswith(".parquet")):
        raise DataError("predict.no_columns", "{source}: columns can be copied only from Parquet files", source=source)
    if source not in SETS and isinstance(spec, Arrays):
        return _arrays(spec, Path(resolved_source(spec, source)), columns)
    if source not in SETS and isinstance(spec, Images):
        return _images(spec, Path(resolved_source(spec, source)), job.model.input_shape(), classes)
    if source not in SETS and isinstance(spec, Custom | Streamed):
        made = load_object(resolved_source(spec, source))(**spec.args)
        return _of_dataset(WithoutTargets(kept_whole(made)), classes)
    if source not in SETS and isinstance(spec, Records) and spec.inputs is not None:
        job = job.model_copy(update={"data": spec.model_copy(update={"target": None})})
    return _of_dataset(data_of(job, source), classes)


class WithoutTargets(Dataset[Any]):
    """Wrapper of a data set that adds a placeholder target to samples without a target."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        sample = self.dataset[index]
        if isinstance(sample, dict) or (isinstance(sample, tuple) and len(sample) > 1):
            return sample
        return (*(sample if isinstance(sample, tuple) else (sample,)), 0)


def _of_dataset(dataset: Dataset[Any], classes: list[str] | None) -> Inputs:
    names = getattr(in_users_data(dataset, [])[0], "classes", None)
    known = classes or (list(names) if isinstance(names, (list, tuple)) else None)

    def batches(batch: int) -> Iterator[tuple[Batch, dict[str, Any]]]:
        for found in held_out_batches(dataset, batch=batch, replica=0, replicas=1):
            yield found, {}

    return Inputs(len(dataset), batches, dataset, known)  # type: ignore[arg-type]  # Dataset does not declare __len__


# Images


class ImageFiles(Dataset[Batch]):
    """Data set of one image file, or of all image files below a folder.

    The files are sorted by path.
    """

    def __init__(self, path: Path, shape: images.Shape) -> None:
        self.path, self.shape = path, shape
        with arrays.reading(path, "an image, or a folder of images"):
            self.files = arrays.files_below(path, images._IMAGE_SUFFIXES) if path.is_dir() else [str(path)]
        if not self.files:
            raise DataError("predict.no_images", "{path}: this folder contains no image", path=str(path))
        self._normalise = images.Normalise(*images.PHOTO[shape[0]], shape[1:])

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Batch:
        found, targets = self.__getitems__([index])
        return found[0], targets[0]

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch of images, with placeholders for their classes."""
        pixels = np.stack([images.decoded(self.files[i], self.shape, self.files[i]) for i in indices])
        return self._normalise(torch.from_numpy(pixels)), torch.zeros(len(indices), dtype=torch.int64)


def _images(spec: Images, path: Path, input_shape: tuple[int, ...] | None, classes: list[str] | None) -> Inputs:
    wanted = spec.shape or input_shape
    if wanted is None:
        raise DataError("predict.no_shape", "the model does not define an input shape. Give data.shape in the job.")
    dataset = ImageFiles(path, images.photo_shape("images", tuple(wanted)))
    base = path if path.is_dir() else path.parent

    def batches(batch: int) -> Iterator[tuple[Batch, dict[str, Any]]]:
        for first in range(0, len(dataset), batch):
            rows = list(range(first, min(first + batch, len(dataset))))
            yield dataset.__getitems__(rows), {"file": [os.path.relpath(dataset.files[i], base) for i in rows]}

    return Inputs(len(dataset), batches, dataset, classes)


# Numbers

_Read = Callable[[int], Iterator[tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]]]


def _arrays(spec: Arrays, path: Path, columns: Sequence[str]) -> Inputs:
    names = (spec.inputs,) if isinstance(spec.inputs, str) else spec.inputs
    with arrays.reading(path, arrays._EXPECTED):
        samples, read = _parquet(path, names, columns) if path.suffix == ".parquet" else _numpy(path, names)
    if not samples:
        raise DataError("predict.no_rows", "{path}: the file contains no rows", path=str(path))

    def batches(batch: int) -> Iterator[tuple[Batch, dict[str, Any]]]:
        for found, extra in read(batch):
            for name, array in found.items():
                arrays._check_numbers(path, name, array)
            values = torch.from_numpy(arrays._inputs(path, found))
            yield (values, torch.zeros(len(values), dtype=torch.int64)), extra

    first: Any = next(batches(1))[0]
    return Inputs(samples, batches, torch.utils.data.TensorDataset(*first))


def _parquet(path: Path, names: Sequence[str], columns: Sequence[str]) -> tuple[int, _Read]:
    parquet = optional_package("pyarrow.parquet", "pyarrow")
    table = optional_package("pyarrow", "pyarrow").Table
    with arrays._decoding(path), parquet.ParquetFile(path) as file:
        arrays._check_names(path, [*names, *columns], file.schema_arrow.names)
        samples = file.metadata.num_rows

    def read(batch: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        with arrays._decoding(path), parquet.ParquetFile(path) as file:
            for part in file.iter_batches(batch_size=batch, columns=list(dict.fromkeys([*names, *columns]))):
                chunk = table.from_batches([part])
                found = {name: arrays._parquet_column(path, name, chunk.column(name)) for name in names}
                yield found, {name: chunk.column(name) for name in columns}

    return samples, read


def _numpy(path: Path, names: Sequence[str]) -> tuple[int, _Read]:
    """Open the arrays of a folder or file without reading them whole."""
    if path.is_dir():
        arrays._check_names(path, list(names), [file.stem for file in path.glob("*.npy")])
        mapped = {name: np.load(path / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in names}
    elif path.suffix == ".npy" and len(names) == 1:
        with arrays._decoding(path):
            mapped = {names[0]: np.load(path, mmap_mode="r", allow_pickle=False)}
    elif path.suffix == ".npz":
        return _npz(path, names)
    else:
        raise DataError(
            "predict.unknown_file",
            "{path}: this kind of file is not supported. Expected: a .parquet, .npz or .npy file, or a folder of "
            ".npy files with {names}",
            path=str(path),
            names=list(names),
        )
    arrays._check_rows(path, mapped)
    samples = len(mapped[names[0]])

    def read(batch: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        for first in range(0, samples, batch):
            yield {name: np.array(array[first : first + batch]) for name, array in mapped.items()}, {}

    return samples, read


def _npz(path: Path, names: Sequence[str]) -> tuple[int, _Read]:
    with arrays._decoding(path), zipfile.ZipFile(path) as archive:
        arrays._check_names(path, list(names), [name.removesuffix(".npy") for name in archive.namelist()])
        lengths = []
        for name in names:
            with _member(archive, name) as (_, shape, dtype, in_order):
                lengths.append(shape[0] if shape else 0)
                if not in_order or dtype.hasobject:
                    raise DataError(
                        "predict.array_order",
                        "{path}: the array {name} is not in C order or contains objects. Save numpy.ascontiguousarray.",
                        path=str(path),
                        name=name,
                    )
    if len(set(lengths)) > 1:
        raise DataError(
            "predict.rows_differ",
            "{path}: the arrays have different numbers of rows: {rows}",
            path=str(path),
            rows=lengths,
        )

    def read(batch: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        from contextlib import ExitStack

        with arrays._decoding(path), ExitStack() as held:
            archive = held.enter_context(zipfile.ZipFile(path))
            opened = {name: held.enter_context(_member(archive, name)) for name in names}
            for first in range(0, lengths[0], batch):
                rows = min(batch, lengths[0] - first)
                yield {name: _rows(file, rows, shape, dtype) for name, (file, shape, dtype, _) in opened.items()}, {}

    return lengths[0], read


@contextmanager
def _member(archive: zipfile.ZipFile, name: str) -> Iterator[tuple[Any, tuple[int, ...], np.dtype[Any], bool]]:
    """Open an array after its header; yield file, shape, dtype, and True in C order."""
    with archive.open(f"{name}.npy") as file:
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = header(file)
        yield file, shape, dtype, not fortran or len(shape) < 2


def _rows(file: Any, rows: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    wanted = rows * int(np.prod(shape[1:])) * dtype.itemsize
    return np.frombuffer(bytearray(file.read(wanted)), dtype=dtype).reshape(rows, *shape[1:])
