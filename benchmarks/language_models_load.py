"""Bytes that a rank reads, and memory that it takes, to load its part of an 8B-shaped checkpoint.

    python benchmarks/language_models_load.py [--plan fsdp=8] [--dtype bf16|fp32] [--json]

The checkpoint has the tensors of Llama-3.1-8B in bf16, in four safetensors files with an index. The files are sparse:
they have their full size, but take no room on the disk, and every number in them is zero. A process plays one rank of
the plan at a time, with torch's process group `fake`, which sends nothing. It builds the model, divides it and loads
its part, with the functions of a run.

*Bytes read* is the growth of `rchar` in /proc/self/io, which counts all bytes that the process got from files.
paceline reads with `pread` and maps no file, so no page fault reads weights beside this count; what Python reads to
import modules during the measurement is part of it. *Peak memory* is the growth of the peak resident memory (VmHWM),
which is reset before the measurement, over the resident memory at this time. Everything was imported before. The
*share* is what the rank holds in the end: of the file's bytes for the reading, of its own tensors for the memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure import parser_of, print_figures

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.planning.plan import Plan
    from paceline.split.apply import Split
    from paceline.split.mesh import Mesh

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
FILES = 4
_CONTEXT = 128


@dataclass(frozen=True)
class Loading:
    """What one rank read and held.

    Attributes:
        read_bytes: bytes that the rank got from files.
        share_bytes: bytes of its part in the files.
        peak_bytes: growth of the resident memory at its peak.
        held_bytes: bytes of its parameters in the end.
    """

    rank: int
    read_bytes: int
    share_bytes: int
    peak_bytes: int
    held_bytes: int

    @property
    def read_to_share(self) -> float:
        """Bytes read, relative to the rank's part of the files."""
        return self.read_bytes / self.share_bytes

    @property
    def peak_to_share(self) -> float:
        """Peak memory, relative to what the rank holds."""
        return self.peak_bytes / self.held_bytes


def main() -> None:
    """Measure every rank, and print a table."""
    parser = parser_of(__doc__)
    parser.add_argument("--plan", default="fsdp=8")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"], help="type in which weights are held")
    parser.add_argument("--rank", type=int, help="measure only this rank; default: the first and the last")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        print(json.dumps(asdict(_measure_here(options.folder, options.plan, options.rank, options.dtype))))
        return
    ranks = [options.rank] if options.rank is not None else None
    found = measure_loading(options.plan, dtype=options.dtype, ranks=ranks)
    print(f"{options.plan}, weights held in {options.dtype}; GB\n")
    print("rank    read   share  ratio    peak    held  ratio")
    for one in found:
        read, share, peak, held = (n / 1e9 for n in (one.read_bytes, one.share_bytes, one.peak_bytes, one.held_bytes))
        ratios = one.read_to_share, one.peak_to_share
        print(f"{one.rank:4} {read:7.3f} {share:7.3f} {ratios[0]:6.3f} {peak:7.3f} {held:7.3f} {ratios[1]:6.3f}")
    if options.json:
        print_figures(figures(found))


def figures(found: list[Loading]) -> dict[str, float | None]:
    """Return the figures of the benchmark: the largest ratios of all ranks."""
    return {
        "loading_read_to_share": round(max(one.read_to_share for one in found), 4),
        "loading_peak_to_share": round(max(one.peak_to_share for one in found), 4),
    }


def measure_loading(
    plan: str = "fsdp=8",
    *,
    dtype: str = "bf16",
    ranks: list[int] | None = None,
    config: dict[str, Any] = LLAMA_8B,
) -> list[Loading]:
    """Measure ranks of a plan one after the other, each in a process of its own.

    Args:
        dtype: type in which the weights are held, `bf16` or `fp32`.
        ranks: the ranks to measure; None for the first and the last.
        config: configuration of the model.
    """
    from paceline.planning.plan import Plan

    last = Plan.parse(plan).ranks - 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_checkpoint(folder, config)
        return [_in_a_process(folder, plan, rank, dtype) for rank in (ranks or dict.fromkeys((0, last)))]


