"""The loader of another system, set up as its documentation recommends; run by the peers' interpreter.

    PYTHON benchmarks/data_peers.py SYSTEM TASK    (started by data.py)

Each system reads the records in the format that its documentation recommends, which is written once and not timed.
All systems decode and collate with the same functions, in their loader processes. Pillow decodes the images, because
the decoder of torchvision, which litdata prefers, is built for CUDA only.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from data_serve import Batch, Loading, Task, batch_of, serve

SHARD_BYTES = 1 << 26  # what MosaicML and litdata recommend
BUFFER = 1000  # samples in the shuffle buffers of webdataset and datasets, as in their documentation


def main(system: str, task: Task) -> None:
    """Write the system's own copy of the corpus if it is missing, and serve."""
    own = Path(task.own) / system / f"{Path(task.source).name}"
    write, load = SYSTEMS[system]

    def prepare() -> None:
        if not (own / "made").exists():
            shutil.rmtree(own, ignore_errors=True)
            own.mkdir(parents=True)
            write(task, own)
            (own / "made").touch()

    serve(lambda: load(task, own), prepare)


def records(task: Task) -> Iterator[dict[str, Any]]:
    """Yield the corpus as records of `batch_of`; rows of tokens as bytes."""
    source = Path(task.source)
    match task.work:
        case "text":
            for path in sorted(source.glob("*.jsonl")):
                yield from map(json.loads, path.open())
        case "tokens" | "tiny":
            import pyarrow as pa
            import pyarrow.parquet as pq

            for path in sorted((*source.glob("*.parquet"), *source.glob("*.arrow"))):
                parquet = path.suffix == ".parquet"
                table = pq.read_table(path) if parquet else pa.ipc.open_file(pa.memory_map(str(path))).read_all()
                for part in table.to_batches(10_000):
                    tokens = part["tokens"].flatten().to_numpy().reshape(len(part), -1)
                    labels = part["label"].to_numpy().astype(np.int32)
                    yield from ({"row": row.tobytes()} for row in np.column_stack((tokens, labels)))
        case "images":
            yield from ({"image": path.read_bytes(), "label": label} for path, label in image_files(source))
        case _:
            for path in sorted(source.glob("*.tar")):
                with tarfile.open(path) as tar:
                    entries = iter(tar)
                    for jpeg, label in zip(entries, entries, strict=True):
                        yield {"image": content(tar, jpeg), "label": int(content(tar, label))}


def content(tar: tarfile.TarFile, entry: tarfile.TarInfo) -> bytes:
    """Return the content of a file in a tar."""
    file = tar.extractfile(entry)
    assert file is not None
    return file.read()


def image_files(source: Path) -> list[tuple[Path, int]]:
    """Return the files and classes of a folder of images."""
    folders = sorted(path for path in source.iterdir() if path.is_dir())
    return [(path, label) for label, folder in enumerate(folders) for path in sorted(folder.iterdir())]


def processes(task: Task) -> dict[str, Any]:
    """Return DataLoader's arguments for loader processes that live through all epochs."""
    return {"num_workers": task.workers, "persistent_workers": task.workers > 0}


# MosaicML Streaming: MDS shards, StreamingDataset and StreamingDataLoader
# https://docs.mosaicml.com/projects/streaming; rows of tokens are bytes, as in llm-foundry


def write_mds(task: Task, own: Path) -> None:
    """Write MDS shards."""
    import_torchvision()
    from streaming import MDSWriter

    rows = {"row": "bytes"}
    columns = {"text": {"text": "str"}, "tokens": rows, "tiny": rows}.get(task.work, {"image": "jpeg", "label": "int"})
    with MDSWriter(out=str(own / "mds"), columns=columns, size_limit=SHARD_BYTES) as writer:
        for record in records(task):
            writer.write(record)


def load_mds(task: Task, own: Path) -> Loading:
    """Load MDS shards."""
    import_torchvision()
    from streaming import StreamingDataLoader, StreamingDataset

    data = StreamingDataset(local=str(own / "mds"), shuffle=True, shuffle_seed=task.seed, batch_size=task.batch)
    loader = StreamingDataLoader(data, batch_size=task.batch, collate_fn=partial(batch_of, task), **processes(task))
    position = {"epoch": 0, "num_canonical_nodes": 1, "initial_physical_nodes": 1, "shuffle_seed": task.seed}
    return Loading(lambda: loader, lambda sample: loader.load_state_dict(position | {"sample_in_epoch": sample}))


@cache
def import_torchvision() -> torch.library.Library:
    """Make torchvision importable, which `streaming` imports, although this torch has none of its operators.

    torch forgets the operators with the returned object, which the cache keeps.
    """
    declared = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return declared


