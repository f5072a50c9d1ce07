"""A cluster: *where* a job runs. Discovered on this machine, or read from YAML; it says nothing of what runs and how."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

T = TypeVar("T")
Kind = Literal["cpu", "cuda"]
_Tuple = Annotated[tuple[T, ...], Field(strict=False)]  # YAML has only lists


class _Part(BaseModel):
    """Strict keys and values (a number in quotes is no number), frozen once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Device(_Part):
    """What one rank computes on: a GPU, or one core of a host without GPUs."""

    index: int = Field(ge=0)  # as torch numbers it on its host
    kind: Kind = "cuda"
    name: str
    memory_bytes: int = Field(ge=1)  # a core's is its equal share of the host's
    bf16: bool | None = None  # arithmetic in hardware; None where unknown


class Link(_Part):
    """A way for bytes between hosts (`loopback`, or `ethernet` for any other interface) or between devices (`nvlink`, `pcie`).

    Named after the interface (`eth0`), the two devices (`cuda:0-cuda:1`), or the device and what it is plugged into (`cuda:0-switch`).
    """

    name: str
    kind: Literal["loopback", "ethernet", "nvlink", "pcie"]
    bandwidth_gbps: float | None = Field(None, gt=0)  # Gbit/s each way, as the driver states it; None where it states nothing


class Host(_Part):
    """One machine, or the part of it that control groups and affinity leave to us."""

    name: str
    cores: int = Field(ge=1)  # logical, as many as may be busy at once
    memory_bytes: int = Field(ge=1)
    cpu: str = "CPU"
    cpu_bf16: bool | None = None  # arithmetic in hardware; None where unknown
    affinity: _Tuple[_Tuple[int]] = ()
    """The ids of the logical cores that we may run on, those of one physical core together. Empty where unknown."""
    gpus: _Tuple[Device] = ()
    links: _Tuple[Link] = ()

    @model_validator(mode="after")
    def _parts_agree(self) -> Host:
        named = sum(map(len, self.affinity))
        if self.affinity and self.cores > named:
            raise ValueError(f"host {self.name} has {self.cores} cores, but its affinity names only {named}")
        if not all(self.affinity):
            raise ValueError(f"the affinity of host {self.name} has an empty list; each one holds the cores of one physical core")
        if any(gpu.kind == "cpu" for gpu in self.gpus):
            raise ValueError(f"host {self.name} has a device of kind cpu among its GPUs; its cores are devices by themselves")
        return self

    @property
    def kind(self) -> Kind:
        """`cuda` where there is a GPU."""
        return "cuda" if self.gpus else "cpu"

    @property
    def devices(self) -> tuple[Device, ...]:
        """The GPUs; on a host without any, its usable cores, one device each."""
        share = max(1, self.memory_bytes // self.cores)
        return self.gpus or tuple(
            Device(index=i, kind="cpu", name=self.cpu, memory_bytes=share, bf16=self.cpu_bf16) for i in range(self.cores)
        )

    @property
    def physical_cores(self) -> int:
        """How many of the usable cores have arithmetic units of their own (hyper-threads share them)."""
        return min(self.cores, len(self.affinity) or self.cores)


class Cluster(_Part):
    """The hosts that a job may use. `name` is what messages call it."""

    name: str = "this cluster"
    hosts: _Tuple[Host]

    @model_validator(mode="after")
    def _hosts_differ(self) -> Cluster:
        if not self.hosts:
            raise ValueError("a cluster has at least one host")
        twice = [name for name, count in Counter(host.name for host in self.hosts).items() if count > 1]
        if twice:
            raise ValueError(f"two hosts are named {twice[0]!r}; give each a name of its own")
        return self

    @classmethod
    def load(cls, file: str | Path) -> Cluster:
        """Read a cluster from a YAML file.

        Raises:
            ClusterError: the file cannot be read, or a key or value is wrong. Names the line, and the nearest key for a misspelled one.
        """
        from paceline.cluster.source import read_cluster

        return read_cluster(Path(file))

    def to_yaml(self) -> str:
        """The cluster as YAML that `Cluster.load` reads back to an equal cluster (defaults omitted)."""
        import yaml

        data = self.model_dump(mode="json", exclude_defaults=True)
        return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=140, allow_unicode=True)

    @property
    def kind(self) -> Kind:
        """`cuda` where any host has a GPU; ranks then run on GPUs only."""
        return "cuda" if any(host.gpus for host in self.hosts) else "cpu"

    @property
    def devices(self) -> int:
        """How many ranks fit: all GPUs, or all usable cores of a cluster without any."""
        return sum(self.devices_per_host)

    @property
    def devices_per_host(self) -> tuple[int, ...]:
        """How many ranks fit on each host; none on a host without GPUs in a cluster that has some."""
        return tuple(len(host.devices) if host.kind == self.kind else 0 for host in self.hosts)

    def describe(self) -> str:
        """One line for people: `this machine: 2 cores (AMD EPYC), 24 GiB memory, no GPU`."""
        cores = sum(host.cores for host in self.hosts)
        memory = _gib(sum(host.memory_bytes for host in self.hosts))
        hosts = f"{len(self.hosts)} hosts, " if len(self.hosts) > 1 else ""
        gpus = _tally(f"{gpu.name} ({_gib(gpu.memory_bytes)})" for host in self.hosts for gpu in host.gpus)
        cpus = ", ".join(dict.fromkeys(host.cpu for host in self.hosts))
        return f"{self.name}: {hosts}{_count(cores, 'core')} ({cpus}), {memory} memory, {gpus or 'no GPU'}"


def _tally(names: Iterable[str]) -> str:
    return ", ".join(f"{count} × {name}" for name, count in Counter(names).items())


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _gib(size_bytes: int) -> str:
    gib = size_bytes / 2**30
    return f"{gib:.0f} GiB" if gib >= 10 else f"{gib:.1f} GiB"
