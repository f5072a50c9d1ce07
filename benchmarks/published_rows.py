"""Rows of published measurements as layouts.

What a table's cells say, what follows from them, and why a row cannot be used.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Literal

from paceline.cluster.catalogue.hardware import Accelerator, LinkSpec, accelerator
from paceline.errors import ClusterError
from paceline.job.read.dimensions import Dimensions
from paceline.planner.cost.compute import peak_flops
from paceline.planner.cost.layout import Layout, Machines, Precision
from paceline.trace.transformer import transformer
from published_stacks import StackFacts, facts

DISCRIMINATING = (
    "vtrain_single_a100",
    "bloom_tr11_a100",
    "megatron_sc21_table1",
    "korthikanti_2022_table5",
    "llmfoundry_mpt_a100",
)
# of these, a tenth of the rows is set aside to fit constants and deratings
FITTED = (*DISCRIMINATING, "ddp_resnet50_bert")
GATED = re.compile(r"llama|mistral|mixtral|qwen|gemma|deepseek|swiglu|internlm|yi-|olmo", re.IGNORECASE)
MODERN = re.compile(r"composer|foundry|fsdp|titan|olmo", re.IGNORECASE)  # their models have no dropout
PCIE = LinkSpec("PCIe 4 x16", 32e9, 10e-6)
Cells = Mapping[str, str]


class Unusable(Exception):
    """A row that cannot be predicted or compared; says why."""


@dataclass(frozen=True)
class Row:
    """One measured run: the plan, and what was measured of it."""

    table: str
    number: int
    cells: Cells
    layout: Layout
    seconds: float | None
    memory_gib: float | None
    out_of_memory: bool
    stack: StackFacts

    @property
    def place(self) -> tuple[str, int]:
        """The table and the line."""
        return self.table, self.number

    @property
    def group(self) -> tuple[str, ...]:
        """Rows of one group do the same work on as many devices: the choice among them is what a planner is for."""
        return (self.table, *(self.cells.get(name, "") for name in ("model", "n_gpus", "global_batch", "seq_len")))


@dataclass(frozen=True)
class Skipped:
    """A row that is not scored."""

    table: str
    number: int
    why: str


def read(files: Iterable[Path]) -> tuple[list[Row], list[Skipped]]:
    """All rows of the tables that name a model and devices."""
    rows: list[Row] = []
    skipped: list[Skipped] = []
    for path in files:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            table = [
                {key: (value or "").strip() for key, value in cells.items() if key} for cells in csv.DictReader(file)
            ]
        if not table or not {"model", "gpu"} <= table[0].keys():
            continue
        for number, cells in enumerate(table, start=2):
            try:
                rows.append(_row(path.stem, number, cells, table))
            except Unusable as unusable:
                skipped.append(Skipped(path.stem, number, str(unusable)))
            except (ClusterError, ValueError, ZeroDivisionError) as error:
                skipped.append(Skipped(path.stem, number, str(error).strip().splitlines()[-1]))
    return rows, skipped


def set_aside(rows: Iterable[Row]) -> set[tuple[str, int]]:
    """A tenth of the timed rows of each table of ours, at least one: those whose places have the lowest SHA-256."""
    aside: set[tuple[str, int]] = set()
    every = [row for row in rows if row.seconds]
    for table in FITTED:
        places = sorted(
            (row.place for row in every if row.table == table),
            key=lambda place: sha256(f"{place[0]}:{place[1]}".encode()).digest(),
        )
        aside |= set(places[: max(len(places) // 10, 1)])
    return aside


def _drawn(place: tuple[str, int]) -> bytes:
    return sha256(f"{place[0]}:{place[1]}".encode()).digest()


def number(text: str) -> float | None:
    """The first number of a cell: `1,024`, `7.5e9`, `175B`, `250k-class (…)`; None where there is none."""
    found = re.search(r"(?<![\w.])(\d[\d,]*\.?\d*(?:[eE][+-]?\d+)?)\s*([kKMBT](?![A-Za-z]))?", text or "")
    if not found:
        return None
    scale = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(found[2] or "", 1.0)
    return float(found[1].replace(",", "")) * scale


def _whole(cells: Cells, name: str, default: int | None = None) -> int:
    value = number(cells.get(name, ""))
    if value is None:
        if default is None:
            raise Unusable(f"{name} is not stated")
        return default
    return int(value)


def _row(table: str, at: int, cells: Cells, others: list[dict[str, str]]) -> Row:
    out_of_memory = any(
        "oom" in cells.get(name, "").lower() for name in ("memory_gib", "step_time_s", "tokens_per_s_per_gpu")
    )
    stack = facts(cells)
    layout = _layout(cells, others, stack)
    seconds = None if out_of_memory else _seconds(cells, layout)
    memory = None if out_of_memory else number(cells.get("memory_gib", ""))
    if seconds is None and memory is None and not out_of_memory:
        raise Unusable("neither a time nor a memory was measured")
    return Row(table, at, cells, layout, seconds, memory, out_of_memory, stack)


def _layout(cells: Cells, others: list[dict[str, str]], stack: StackFacts) -> Layout:
    device = accelerator(re.sub(r"(?<=[AH])800", "100", cells["gpu"]))  # the same chips with slower links
    degrees = {name: _whole(cells, name, 1) for name in ("tp", "pp", "cp", "ep")}
    inside = degrees["tp"] * degrees["pp"] * degrees["cp"]
    gpus, dp = number(cells.get("n_gpus", "")), number(cells.get("dp", ""))
    if gpus is None and dp is None:
        raise Unusable("n_gpus is not stated")
    ranks = int(gpus or inside * int(dp or 1))
    data_ranks, rest = divmod(ranks, inside)
    if rest or not data_ranks:
        raise Unusable(f"{ranks} GPUs are not a multiple of tp × pp × cp = {inside}")
    dimensions = _dimensions(cells, others, degrees)
    batch = _whole(cells, "global_batch", _batch_default(cells, data_ranks))
    if "token" in cells.get("global_batch", "").lower():
        batch = max(round(batch / dimensions.seq), 1)
    samples = number(cells.get("micro_batch", "")) or _micro_default(cells, batch, data_ranks)
    microbatches = max(round(batch / data_ranks / samples), 1)
    layout = Layout(
        transformer(dimensions),
        _machines(cells, device, ranks),
        tp=degrees["tp"],
        pp=degrees["pp"],
        cp=degrees["cp"],
        samples=batch / data_ranks / microbatches,
        microbatches=microbatches,
        precision=_precision(cells, device),
        remat=_remat(cells),
        sequence=_sequence(cells),
        chunks=_chunks(cells, degrees["pp"], dimensions.layers),
    )
    layout = replace(layout, schedule="interleaved" if layout.chunks > 1 else _schedule(cells))
    layout = _sharded(layout, cells, data_ranks, degrees["ep"], stack)
    layout = replace(layout, cut=_cut(layout, dimensions.layers))
    return stack.laid_out(layout, cells)


def _batch_default(cells: Cells, data_ranks: int) -> int | None:
    micro = number(cells.get("micro_batch", ""))
    return int(micro * data_ranks) if micro and _whole(cells, "pp", 1) == 1 else None


def _micro_default(cells: Cells, batch: int, data_ranks: int) -> float:
    return 1.0 if _whole(cells, "pp", 1) > 1 else batch / data_ranks


def _dimensions(cells: Cells, others: list[dict[str, str]], degrees: Mapping[str, int]) -> Dimensions:
    hidden, vocab = _whole(cells, "hidden"), _whole(cells, "vocab", 50_257)
    seq = _whole(cells, "seq_len", _sequence_in_notes(cells))
    if re.search(r"\d\s*[kK]\b", cells.get("seq_len", "")):
        seq = seq * 1024 // 1000
    ffn = _whole(cells, "ffn", 4 * hidden)
    heads = _whole(cells, "n_heads", _heads_of_others(cells, others, hidden))
    kv_heads = _whole(cells, "n_kv_heads", heads)
    notes = " ".join(cells.values())
    experts = re.search(r"num-experts=(\d+)", notes)
    top_k = re.search(r"moe-router-topk=(\d+)", notes)
    wide = 128 * degrees["tp"] if degrees["tp"] > 1 else 1  # a vocabulary is padded where it must divide
    base = {"hidden": hidden, "ffn": ffn, "heads": heads, "seq": seq, "vocab": -(-vocab // wide) * wide}
    base["kv_heads"] = kv_heads if heads % kv_heads == 0 else heads
    gated = bool(GATED.search(notes))
    tied = not re.search(r"untie-embeddings|untied|llama", notes, re.IGNORECASE)
    parameters = number(cells.get("n_params", ""))
    layers = number(cells.get("n_layers", ""))
    if layers is None:
        if parameters is None:
            raise Unusable("neither n_layers nor n_params is stated")
        per_layer = (12 if not gated else 4 + 3 * ffn / hidden) * hidden**2
        stages = degrees["pp"] * _whole(cells, "vpp", 1)
        layers = max(round((parameters - vocab * hidden) / per_layer / stages), 1) * stages
    if experts:
        base |= {"experts": int(experts[1]), "top_k": int(top_k[1]) if top_k else 1}
    elif parameters and number(cells.get("ffn", "")):
        gated = _gated_by_size(base, int(layers), parameters, gated)
    causal = not re.search(r"bert|t5", cells["model"], re.IGNORECASE)
    return Dimensions(
        layers=int(layers),
        gated=gated,
        tied=tied,
        causal=causal,
        dropout=not MODERN.search(cells.get("framework", "")),
        **base,
    )


def _gated_by_size(base: Mapping[str, int], layers: int, parameters: float, likely: bool) -> bool:
    """Whether two or three matrices a feed-forward part come nearer to the stated number of parameters."""

    def off(gated: bool) -> float:
        return abs(transformer(Dimensions(layers=layers, gated=gated, **base)).parameters / parameters - 1)

    return likely if abs(off(True) - off(False)) < 0.02 else off(True) < off(False)


def _sequence_in_notes(cells: Cells) -> int | None:
    found = re.search(r"seq\w* ?len\w*\D{0,60}?(\d{2,6})\b", cells.get("notes", ""))
    return int(found[1]) if found else None


def _heads_of_others(cells: Cells, others: list[dict[str, str]], hidden: int) -> int:
    """Where a row does not say how many heads.

    As other rows of its table with the same width, or heads about 128 wide.
    """
    for other in others:
        if other.get("n_heads") and number(other.get("hidden", "")) == hidden:
            return _whole(other, "n_heads")
    return min(
        (heads for heads in range(1, hidden + 1) if hidden % heads == 0), key=lambda heads: abs(hidden / heads - 128)
    )


def _machines(cells: Cells, device: Accelerator, ranks: int) -> Machines:
    per_host = _whole(cells, "gpus_per_node", device.per_host)
    text = cells.get("interconnect", "")
    if re.search(r"pcie", text, re.IGNORECASE) and not re.search(r"nvlink|nvswitch", text, re.IGNORECASE):
        device = replace(device, inside=PCIE)
    rate = _between_bytes_per_s(text, per_host)
    if (
        rate
        and re.search(r"IB|InfiniBand|[HN]DR|RoCE", text)
        and not re.search(r"per (node|host)|node-node|total|\d\s*[x×]", text)
    ):
        rate = (
            min(rate * per_host, device.network.bandwidth)
            if rate * per_host <= 1.01 * device.network.bandwidth
            else rate
        )
    between = LinkSpec("between hosts", rate, device.network.latency_s) if rate else device.network
    return Machines(device, max(-(-ranks // per_host), 1), per_host, between)


def _between_bytes_per_s(text: str, per_host: int) -> float | None:
    """Of one device, from `8x200Gb/s HDR IB per node`, `400Gb/s per GPU`, `100GbE`."""
    found = re.findall(
        r"(?:(\d+)\s*[x×]\s*)?(\d+(?:\.\d+)?)\s*(?:Gb/s|Gbps|Gbit/s|gbit|GbE)(\s*per (?:GPU|device|card))?", text
    )
    rates = [float(times or 1) * float(rate) * 1e9 / 8 / (1 if per_gpu else per_host) for times, rate, per_gpu in found]
    return max(rates, default=None)


def _precision(cells: Cells, device: Accelerator) -> Precision:
    text = cells.get("precision", "").lower()
    names: tuple[Precision, ...] = ("bf16", "fp16", "tf32", "fp32", "fp64")
    found: Precision | None = next((name for name in names if name in text), None)
    if "amp" in text or "mixed" in text or "fp8" in text or found is None:
        found = found if found in ("bf16", "fp16") else ("fp16" if "V100" in device.name else "bf16")
    return found


def _remat(cells: Cells) -> Literal["none", "selective", "block"]:
    text = cells.get("act_ckpt", "").lower()
    if "selective" in text:
        return "selective"
    return (
        "block"
        if re.search(r"full|block|every|yes|true|uniform", text) and not text.startswith(("none", "no "))
        else "none"
    )


def _sequence(cells: Cells) -> bool:
    text = f"{cells.get('act_ckpt', '')} {cells.get('notes', '')}"
    if re.search(r"no sequence|no SP|sequence-parallel=False", text):
        return False
    return bool(re.search(r"\bseq\+|seq(uence)?[- ]parallel|\+SP\b", text, re.IGNORECASE))


def _chunks(cells: Cells, pp: int, layers: int) -> int:
    """Virtual stages a rank.

    Where a schedule is interleaved and it is not stated how often: 4 chunks, or what divides the layers.
    """
    stated = number(cells.get("vpp", ""))
    if pp == 1:
        return 1
    if stated is None or (stated == 1 and "interleaved" in cells.get("schedule", "").lower()):
        interleaved = "interleaved" in f"{cells.get('vpp', '')} {cells.get('schedule', '')}".lower()
        return (
            next((chunks for chunks in (4, 3, 2) if layers % (pp * chunks) == 0), min(4, max(layers // pp, 1)))
            if interleaved
            else 1
        )
    return max(int(stated), 1)


def _schedule(cells: Cells) -> Literal["gpipe", "1f1b", "zero-bubble"]:
    text = cells.get("schedule", "").lower()
    return "gpipe" if "gpipe" in text else "zero-bubble" if "zero" in text or "zb" in text else "1f1b"


def _sharded(layout: Layout, cells: Cells, data_ranks: int, ep: int, stack: StackFacts) -> Layout:
    """The data-parallel ranks that shard parameters, gradients or the optimizer's state."""
    text = cells.get("zero_fsdp", "").lower()
    data_ranks, ep = (data_ranks // ep, ep) if ep > 1 and data_ranks % ep == 0 else (data_ranks, 1)
    layout = replace(layout, ep=ep)
    stage = re.search(r"zero[-_ ]?(\d)", text)
    if re.search(r"shard_grad_op|zero[-_ ]?2|optim_grads(?!_params)", text):
        return replace(layout, fsdp=data_ranks, zero=2)
    if re.search(r"hybrid|hsdp", text):
        width = min(layout.machines.per_host, data_ranks)
        return replace(layout, fsdp=width, dp=data_ranks // width, zero=3)
    if (stage and stage[1] == "3") or re.search(r"fsdp|full_shard|optim_grads_params", text):
        return replace(layout, fsdp=data_ranks, zero=3)
    return replace(layout, dp=data_ranks, zero_dp=bool(stage and stage[1] == "1") or "dist-opt" in text)


def _cut(layout: Layout, layers: int) -> tuple[int, ...]:
    """Megatron's cut: equal numbers of layers per stage; () where they do not divide.

    The embedding is with the first stage, the head with the last.
    """
    stages = layout.pp * layout.chunks
    each, rest = divmod(layers, stages)
    if rest:
        return ()
    return tuple(each + (stage == 0) + (stage == stages - 1) for stage in range(stages))


def _seconds(cells: Cells, layout: Layout) -> float | None:
    """A step's time, or what it is by the rate that was printed instead."""
    stated = number(cells.get("step_time_s", ""))
    if stated:
        return stated
    tokens, tflops, mfu = (number(cells.get(name, "")) for name in ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu"))
    if tokens:
        return layout.global_batch * layout.trace.tokens / tokens / layout.ranks
    recomputed = layout.remat == "block" and "recompute" in cells.get("notes", "")
    flops = (4 if recomputed and tflops else 3) * layout.trace.flops * layout.global_batch / layout.ranks
    if tflops:
        return flops / tflops / 1e12
    if mfu:
        return flops / peak_flops(layout.machines.device, layout.precision) / (mfu / 100 if mfu > 1 else mfu)
    return None
