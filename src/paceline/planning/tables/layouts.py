"""Layouts of table rows, from stated and inferred values."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.cluster.catalogue import Accelerator, LinkSpec
from paceline.cluster.named import accelerator
from paceline.errors import ClusterError
from paceline.planning.cost import frameworks as known
from paceline.planning.cost.compute import peak_flops
from paceline.planning.cost.estimate import memory_fits
from paceline.planning.cost.frameworks import (
    MEGATRON_DEEPSPEED,
    Framework,
)
from paceline.planning.cost.layout import Layout, Machines
from paceline.planning.model.graph import ModelTrace
from paceline.planning.plan import Schedule
from paceline.planning.tables import cells as table
from paceline.planning.tables.cells import Cells, UnusableError, model_of, number, whole

PCIE = LinkSpec("PCIe 4 x16", 32e9, 10e-6)
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # shares of the layers that may be recomputed


def layout_of(cells: Cells, others: Sequence[Cells]) -> Layout:
    """Return the layout of a row.

    Raises:
        UnusableError: a value is missing and cannot be inferred.
        ClusterError: the device of the row is not in the catalogue.
    """
    device = accelerator(cells["gpu"])
    framework = framework_of(cells, device)
    degrees = {name: whole(cells, name, 1) or 1 for name in ("tp", "pp", "cp")}
    inside = degrees["tp"] * degrees["pp"] * degrees["cp"]
    ranks = _ranks(cells, inside)
    data_ranks, rest = divmod(ranks, inside)
    if rest or not data_ranks:
        raise UnusableError(f"{ranks} GPUs are not a multiple of tp × pp × cp = {inside}")
    trace = model_of(cells, others, degrees["tp"], degrees["pp"] * whole(cells, "vpp", 1))
    batch = _batch(cells, data_ranks, trace.tokens)
    samples = number(cells.get("micro_batch", "")) or (1.0 if degrees["pp"] > 1 else batch / data_ranks)
    microbatches = max(round(batch / data_ranks / samples), 1)
    layers = sum(block.kind not in ("embedding", "head") for block in trace.blocks)
    if degrees["pp"] > len(trace.blocks):
        raise UnusableError(f"pp is {degrees['pp']}, but the model has only {len(trace.blocks)} parts")
    remat, share = table.recomputed(cells), _recomputed_share(trace, table.recomputed_modules(cells))
    if remat == "unknown" and framework.recomputes:
        remat = framework.recomputes
    elif remat == "unknown" and not cells.get("act_ckpt") and not framework.profile.flash:
        remat = "none"  # the default for image models and small models
    layout = Layout(
        trace,
        _machines(cells, device, ranks),
        tp=degrees["tp"],
        pp=degrees["pp"],
        cp=degrees["cp"],
        samples=batch / data_ranks / microbatches,
        microbatches=microbatches,
        precision=table.precision(cells, device),
        products=table.products(cells),
        remat="block" if share else "none" if remat == "unknown" else remat,
        remat_share=share or 1.0,
        sequence=table.sequence(cells, framework.sequence),
        chunks=_chunks(cells, degrees["pp"], layers),
        lora=_lora(cells),
        # DeepSpeed's sequence parallelism exchanges heads
        ulysses=framework.name == known.DEEPSPEED.name or "ulysses" in " ".join(cells.values()).lower(),
    )
    layout = replace(layout, schedule="interleaved" if layout.chunks > 1 else _schedule(cells))
    layout = _sharded(layout, cells, data_ranks, framework)
    layout = replace(layout, cut=_cut_by_cost(layout) if framework.cuts_by_cost else _cut(layout, layers))
    if layout.zero_dp and not re.search("zero", cells.get("zero_fsdp", ""), re.IGNORECASE):
        # its gradients are scattered; with stage 1 they are summed whole
        framework = replace(framework, profile=replace(framework.profile, sums_gradients=False))
    layout = framework.laid_out(
        layout,
        fp32_gradients="fp32 grad" in cells.get("precision", "").lower(),
        pure="pure" in cells.get("precision", "").lower(),
        moment_bytes=table.moment_bytes(cells),
    )
    return _with_least_recomputed(layout) if remat == "unknown" else layout


def _recomputed_share(trace: ModelTrace, modules: frozenset[str]) -> float:
    """Return the share of the layers' forward FLOPs that Megatron's `recompute_modules` repeat.

    The result is 0 if only parts without large matrix products are recomputed, which is remat=selective.
    """
    if not modules & {"moe", "mlp", "shared_experts"}:
        return 0.0
    again = total = 0.0
    for block in trace.blocks:
        if block.kind in ("embedding", "between", "head"):
            continue
        total += block.flops
        squares = [at for at, gemm in enumerate(block.gemms) if gemm.batch]
        # the product after the attention's own belongs to attention
        later = block.gemms[squares[-1] + 2 :] if squares else block.gemms
        later = () if block.kind in ("mamba", "delta") else later
        if "core_attn" in modules:
            again += sum(block.gemms[at].flops for at in squares)
        mixture = any(gemm.experts for gemm in later)
        if ("moe" if mixture else "mlp") in modules:
            again += sum(gemm.flops for gemm in later)
        elif mixture and "shared_experts" in modules:
            again += sum(gemm.flops for gemm in later if not gemm.experts)
    return again / total if total else 0.0


def _divides_always(layout: Layout, framework: Framework) -> bool:
    """True for DeepSpeed in bf16, whose `BF16_Optimizer` shards its state at every stage."""
    return framework.name == MEGATRON_DEEPSPEED.name and layout.precision == "bf16"


def _ranks(cells: Cells, inside: int) -> int:
    gpus, dp = number(cells.get("n_gpus", "")), number(cells.get("dp", ""))
    if gpus is None and dp is None:
        raise UnusableError("n_gpus is not stated")
    return int(gpus or inside * int(dp or 1))


def _batch(cells: Cells, data_ranks: int, tokens: int) -> int:
    """Return the samples of a step: as stated, or from the microbatch or the rate."""
    micro = number(cells.get("micro_batch", ""))
    stated = number(cells.get("global_batch", ""))
    if stated is None:
        if micro and whole(cells, "pp", 1) == 1:
            return int(micro * data_ranks)
        rate, seconds = number(cells.get("tokens_per_s_per_gpu", "")), number(cells.get("step_time_s", ""))
        ranks = number(cells.get("n_gpus", ""))
        if rate and seconds and ranks:
            return max(round(rate * seconds * ranks / tokens), 1)
        raise UnusableError("global_batch is not stated")
    if "token" in cells.get("global_batch", "").lower():
        return max(round(stated / tokens), 1)
    return int(stated)


def _machines(cells: Cells, device: Accelerator, ranks: int) -> Machines:
    per_host = whole(cells, "gpus_per_node", device.per_host)
    if device.machine:  # several machines form one domain of links
        per_host = max(per_host, device.per_host)
    text = cells.get("interconnect", "")
    if re.search(r"pcie", text, re.IGNORECASE) and not re.search(r"nvlink|nvswitch", text, re.IGNORECASE):
        device = replace(device, inside=PCIE)
    rate = table.between_bytes_per_s(text, whole(cells, "gpus_per_node", device.machine or device.per_host))
    if (
        rate
        and re.search(r"IB|InfiniBand|[HN]DR|RoCE", text)
        and not re.search(r"per (node|host|GPU|device)|node-node|total|\d\s*[x×]", text)
        and rate * per_host <= 1.01 * device.network.bandwidth
    ):
        rate *= per_host  # the rate is for one of a host's cards
    between = LinkSpec("between hosts", rate, device.network.latency_s) if rate else device.network
    hosts = max(-(-ranks // per_host), 1)
    return Machines(device, hosts, per_host, between, oversubscription=1 / table.fabric_share(text))


def _chunks(cells: Cells, pp: int, layers: int) -> int:
    """Return the virtual stages per rank. The default is 4, or a number that divides the layers."""
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
    return max(min(int(stated), layers // pp), 1)


def _schedule(cells: Cells) -> Schedule:
    text = cells.get("schedule", "").lower()
    return "gpipe" if "gpipe" in text else "zero-bubble" if re.search(r"zero|\bzb|dualpipe", text) else "1f1b"


def _lora(cells: Cells) -> int:
    text = f"{cells.get('framework', '')} {cells.get('notes', '')} {cells.get('model', '')}"
    if not re.search(r"\blora\b", text, re.IGNORECASE):
        return 0
    rank = re.search(r"rank\W{0,3}(\d+)", text, re.IGNORECASE)
    return int(rank[1]) if rank else 32


def _sharded(layout: Layout, cells: Cells, data_ranks: int, framework: Framework) -> Layout:
    """Return the data-parallel ranks that shard parameters, gradients or optimizer state, also for experts."""
    text = cells.get("zero_fsdp", "")
    ep = whole(cells, "ep", 1) or 1
    if not any(block.experts for block in layout.trace.blocks):
        ep = 1
    if ep > 1 and framework.folds:
        layout = replace(layout, expert_ranks=ep, expert_tp=table.expert_tp(cells))
    elif ep > 1 and data_ranks % ep == 0:
        layout, data_ranks = replace(layout, ep=ep), data_ranks // ep
    kind = table.sharding(text, framework.shards)
    if kind == "none" and _divides_always(layout, framework):
        kind = "zero1"
    over = re.search(r"\bover (\d+)|fsdp(\d{2,})", text, re.IGNORECASE)
    over_ranks = int(over[1] or over[2]) if over else 0
    if kind == "hybrid" or (kind == "zero3" and 1 < over_ranks < data_ranks):
        width = over_ranks or min(layout.machines.per_host, data_ranks)
        return replace(layout, fsdp=width, dp=max(data_ranks // width, 1), zero=3)
    if kind == "zero3":
        return replace(layout, fsdp=data_ranks, zero=3)
    if kind == "zero2":
        return replace(layout, fsdp=data_ranks, zero=2)
    return replace(layout, dp=data_ranks, zero_dp=kind == "zero1")


def _cut(layout: Layout, layers: int) -> tuple[int, ...]:
    """Return Megatron's cut: equal numbers of layers per stage; () if they do not divide evenly."""
    stages = layout.pp * layout.chunks
    each, rest = divmod(layers, stages)
    if rest or len(layout.trace.blocks) != layers + 2:
        return ()
    return tuple(each + (stage == 0) + (stage == stages - 1) for stage in range(stages))