# litdata: chunks of `optimize`, StreamingDataset and StreamingDataLoader
# https://lightning.ai/docs/litdata; tokens as on its page on pre-training


def write_litdata(task: Task, own: Path) -> None:
    """Write litdata's chunks."""
    import litdata

    kind: dict[str, Any] = {"chunk_bytes": SHARD_BYTES}
    if task.work in ("tokens", "tiny"):
        length = row_length(task)
        kind = {
            "item_loader": litdata.TokensLoader(block_size=length),
            "chunk_size": length * (SHARD_BYTES // (4 * length)),
        }
    one = {"num_workers": 1, "start_method": "fork"}
    litdata.optimize(fn=partial(litdata_items, task), inputs=[0], output_dir=str(own / "chunks"), **one, **kind)


def litdata_items(task: Task, _: int) -> Iterator[Any]:
    """Yield what litdata stores."""
    for record in records(task):
        row = record.get("row")
        yield record if row is None else torch.frombuffer(bytearray(row), dtype=torch.int32)


def row_length(task: Task) -> int:
    """Return the number of tokens of a row, with its label."""
    return len(next(records(task))["row"]) // 4


def load_litdata(task: Task, own: Path) -> Loading:
    """Load litdata's chunks."""
    import litdata

    settings: dict[str, Any] = {"shuffle": True, "seed": task.seed, "drop_last": False}
    collate: Callable[[Sequence[Any]], Batch] = partial(batch_of, task)
    if task.work in ("tokens", "tiny"):
        settings["item_loader"] = litdata.TokensLoader(block_size=row_length(task))
        collate = stacked
    data = litdata.StreamingDataset(str(own / "chunks"), **settings)
    loader = litdata.StreamingDataLoader(data, batch_size=task.batch, collate_fn=collate, **processes(task))

    def seek(sample: int) -> None:
        position = {
            "dataset": data.state_dict(sample, task.workers, task.batch),
            "current_epoch": 1,
            "num_samples_yielded": sample,
            "latest_worker_idx": (sample // task.batch - 1) % max(1, task.workers),
        }
        loader.load_state_dict(position)

    return Loading(lambda: loader, seek)


def stacked(rows: Sequence[torch.Tensor]) -> Batch:
    """Collate rows of tokens."""
    whole = torch.stack(list(rows)).long()
    return whole[:, :-1].contiguous(), whole[:, -1].contiguous()


# webdataset: tar files, WebDataset and WebLoader, batches made in the loader processes
# https://webdataset.github.io/webdataset


def write_tars(task: Task, own: Path) -> None:
    """Write tar files of at most 1,000 samples, unless the corpus has some."""
    import webdataset

    if task.work == "tars":
        return
    with webdataset.ShardWriter(f"{own}/%06d.tar", maxcount=BUFFER, verbose=0) as writer:
        for row, record in enumerate(records(task)):
            parts: dict[str, Any] = {"__key__": f"{row:09}"}
            if "text" in record:
                parts["txt"] = record["text"]
            elif "row" in record:
                parts["bin"] = record["row"]
            else:
                parts |= {"jpg": record["image"], "cls": record["label"]}
            writer.write(parts)


def load_tars(task: Task, own: Path) -> Loading:
    """Load tar files."""
    import webdataset

    files = sorted(str(path) for path in (Path(task.source) if task.work == "tars" else own).glob("*.tar"))
    data = webdataset.WebDataset(files, shardshuffle=len(files), seed=task.seed).shuffle(BUFFER)
    match task.work:
        case "text":
            data = data.map(lambda sample: {"text": sample["txt"].decode()})
        case "tokens" | "tiny":
            data = data.map(lambda sample: {"row": sample["bin"]})
        case _:
            data = data.map(lambda sample: {"image": sample["jpg"], "label": sample["cls"]})
    data = data.batched(task.batch, collation_fn=partial(batch_of, task))
    loader = webdataset.WebLoader(data, batch_size=None, **processes(task))
    return Loading(lambda: loader)


# Grain: ArrayRecord files or a data source of files, MapDataset and mp_prefetch
# https://google-grain.readthedocs.io


def write_array_records(task: Task, own: Path) -> None:
    """Write an ArrayRecord file; a folder of images is read as it is."""
    from array_record.python.array_record_module import ArrayRecordWriter

    if task.work == "images":
        return
    writer = ArrayRecordWriter(str(own / "0.array_record"), "group_size:1")
    for record in records(task):
        if "text" in record:
            writer.write(record["text"].encode())
        else:
            writer.write(record["row"] if "row" in record else bytes([record["label"]]) + record["image"])
    writer.close()


class Files:
    """Grain's data source of image files."""

    def __init__(self, source: Path) -> None:
        self.files = image_files(source)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> bytes:
        path, label = self.files[index]
        return bytes([label]) + path.read_bytes()


def load_grain(task: Task, own: Path) -> Loading:
    """Load batches of a MapDataset; one thread reads in each process, as more of them would share its core."""
    import grain
    from absl import flags

    flags.FLAGS(["data_peers"])  # grain asks for parsed flags before it starts processes
    source = (
        Files(Path(task.source))
        if task.work == "images"
        else grain.sources.ArrayRecordDataSource(str(own / "0.array_record"))
    )

    def decoded(raw: Sequence[bytes]) -> tuple[Any, ...]:
        if task.work == "text":
            found = batch_of(task, [{"text": one.decode()} for one in raw])
        elif task.work in ("tokens", "tiny"):
            found = batch_of(task, [{"row": one} for one in raw])
        else:
            found = batch_of(task, [{"image": one[1:], "label": one[0]} for one in raw])
        return tuple(column.numpy() for column in found)

    data = (
        grain.MapDataset.source(source)
        .seed(task.seed)
        .shuffle()
        .repeat()
        .batch(task.batch, batch_fn=list)
        .map(decoded)
        .to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4))
        .mp_prefetch(grain.MultiprocessingOptions(num_workers=task.workers, per_worker_buffer_size=2))
    )
    batches = iter(data)
    steps = len(source) // task.batch

    def epoch() -> Iterable[Any]:
        for columns in islice(batches, steps):
            yield tuple(torch.from_numpy(np.asarray(column)) for column in columns)

    return Loading(epoch, lambda sample: grain.experimental.set_next_index(batches, sample // task.batch))


# Hugging Face datasets: a Dataset with batched access for tokens, otherwise an IterableDataset of many shards
# https://huggingface.co/docs/datasets/use_with_pytorch


def write_nothing(task: Task, own: Path) -> None:
    """Write nothing: `load_dataset` keeps its own Arrow copy in a cache."""


def load_datasets(task: Task, own: Path) -> Loading:
    """Load by `load_dataset`."""
    import datasets

    datasets.disable_progress_bars()
    kinds = {"text": "json", "tokens": "parquet", "tiny": "arrow", "images": "imagefolder", "tars": "webdataset"}
    files = {"data_dir": task.source} if task.work == "images" else {"data_files": f"{task.source}/*.*"}
    data = datasets.load_dataset(kinds[task.work], **files, split="train", cache_dir=str(own / "cache"))
    if task.work in ("tokens", "tiny"):
        batches = Skipping(RandomSampler(data), task.batch, drop_last=False)
        arrays = data.with_format("numpy")
        loader = DataLoader(arrays, sampler=batches, batch_size=None, collate_fn=of_arrays, **processes(task))
        return Loading(lambda: loader, batches.seek)
    if task.work != "text":
        data = data.cast_column("image" if task.work == "images" else "jpg", datasets.Image(decode=True))
        data = data.rename_columns({} if task.work == "images" else {"jpg": "image", "cls": "label"})
    shuffled = data.to_iterable_dataset(num_shards=64).shuffle(seed=task.seed, buffer_size=BUFFER)
    loader = DataLoader(shuffled, batch_size=task.batch, collate_fn=partial(batch_of, task), **processes(task))
    return Loading(lambda: loader)


class Skipping(BatchSampler):
    """A BatchSampler that leaves out the batches before a position, as accelerate's `skip_first_batches` does."""

    skipped = 0

    def seek(self, sample: int) -> None:
        """Begin the next epoch at this sample."""
        self.skipped = sample // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        skipped, self.skipped = self.skipped, 0
        return islice(super().__iter__(), skipped, None)


def of_arrays(columns: Any) -> Batch:
    """Return tensors of a batch of NumPy columns."""
    return torch.from_numpy(columns["tokens"]).long(), torch.from_numpy(columns["label"]).long()


Write = Callable[[Task, Path], None]
Load = Callable[[Task, Path], Loading]
SYSTEMS: dict[str, tuple[Write, Load]] = {
    "streaming": (write_mds, load_mds),
    "litdata": (write_litdata, load_litdata),
    "webdataset": (write_tars, load_tars),
    "grain": (write_array_records, load_grain),
    "datasets": (write_nothing, load_datasets),
}


if __name__ == "__main__":
    os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    import data_peers  # loader processes that are spawned find a module by its name

    data_peers.main(sys.argv[1], Task(**json.loads(sys.argv[2])))
