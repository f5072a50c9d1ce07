"""Losses of packed documents compared with losses of the same documents, padded to one sequence each.

Both jobs train on all documents in every step, in float64. Their losses are equal if no document influences another
document. The losses after the first step also depend on the gradients.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

import paceline
from paceline.job.job import Job

VOCABULARY, CONTEXT, STEPS = 62, 24, 3
PLANS = ("dp=1", "dp=2", "fsdp=2", "tp=2", "pp=2 microbatches=2", "fsdp=2 tp=2", "tp=2 pp=2 microbatches=2", "cp=2")


def packed_loss_difference(plans: Sequence[str] = PLANS) -> dict[str, float]:
    """Return the largest relative difference of a step's loss from the padded job, for each plan."""
    with tempfile.TemporaryDirectory() as folder:
        expected = _losses("padded", "dp=1", Path(folder, "padded"))
        found = {plan: _losses("packed", plan, Path(folder, f"packed-{i}")) for i, plan in enumerate(plans)}
    return {
        plan: max(abs(loss - other) / abs(other) for loss, other in zip(losses, expected, strict=True))
        for plan, losses in found.items()
    }


class Sequences(Dataset[dict[str, Tensor]]):
    """Sequences of `context` tokens; each has the documents of one entry of `rows`, and padding as a last document."""

    def __init__(self, rows: Sequence[Sequence[Tensor]], context: int = CONTEXT) -> None:
        self.rows = [sequence(row, context) for row in rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


class Packed(Sequences):
    """Sequences of several documents."""

    packed = True


def sequence(documents: Sequence[Tensor], context: int = CONTEXT) -> dict[str, Tensor]:
    """Make a sample of the documents in their order."""
    ids, positions = torch.zeros(context, dtype=torch.long), torch.zeros(context, dtype=torch.long)
    labels, at = torch.full((context,), -100), 0
    for document in documents:
        stop = at + len(document)
        ids[at:stop], positions[at:stop], labels[at : stop - 1] = document, torch.arange(len(document)), document[1:]
        at = stop
    positions[at:] = torch.arange(context - at)
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def documents(count: int = 48, longest: int = 20) -> list[Tensor]:
    """Draw documents of 2 to `longest` tokens."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, longest + 1, (count,), generator=draw).tolist()
    return [torch.randint(1, VOCABULARY, (length,), generator=draw) for length in lengths]


def packed(count: int = 48, context: int = CONTEXT) -> Packed:
    """Pack the documents in their order; a sequence ends before a document that does not fit."""
    rows: list[list[Tensor]] = [[]]
    for document in documents(count):
        if sum(map(len, rows[-1])) + len(document) > context:
            rows.append([])
        rows[-1].append(document)
    return Packed(rows, context)


def padded(count: int = 48, context: int = CONTEXT) -> Sequences:
    """Pad each document to one sequence."""
    return Sequences([[document] for document in documents(count)], context)


def _losses(data: str, plan: str, folder: Path) -> list[float]:
    samples = len(packed()) if data == "packed" else len(padded())
    sizes: dict[str, Any] = {"vocab": VOCABULARY, "context": CONTEXT, "layers": 4, "hidden": 32, "heads": 4}
    job = Job.model_validate(
        {
            "model": {"zoo": "gpt", "args": sizes},
            "data": {"kind": "dataset", "factory": f"{Path(__file__).resolve()}:{data}", "held_out": 0},
            "loss": "cross_entropy",
            "optimizer": {"name": "sgd", "lr": 0.5},
            "global_batch": samples,
            "precision": "fp64",
            "stop": {"steps": STEPS},
        }
    )
    run = paceline.train(job, plan, run=folder)
    return run.losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    differences = packed_loss_difference()
    if parser.parse_args().json:
        print(json.dumps({"packed_loss_difference": max(differences.values()), "of_plan": differences}))
    else:
        for plan, difference in differences.items():
            print(f"{plan:30} {difference:.1e}")