def _cut_by_cost(layout: Layout) -> tuple[int, ...]:
    """Return a cut by multiplications with weights.

    A stage ends with the block that exceeds its share.
    """
    costs = [
        sum(gemm.n * gemm.k * gemm.times for gemm in block.gemms if not gemm.batch) for block in layout.trace.blocks
    ]
    stages = layout.pp * layout.chunks
    counts, done = [0], 0.0
    for rest, cost in zip(range(len(costs) - 1, -1, -1), costs, strict=True):
        counts[-1] += 1
        done += cost
        left = stages - len(counts)
        if left and (done > sum(costs) / stages * len(counts) or rest <= left):
            counts.append(0)
    return tuple(counts)


def _with_least_recomputed(layout: Layout) -> Layout:
    """Return a layout with the least recomputation that fits, as users would choose."""
    for share in _SHARES:
        changed = replace(layout, remat="block" if share else "none", remat_share=share or 1.0)
        if memory_fits(changed):
            return changed
    return replace(changed, offload_activations=True)


# keys of the model that a plan does not change; its trace has the vocabulary padded for tp
_MODEL = ("model", "n_layers", "hidden", "ffn", "n_heads", "n_kv_heads", "vocab")


@dataclass(frozen=True)
class Row:
    """One measured run: the plan, and its measurements.

    Attributes:
        table, number: the table's name and the row's line.
        cells: the cells as written.
        seconds: seconds of a step; None if not measured.
        memory_gib: memory of a device; None if not measured.
        out_of_memory: True if the run ran out of memory.
    """

    table: str
    number: int
    cells: Cells
    layout: Layout
    seconds: float | None
    memory_gib: float | None
    out_of_memory: bool

    @property
    def place(self) -> tuple[str, int]:
        """Return the table and the line."""
        return self.table, self.number

    @property
    def group(self) -> tuple[object, ...]:
        """Return the key of a group of rows that differ only in their plans.

        Such rows do the same work on the same machines.
        """
        layout = self.layout
        model = tuple(self.cells.get(name, "") for name in _MODEL)
        work = (layout.trace.tokens, round(layout.global_batch, 3), layout.precision, layout.products, layout.lora)
        device = layout.machines.device
        where = (device.name, device.memory_bytes, layout.ranks, layout.machines.between.bandwidth)
        return self.table, self.framework, *model, *work, *where

    @property
    def framework(self) -> str:
        """Return the framework and its version, without remarks that distinguish plans."""
        name = re.split(r"[;(]", self.cells.get("framework", ""))[0].strip().lower()
        return f"{name} {self.cells.get('source', '')}"

    @property
    def plan(self) -> tuple[object, ...]:
        """Return the part of the layout that a planner chooses."""
        layout = self.layout
        degrees = (layout.dp, layout.fsdp, layout.tp, layout.pp, layout.cp, layout.ep, layout.expert_parts)
        return *degrees, layout.zero, layout.zero_dp, layout.samples, layout.chunks, layout.schedule, layout.remat


