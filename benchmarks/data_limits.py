"""Packed compared with padded sequences, and the cost of a corpus of 10 TB; parts of `data.py`."""

from __future__ import annotations

import gc
import io
import json
import shutil
import tarfile
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

import data_corpora as corpora
from data_ours import data_of, loader_of
from data_serve import Task
from data_speed import SEED
from paceline.corpus.host_files import HostFiles
from paceline.corpus.shards import Corpus
from paceline.job.model import ModelSpec

# Packed against padded

DOCUMENTS, QUICK_DOCUMENTS, PACKED_CONTEXT = 2000, 200, 512
SHORT_DOCUMENTS, SHORT, SHORT_CONTEXT = 200, 350, 256  # characters of documents that fit into the context
GPT = {"vocab": corpora.VOCABULARY, "context": SHORT_CONTEXT, "layers": 2, "hidden": 64, "heads": 4}


def packed_measured(folder: Path, quick: bool) -> dict[str, float]:
    """Compare losses and gradients of documents packed and alone, and count useful tokens.

    The loss is of documents that fit into the context, as longer ones are cut if they are not packed.
    """
    tokenizer = str(corpora.tokenizer(folder))
    short = corpora.text(folder, SHORT_DOCUMENTS, longest=SHORT, shards=4)
    torch.manual_seed(0)
    model = ModelSpec.model_validate({"zoo": "gpt", "args": GPT}).build().double()
    task = Task("text", str(short), "", 4, 0, tokenizer, SHORT_CONTEXT, SEED)
    (alone, of_alone), (packed, of_packed) = (trained(model, replace(task, pack=pack)) for pack in (False, True))
    of_gradients = max(float((a - b).abs().max()) for a, b in zip(of_alone, of_packed, strict=True))
    print(f"loss: packed {packed:.14f}, alone {alone:.14f}; gradients differ by {of_gradients:.1e}")

    source = corpora.text(folder, QUICK_DOCUMENTS if quick else DOCUMENTS, longest=20_000, shards=4)
    task = Task("text", str(source), "", 8, 0, tokenizer, PACKED_CONTEXT, SEED)
    useful, useful_packed = (useful_share(replace(task, pack=pack)) for pack in (False, True))
    ratio = useful_packed / useful
    print(f"labels per position of a batch: packed {useful_packed:.3f}, padded {useful:.3f}, ratio {ratio:.2f}")
    return {
        "packed_loss_difference": abs(packed - alone),
        "packed_gradient_difference": of_gradients,
        "packed_useful_to_padded": ratio,
    }


def trained(model: torch.nn.Module, task: Task) -> tuple[float, list[Tensor]]:
    """Return the mean loss over all labels of an epoch, and its gradients."""
    model.zero_grad()
    total, counted = 0.0, 0
    for inputs, labels, positions in sequences(task):
        scores = model(inputs, positions)
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")
        loss.backward()
        total += float(loss.detach())
        counted += int((labels != -100).sum())
    return total / counted, [p.grad / counted for p in model.parameters() if p.grad is not None]


def useful_share(task: Task) -> float:
    """Return the share of the positions of an epoch's batches that have a label."""
    found = [(int((labels != -100).sum()), labels.numel()) for _, labels, _ in sequences(task)]
    return sum(useful for useful, _ in found) / sum(places for _, places in found)


