"""Hosts with their devices and links, and hosts that this machine emulates."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from paceline.device import CPU, GPU
from paceline.errors import InvalidValue

T = TypeVar("T")
# torch's type of a device: `cuda` (also AMD's), `xpu`, `mps`, a plugin's own; `cpu` is a core
Kind = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
Listed = Annotated[tuple[T, ...], Field(strict=False)]  # YAML has only lists


class Part(BaseModel):
    """Base class with strict keys and values (a quoted number is not a number), frozen once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Device(Part):
    """Device of one rank: an accelerator, or one core of a host without accelerators."""

    index: int = Field(ge=0)  # torch's index on its host
    kind: Kind = GPU
    name: str
    memory_bytes: int = Field(ge=1)  # for a core, its equal share of the host's memory
    bf16: bool | None = None  # arithmetic in hardware; None if unknown
    graphs: bool | None = None  # True if torch can replay its kernels as graphs; None if not queried


class Link(Part):
    """Link between hosts or between devices.

    Between hosts: `loopback`, or `ethernet` for any other interface; between devices: `nvlink`, `pcie`.

    It is named after the interface (`eth0`), the two devices (`cuda:0-cuda:1`), or the device and its switch
    (`cuda:0-switch`). `channel:1` is the measured link to host 1 over the channel of the host processes.
    """

    name: str
    kind: Literal["loopback", "ethernet", "nvlink", "pcie", "measured"]
    # Gbit/s per direction, as stated by the driver; None if not stated
    bandwidth_gbps: float | None = Field(None, gt=0)
    latency_ms: float | None = Field(None, gt=0)  # one-way latency, if measured
    # ratio of all hosts' rates together to the capacity of the switches above them, …
    oversubscription: float = Field(1.0, ge=1, allow_inf_nan=False)
    oversubscribed_beyond: int = Field(1, ge=1)  # … for more than this number of hosts


