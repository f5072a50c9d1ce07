"""paceline's splits beside the same parallelism by hand on PyTorch's own API.

On the same ranks, weights and batches.

    python benchmarks/split_speed.py [--json]

Figures:
- `ratio_to_torch_fsdp`, `ratio_to_torch_tp`, `ratio_to_torch_pp`: our step time / that of FSDP2's `fully_shard` per
  layer, of `parallelize_module` with `ColwiseParallel` and `RowwiseParallel`, and of `PipelineStage` with
  `Schedule1F1B`, for a Llama of 4 layers on 2 ranks, over the same transport; `worst_ratio_to_torch` is the largest.
  Less than 1: ours is faster. Our step includes what a run needs (the norm of the gradient, agreement on loss and
  votes, timing); the hand-written one is forward, backward and fused AdamW alone.
- `balanced_ratio`: the step time of a pipeline cut by the number of blocks / cut by measured cost, for a model whose
  first blocks are wider; `balanced_ratio_predicted`: what the time of each block, measured alone, predicts for the
  passes of a step.
- `zero3_state_share`: bytes of parameters, gradients and AdamW's state that one of 4 ranks holds under fsdp=4 / those
  of an undivided model (largest rank); `zero3_state_to_prediction`: what it holds / what shapes alone predict.
- `applied_peak_to_shard`: how far a rank's memory rises at most while fsdp=4 is applied to a Llama of 1.1 billion
  parameters, from before the model is made until every weight is drawn / the bytes of its shard (largest rank). The
  undivided model would be 4.

Both ways live in the same processes and take turns, in blocks of steps; a block's time is that of its slowest rank, and
each ratio is of neighbouring blocks (median, 95 % interval). Before any time is taken, both train the same steps and
their losses are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from measure import environment_line, parser_of, print_figures
from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.job.job import Job
from paceline.planning.plan import Plan
from paceline.run.build import build_engine, built, seed_all
from paceline.split.layout import held_bytes, predicted_bytes
from paceline.stats import Interval, median_interval
from served import Ranks

LLAMA = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}
BATCH, TOKENS, MICROBATCHES, LR = 8, 128, 4, 1e-3
PLANS = {"fsdp": "fsdp=2", "tp": "tp=2", "pp": f"pp=2 microbatches={MICROBATCHES}"}
COUNT, COST = "by number of blocks", "by measured cost"
WIDE, NARROW = 2048, 256  # of the MLPs of uneven blocks
STARTS, BLOCKS, STEPS, WARM_UP = 3, 8, 4, 3
Step = Callable[[int], float]  # takes the step of that number; returns its loss


def main() -> None:
    """Measure, print the table, and with --json a last line for machines."""
    parser = parser_of(__doc__)
    parser.add_argument("--serve", metavar="CASE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    figures = {}
    print(
        f"step time, Llama of 4 layers, batch {BATCH} x {TOKENS} tokens, 2 ranks (median of {STARTS} x {BLOCKS} blocks)"
    )
    print(f"{'':28}{'ours':>12}{'torch':>12}   ours / torch")
    for case, plan in PLANS.items():
        ours, torchs = compared(case, ("ours", "torch"))
        ratio = ratio_of(ours, torchs)
        figures[f"ratio_to_torch_{case}"] = ratio.middle
        print(f"{plan:28}{milliseconds(ours):>12}{milliseconds(torchs):>12}   {text(ratio)}", flush=True)
    figures["worst_ratio_to_torch"] = max(figures.values())
    figures |= uneven()
    figures |= state()
    figures |= large()
    print(environment_line())
    if arguments.json:
        print_figures({name: round(value, 4) for name, value in figures.items()})


def compared(case: str, sides: tuple[str, str]) -> tuple[list[float], list[float]]:
    """Seconds a step of both sides, block by block, after their losses agreed."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(STARTS):
        with Ranks([__file__, "--serve", case], ranks=2) as group:
            losses = [group.ask({"side": side, "steps": WARM_UP})[-1]["losses"] for side in sides]
            if any(abs(a - b) > 1e-4 * abs(b) for a, b in zip(*losses, strict=True)):
                raise SystemExit(f"{case}: the losses differ, so the times cannot be compared: {losses}")
            for _ in range(BLOCKS):
                for side, found in zip(sides, times, strict=True):
                    found.append(max(answer["step_s"] for answer in group.ask({"side": side, "steps": STEPS})))
    return times


