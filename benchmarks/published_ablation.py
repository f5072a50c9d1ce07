"""What each piece of the cost model is worth on published runs: their error with it and without it.

    python benchmarks/published_ablation.py [--tables DIR] [--json]

Every piece is taken out alone, the factor of each table is found again on its set-aside rows, and the other constants
stay: what a refit would hide is part of what the piece does. Runs that are alike correct nothing here. Columns: the
mean error of all rows and over tables without it, both less those with it, and the rows whose step time it moves by
more than 1 %, with their error before and after. A piece that is not worth its place has no or a negative difference.
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
from paceline.planning.cost.estimate import predict_layout
from paceline.planning.cost.layout import Layout
from paceline.planning.machines import adjustment
from paceline.planning.tables.layouts import Row
from published_fit import with_constants
from published_rows import TABLES, read, set_aside
from published_score import mean

# a row is moved by a piece if its time changes by more, relative
MOVED = 0.01


@dataclass(frozen=True)
class Piece:
    """A piece of the model.

    Attributes:
        source: where it is from.
        patched: values of modules' names without it.
        layout: a layout without it.
    """

    name: str
    source: str
    patched: Mapping[tuple[Any, str], object] = field(default_factory=dict)
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
    Piece("start and end of kernels", "fitted", constant(KERNEL_S=0.0)),
    Piece("traffic of other kernels by framework", "fitted", layout=framework(vector=1.0, mixtures=1.0)),
    Piece("traffic of the loss by framework", "fitted", layout=framework(loss=1.0)),
    Piece("time of each framework's computing", "fitted", layout=framework(derating=1.0)),
    Piece("softmax that needs a multiple of four", "Megatron-LM's code", layout=framework(softmax_of=1)),
    Piece("recomputation that stops early", "torch.utils.checkpoint", layout=framework(stops_early=False)),
    Piece("what selective recomputation keeps", "torchtitan, MaxText", layout=framework(keeps="attention")),
    Piece("kernels of a mixture's routing", "fitted", constant(MIXTURE_KERNELS=0.0, EXPERT_KERNELS=0.0, EXPERT_S=0.0)),
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
    Piece("traffic slows the computing that hides it", "arXiv:2211.13878; fitted", constant(CONTENTION=0.0)),
    Piece("latency of each collective", "calib_collectives.csv", constant(COLLECTIVE_S=0.0)),
    Piece("domains of 72", "NVIDIA, NVL72", layout=in_hosts_of_eight),
    Piece("links of meshes and tori", "data sheets", {(traffic, "_of_torus"): lambda *_: 1.0}),
    Piece("ranks of tp meet in each layer", "fitted", constant(MEETING=50.0, LAUNCH_TP=0.0)),
    Piece("Winograd's products in fp32", "arXiv:1509.09308", constant(WINOGRAD=1.0)),
    Piece("convolutions' groups together", "assumed", constant(GROUPS_N=0.0)),
    Piece("products and traffic of convolutions", "fitted", constant(CONVOLUTION=1.0, CONVOLUTION_VECTOR=1.0)),
    Piece(
        "the gradient of a convolution's image is a convolution",
        "NVIDIA, Convolutional Layers Guide",
        {(compute, "_gradient_of_inputs"): lambda _, shape, read: (shape.rows, shape.k, shape.n, read)},
    ),
    Piece("convolutions over three dimensions", "fitted", constant(CONVOLUTION_3D=1.0)),
    Piece(
        "images with channels first in tf32",
        "NVIDIA, Convolutional Layers Guide; fitted",
        constant(CONVOLUTION_TF32=1.0),
    ),
    Piece("narrow tiles beside tensor cores", "assumed", constant(NARROW_N=0)),
    Piece("adapters train less", "arXiv:2106.09685", layout=lambda layout: replace(layout, lora=0)),
    Piece("the update", "bytes moved; fitted", constant(OPTIMIZER_PASSES=0.0)),
    Piece("a fixed time of each step", "fitted", constant(STEP_S=0.0)),
)


@dataclass(frozen=True)
class Errors:
    """Errors by row, and the times of the model alone."""

    by_row: Mapping[tuple[str, int], float]
    seconds: Mapping[tuple[str, int], float]

    @property
    def mean(self) -> float:
        """Of all rows."""
        return mean(list(self.by_row.values()))

    @property
    def over_tables(self) -> float:
        """The mean of tables' means."""
        tables = dict.fromkeys(table for table, _ in self.by_row)
        return mean([mean([error for (of, _), error in self.by_row.items() if of == table]) for table in tables])


def main() -> None:
    """Take each piece out, and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--tables", type=Path, default=TABLES)
    options = parser.parse_args()
    rows = [row for row in read(sorted(options.tables.glob("*.csv")))[0] if row.seconds]
    aside = set_aside(rows)
    whole = errors(rows, aside)
    print(f"with all: mean error {whole.mean:.2%}, over tables {whole.over_tables:.2%}, {len(whole.by_row)} rows\n")
    print(f"{'without':60}{'all rows':>10}{'tables':>9}{'rows moved':>12}{'their error':>18}  source")
    found = {}
    for piece in PIECES:
        with taken_out(piece):
            without = errors(rows, aside, piece.layout)
        moved = [row for row, time in without.seconds.items() if abs(time / whole.seconds[row] - 1) > MOVED]
        before, after = (mean([each.by_row[row] for row in moved if row in each.by_row]) for each in (whole, without))
        worth = without.mean - whole.mean, without.over_tables - whole.over_tables
        found[piece.name] = {"all": worth[0], "tables": worth[1], "rows": len(moved), "before": before, "after": after}
        print(
            f"{piece.name:60}{worth[0]:+10.2%}{worth[1]:+9.2%}{len(moved):12}"
            f"{f'{before:.1%} → {after:.1%}' if moved else '–':>18}  {piece.source}"
        )
    if options.json:
        print(json.dumps({"mean_error": whole.mean, "mean_over_tables": whole.over_tables, "without": found}))


def errors(
    rows: Sequence[Row], aside: set[tuple[str, int]], changed: Callable[[Layout], Layout] = lambda layout: layout
) -> Errors:
    """Errors of the rows that are not set aside, with the factor of those that are."""
    seconds = {row.place: predict_layout(changed(row.layout)).step_time_s for row in rows}
    by_row = {}
    for table in dict.fromkeys(row.table for row in rows):
        own = [row for row in rows if row.table == table]
        known = {id(row.layout): seconds[row.place] for row in own}
        few = [row for row in own if row.place in aside]
        factors = adjustment(few, lambda layout, known=known: known[id(layout)], rounds=0)  # type: ignore[misc]
        for row in own:
            if row.place not in aside and row.seconds:
                by_row[row.place] = abs(seconds[row.place] * factors.factor(row.layout) / row.seconds - 1)
    return Errors(by_row, seconds)


@contextmanager
def taken_out(piece: Piece) -> Iterator[None]:
    """The model without a piece, as long as the context lasts."""
    kept = {(module, name): getattr(module, name) for module, name in piece.patched}
    try:
        for (module, name), value in piece.patched.items():
            setattr(module, name, value)
        with_constants({})
        yield
    finally:
        for (module, name), value in kept.items():
            setattr(module, name, value)
        with_constants({})


if __name__ == "__main__":
    main()
