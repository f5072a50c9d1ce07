"""Text as bytes, in windows: predict the next byte, or restore hidden ones."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.errors import DataError
from paceline.job.samples import DataSets, held_out_samples
from paceline.job.zoo.data.files import files_below, reading

if TYPE_CHECKING:
    from paceline.job.data import Text

MASK = 256  # the token that hides a byte
IGNORED = -100  # the label of a position that the loss leaves out
HIDDEN_SHARE = 0.15

_EXPECTED = "a text file, or a folder of text files"
_MAPPED_FROM_BYTES = 64 << 20  # larger files stay on disk, mapped; smaller ones are joined in memory
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]


def build_text(spec: Text, seed: int) -> DataSets:
    """Windows over all bytes of the files, in the given order; folders are sorted.

    The validation set is the last part of the bytes; training and validation windows share no byte.
    """
    with reading(spec.path[0], _EXPECTED):
        corpus = Corpus(_files(spec))
    # the byte after a window, which is the target of its last position
    overlap = 1 if spec.objective == "causal" else 0
    available = (corpus.size - overlap) // spec.context
    if available < 1:
        raise DataError(
            f"{_named(spec)}: {corpus.size} bytes of text; one sample of context {spec.context} needs "
            f"{spec.context + overlap}"
        )
    samples = min(available, spec.limit or available)
    kept = held_out_samples(samples, spec.held_out)
    one_each = overlap * (2 if kept else 1)  # each side has an overlap of its own
    end = corpus.size if samples == available else samples * spec.context + one_each
    if not kept:
        return DataSets(Windows(corpus, 0, end, spec, seed), None)
    cut = end - kept * spec.context - overlap
    if cut < spec.context + overlap:
        raise DataError(
            f"{_named(spec)}: {end} bytes of text are too few for a training and a validation sample; add text "
            "or set held_out: 0"
        )
    return DataSets(Windows(corpus, 0, cut, spec, seed), Windows(corpus, cut, end, spec, seed))


class Corpus:
    """The bytes of several files as one sequence.

    Large files are mapped, so the ranks of a host share one copy of them.
    """

    def __init__(self, files: list[Path]) -> None:
        self._parts: list[Bytes] = []
        small: list[Bytes] = []
        for file in files:
            size = file.stat().st_size
            if size >= _MAPPED_FROM_BYTES:
                self._parts += [*_joined(small), np.memmap(file, dtype=np.uint8, mode="r")]
                small = []
            elif size:
                small.append(np.fromfile(file, dtype=np.uint8))
        self._parts += _joined(small)
        self._starts = np.cumsum([0, *map(len, self._parts)]).tolist()

    @property
    def size(self) -> int:
        """Bytes in all files together."""
        return int(self._starts[-1])

    def read(self, start: int, size: int) -> Bytes:
        """`size` bytes from byte `start` on; they may span files."""
        part = bisect_right(self._starts, start) - 1
        piece = self._parts[part][start - self._starts[part] :][:size]
        if len(piece) == size:
            return piece
        return np.concatenate([piece, self.read(start + len(piece), size - len(piece))])


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of `context` bytes in `corpus[first:end]`, side by side.

    A sample is `(input, target)`, both int64 of shape (context,).

    `causal`: the target is the window one byte later. `masked`: 15 % of the positions are chosen; of these 80 % become
    token 256, 10 % a random byte, 10 % stay; the target is the byte there and -100 elsewhere (Devlin et al., 2019,
    arXiv:1810.04805). What is chosen depends on the seed, the epoch and the index alone.
    """

    labels = None

    def __init__(self, corpus: Corpus, first: int, end: int, spec: Text, seed: int) -> None:
        self.corpus = corpus
        self.first = first
        self.context = spec.context
        self.causal = spec.objective == "causal"
        self.samples = (end - first - self.causal) // spec.context
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Hide other bytes in this epoch than in the others."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = self.__getitems__([index])
        return inputs[0], target[0]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        if not all(0 <= i < self.samples for i in indices):
            raise IndexError(f"text sample out of range in {indices}: there are {self.samples}")
        read, context = self.corpus.read, self.context
        tokens = np.stack([read(self.first + i * context, context + self.causal) for i in indices]).astype(np.int64)
        if self.causal:
            both = torch.from_numpy(tokens)
            return both[:, :-1].contiguous(), both[:, 1:].contiguous()
        hidden, target = hide(tokens, keys=_sample_keys(self.seed, self.epoch, indices))
        return torch.from_numpy(hidden), torch.from_numpy(target)


def hide(tokens: npt.NDArray[np.int64], keys: Words) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Mask 15 % of each row's tokens, at least one.

    So every batch has equally many items per sample.

    Args:
        tokens: bytes, (samples, context).
        keys: one per sample; the same key hides the same positions.

    Returns:
        `(input, target)`, each (samples, context).
    """
    context = tokens.shape[1]
    counter: Words = np.arange(1, 2 * context + 1, dtype=np.uint64)
    noise = _mix(keys[:, None] + counter * _GOLDEN)
    order, fate = noise[:, :context], noise[:, context:]
    count = max(1, round(HIDDEN_SHARE * context))
    chosen = order <= np.partition(order, count - 1, axis=1)[:, count - 1 : count]
    # the high bits as a number in [0, 1); the low byte is free for the random token
    draw = (fate >> np.uint64(11)) * 2.0**-53
    replaced = np.where(draw < 0.8, MASK, np.where(draw < 0.9, (fate & np.uint64(0xFF)).astype(np.int64), tokens))
    return np.where(chosen, replaced, tokens), np.where(chosen, tokens, IGNORED)


def _sample_keys(seed: int, epoch: int, indices: list[int]) -> Words:
    epoch_key = _mix(_mix(np.array([seed], dtype=np.uint64) + _GOLDEN) + np.array([epoch], dtype=np.uint64) * _GOLDEN)
    return _mix(epoch_key + np.array(indices, dtype=np.uint64) * _GOLDEN)


def _mix(x: Words) -> Words:
    """The output function of SplitMix64 (Steele, Lea and Flood, 2014).

    Equal on every machine, and no generator's state to carry.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _files(spec: Text) -> list[Path]:
    files: list[Path] = []
    for path in spec.path:
        found = [Path(file) for file in files_below(path, spec.suffixes)] if path.is_dir() else [path]
        if not found:
            raise DataError(
                f"{path.absolute()}: no {' '.join(spec.suffixes)} file in this folder; name others by data.suffixes"
            )
        files += found
    return files


def _joined(arrays: list[Bytes]) -> list[Bytes]:
    return [np.concatenate(arrays)] if arrays else []


def _named(spec: Text) -> str:
    return ", ".join(str(path.absolute()) for path in spec.path)
