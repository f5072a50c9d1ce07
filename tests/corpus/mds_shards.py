"""Shards as MosaicML Streaming's `MDSWriter` writes them, without that package."""

from __future__ import annotations

import json

import numpy as np


def mds_shard(columns: list[tuple[str, str, int | None]], rows: list[list[bytes]]) -> bytes:
    """Return a shard, given (name, encoding, fixed size) of each column and the encoded values of each row."""
    about = {
        "column_names": [name for name, _, _ in columns],
        "column_encodings": [encoding for _, encoding, _ in columns],
        "column_sizes": [size for _, _, size in columns],
        "format": "mds",
    }
    header = json.dumps(about, sort_keys=True).encode()
    bodies = []
    for row in rows:
        sizes = [len(value) for value, (_, _, size) in zip(row, columns, strict=True) if size is None]
        bodies.append(np.array(sizes, np.uint32).tobytes() + b"".join(row))
    offsets = np.cumsum([4 + 4 * (len(rows) + 1) + len(header), *map(len, bodies)]).astype(np.uint32)
    return np.uint32(len(rows)).tobytes() + offsets.tobytes() + header + b"".join(bodies)
