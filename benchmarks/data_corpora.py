"""Corpora of `data.py`: text of the standard library, its tokens, images of random noise, and millions of tiny rows.

The content of a corpus depends only on the arguments of its function. An existing corpus is not written again.
"""

from __future__ import annotations

import io
import json
import shutil
import sysconfig
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CONTEXT, VOCABULARY, END = 512, 8192, "<|endoftext|>"
SIDE, CLASSES = 256, 10
TINY, TINY_BASE = 8, 10_000  # tokens of a tiny row, and the base in which the first two tell its number
_MADE = "made"


def made(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return the folder, which `make` has filled completely."""
    if not (folder / _MADE).exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        make(folder)
        (folder / _MADE).touch()
    return folder


def documents(*, longest: int) -> Iterator[str]:
    """Yield pieces of the standard library's sources, which end at empty lines.

    Args:
        longest: most characters of a piece. Lengths are drawn, and most are well below it.
    """
    draw = np.random.default_rng(0)
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" in path.parts or "lib2to3" in path.parts:
            continue
        try:
            paragraphs = path.read_text("utf-8").split("\n\n")
        except UnicodeDecodeError:
            continue
        piece, wanted = "", 0
        for paragraph in paragraphs:
            wanted = wanted or int(min(longest, draw.lognormal(6.5, 1.0)))
            piece += paragraph.strip("\n") + "\n\n"
            if len(piece) >= wanted:
                yield piece[:longest]
                piece, wanted = "", 0


def tokenizer(folder: Path) -> Path:
    """Train a byte-level BPE tokenizer on the documents; return its file."""

    def make(made: Path) -> None:
        found = Tokenizer(models.BPE())
        found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        found.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        )
        found.train_from_iterator(islice(documents(longest=20_000), 5000), trainer)
        found.save(str(made / "tokenizer.json"))

    return made(folder / "tokenizer", make) / "tokenizer.json"


def text(folder: Path, rows: int, *, longest: int, shards: int = 16) -> Path:
    """Write JSONL files with a column `text`."""

    def make(made: Path) -> None:
        found = list(islice(documents(longest=longest), rows))
        if len(found) < rows:
            raise SystemExit(f"the standard library has only {len(found)} documents, not {rows}")
        for number, part in enumerate(_parts(rows, shards)):
            lines = [json.dumps({"text": found[row]}) + "\n" for row in part]
            (made / f"{number:05}.jsonl").write_text("".join(lines))

    return made(folder / f"text-{rows}-{longest}", make)


def tokens(folder: Path, rows: int, *, shards: int = 16) -> Path:
    """Write Parquet files with `tokens` (CONTEXT numbers) and `label`."""

    def make(made: Path) -> None:
        draw = np.random.default_rng(1)
        for number, part in enumerate(_parts(rows, shards)):
            # Zipf's law, as in text, so that the files compress as text's tokens do
            drawn = np.minimum(draw.zipf(1.2, (len(part), CONTEXT)), VOCABULARY) - 1
            lists = pa.ListArray.from_arrays(
                np.arange(len(part) + 1, dtype=np.int32) * CONTEXT, drawn.astype(np.int32).ravel()
            )
            labels = pa.array(draw.integers(CLASSES, size=len(part)))
            pq.write_table(
                pa.table({"tokens": lists, "label": labels}), made / f"{number:05}.parquet", row_group_size=1024
            )

    return made(folder / f"tokens-{rows}-{shards}", make)


def images(folder: Path, rows: int) -> Path:
    """Write a folder of JPEG files for each class."""

    def make(made: Path) -> None:
        for label in range(CLASSES):
            (made / f"class_{label}").mkdir()
        with ProcessPoolExecutor() as pool:
            for row, jpeg in enumerate(pool.map(drawn_jpeg, range(rows), chunksize=64)):
                (made / f"class_{row % CLASSES}" / f"{row:06}.jpg").write_bytes(jpeg)

    return made(folder / f"images-{rows}", make)


def tars(folder: Path, rows: int, *, shards: int = 16) -> Path:
    """Write the images of `images` into WebDataset's tar files: KEY.jpg and KEY.cls."""
    source = images(folder, rows)

    def make(made: Path) -> None:
        for number, part in enumerate(_parts(rows, shards)):
            with tarfile.open(made / f"{number:05}.tar", "w") as tar:
                for row in part:
                    jpeg = (source / f"class_{row % CLASSES}" / f"{row:06}.jpg").read_bytes()
                    for suffix, content in (("jpg", jpeg), ("cls", str(row % CLASSES).encode())):
                        entry = tarfile.TarInfo(f"{row:06}.{suffix}")
                        entry.size = len(content)
                        tar.addfile(entry, io.BytesIO(content))

    return made(folder / f"tars-{rows}", make)


def tiny_rows(folder: Path, rows: int, *, shards: int = 64) -> Path:
    """Write Arrow files with `tokens` (TINY numbers, the first two of which tell the row) and `label`."""

    def make(made: Path) -> None:
        for number, part in enumerate(_parts(rows, shards)):
            table = tiny_table(part)
            with pa.OSFile(str(made / f"{number:05}.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as new:
                new.write_table(table, max_chunksize=10_000)

    return made(folder / f"tiny-{rows}-{shards}", make)


def tiny_table(part: range) -> pa.Table:
    """Return the tiny rows with these numbers."""
    numbers = np.arange(part.start, part.stop, dtype=np.int32)
    values = np.zeros((len(part), TINY), np.int32)
    values[:, 0], values[:, 1] = numbers // TINY_BASE, numbers % TINY_BASE
    lists = pa.ListArray.from_arrays(np.arange(len(part) + 1, dtype=np.int32) * TINY, values.ravel())
    return pa.table({"tokens": lists, "label": pa.array(numbers.astype(np.int64) % CLASSES)})


def drawn_jpeg(row: int) -> bytes:
    """Return a JPEG of smooth noise with edges, about as large as a photograph of its size."""
    draw = np.random.default_rng(row)
    picture = np.zeros((SIDE, SIDE, 3))
    for cells, weight in ((4, 90), (16, 45), (64, 20), (256, 5)):
        coarse = draw.normal(0, weight, (cells, cells, 3))
        picture += coarse.repeat(SIDE // cells, 0).repeat(SIDE // cells, 1)
    written = io.BytesIO()
    Image.fromarray((picture + 128).clip(0, 255).astype(np.uint8)).save(written, "JPEG", quality=85)
    return written.getvalue()


def _parts(rows: int, shards: int) -> list[range]:
    return [range(shard * rows // shards, (shard + 1) * rows // shards) for shard in range(shards)]