def uneven() -> dict[str, float]:
    """A pipeline of uneven blocks, cut in two ways."""
    count, cost = compared("uneven", (COUNT, COST))
    with Ranks([__file__, "--serve", "uneven"], ranks=2) as group:
        loads = group.ask({"loads": True})[0]
    ratio = ratio_of(count, cost)
    predicted = loads[COUNT] / loads[COST]
    both = f"{COUNT} {milliseconds(count)}, {COST} {milliseconds(cost)}"
    print(f"pipeline of uneven blocks     {both}: {text(ratio)}, predicted {predicted:.2f}")
    return {"balanced_ratio": ratio.middle, "balanced_ratio_predicted": predicted}


def state() -> dict[str, float]:
    """What a rank of fsdp=4 holds."""
    with Ranks([__file__, "--serve", "state"], ranks=4) as group:
        answers = group.ask({})
    held, whole, predicted = max(a["held"] for a in answers), answers[0]["whole"], max(a["predicted"] for a in answers)
    print(
        f"state of a rank, fsdp=4       {held / 1e6:.2f} MB of {whole / 1e6:.2f} MB: {held / whole:.4f}; "
        f"predicted {predicted / 1e6:.2f} MB"
    )
    return {"zero3_state_share": held / whole, "zero3_state_to_prediction": held / predicted}


def large() -> dict[str, float]:
    """What a rank holds at most while a large model is divided."""
    with Ranks([__file__, "--serve", "large"], ranks=4, deadline_s=600) as group:
        answers = group.ask({})
    risen, shard = max(a["peak"] - a["before"] for a in answers), max(a["shard"] for a in answers)
    print(
        f"1.1 billion parameters        a rank's memory rises by {risen / 2**30:.2f} GiB to hold a shard of "
        f"{shard / 2**30:.2f} GiB"
    )
    return {"applied_peak_to_shard": risen / shard}


def ratio_of(a: list[float], b: list[float]) -> Interval:
    """a / b over neighbouring blocks."""
    return median_interval([x / y for x, y in zip(a, b, strict=True)])


def milliseconds(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f} ms"


def text(ratio: Interval) -> str:
    return f"{ratio.middle:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


# On the ranks


def serve(case: str) -> None:
    """Answer questions as a rank."""
    with joined(deadline_s=120, transport="shm") as group, tempfile.TemporaryDirectory() as folder:
        if case in ("state", "large"):
            for _ in sys.stdin:
                found = (
                    held_under_fsdp(Path(folder), group) if case == "state" else peak_while_applied(Path(folder), group)
                )
                print(json.dumps(found), flush=True)
            return
        sides, loads = _uneven_sides(group) if case == "uneven" else ({}, {})
        if case != "uneven":
            sides = {"ours": ours(llama(Path(folder)), PLANS[case], group), "torch": BY_HAND[case](Path(folder), group)}
        taken = dict.fromkeys(sides, 0)
        for line in sys.stdin:
            question = json.loads(line)
            if question.get("loads"):
                print(json.dumps(loads), flush=True)
                continue
            side, steps = question["side"], question["steps"]
            group.barrier()
            started = time.perf_counter()
            losses = [sides[side](taken[side] + i) for i in range(steps)]
            print(json.dumps({"step_s": (time.perf_counter() - started) / steps, "losses": losses}), flush=True)
            taken[side] += steps


def llama(folder: Path, **changes: int) -> Job:
    """The job that all sides train; `changes` to its model."""
    file = folder / f"llama-{len(changes)}.json"
    file.write_text(json.dumps(LLAMA | changes))
    return Job(**_job({"hf": file, "task": "causal_lm"}))


