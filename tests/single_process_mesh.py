"""The ranks of a plan played by one process.

Where each sits, and which part it holds of tensors that are divided in many ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from paceline.comm import Group
from paceline.planning.plan import AXES
from paceline.split.layout import Part, ShardLayout
from paceline.split.mesh import Mesh
from paceline.state.writer import Checkpointer, Snapshot

SHAPES = {  # of a model that has what is easily lost
    "embedding": (10, 6),  # tied to the head, so on the first and the last stage
    "qkv": (12, 6),  # three matrices in one
    "norm": (3,),  # so short that some ranks hold nothing of it
    "experts": (4, 2, 6),
    "scale": (),
}


def meshes(**sizes: int) -> Iterator[Mesh]:
    """The mesh of a plan with these degrees, as each of its ranks sees it, in the order of the ranks.

    No rank can talk to another.
    """
    sizes = {axis: sizes.get(axis, 1) for axis in AXES}
    for rank, place in enumerate(product(*(range(n) for n in sizes.values()))):
        yield Mesh(sizes, dict(zip(sizes, place, strict=True)), Group(rank, prod(sizes.values())), None, {})


def parts_of(mesh: Mesh) -> dict[str, Part]:
    """How a rank holds the tensors of `SHAPES`: tp, ep and then uneven fsdp; under pp those of its stage only."""
    sizes, place = mesh.sizes, mesh.place
    parts = {name: Part(name, ShardLayout.whole(shape)) for name, shape in SHAPES.items()}
    if sizes["tp"] > 1:
        _divide(parts["embedding"], "tp", 0, place["tp"], sizes["tp"])
        _divide(parts["qkv"], "tp", 0, place["tp"], sizes["tp"], sections=(4, 4, 4))
    if sizes["ep"] > 1:
        _divide(parts["experts"], "ep", 0, place["ep"], sizes["ep"])
    if sizes["fsdp"] > 1:
        for part in parts.values():
            if part.layout.full:
                length = part.layout.shape[0]
                each = -(-length // sizes["fsdp"])
                begin = min(each * place["fsdp"], length)
                part.layout = part.layout.narrow(0, begin, min(begin + each, length))
                part.sharded.add("fsdp")
    if sizes["pp"] > 1:
        parts["embedding"].stages = 2
        parts["embedding"].writes = place["pp"] == 0
        stages = {"embedding": {0, sizes["pp"] - 1}, "qkv": {0}, "norm": {0}, "experts": {1}, "scale": {1}}
        parts = {name: part for name, part in parts.items() if place["pp"] in stages[name]}
    return parts


def own_parts(full: Mapping[str, Tensor], parts: Mapping[str, Part]) -> dict[str, Tensor]:
    """What a rank holds of full tensors."""
    return {name: part.layout.take(full[name]).clone() for name, part in parts.items()}


def random_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Full tensors of `SHAPES`, float64."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def save_all(folder: Path, step: int, snapshots: list[Snapshot], *, deadline_s: float = 30.0) -> Path:
    """One checkpoint of all ranks; an error of rank 0 is raised when the others are done."""
    world = len(snapshots)
    writers = [
        Checkpointer(folder, rank=r, world=world, keep=2, deadline_s=deadline_s, report=lambda *_: None)
        for r in range(world)
    ]
    for writer, snapshot in zip(writers, snapshots, strict=True):
        writer.save(step, snapshot)
    for writer in reversed(writers):
        writer.close()
    return folder / f"step-{step:08d}"


def _divide(part: Part, axis: str, dim: int, index: int, of: int, sections: tuple[int, ...] | None = None) -> None:
    part.layout = part.layout.divide(dim, index, of, sections)
    part.sharded.add(axis)
