"""Layout of a table's row: what it states, and what follows from that."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from paceline.cluster.catalogue.hardware import Accelerator, LinkSpec, accelerator
from paceline.planning.choices import Schedule
from paceline.planning.cost.estimate import memory_fits
from paceline.planning.cost.frameworks import (
    MEGATRON_DEEPSPEED,
    TENSORFLOW_FUSED_IMAGES,
    TENSORFLOW_IMAGES,
    TORCH_IMAGES,
    Framework,
)
from paceline.planning.cost.layout import Layout, Machines
from paceline.planning.model.graph import ModelTrace
from paceline.planning.tables import cells as read
from paceline.planning.tables.cells import Cells, UnusableError, number, whole
from paceline.planning.tables.frameworks import framework_of
from paceline.planning.tables.models import model_of

PCIE = LinkSpec("PCIe 4 x16", 32e9, 10e-6)
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the layers, computed again


def layout_of(cells: Cells, others: Sequence[Cells]) -> Layout:
    """Layout of a row.

    Raises:
        UnusableError: something is not stated that nothing else tells.
        ClusterError: its device is not in the catalogue.
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
    framework = _for_model(framework, trace, cells)
    batch = _batch(cells, data_ranks, trace.tokens)
    samples = number(cells.get("micro_batch", "")) or (1.0 if degrees["pp"] > 1 else batch / data_ranks)
    microbatches = max(round(batch / data_ranks / samples), 1)
    layers = sum(block.kind not in ("embedding", "head") for block in trace.blocks)
    remat = read.recomputed(cells)
    if remat == "unknown" and not cells.get("act_ckpt") and not framework.profile.flash:
        remat = "none"  # where nobody asks: images, and small models
    layout = Layout(
        trace,
        _machines(cells, device, ranks),
        tp=degrees["tp"],
        pp=degrees["pp"],
        cp=degrees["cp"],
        samples=batch / data_ranks / microbatches,
        microbatches=microbatches,
        precision=read.precision(cells, device),
        products=read.products(cells),
        remat="none" if remat == "unknown" else remat,
        sequence=framework.sequence or read.sequence(cells),
        chunks=_chunks(cells, degrees["pp"], layers),
        lora=_lora(cells),
    )
    layout = replace(layout, schedule="interleaved" if layout.chunks > 1 else _schedule(cells))
    layout = _sharded(layout, cells, data_ranks, framework)
    layout = replace(layout, cut=_cut(layout, layers))
    if layout.zero_dp and not re.search("zero", cells.get("zero_fsdp", ""), re.IGNORECASE):
        # its gradients are scattered; those of stage 1 are summed whole
        framework = replace(framework, profile=replace(framework.profile, sums_gradients=False))
    layout = framework.laid_out(
        layout,
        fp32_gradients="fp32 grad" in cells.get("precision", "").lower(),
        pure="pure" in cells.get("precision", "").lower(),
        moment_bytes=read.moment_bytes(cells),
    )
    return _with_least_recomputed(layout) if remat == "unknown" else layout


def _divides_always(layout: Layout, framework: Framework) -> bool:
    """True of DeepSpeed in bf16, whose `BF16_Optimizer` divides its state at every stage."""
    return framework.name == MEGATRON_DEEPSPEED.name and layout.precision == "bf16"


# the scripts of NVIDIA's U-Nets pass --xla
_XLA = re.compile(r"\bXLA\b|DeepLearningExamples\S* TensorFlow2?/Segmentation/UNet")


def _for_model(framework: Framework, trace: ModelTrace, cells: Cells) -> Framework:
    """A framework as it computes convolutions, whose kernels are others than those of transformers."""
    if not any(gemm.read for block in trace.blocks for gemm in block.gemms):
        return framework
    if not re.search(r"tensorflow|\btf\b|horovod", cells.get("framework", ""), re.IGNORECASE):
        return TORCH_IMAGES
    return TENSORFLOW_FUSED_IMAGES if _XLA.search(" ".join(cells.values())) else TENSORFLOW_IMAGES


def _ranks(cells: Cells, inside: int) -> int:
    gpus, dp = number(cells.get("n_gpus", "")), number(cells.get("dp", ""))
    if gpus is None and dp is None:
        raise UnusableError("n_gpus is not stated")
    return int(gpus or inside * int(dp or 1))


def _batch(cells: Cells, data_ranks: int, tokens: int) -> int:
    """Samples of a step: as stated, by the microbatch, or by the rate."""
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
    if device.machine:  # several machines are one domain of links
        per_host = max(per_host, device.per_host)
    text = cells.get("interconnect", "")
    if re.search(r"pcie", text, re.IGNORECASE) and not re.search(r"nvlink|nvswitch", text, re.IGNORECASE):
        device = replace(device, inside=PCIE)
    rate = read.between_bytes_per_s(text, whole(cells, "gpus_per_node", device.machine or device.per_host))
    if (
        rate
        and re.search(r"IB|InfiniBand|[HN]DR|RoCE", text)
        and not re.search(r"per (node|host|GPU|device)|node-node|total|\d\s*[x×]", text)
        and rate * per_host <= 1.01 * device.network.bandwidth
    ):
        rate *= per_host  # one of a host's cards
    between = LinkSpec("between hosts", rate, device.network.latency_s) if rate else device.network
    hosts = max(-(-ranks // per_host), 1)
    return Machines(device, hosts, per_host, between, oversubscription=1 / read.fabric_share(text))


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
    """The data-parallel ranks that shard parameters, gradients or the optimizer's state, and those of experts."""
    text = cells.get("zero_fsdp", "")
    ep = whole(cells, "ep", 1) or 1
    if not any(block.experts for block in layout.trace.blocks):
        ep = 1
    if ep > 1 and framework.folds:
        layout = replace(layout, expert_ranks=ep)
    elif ep > 1 and data_ranks % ep == 0:
        layout, data_ranks = replace(layout, ep=ep), data_ranks // ep
    kind = read.sharding(text, framework.shards)
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
    """Megatron's cut: equal numbers of layers per stage; () where they do not divide.

    The embedding is with the first stage, the head with the last.
    """
    stages = layout.pp * layout.chunks
    each, rest = divmod(layers, stages)
    if rest or len(layout.trace.blocks) != layers + 2:
        return ()
    return tuple(each + (stage == 0) + (stage == stages - 1) for stage in range(stages))


def _with_least_recomputed(layout: Layout) -> Layout:
    """A layout with the least recomputation that fits, as users would choose.

    Of the layers some may be computed again, and others not; what is kept of all may wait in the host's memory.
    """
    for share in _SHARES:
        changed = replace(layout, remat="block" if share else "none", remat_share=share or 1.0)
        if memory_fits(changed):
            return changed
    return replace(changed, offload_activations=True)