def _job(model: Any) -> dict[str, Any]:
    return {
        "model": model,
        "data": {"kind": "synthetic", "samples": 64, "shape": [TOKENS], "vocab": LLAMA["vocab_size"], "held_out": 0},
        "loss": "cross_entropy",
        "optimizer": {"name": "adamw", "lr": LR},
        "global_batch": BATCH,
        "partition": {"shuffle": False},
        "stop": {"steps": 1},
    }


def ours(job: Job, plan: str, group: Group) -> Step:
    """Paceline's engine under a plan."""
    engine = _engine(job, plan, group)
    batches = _endless(engine.loader)

    return partial(_step, engine, batches)


def _engine(job: Job, plan: str, group: Group) -> Any:
    parsed = Plan.parse(plan)
    seed_all(job.seed)
    model = built(job, parsed)
    data = job.data.build(input_shape=None, seed=job.seed)
    return build_engine(job, parsed, model, data, group)


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


class Batches:
    """The job's batches, in the job's order."""

    def __init__(self, job: Job) -> None:
        self.train = job.data.build(input_shape=None, seed=job.seed).train

    def __call__(self, number: int) -> tuple[Tensor, Tensor]:
        first = number * BATCH % len(self.train)  # type: ignore[arg-type]
        batch: tuple[Tensor, Tensor] = self.train.__getitems__(list(range(first, first + BATCH)))  # type: ignore[attr-defined]
        return batch


def _by_hand(folder: Path) -> tuple[Any, Batches]:
    job = llama(folder)
    seed_all(job.seed)
    return job.model.build(), Batches(job)


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def torch_fsdp(folder: Path, group: Group) -> Step:
    """FSDP2, as its documentation has it: every layer, then the model."""
    model, batches = _by_hand(folder)
    mesh = init_device_mesh("cpu", (group.size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)

    def step(number: int) -> float:
        tokens, target = batches(number)
        optimizer.zero_grad()
        loss = _loss(model(tokens.chunk(group.size)[group.rank]).logits, target.chunk(group.size)[group.rank])
        loss.backward()
        optimizer.step()
        mean = loss.detach() / group.size
        dist.all_reduce(mean)
        return float(mean)

    return step


def torch_tp(folder: Path, group: Group) -> Step:
    """`parallelize_module`: columns, then rows; the embedding by rows of its table, the head by columns."""
    model, batches = _by_hand(folder)
    mesh = init_device_mesh("cpu", (group.size,))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    for layer in model.model.layers:
        parallelize_module(
            layer, mesh, {**{n: ColwiseParallel() for n in columns}, **{n: RowwiseParallel() for n in rows}}
        )
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
    # a fused step supports either tensors or DTensors
    split = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    groups = [{"params": split}, {"params": whole}]
    optimizer = torch.optim.AdamW(groups, lr=LR, weight_decay=0.0, fused=True)

    def step(number: int) -> float:
        tokens, target = batches(number)
        optimizer.zero_grad()
        loss = _loss(model(tokens).logits, target)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


class Half(nn.Module):
    """Two of the layers, with the embedding before the first ones and the head behind the last ones."""

    def __init__(self, model: Any, rank: int) -> None:
        super().__init__()
        self.embed = model.model.embed_tokens if rank == 0 else None
        self.rotary = model.model.rotary_emb
        self.layers = model.model.layers[:2] if rank == 0 else model.model.layers[2:]
        self.norm = None if rank == 0 else model.model.norm
        self.head = None if rank == 0 else model.lm_head

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        positions = torch.arange(x.shape[1])[None]
        rotary = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, position_embeddings=rotary, position_ids=positions)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def torch_pp(folder: Path, group: Group) -> Step:
    """`PipelineStage` and `Schedule1F1B` over modules cut by hand."""
    model, batches = _by_hand(folder)
    stage = PipelineStage(Half(model, group.rank), group.rank, group.size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=_loss)
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=LR, weight_decay=0.0, fused=True)

    def step(number: int) -> float:
        tokens, target = batches(number)
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if group.rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=target, losses=losses)
        optimizer.step()
        return float(torch.stack(losses).detach().mean()) if losses else 0.0

    return step


