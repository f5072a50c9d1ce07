"""What each piece of the cost model is worth on published runs: their error with it and without it.

    python benchmarks/published_ablation.py [--tables DIR] [--json]

Every row is predicted without its source (`tables/fits.json`). Every piece is taken out alone, and the other constants
stay: what a refit would hide is part of what the piece does. Columns: the mean error without the piece less that with
it, for all rows and over tables, cold and calibrated by factors of the table's set-aside rows; and the rows whose step
time the piece moves by more than 1 %. A piece that is not worth its place has no or a negative difference.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from measure import parser_of
from paceline.planning.cost import compute, constants
from paceline.planning.cost import compute as attention
from paceline.planning.cost import compute as products
from paceline.planning.cost import estimate as state_traffic
from paceline.planning.cost import layout as traffic
from paceline.planning.cost.estimate import step_time_s
from paceline.planning.cost.layout import Layout
from paceline.planning.machines import regression
from paceline.planning.tables.layouts import Row
from published_fit import FITS
from published_rows import TABLES, read, set_aside, source
from published_score import mean

# a row is moved by a piece if its time changes by more, relative
MOVED = 0.01


@dataclass(frozen=True)
class Piece:
    """A piece of the model.

    Attributes:
        source: where it is from.
        patched: values of modules' names without it.
        fitted: values of fitted constants without it.
        layout: a layout without it.
    """

    name: str
    source: str
    patched: Mapping[tuple[Any, str], object] = field(default_factory=dict)
    fitted: Mapping[str, float] = field(default_factory=dict)
    layout: Callable[[Layout], Layout] = lambda layout: layout


def constant(**values: object) -> dict[tuple[Any, str], object]:
    """Values of constants."""
    return {(constants, name): value for name, value in values.items()}


def framework(**values: object) -> Callable[[Layout], Layout]:
    """Layouts whose framework has other properties."""
    return lambda layout: replace(layout, framework=replace(layout.framework, **values))  # type: ignore[arg-type]


def in_hosts_of_eight(layout: Layout) -> Layout:
    """The same devices, with links inside eight at most."""
    machines, device = layout.machines, layout.machines.device
    if not device.is_gpu or machines.per_host <= 8:
        return layout
    hosts = -(-machines.devices // 8)
    return replace(layout, machines=replace(machines, hosts=hosts, per_host=8))


def flat_attention(speed: attention.KernelSpeed) -> dict[tuple[Any, str], object]:
    """One speed of all kernels on all devices."""
    return {(attention, "KERNELS"): {kernel: {"": speed} for kernel in attention.KERNELS}}


def _untiled_s(m: float, n: float, k: float, many: float, units: int, each: float, sizes: constants.Tiles) -> float:
    return 2 * m * n * k * many / (units * each)


NOTHING = attention.KernelSpeed(0.0, 0.0)
PIECES = (
    Piece(
        "products in fp8, fp4 and int8",
        "data sheets; operations_h100.csv",
        layout=lambda one: replace(one, products=""),
    ),
    Piece(
        "casts to fp8, fp4, int8", "operations_h100.csv", constant(CAST_BYTES=dict.fromkeys(constants.CAST_BYTES, 0.0))
    ),
    Piece("power slows the clock of products", "data sheets; fitted", {(compute, "_throttled"): lambda *_: 1.0}),
    Piece("tiles and waves of products", "NVIDIA, Matrix Multiplication Guide", {(products, "_tiled_s"): _untiled_s}),
    Piece(
        "alignment of products",
        "NVIDIA, Matrix Multiplication Guide; fitted",
        {(products, "_alignment"): lambda *_: 1.0},
    ),
    Piece(
        "attention by generation of kernel and device",
        "arXiv:2307.08691; operations_h100.csv",
        flat_attention(attention.KernelSpeed(0.6, 0.52)),
    ),
    Piece(
        "attention slower on short sequences, narrow heads",
        "operations_h100.csv",
        {(attention, "HALF_CAUSAL"): NOTHING, (attention, "HALF"): NOTHING, (attention, "NARROW"): 1.0},
    ),
    Piece("launches from Python", "assumed; fitted", layout=framework(graphs=True, blocking=False)),
    Piece("start and end of kernels", "fitted", fitted={"KERNEL_S": 0.0}),
    Piece("traffic and kernels by software stack", "fitted", layout=framework(stack="partly fused")),
    Piece("attention in a step is slower than alone", "fitted", fitted={"ATTENTION": 1.0}),
    Piece("bandwidth falls with the number of hosts", "fitted", fitted={"HOSTS": 0.0}),
    Piece("time to pass a microbatch on", "fitted", fitted={"PIPELINE_S": 0.0}),
    Piece("speed of a state space's scan", "fitted", fitted={"SCAN": 1.0}),
    Piece("softmax that needs a multiple of four", "Megatron-LM's code", layout=framework(softmax_of=1)),
    Piece("recomputation that stops early", "torch.utils.checkpoint", layout=framework(stops_early=False)),
    Piece("what selective recomputation keeps", "torchtitan, MaxText", layout=framework(keeps="attention")),
    Piece(
        "kernels of a mixture's routing",
        "fitted",
        fitted={"MIXTURE_KERNELS": 0.0, "EXPERT_KERNELS": 0.0, "EXPERT_S": 0.0},
    ),
    Piece("a token once to a host", "Megatron Core's dispatchers", layout=framework(node_limit=0)),
    Piece("experts on ranks of dp and tp", "arXiv:2504.14960", layout=lambda a: replace(a, expert_ranks=0)),
    Piece(
        "traffic of tp and ep beside products",
        "MaxText, Megatron Core; fitted",
        layout=framework(overlaps_tp=0.0, overlaps_ep=0.0),
    ),
    Piece(
        "stages that send while they compute, parts of ranks of tp",
        "Megatron Core",
        layout=framework(overlaps_hops=False, scatters_hops=False),
    ),
    Piece(
        "chunks hide a sharded optimizer's traffic",
        "Megatron Core",
        {(state_traffic, "_behind_chunks_s"): lambda seconds, behind, chunks, blocks: seconds},
    ),
    Piece("traffic slows the computing that hides it", "arXiv:2211.13878; fitted", fitted={"CONTENTION": 0.0}),
    Piece("latency of each collective", "calib_collectives.csv", constant(COLLECTIVE_S=0.0)),
    Piece("domains of 72", "NVIDIA, NVL72", layout=in_hosts_of_eight),
    Piece("links of meshes and tori", "data sheets", {(traffic, "_of_torus"): lambda *_: 1.0}),
    Piece("ranks of tp meet in each layer", "fitted", constant(MEETING=50.0), fitted={"LAUNCH_TP": 0.0}),
    Piece("Winograd's products in fp32", "arXiv:1509.09308", constant(WINOGRAD=1.0)),
    Piece("convolutions' groups together", "assumed", constant(GROUPS_N=0.0)),
    Piece("products and traffic of convolutions", "fitted", fitted={"CONVOLUTION": 1.0, "CONVOLUTION_VECTOR": 1.0}),
    Piece(
        "the gradient of a convolution's image is a convolution",
        "NVIDIA, Convolutional Layers Guide",
        {(compute, "_gradient_of_inputs"): lambda _, shape, read: (shape.rows, shape.k, shape.n, read)},
    ),
    Piece("convolutions over three dimensions", "fitted", fitted={"CONVOLUTION_3D": 1.0}),
    Piece(
        "images with channels first in tf32",
        "NVIDIA, Convolutional Layers Guide; fitted",
        fitted={"CONVOLUTION_TF32": 1.0},
    ),
    Piece("narrow tiles beside tensor cores", "assumed", constant(NARROW_N=0)),
    Piece("adapters train less", "arXiv:2106.09685", layout=lambda layout: replace(layout, lora=0)),
    Piece("the update", "bytes moved; fitted", fitted={"OPTIMIZER_PASSES": 0.0}),
    Piece("a fixed time of each step", "fitted", fitted={"STEP_S": 0.0}),
)


@dataclass(frozen=True)
class Errors:
    """Errors by row, cold and calibrated, and the times of the model alone."""

    cold: Mapping[tuple[str, int], float]
    calibrated: Mapping[tuple[str, int], float]
    seconds: Mapping[tuple[str, int], float]

    @property
    def means(self) -> tuple[float, float, float, float]:
        """Cold and calibrated mean errors, of all rows and over tables."""
        found = []
        for errors in (self.cold, self.calibrated):
            by_table: dict[str, list[float]] = {}
            for (table, _), error in errors.items():
                by_table.setdefault(table, []).append(error)
            found += [mean(list(errors.values())), mean([mean(own) for own in by_table.values()])]
        cold, cold_tables, calibrated, tables = found
        return cold, cold_tables, calibrated, tables


COLUMNS = ("cold", "cold, tables", "calibrated", "calibrated, tables")


def main() -> None:
    """Take each piece out, and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--tables", type=Path, default=TABLES)
    options = parser.parse_args()
    rows = [row for row in read(sorted(options.tables.glob("*.csv")))[0] if row.seconds]
    aside = set_aside(rows)
    whole = errors(rows, aside)
    print("with all: " + ", ".join(f"{name} {value:.2%}" for name, value in zip(COLUMNS, whole.means, strict=True)))
    print(f"\n{'without':60}" + "".join(f"{name:>20}" for name in COLUMNS) + f"{'rows moved':>12}  source")
    found = {}
    for piece in PIECES:
        without = errors(rows, aside, piece)
        moved = [row for row, time in without.seconds.items() if abs(time / whole.seconds[row] - 1) > MOVED]
        worth = [after - before for after, before in zip(without.means, whole.means, strict=True)]
        found[piece.name] = {**dict(zip(COLUMNS, worth, strict=True)), "rows": len(moved), "source": piece.source}
        print(f"{piece.name:60}" + "".join(f"{each:+20.2%}" for each in worth) + f"{len(moved):12}  {piece.source}")
    if options.json:
        print(json.dumps({"with_all": dict(zip(COLUMNS, whole.means, strict=True)), "without": found}))


