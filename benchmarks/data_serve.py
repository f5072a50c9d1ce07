"""A process that loads data for `data.py`: digests of the samples and times of epochs, as lines of JSON.

Imported by the peers' interpreter and by paceline's, so it needs only torch and NumPy.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

Batch = tuple[Tensor, ...]  # of equal length
# mean and standard deviation of ImageNet's pixels
MEAN, STD = torch.tensor((0.485, 0.456, 0.406)).view(-1, 1, 1), torch.tensor((0.229, 0.224, 0.225)).view(-1, 1, 1)
SCALE, SHIFT = 1 / (255 * STD), -MEAN / STD


@dataclass(frozen=True)
class Task:
    """What is loaded, and how.

    Attributes:
        work: name of the workload: text, tokens, images, tars or tiny.
        source: folder with the corpus as it was made.
        own: folder for a system's own copy, in the format that its documentation recommends.
        workers: number of loader processes.
        tokenizer: file of the tokenizer, for `text`.
        context: tokens of a sample, for `text`.
        window: samples that are shuffled together; 0 is a system's own choice.
        pack: True to fill a sequence with several documents, for `text`.
    """

    work: str
    source: str
    own: str
    batch: int
    workers: int
    tokenizer: str = ""
    context: int = 0
    seed: int = 0
    window: int = 0
    pack: bool = False

    def text(self) -> str:
        """Return the task as JSON."""
        return json.dumps(asdict(self))


@dataclass
class Loading:
    """A loader of one task.

    Attributes:
        epoch: function that yields the batches of the next epoch.
        seek: function that loads the position before this sample, a multiple of the batch, of the first epoch; None if
            the system can only read everything before it.
    """

    epoch: Callable[[], Iterable[Any]]
    seek: Callable[[int], None] | None = None


def serve(open_loader: Callable[[], Loading], prepare: Callable[[], None]) -> None:
    """Answer requests on standard input; each request and each answer is one line of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some libraries print to standard output

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    prepare()
    begin = time.perf_counter()
    loading = open_loader()
    answer({"opened_s": time.perf_counter() - begin})
    for line in sys.stdin:
        question = json.loads(line)
        match question["ask"]:
            case "digest":
                answer(digest(loading.epoch()))
            case "epoch":
                answer(timed(iter(loading.epoch()), question["skip"]))
            case "from":
                answer(read_from(loading, question["sample"], question["batches"]))


def read_from(loading: Loading, sample: int, batches: int) -> dict[str, Any]:
    """Read batches from a position of the first epoch; return the seconds to the first one, and all digests."""
    begin = time.perf_counter()
    if loading.seek is not None:
        loading.seek(sample)
    reading = iter(loading.epoch())
    if loading.seek is None:
        read = 0
        while read < sample:
            read += len(next(reading)[0])
    found, first_s = [next(reading)], time.perf_counter() - begin
    found += [next(reading) for _ in range(batches - 1)]
    return {"first_s": first_s, "digests": [digest([batch]) for batch in found]}


def timed(batches: Iterator[Any], skip: int) -> dict[str, float]:
    """Read an epoch; return the number of samples after the first `skip` batches, and their time.

    What the loader read ahead while nothing was asked of it is thus not counted. `first_s` is the time to the first
    batch.
    """
    begin = start = time.perf_counter()
    first_s, samples = 0.0, 0
    for nth, batch in enumerate(batches, 1):
        used = len(_touched(batch)[0])
        if nth == 1:
            first_s = time.perf_counter() - begin
        if nth == skip:
            start = time.perf_counter()
        elif nth > skip:
            samples += used
    return {"samples": samples, "time_s": time.perf_counter() - start, "first_s": first_s}


def _touched(batch: Batch) -> Batch:
    """Read one value of each page, as a training step would read them all."""
    for tensor in batch:
        # in the order of the memory: `flatten` would copy a tensor whose channels come last
        tensor.as_strided((tensor.numel(),), (1,))[::512].sum()
    return batch


def digest(batches: Iterable[Any]) -> dict[str, Any]:
    """Return the number of samples, a digest of the multiset of samples, and one of their order."""
    count, total, order = 0, 0, hashlib.blake2b(digest_size=8)
    kinds: set[str] = set()
    for batch in batches:
        columns = [column.contiguous().numpy() for column in batch]
        kinds.add(" ".join(f"{column.dtype}{list(column.shape[1:])}" for column in columns))
        for row in range(len(columns[0])):
            of_row = hashlib.blake2b(digest_size=8)
            for column in columns:
                of_row.update(column[row].tobytes())
            order.update(of_row.digest())
            total = (total + int.from_bytes(of_row.digest(), "little")) % 2**64
            count += 1
    return {"samples": count, "multiset": f"{total:016x}", "order": order.hexdigest(), "kinds": sorted(kinds)}


# Samples, the same for all systems


def batch_of(task: Task, records: Sequence[Mapping[str, Any]]) -> Batch:
    """Decode and collate records in a loader process.

    A record has `text`, or `row` (int32 tokens and the label, as an array or bytes), or `image` (a JPEG or a picture of
    Pillow) and `label`.
    """
    if task.work == "text":
        return padded(encoder(task.tokenizer)([record["text"] for record in records]), task.context)
    if "row" in records[0]:
        if isinstance(records[0]["row"], bytes):
            rows = np.frombuffer(b"".join(record["row"] for record in records), np.int32).reshape(len(records), -1)
        else:
            rows = np.stack([record["row"] for record in records])
        whole = torch.from_numpy(rows.astype(np.int64))
        return whole[:, :-1].contiguous(), whole[:, -1].contiguous()
    images = torch.stack([planes(record["image"]) for record in records])
    return images.float().mul_(SCALE).add_(SHIFT), torch.tensor([int(record["label"]) for record in records])


def padded(documents: Sequence[Sequence[int]], context: int) -> Batch:
    """Return inputs and labels of a batch of documents, each cut or padded to `context`."""
    inputs = np.zeros((len(documents), context), np.int64)
    labels = np.full((len(documents), context), -100, np.int64)
    for row, ids in enumerate(documents):
        inputs[row, : min(len(ids), context)] = ids[:context]
        labels[row, : min(len(ids) - 1, context)] = ids[1 : context + 1]
    return torch.from_numpy(inputs), torch.from_numpy(labels)


@cache
def encoder(path: str) -> Callable[[list[str]], list[list[int]]]:
    """Return a function that tokenizes a batch, and ends each document; one of each loader process."""
    from tokenizers import Tokenizer

    found: Any = Tokenizer.from_file(path)
    end = found.token_to_id("<|endoftext|>")
    return lambda texts: [[*encoded.ids, end] for encoded in found.encode_batch_fast(texts)]


def planes(image: Any) -> Tensor:
    """Return the colour planes of a JPEG or of a picture of Pillow, shape (3, height, width)."""
    if isinstance(image, bytes):
        from PIL import Image

        image = Image.open(io.BytesIO(image))
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