BY_HAND: dict[str, Callable[[Path, Group], Step]] = {"fsdp": torch_fsdp, "tp": torch_tp, "pp": torch_pp}


class Uneven(nn.Module):
    """A trunk of 8 blocks whose MLPs are 8 times as wide in the first three."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(LLAMA["vocab_size"], 256)  # type: ignore[arg-type]
        self.blocks = nn.ModuleList(Mlp(WIDE if i < 3 else NARROW) for i in range(8))
        self.head = nn.Linear(256, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


class Mlp(nn.Module):
    """A residual MLP of some width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, width), nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


def _uneven_sides(group: Group) -> tuple[dict[str, Step], dict[str, float]]:
    job = Job(**{**_job(f"{__file__}:Uneven"), "loss": f"{__file__}:small_loss"})
    middle = "blocks.4"
    engines = {
        COUNT: _engine(job, f"pp=2 microbatches={MICROBATCHES} cut={middle}", group),
        COST: _engine(job, f"pp=2 microbatches={MICROBATCHES}", group),
    }
    batches = {side: _endless(engine.loader) for side, engine in engines.items()}
    block_s = {width: _block_s(width) for width in (WIDE, NARROW)}
    loads = {side: _predicted(group.gather_json(_stage_s(engine, block_s))) for side, engine in engines.items()}
    return {side: partial(_step, engines[side], batches[side]) for side in engines}, loads


def _block_s(width: int) -> float:
    """Seconds of a block's forward and backward pass of a microbatch, alone on this rank."""
    block, x = Mlp(width), torch.randn(BATCH // MICROBATCHES, TOKENS, 256, requires_grad=True)
    taken = []
    for _ in range(20):
        started = time.perf_counter()
        block(x).sum().backward()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def _stage_s(engine: Any, block_s: dict[int, float]) -> float:
    return sum(block_s[block.up.out_features] for block in engine.split.pipeline.blocks())


def _predicted(of_stages: list[float]) -> float:
    """The passes of a step.

    The slower stage computes all microbatches, the other one before or behind it a single one.
    """
    return MICROBATCHES * max(of_stages) + min(of_stages)


def _step(engine: Any, batches: Iterator[Any], number: int) -> float:
    return float(engine.step(next(batches)).loss)


def small_loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy over 64 classes, so that the head weighs nothing."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten() % 64)


def held_under_fsdp(folder: Path, group: Group) -> dict[str, int]:
    """Bytes of state after two steps."""
    engine = _engine(llama(folder), f"fsdp={group.size}", group)
    batches = _endless(engine.loader)
    for _ in range(2):
        engine.step(next(batches))
    held = held_bytes(engine.named_parameters().values(), engine.optimizer).total
    predicted = predicted_bytes(engine.parts, engine.named_parameters(), llama(folder).optimizer).total
    whole = 4 * 4 * engine.parameter_count
    engine.close()
    return {"held": held, "predicted": predicted, "whole": whole}


def peak_while_applied(folder: Path, group: Group) -> dict[str, int]:
    """Resident bytes before, and at most during, the division of a model.

    The model has 1.1 billion parameters, whose weights are drawn meanwhile.
    """
    sizes = {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "vocab_size": 32_000,
        "num_attention_heads": 32,
    }
    job = llama(folder, **sizes)
    small = _engine(llama(folder, num_hidden_layers=1), f"fsdp={group.size}", group)  # loads all libraries
    small.close()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    engine = _engine(job, f"fsdp={group.size}", group)
    peak = _status("VmHWM")
    shard = sum(p.nbytes for p in engine.named_parameters().values())
    engine.close()
    return {"before": before, "peak": peak, "shard": shard}


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
