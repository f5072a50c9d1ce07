"""Entries of the catalogue, from figures in the units of data sheets.

TFLOP/s, GiB, GB/s, Gbit/s, W.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from paceline.cluster.catalogue.accelerator import NEURON, TPU, Accelerator, LinkSpec
from paceline.cluster.catalogue.hosts import HOP, PCIE_3, PCIE_4, PCIE_5, UsualHost, network
from paceline.device import CPU, GPU

_GIB = 2**30
_CORE = "FLOPs a cycle of the class × 2.5 GHz; a share of DDR4-3200's bandwidth on 8 channels among 20 cores"


def peaks(
    fp64: float,
    fp32: float,
    half: float,
    *,
    tf32: float | None = None,
    bf16: float | None = None,
    fp8: float | None = None,
    fp4: float | None = None,
    int8: float | None = None,
) -> Mapping[str, float]:
    """Peak FLOP/s by precision, from TFLOP/s. `half` is fp16's, and bf16's without `bf16`."""
    always = {"fp64": fp64, "fp32": fp32, "tf32": tf32 or fp32, "bf16": bf16 or half, "fp16": half}
    where_there = {"fp8": fp8, "fp4": fp4, "int8": int8}
    found = always | {precision: tflops for precision, tflops in where_there.items() if tflops}
    return {precision: tflops * 1e12 for precision, tflops in found.items()}


class Chip(NamedTuple):
    """Chip that several entries share.

    Attributes:
        generation: as `Accelerator` has it.
        multiprocessors: those that are in use.
        figures: its peaks.
        sustained: part of them that lasts within its power.
        measured: source of that; "" where power does not bind, or nobody has measured it.
    """

    generation: str
    multiprocessors: int
    figures: Mapping[str, float]
    sustained: float = 1.0
    measured: str = ""


def gpu(
    name: str,
    chip: Chip,
    memory_gib: float,
    memory_gbps: float,
    power_w: float,
    host: UsualHost,
    source: str,
    kind: str = GPU,
) -> Accelerator:
    """Entry of a GPU, or of another card."""
    measured = {"sustained": chip.measured} if chip.measured else {}
    return Accelerator(
        name,
        kind,
        chip.figures,
        int(memory_gib * _GIB),
        memory_gbps * 1e9,
        host.inside,
        per_host=host.per_host,
        mesh=host.mesh,
        sources={"all": source, "latency": HOP, "network": host.source, **measured},
        network=network(host.network_gbps),
        multiprocessors=chip.multiprocessors,
        sustained=chip.sustained,
        generation=chip.generation,
        power_w=power_w,
        host_link=host.host_link,
        host_memory_bytes=int(host.memory_gib * _GIB),
        machine=host.machine,
    )


def tpu(
    name: str,
    bf16: float,
    memory_gib: float,
    memory_gbps: float,
    ici_gbps: float,
    pod: int,
    network_gbps: float,
    *,
    torus: int,
    machine: int,
    host_gib: float,
    fp8: float | None = None,
    int8: float | None = None,
    power_w: float | None = None,
    assumed: Mapping[str, str] | None = None,
) -> Accelerator:
    """Entry of a TPU: a chip, its pod a torus of `torus` dimensions. `assumed` says which figures are."""
    source = f"Cloud {name.replace('-', ' ')} documentation, Google"
    always = {"latency": "assumed", "fp32": "assumed: six passes in bf16 (XLA's HIGHEST)"}
    return Accelerator(
        name,
        TPU,
        peaks(bf16 / 36, bf16 / 6, bf16 / 6, bf16=bf16, fp8=fp8, int8=int8),
        int(memory_gib * _GIB),
        memory_gbps * 1e9,
        LinkSpec("ICI", ici_gbps * 1e9, 1e-6),
        per_host=pod,
        sources={"all": source, "network": source, **always, **(assumed or {})},
        network=network(network_gbps),
        generation="tpu",
        power_w=power_w,
        host_link=PCIE_5 if name in ("TPU-v6e", "TPU-v7x") else PCIE_3,
        host_memory_bytes=int(host_gib * _GIB),
        machine=machine,
        torus=torus,
    )


def neuron(
    name: str,
    figures: Mapping[str, float],
    memory_gib: float,
    memory_gbps: float,
    link_gbps: float,
    per_host: int,
    network_gbps: float,
    host_gib: float,
    source: str,
) -> Accelerator:
    """Entry of a core of a Trainium chip as torch sees it.

    The 16 chips of an instance are a torus of 4 × 4.
    """
    return Accelerator(
        name,
        NEURON,
        figures,
        int(memory_gib * _GIB),
        memory_gbps * 1e9,
        LinkSpec("NeuronLink", link_gbps * 1e9, 3e-6),
        per_host=per_host,
        sources={"all": source, "network": source, "latency": "assumed", "fp64": "assumed: six products of fp32"},
        network=network(network_gbps),
        generation="trainium",
        host_link=PCIE_4,
        host_memory_bytes=int(host_gib * _GIB),
        torus=2,
    )


def core(name: str, fp32_per_cycle: int, bf16_per_cycle: int | None = None) -> Accelerator:
    """Entry of one core of a processor.

    A job that runs on CPUs had better be measured.
    """
    fp32 = fp32_per_cycle * 2.5e-3
    return Accelerator(
        name,
        CPU,
        peaks(fp32 / 2, fp32, fp32, bf16=(bf16_per_cycle or fp32_per_cycle) * 2.5e-3),
        4 * _GIB,
        10e9,
        LinkSpec("shared memory", 5e9, 10e-6),
        launch_s=5e-6,
        per_host=8,
        sources={"all": _CORE, "latency": "measured with paceline links", "network": "assumed"},
        network=LinkSpec("network of 10 Gbit/s, over 8 cores", 10e9 / 8 / 8, 50e-6),
        host_link=LinkSpec("its own memory", 10e9, 0.0),
        host_memory_bytes=4 * _GIB,
    )
