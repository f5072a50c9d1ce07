"""What a search found, by hand: a job by its dimensions, a cluster, three candidates, and why others were excluded."""

from __future__ import annotations

from typing import Any

from paceline.cluster.catalogue import Accelerator, LinkSpec
from paceline.cluster.cluster import Cluster
from paceline.job.job import Job
from paceline.planning.cost.layout import PARTS, Layout, Machines, Prediction
from paceline.planning.explain.advice import Advice
from paceline.planning.model.graph import BlockTrace, Gemm, ModelTrace
from paceline.planning.plan import Plan
from paceline.planning.search.result import Candidate, SearchResult
from paceline.planning.search.space import Excluded

TRACE = ModelTrace(
    tuple(
        BlockTrace("layer", f"layers.{i}", (Gemm(1024, 4096, 1024),), matrices=12_000_000, boundary=1024)
        for i in range(8)
    ),
    tokens=1024,
)
DEVICE = Accelerator(
    "H100-SXM", "cuda", {"bf16": 989e12, "fp32": 67e12}, 80 * 10**9, 3.35e12, LinkSpec("NVLink", 450e9, 3e-6)
)
MACHINES = Machines(DEVICE, 2, 8, LinkSpec("network", 6.25e9, 14e-6), memory_bytes=80 * 10**9)

RARER = Advice("sync=local:8", gain=0.25, but="replicas agree in every eighth step only")


def job(**changes: Any) -> Job:
    """A small GPT by its dimensions."""
    values: dict[str, Any] = {
        "name": "small-gpt",
        "model": {"transformer": {"layers": 8, "hidden": 1024, "heads": 16, "seq": 1024, "vocab": 32000}},
        "data": "synthetic",
        "loss": "cross_entropy",
        "optimizer": {"name": "adamw", "lr": 0.001},
        "global_batch": 64,
        "precision": "bf16",
        "stop": {"steps": 1000},
    }
    return Job.model_validate(values | changes)


def cluster(per_host: int = 8, **changes: Any) -> Cluster:
    """Two hosts of eight GPUs."""
    gpus = [{"index": i, "name": "H100-SXM", "memory_bytes": 80 * 10**9} for i in range(per_host)]
    link = {"name": "eth0", "kind": "ethernet", "bandwidth_gbps": 400.0}
    hosts = [{"name": name, "cores": 64, "memory_bytes": 2**40, "gpus": gpus, "links": [link]} for name in ("a", "b")]
    return Cluster.model_validate({"name": "two hosts", "hosts": hosts} | changes)


def candidate(plan: str, *, why: str = "", memory: float = 30e9, **parts: float) -> Candidate:
    """A plan whose step takes these seconds."""
    read = Plan.parse(plan)
    step = sum(parts.values())
    prediction = Prediction(
        step_time_s=step,
        memory_bytes=int(memory),
        throughput=64 / step,
        mfu=0.4 / step,
        breakdown=dict.fromkeys(PARTS, 0.0) | parts,
        memory={"parameters": 0.25 * memory, "activations": 0.75 * memory},
        notes=("kernels that nobody measured are taken to be as fast as others",),
    )
    layout = Layout(
        TRACE,
        MACHINES,
        **{axis: getattr(read, axis) for axis in ("dp", "fsdp", "tp", "pp", "cp", "ep")},
        samples=64 / read.data_ranks / read.microbatches,
        microbatches=read.microbatches,
        precision="bf16",
    )
    return Candidate(read, layout, prediction, why)


def found(**changes: Any) -> SearchResult:
    """Three candidates, the second 10 % slower than the first."""
    best = (
        candidate("dp=2 tp=8", compute=0.8, tp=0.15, dp=0.03, optimizer=0.02),
        candidate("fsdp=16", why="fsdp +0.20 s: weights between hosts", compute=0.8, fsdp=0.28, optimizer=0.02),
        candidate(
            "dp=2 tp=4 pp=2 microbatches=8",
            why="bubble +0.31 s",
            memory=22e9,
            compute=0.8,
            tp=0.1,
            bubble=0.4,
            optimizer=0.02,
        ),
    )
    values: dict[str, Any] = {
        "best": best,
        "excluded": (
            Excluded("memory", "state of all parameters on one GPU: fsdp=2 would work", 40),
            Excluded("tp=16", "heads: 16 do", 8),
        ),
        "considered": 1234,
        "evaluated": 100,
        "pruned": 900,
        "gap": 0.0,
        "seconds": 0.21,
    }
    return SearchResult(**values | changes)
