"""Every example of data of the reference of records trains as it is typed there."""

from __future__ import annotations

import csv
import io
import json
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
import yaml
from PIL import Image
from torch import Tensor, nn

from commands import losses
from corpus.mds_shards import mds_shard
from paceline.job.job import Job
from small_jobs import train_here

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "job.md"
EXAMPLES = dict(re.findall(r"^\| `(\w+)`.*\| `(\{kind: records.*\})` \|$", PAGE.read_text(), re.MULTILINE))
POINTS: list[dict[str, Any]] = [{"x": [float(n % 5), 1.0, 0.5, float(n % 3), 0.0, 2.0], "y": n % 3} for n in range(24)]


def jsonl(folder: Path) -> None:
    (folder / "points").mkdir()
    for nth in range(2):
        lines = [json.dumps(point) + "\n" for point in POINTS[nth::2]]
        (folder / "points" / f"{nth}.jsonl").write_text("".join(lines))


def table(folder: Path) -> None:
    with (folder / "houses.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["area", "rooms", "price"])
        rows.writerows([[50.5 + n, n % 4, 100.0 + n] for n in range(24)])


def parquet(folder: Path) -> None:
    (folder / "points").mkdir()
    pyarrow.parquet.write_table(pa.Table.from_pylist(POINTS), folder / "points" / "a.parquet")


def arrow(folder: Path) -> None:
    """As `datasets.Dataset.save_to_disk` writes it."""
    (folder / "saved").mkdir()
    points = pa.Table.from_pylist(POINTS)
    with pa.ipc.new_stream(folder / "saved" / "data-00000-of-00001.arrow", points.schema) as file:
        file.write_table(points)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_indices_files": None, "_split": None}
    (folder / "saved" / "state.json").write_text(json.dumps(state))


def picture(seed: int, kind: str) -> bytes:
    content = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (12, 10, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(content, kind)
    return content.getvalue()


def tar(folder: Path) -> None:
    (folder / "shards").mkdir()
    for shard in range(2):
        with tarfile.open(folder / "shards" / f"{shard:02}.tar", "w") as file:
            for nth in range(12):
                for ending, content in (("jpg", picture(nth, "JPEG")), ("cls", str(nth % 3).encode())):
                    about = tarfile.TarInfo(f"{shard}-{nth}.{ending}")
                    about.size = len(content)
                    file.addfile(about, io.BytesIO(content))


def mds(folder: Path) -> None:
    (folder / "mds").mkdir()
    rows = [[np.array(p["x"], np.float64).tobytes(), np.int64(p["y"]).tobytes()] for p in POINTS]
    columns: list[tuple[str, str, int | None]] = [("x", "ndarray:float64:6", 48), ("y", "int", 8)]
    content = mds_shard(columns, rows)
    (folder / "mds" / "shard.00000.mds").write_bytes(content)
    shard = {
        "column_encodings": [encoding for _, encoding, _ in columns],
        "column_names": [name for name, _, _ in columns],
        "column_sizes": [size for _, _, size in columns],
        "compression": None,
        "format": "mds",
        "hashes": [],
        "raw_data": {"basename": "shard.00000.mds", "bytes": len(content), "hashes": {}},
        "samples": len(rows),
        "size_limit": 1 << 26,
        "version": 2,
        "zip_data": None,
    }
    (folder / "mds" / "index.json").write_text(json.dumps({"shards": [shard], "version": 2}))


def images(folder: Path) -> None:
    for label in ("ants", "bees", "cows"):
        (folder / "photos" / label).mkdir(parents=True)
        for nth in range(8):
            (folder / "photos" / label / f"{nth}.png").write_bytes(picture(nth, "PNG"))


def lines(folder: Path) -> None:
    (folder / "notes").mkdir()
    (folder / "notes" / "a.txt").write_text("".join(f"{n % 5} {n % 3}\n" for n in range(24)))
    (folder / "lines.py").write_text(
        "import torch\n\n\ndef sample(row):\n    x, y = row['text'].split()\n"
        "    return torch.full((6,), float(x)), int(y)\n"
    )


WRITERS: dict[str, Callable[[Path], None]] = {
    "jsonl": jsonl,
    "csv": table,
    "parquet": parquet,
    "arrow": arrow,
    "tar": tar,
    "mds": mds,
    "images": images,
    "lines": lines,
}
REGRESSION = {"model": {"factory": f"{__file__}:Price"}, "loss": "mse"}


class Price(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, area: Tensor, rooms: Tensor) -> Tensor:
        price: Tensor = self.layer(torch.stack([area, rooms.float()], 1)).squeeze(1)
        return price


def pixels() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 3))


@pytest.mark.parametrize("kind", sorted(WRITERS.keys() | EXAMPLES.keys()))
def test_an_example_of_the_page_trains(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    WRITERS[kind](tmp_path)
    monkeypatch.chdir(tmp_path)
    job: dict[str, Any] = {
        "name": kind,
        "model": {"factory": f"{__file__}:pixels" if kind in ("tar", "images") else "small_jobs:plain"},
        "data": yaml.safe_load(EXAMPLES[kind]),
        "loss": "cross_entropy",
        "optimizer": {"name": "sgd", "lr": 1e-5},
        "global_batch": 8,
        "stop": {"epochs": 1},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job | (REGRESSION if kind == "csv" else {})))
    run = train_here(tmp_path / "run", Job.load(tmp_path / "job.yaml"))
    assert len(losses(run.path)) == 3
