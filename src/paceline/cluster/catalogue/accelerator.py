"""Entries of the hardware catalogue: devices and links, with their makers' figures, not derated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.device import CPU
from paceline.errors import ClusterError

TPU = "tpu"
HPU = "hpu"
NEURON = "neuron"
_COMPILED = (TPU, HPU, NEURON)  # whole graphs are compiled, no kernel is started by the host


@dataclass(frozen=True)
class LinkSpec:
    """A link's bandwidth (bytes per second and direction) and latency (seconds), as its maker states.

    One device sends at that rate while it receives as much.
    """

    name: str
    bandwidth: float
    latency_s: float


@dataclass(frozen=True)
class Accelerator:
    """Peak capabilities of a device.

    Attributes:
        name: in the catalogue, such as `H100-SXM`.
        kind: torch's type, `cuda` also for AMD's; `cpu` for a core.
        peak_flops: dense, without sparsity, by precision: `fp64`, `fp32`, `tf32`, `bf16`, `fp16`; where the
            hardware has them `fp8`, `fp4` and `int8`, the same however their scales are laid out. 16-bit products are
            summed in fp32. Of the first five, one that the hardware does not have stands there with the peak of the one
            that it is computed in.
        memory_bytes: memory of the device.
        memory_bandwidth: bytes per second.
        inside: link to the other devices of its host; a host is what such links join, as the 72 of an NVL72.
        launch_s: shortest time from one kernel's start to the next one's.
        per_host: number of devices in its usual host.
        network: link of one device to other hosts in its maker's own systems, the default of a cluster without a stated
            rate.
        multiprocessors: streaming multiprocessors (compute units) among which the tiles of a product are divided.
        sustained: part of `peak_flops` that lasts within its power, where that binds.
        generation: of its units for products and attention: `ampere`, `hopper`, `blackwell`, `cdna3`, `tpu`, …; "" if
            unknown.
        power_w: watts at full load, its memory's included; None if unknown.
        host_link: link to its host's memory, its part of one that devices share.
        host_memory_bytes: memory of its host, for each device.
        machine: devices of one operating system, where `per_host` counts those of a domain of several; 0: `per_host`.
        mesh: True if its host's devices are joined in pairs, without a switch.
        torus: dimensions of the torus that joins its domain; 0: a switch, or links between all.
        sources: for each attribute, or `all`, where the figure is printed.
    """

    name: str
    kind: str
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    memory_bandwidth: float
    inside: LinkSpec
    launch_s: float = 4e-6
    per_host: int = 8
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    network: LinkSpec = LinkSpec("network, 100 Gbit/s", 12.5e9, 14e-6)
    multiprocessors: int = 128
    sustained: float = 1.0
    generation: str = ""
    power_w: float | None = None
    host_link: LinkSpec = LinkSpec("PCIe 4 x16", 32e9, 5.7e-6)
    host_memory_bytes: int = 128 * 2**30
    machine: int = 0
    torus: int = 0
    mesh: bool = False

    @property
    def is_core(self) -> bool:
        """True if it is a core of a processor."""
        return self.kind == CPU

    @property
    def is_gpu(self) -> bool:
        """True if the host starts its kernels one by one, unlike a TPU's.

        Products are cut into tiles, one for each of its multiprocessors at a time.
        """
        return self.kind not in (CPU, *_COMPILED)

    def peak(self, precision: str) -> float:
        """FLOPs per second, dense.

        Raises:
            ClusterError: the device does not compute in that precision.
        """
        if precision in self.peak_flops:
            return self.peak_flops[precision]
        raise ClusterError(f"{self.name} does not compute in {precision}; it has {', '.join(self.peak_flops)}")