def errors(rows: Sequence[Row], aside: set[tuple[str, int]], piece: Piece | None = None) -> Errors:
    """Errors of the rows that are not set aside, without a piece."""
    piece = piece or Piece("", "")
    fits = json.loads(FITS.read_text(encoding="utf-8"))
    cold, calibrated, seconds = {}, {}, {}
    with taken_out(piece):
        for table in dict.fromkeys(row.table for row in rows):
            constants.fix({**constants.FITTED, **fits.get(source(table), {}), **piece.fitted})
            own = [replace(row, layout=piece.layout(row.layout)) for row in rows if row.table == table]
            factors = regression([row for row in own if row.place in aside and row.seconds], {}, {}, _seconds)
            for row in own:
                seconds[row.place] = step_time_s(row.layout)
                if row.place not in aside and row.seconds:
                    cold[row.place] = abs(seconds[row.place] / row.seconds - 1)
                    calibrated[row.place] = abs(seconds[row.place] * factors.factor(row.layout) / row.seconds - 1)
    return Errors(cold, calibrated, seconds)


def _seconds(layout: Layout, _: Mapping[str, float]) -> float:
    return step_time_s(layout)


@contextmanager
def taken_out(piece: Piece) -> Iterator[None]:
    """The model without a piece, as long as the context lasts."""
    kept = {(module, name): getattr(module, name) for module, name in piece.patched}
    try:
        for (module, name), value in piece.patched.items():
            setattr(module, name, value)
        constants.forget()
        yield
    finally:
        for (module, name), value in kept.items():
            setattr(module, name, value)
        constants.forget()
        constants.fix()


if __name__ == "__main__":
    main()