def make_checkpoint(folder: Path, config: dict[str, Any], *, files: int = FILES) -> None:
    """Write a configuration, and sparse safetensors files in bf16 with an index."""
    import torch

    from paceline.job.model import ModelSpec

    (folder / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = ModelSpec(hf=folder / "config.json").build()
    tied = config.get("tie_word_embeddings") and "lm_head.weight"
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items() if name != tied}
    share = -(-len(shapes) // files)
    where: dict[str, str] = {}
    for number in range(files):
        file = folder / f"model-{number + 1:05}-of-{files:05}.safetensors"
        end, header = 0, {}
        for name in list(shapes)[number * share : (number + 1) * share]:
            size = 2 * torch.Size(shapes[name]).numel()
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [end, end + size]}
            end, where[name] = end + size, file.name
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with file.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def _in_a_process(folder: Path, plan: str, rank: int, dtype: str) -> Loading:
    command = [sys.executable, __file__, "--folder", str(folder), "--plan", plan, "--rank", str(rank), "--dtype", dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise RuntimeError(f"rank {rank} failed:\n{done.stderr[-4000:]}")
    return Loading(**json.loads(done.stdout.splitlines()[-1]))


def _measure_here(folder: Path, plan_text: str, rank: int, dtype: str) -> Loading:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from paceline.comm import Group
    from paceline.planning.plan import Plan
    from paceline.split.mesh import Mesh

    plan = Plan.parse(plan_text)
    dist.init_process_group("fake", rank=rank, world_size=plan.ranks, store=FakeStore())
    mesh = Mesh.of(plan, Group(rank, plan.ranks, dist.group.WORLD, hosts=(0,) * plan.ranks))
    with (
        tempfile.TemporaryDirectory() as name
    ):  # a small model first: what is imported and cached is no memory of weights
        small = json.loads((folder / "config.json").read_text())
        heads = {key: small[key] for key in ("num_attention_heads", "num_key_value_heads")}
        sizes = {"vocab_size": 64, "hidden_size": 8 * heads["num_attention_heads"], "intermediate_size": 64}
        make_checkpoint(Path(name), {**small, **sizes, "num_hidden_layers": 2 * plan.pp})
        _load(Path(name), plan, mesh, dtype)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak of the resident memory
    before, began = _status("VmRSS"), _read_bytes()
    split = _load(folder, plan, mesh, dtype)
    read, peak = _read_bytes() - began, _status("VmHWM") - before
    parts = [split.parts[name].layout.numel for name in split.parameters]
    held = {id(tensor): tensor.nbytes for tensor in map(_own, split.parameters.values())}
    return Loading(rank, read, 2 * sum(parts), peak, sum(held.values()))


def _load(folder: Path, plan: Plan, mesh: Mesh, dtype: str) -> Split:
    """Build the model, divide it and load this rank's part, as a run does."""
    from paceline.engine.split_model import divide
    from paceline.job.job import Job
    from paceline.run import build
    from paceline.run.convert import load_weights

    job = Job(
        model={"hf": folder, "dtype": dtype},
        data={"kind": "synthetic", "samples": 64, "shape": [_CONTEXT], "vocab": 64, "held_out": 0},
        loss="cross_entropy",
        optimizer="sgd",
        precision="bf16",
        global_batch=8,
        stop={"steps": 1},
    )
    loader = build.loader_of(job, mesh, job.data.build(input_shape=None, seed=0))
    recorded = build.built(job, plan)
    source = build.published(job, recorded)
    assert source is not None
    split = divide(recorded, plan, mesh, loader, job.loss.build(), build.settings_of(job), loaded=list(source))
    load_weights(split.parameters, split.parts, source)
    return split


def _own(tensor: Tensor) -> Tensor:
    from paceline.split.layout import local

    return local(tensor)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def _read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().splitlines()[0].split()[1])


if __name__ == "__main__":
    main()