class Host(Part):
    """Machine, or the part of it that control groups and affinity allow."""

    name: str
    cores: int = Field(ge=1)  # logical cores: the maximum that may be busy at once
    memory_bytes: int = Field(ge=1)
    cpu: str = "CPU"
    cpu_bf16: bool | None = None  # arithmetic in hardware; None if unknown
    cpu_avx512: bool | None = None  # x86 vectors of 512 bits
    affinity: Listed[Listed[int]] = ()
    """Ids of the usable logical cores, grouped by physical core; empty where unknown."""
    gpus: Listed[Device] = ()
    links: Listed[Link] = ()

    @model_validator(mode="after")
    def _parts_agree(self) -> Host:
        named = sum(map(len, self.affinity))
        if self.affinity and self.cores > named:
            raise InvalidValue(
                "cluster.affinity_short",
                "host {name} has {cores} cores, but its affinity names only {named}",
                name=self.name,
                cores=self.cores,
                named=named,
            )
        if not all(self.affinity):
            raise InvalidValue(
                "cluster.affinity_empty",
                "the affinity of host {name} has an empty list. Each list must contain the cores of one physical core.",
                name=self.name,
            )
        if any(gpu.kind == CPU for gpu in self.gpus):
            raise InvalidValue(
                "cluster.cpu_among_gpus",
                "host {name} lists a device of kind cpu among its GPUs. Remove it: the cores of a host are always "
                "devices.",
                name=self.name,
            )
        if len(kinds := sorted({gpu.kind for gpu in self.gpus})) > 1:
            raise InvalidValue(
                "cluster.host_of_several_kinds",
                "host {name} has GPUs of several kinds ({kinds}), but torch can use only one kind",
                name=self.name,
                kinds=list(kinds),
            )
        return self

    @property
    def kind(self) -> Kind:
        """Torch's type of its devices."""
        return self.gpus[0].kind if self.gpus else CPU

    @property
    def has_accelerators(self) -> bool:
        """True if ranks use accelerators here, not cores."""
        return bool(self.gpus)

    @property
    def devices(self) -> tuple[Device, ...]:
        """Accelerators; on a host without any, its usable cores, one device each."""
        share = max(1, self.memory_bytes // self.cores)
        return self.gpus or tuple(
            Device(index=i, kind=CPU, name=self.cpu, memory_bytes=share, bf16=self.cpu_bf16) for i in range(self.cores)
        )

    @property
    def physical_cores(self) -> int:
        """Number of usable physical cores; hyper-threads share the arithmetic units of a core."""
        return min(self.cores, len(self.affinity) or self.cores)


class Emulate(Part):
    """Hosts emulated on this machine, without GPUs, to test a cluster.

    Links have a configured rate, and hosts a configured number of cores.

    `rate` (`100mbit`, per direction) and `cpu` (cores that may be busy at once) are one value for all hosts or a list
    with one value per host. `delay_ms` is the one-way delay of a packet from any host to any other. The hosts' network
    is isolated, so data must already be on the machine.
    """

    hosts: int = Field(ge=1, le=250)
    rate: str | Listed[str] | None = None  # None: unlimited
    cpu: float | Listed[float] | None = None  # None: all cores of the machine
    delay_ms: float | None = Field(None, gt=0, le=10_000, allow_inf_nan=False)

    @field_validator("rate", mode="before")
    @classmethod
    def _rates(cls, rate: object) -> object:
        for one in rate if isinstance(rate, list | tuple) else [] if rate is None else [rate]:
            bits_per_s(str(one))
        return rate

    @field_validator("cpu", mode="before")
    @classmethod
    def _quotas(cls, cpu: object) -> object:
        for one in cpu if isinstance(cpu, list | tuple) else [] if cpu is None else [cpu]:
            if isinstance(one, bool) or not isinstance(one, int | float) or not 0.05 <= one < math.inf:
                raise InvalidValue(
                    "cluster.busy_cores_invalid",
                    "{value!r} is not a valid number of cores. A host can use, e.g., 2 or 0.5 cores, and at least "
                    "0.05.",
                    value=one,
                )
        return cpu

    @model_validator(mode="after")
    def _one_for_each_host(self) -> Emulate:
        for key, value in (("rate", self.rate), ("cpu", self.cpu)):
            if isinstance(value, tuple) and len(value) != self.hosts:
                raise InvalidValue(
                    "cluster.values_per_host",
                    "{key} lists {values} values, but there are {hosts} hosts. Give one value for each host, or a "
                    "single value for all.",
                    key=key,
                    values=len(value),
                    hosts=self.hosts,
                )
        return self

    @property
    def rates_bps(self) -> tuple[int | None, ...]:
        """Rate of each host's link in bits/s per direction; None if unlimited."""
        rates = self.rate if isinstance(self.rate, tuple) else (self.rate,) * self.hosts
        return tuple(None if rate is None else bits_per_s(rate) for rate in rates)

    @property
    def cores(self) -> tuple[float | None, ...]:
        """Number of cores that each host may keep busy; None if unlimited."""
        return self.cpu if isinstance(self.cpu, tuple) else (self.cpu,) * self.hosts


_RATE = re.compile(r"(?P<number>\d+(\.\d+)?) ?(?P<unit>[kmg])bit(/s)?", re.IGNORECASE)
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9}
_LEAST, _MOST = 10**4, 4 * 10**11  # range that `tc` can shape


def bits_per_s(rate: str) -> int:
    """Parse a rate: `100mbit` is 100,000,000. As in `tc`, kbit, mbit and gbit are 10³, 10⁶ and 10⁹ bits per second.

    Raises:
        ValueError: the text is not a rate; the error shows valid rates.
    """
    match = _RATE.fullmatch(rate.strip())
    speed = round(float(match["number"]) * _UNITS[match["unit"].lower()]) if match else 0
    if not _LEAST <= speed <= _MOST:
        raise InvalidValue(
            "cluster.rate_invalid",
            "{rate!r} is not a rate such as 25mbit or 1gbit (kbit, mbit, gbit: 10³, 10⁶, 10⁹ bits a second, 10kbit "
            "to 400gbit)",
            rate=rate,
        )
    return speed