@dataclass(frozen=True)
class Skipped:
    """A row that cannot be used."""

    table: str
    number: int
    why: str


def read(files: Iterable[Path]) -> tuple[list[Row], list[Skipped]]:
    """Read all rows that name a model and devices."""
    rows: list[Row] = []
    skipped: list[Skipped] = []
    for path in files:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            table = [
                {key: (value or "").strip() for key, value in cells.items() if key} for cells in csv.DictReader(file)
            ]
        if not table or not {"model", "gpu"} <= table[0].keys():
            continue
        for at, cells in enumerate(table, start=2):
            try:
                rows.append(row_of(path.stem, at, cells, table))
            except UnusableError as unusable:
                skipped.append(Skipped(path.stem, at, str(unusable)))
            except (ClusterError, ValueError) as error:
                skipped.append(Skipped(path.stem, at, str(error).strip().splitlines()[-1]))
    return rows, skipped


_COUNTS = (
    *("n_layers", "hidden", "ffn", "n_heads", "n_kv_heads", "seq_len", "vocab"),
    *("gpus_per_node", "n_gpus", "micro_batch", "global_batch"),
)


def row_of(table: str, at: int, cells: Cells, others: Sequence[Cells]) -> Row:
    """Parse a row of a table from its cells; `others` supply missing values.

    Raises:
        UnusableError: a value is missing and cannot be inferred.
        ClusterError: the device of the row is not in the catalogue.
    """
    if empty := next((name for name in _COUNTS if number(cells.get(name, "")) == 0), None):
        raise UnusableError(f"{empty} is 0")
    out_of_memory = any(
        "oom" in cells.get(name, "").lower() for name in ("memory_gib", "step_time_s", "tokens_per_s_per_gpu")
    )
    layout = layout_of(cells, others)
    seconds = None if out_of_memory else _seconds(cells, layout)
    memory = None if out_of_memory else number(cells.get("memory_gib", ""))
    if seconds is None and memory is None and not out_of_memory:
        raise UnusableError("neither a time nor a memory was measured")
    return Row(table, at, cells, layout, seconds, memory, out_of_memory)