def sequences(task: Task) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Yield inputs, labels and positions, which are None for documents that are alone."""
    with closing(loader_of(task, data_of(task))) as loader:
        for batch in loader:
            if isinstance(batch, dict):
                yield batch["input_ids"], batch["labels"], batch["position_ids"]
            else:
                yield *batch, None


# A corpus of 10 TB


BYTES, SHARD_BYTES = 10e12, 256e6
IMAGES = 101_000, 301_000  # more than 100,000, of which no digests are made
ROWS, QUICK_ROWS, SHARDS, QUICK_SHARDS, MOST_BYTES = 100_000, 10_000, 2000, 200, 400e6


@dataclass(frozen=True)
class Kind:
    """A format: how a file of some rows is written, and the bytes of a row in the corpus of 10 TB."""

    write: Callable[[Path, int], None]
    row_bytes: float
    one_row_files: bool = False


@dataclass
class Cost:
    """What it costs to open a corpus: bytes of memory, bytes of index, seconds without an index, and with it."""

    memory: float
    index: float
    first_s: float
    again_s: float

    def __sub__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, name) - getattr(other, name) for name in self.__dataclass_fields__))

    def per(self, count: float) -> Cost:
        """Divide all costs; those below 0, by chance, are 0."""
        return Cost(*(max(0.0, getattr(self, name)) / count for name in self.__dataclass_fields__))

    def times(self, count: float) -> Cost:
        """Multiply all costs."""
        return Cost(*(getattr(self, name) * count for name in self.__dataclass_fields__))

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


def size_measured(folder: Path, quick: bool) -> dict[str, float]:
    """Print what 10 TB cost in each format: costs of a row and of a shard are measured, and multiplied."""
    rows, shards = (QUICK_ROWS, QUICK_SHARDS) if quick else (ROWS, SHARDS)
    print(f"10 TB in shards of {SHARD_BYTES / 1e6:.0f} MB, computed from the measured costs of a row and of a shard")
    print("  format        row      rows    shards  memory MB   index MB  first start s  later starts s")
    figures: dict[str, float] = {}
    for name, kind in KINDS.items():
        with tempfile.TemporaryDirectory(prefix="paceline-size-", dir=folder) as place:
            opened(kind, Path(place) / "first", 4, 1)  # imports what the format needs
            cost = whole(kind, Path(place), rows, shards)
        of_rows, of_shards = BYTES / kind.row_bytes, BYTES / (kind.row_bytes if kind.one_row_files else SHARD_BYTES)
        print(
            f"  {name:8} {kind.row_bytes / 1e3:5.1f} kB {of_rows:9.2g} {of_shards:9.2g} {cost.memory / 1e6:10.0f} "
            f"{cost.index / 1e6:10.0f} {cost.first_s:14.0f} {cost.again_s:15.1f}",
            flush=True,
        )
        figures |= {f"size_{name}_{key}": getattr(cost, key) for key in cost.__dataclass_fields__}
    return figures


def whole(kind: Kind, place: Path, rows: int, shards: int) -> Cost:
    """Return the cost of 10 TB from small corpora: few shards, many shards, and few shards with many rows."""
    if kind.one_row_files:
        few, many = (opened(kind, place / str(count), count, 1) for count in IMAGES)
        return (many - few).per(IMAGES[1] - IMAGES[0]).times(BYTES / kind.row_bytes)
    rows = min(rows, int(MOST_BYTES / kind.row_bytes))
    sizes = ((4, 10), (shards, 10), (4, rows // 4))
    few, many, full = (opened(kind, place / str(nth), *numbers) for nth, numbers in enumerate(sizes))
    of_shard, of_row = (many - few).per(shards - 4), (full - few).per(rows - 40)
    return of_shard.times(BYTES / SHARD_BYTES) + of_row.times(BYTES / kind.row_bytes)


def opened(kind: Kind, place: Path, shards: int, rows: int) -> Cost:
    """Write a corpus, open it without an index and with one, and return its costs."""
    place.mkdir()
    for shard in range(shards):
        kind.write(place / f"{shard:06}", rows)
    cache = place.with_name(f"{place.name}-cache")

    def timed() -> tuple[Corpus, float]:
        begin = time.perf_counter()
        found = Corpus.open([str(place)], cache=HostFiles(cache, 1 << 40))
        return found, time.perf_counter() - begin

    _, first_s = timed()
    index = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    again_s = min(timed()[1] for _ in range(3))
    gc.collect()
    tracemalloc.start()
    corpus, _ = timed()
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(corpus) == shards * rows
    shutil.rmtree(place)
    return Cost(memory, index, first_s, again_s)


def write_jsonl(path: Path, rows: int) -> None:
    """Write documents of 4 kB."""
    path.with_suffix(".jsonl").write_text((json.dumps({"text": "word " * 797}) + "\n") * rows)


def write_parquet(path: Path, rows: int) -> None:
    """Write rows of 1,000 tokens, which hardly compress."""
    pq.write_table(tokens_table(rows), path.with_suffix(".parquet"), row_group_size=1024)


def write_arrow(path: Path, rows: int) -> None:
    """Write rows of 1,000 tokens."""
    table = tokens_table(rows)
    with pa.OSFile(f"{path}.arrow", "wb") as file, pa.ipc.new_file(file, table.schema) as new:
        new.write_table(table, max_chunksize=1024)


def tokens_table(rows: int) -> pa.Table:
    """Return rows of drawn tokens."""
    drawn = np.random.default_rng(0).integers(1 << 30, size=rows * 1000, dtype=np.int32)
    return pa.table({"tokens": pa.ListArray.from_arrays(np.arange(rows + 1, dtype=np.int32) * 1000, drawn)})


def write_tar(path: Path, rows: int) -> None:
    """Write pairs of an image of 110 kB, the mean of ImageNet, and its class."""
    with tarfile.open(f"{path}.tar", "w") as tar:
        for row in range(rows):
            for suffix, size in (("jpg", 109_000), ("cls", 1)):
                entry = tarfile.TarInfo(f"{row:08}.{suffix}")
                entry.size = size
                tar.addfile(entry, io.BytesIO(bytes(size)))


def write_image(path: Path, rows: int) -> None:
    """Write a file in the folder of a class; opening a corpus does not read it."""
    folder = path.parent / f"class_{int(path.name) % 10}"
    folder.mkdir(exist_ok=True)
    (folder / f"{path.name}.jpg").write_bytes(b"0")


KINDS = {
    "jsonl": Kind(write_jsonl, 4000),
    "parquet": Kind(write_parquet, 4000),
    "arrow": Kind(write_arrow, 4000),
    "tar": Kind(write_tar, 111_000),
    "images": Kind(write_image, 110_000, one_row_files=True),
}
