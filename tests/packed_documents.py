"""Documents, and data sets that pack them into sequences or pad each to one sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

VOCABULARY, CONTEXT = 61, 24


class Sequences(Dataset[dict[str, Tensor]]):
    """Sequences of `context` tokens; each has the documents of one entry of `rows`, and padding as a last document."""

    def __init__(self, rows: Sequence[Sequence[Tensor]], context: int = CONTEXT) -> None:
        self.rows = [sequence(row, context) for row in rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


class Packed(Sequences):
    packed = True


def sequence(documents: Sequence[Tensor], context: int = CONTEXT) -> dict[str, Tensor]:
    ids, positions = torch.zeros(context, dtype=torch.long), torch.zeros(context, dtype=torch.long)
    labels, at = torch.full((context,), -100), 0
    for document in documents:
        stop = at + len(document)
        ids[at:stop], positions[at:stop], labels[at : stop - 1] = document, torch.arange(len(document)), document[1:]
        at = stop
    positions[at:] = torch.arange(context - at)
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def documents(count: int = 48, longest: int = 20, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest + 1, (count,), generator=draw).tolist()
    return [torch.randint(1, VOCABULARY, (length,), generator=draw) for length in lengths]


def packed(count: int = 48, context: int = CONTEXT) -> Packed:
    """Documents in their order, each in the first sequence with room after the last one used."""
    rows: list[list[Tensor]] = [[]]
    for document in documents(count):
        if sum(map(len, rows[-1])) + len(document) > context:
            rows.append([])
        rows[-1].append(document)
    return Packed(rows, context)


def padded(count: int = 48, context: int = CONTEXT) -> Sequences:
    """The same documents, one in each sequence."""
    return Sequences([[document] for document in documents(count)], context)