def _seconds(cells: Cells, layout: Layout) -> float | None:
    """Return a step's time as stated, or computed from the stated rate."""
    stated = number(cells.get("step_time_s", ""))
    if stated:
        return stated
    tokens, tflops, mfu = (number(cells.get(name, "")) for name in ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu"))
    if tokens:
        return layout.global_batch * layout.trace.tokens / tokens / layout.ranks
    recomputed = layout.remat == "block" and re.search(r"incl\w* recompute", cells.get("notes", ""))
    flops = (4 if recomputed and tflops else 3) * layout.trace.flops * layout.global_batch / layout.ranks
    if tflops:
        return flops / tflops / 1e12
    if mfu:
        return flops / peak_flops(layout.machines.device, layout.precision) / (mfu / 100 if mfu > 1 else mfu)
    return None


# In the order in which they are tried
_NAMES: tuple[tuple[str, Framework], ...] = (
    (r"titan.*(?:compile|float8|async)", known.TORCHTITAN_COMPILED),
    (r"titan", known.TORCHTITAN),
    (r"maxtext|pax|\bjax|xla|paxml|praxis|levanter|t5x", known.MAXTEXT),
    (r"megatron-deepspeed|megatron.deepspeed", known.MEGATRON_DEEPSPEED),
    (r"deepspeed", known.DEEPSPEED),
    (r"composer|llm-foundry", known.COMPOSER),
    (r"hai-?llm", known.HAI_LLM),
    (r"libai|oneflow", known.ONEFLOW),
    (r"paddle", known.PADDLE),
    (r"horovod|\btf\b|tensorflow", known.HOROVOD),
    (r"nanotron", known.NANOTRON),
    (r"fsdp|pytorch 2|lit-?gpt|olmo|lightning|meta internal", known.FSDP),
    (r"ddp|apex|mxnet|dali", known.DDP),
)
_MODERN = re.compile(r"core|nemo|bridge|transformer ?engine|\bdev\b|h[12]\d\d|b[23]00|mi3\d\d", re.IGNORECASE)
_FLASH = re.compile(r"(?<!no )flash(?!\w* not)|transformer_engine|xformers|sdpa|splash", re.IGNORECASE)


def framework_of(cells: Cells, device: Accelerator) -> Framework:
    """Return the framework of a row, with the row's attention and kernel launches."""
    name, notes = cells.get("framework", ""), cells.get("notes", "")
    found = _by_name(cells, device)
    profile = found.profile
    if device.generation in ("pascal", "volta", "turing") and profile.flash:
        profile = replace(profile, flash=False)  # FlashAttention needs Ampere
    elif not profile.flash and _FLASH.search(f"{name} {notes}"):
        profile = replace(profile, flash=True, attention=2)
    elif re.search(r"no flash|flash\w* off|without flash", notes, re.IGNORECASE):
        profile = replace(profile, flash=False)
    if found is known.MEGATRON_CORE and re.search(r"gpt.?oss", cells.get("model", ""), re.IGNORECASE):
        profile = replace(profile, flash=False)  # attention sinks, which fused kernels lacked before cuDNN 9.13
    if re.search(r"deterministic-mode=True", notes):
        profile = replace(profile, attention=1)
    if found is known.COMPOSER:
        profile = replace(profile, attention=1)  # its models add ALiBi's biases, so FlashAttention runs in Triton
    if _unpadded(cells) and device.generation not in ("pascal", "volta") and "16" in cells.get("precision", ""):
        profile = replace(profile, flash=True, attention=1)  # apex's fused attention supports any sequence length
    if re.search(r"LAUNCH_BLOCKING=1", notes):
        profile = replace(profile, blocking=True)
    if re.search(r"(?<!no )cu[a-z]+ ?graphs", notes, re.IGNORECASE):
        profile = replace(profile, graphs=True)
    if re.search(r"async ?tp|userbuffers|tp-comm-overlap=True", f"{name} {notes}", re.IGNORECASE):
        profile = replace(profile, overlaps_tp=known.OVERLAPPED_TP)
    return replace(found, profile=profile)


def _unpadded(cells: Cells) -> bool:
    """True for NVIDIA's pre-training of BERT with PyTorch or PaddlePaddle."""
    recipe = re.search(r"pre-?training", cells.get("notes", ""), re.IGNORECASE)
    by = re.search(r"pytorch|paddle", cells.get("framework", ""), re.IGNORECASE)
    return bool(recipe and by and re.search(r"\bbert", cells.get("model", ""), re.IGNORECASE))


def _by_name(cells: Cells, device: Accelerator) -> Framework:
    name = cells.get("framework", "").lower()
    if re.search(r"horovod|\btf\b|tensorflow", name) and re.search(r"\bxla\b", " ".join(cells.values()), re.IGNORECASE):
        return known.TENSORFLOW_XLA
    for pattern, framework in _NAMES:
        if re.search(pattern, name):
            of_2024 = framework is known.TORCHTITAN_COMPILED and re.search(r"\b2024\b", cells.get("source", ""))
            return known.TORCHTITAN_2024 if of_2024 else framework
    if "megatron" in name or "nemo" in name:
        about = f"{name} {cells.get('gpu', '')} {cells.get('notes', '')}"
        return known.MEGATRON_CORE if _MODERN.search(about) else known.MEGATRON_LM
    if "fsdp" in cells.get("zero_fsdp", "").lower():
        return known.FSDP
    if "ddp" in cells.get("zero_fsdp", "").lower():
        return known.DDP
    return known.MAXTEXT if device.kind == "tpu" else known.OTHER
