"""Hosts with their devices and links, and the hosts that this machine emulates."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from paceline.device import CPU, GPU
from paceline.errors import InvalidValue

T = TypeVar("T")
# torch's device type: `cuda` (also for AMD), `xpu`, `mps`, or the type of a plugin; `cpu` for a core
Kind = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
Listed = Annotated[tuple[T, ...], Field(strict=False)]  # a tuple that is a list in YAML


class Part(BaseModel):
    """Base class with strict keys and values, which cannot be changed.

    For example, a quoted number is not accepted as a number.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Device(Part):
    """The device of one rank: an accelerator, or one core of a host without accelerators."""

    index: int = Field(ge=0)  # index of the device in torch on its host
    kind: Kind = GPU
    name: str
    memory_bytes: int = Field(ge=1)  # for a core, an equal share of the host's memory
    bf16: bool | None = None  # arithmetic in hardware; None if unknown
    fp8: bool | None = None  # as bf16
    graphs: bool | None = None  # True if torch can capture and replay graphs on the device; None if not queried


class Link(Part):
    """A link between hosts or between devices.

    The kind of a link between hosts is `loopback`, or `ethernet` for any other interface. The kind of a link between
    devices is `nvlink` or `pcie`.

    A link has the name of the interface (`eth0`), of the two devices (`cuda:0-cuda:1`), or of the device and its switch
    (`cuda:0-switch`). `channel:1` is the measured link to host 1 over the channel between host processes.
    """

    name: str
    kind: Literal["loopback", "ethernet", "nvlink", "pcie", "measured"]
    # Gbit/s per direction, as reported by the driver; None if not reported
    bandwidth_gbps: float | None = Field(None, gt=0)
    latency_ms: float | None = Field(None, gt=0)  # one-way latency, if measured
    # oversubscription: total rate of all hosts divided by the capacity of the switches above them, …
    oversubscription: float = Field(1.0, ge=1, allow_inf_nan=False)
    oversubscribed_beyond: int = Field(1, ge=1)  # … which applies if there are more than this number of hosts


class Host(Part):
    """A machine, or the part of a machine that control groups and affinity allow."""

    name: str
    cores: int = Field(ge=1)  # maximum number of logical cores that may be busy at the same time
    memory_bytes: int = Field(ge=1)
    cpu: str = "CPU"
    cpu_bf16: bool | None = None  # arithmetic in hardware; None if unknown
    cpu_avx512: bool | None = None  # x86 vector instructions of 512 bits
    affinity: Listed[Listed[int]] = ()
    """Ids of the usable logical cores, grouped by physical core; empty if unknown."""
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
                "host {name} lists a device of kind cpu among its GPUs. Remove this device: the cores of a host are "
                "always devices.",
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
        """Type of the host's devices, as in torch."""
        return self.gpus[0].kind if self.gpus else CPU

    @property
    def has_accelerators(self) -> bool:
        """True if ranks on this host use accelerators instead of cores."""
        return bool(self.gpus)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The host's accelerators, or its usable cores if it has no accelerators."""
        share = max(1, self.memory_bytes // self.cores)
        return self.gpus or tuple(
            Device(index=i, kind=CPU, name=self.cpu, memory_bytes=share, bf16=self.cpu_bf16) for i in range(self.cores)
        )

    @property
    def physical_cores(self) -> int:
        """Number of usable physical cores, without additional hyper-threads."""
        return min(self.cores, len(self.affinity) or self.cores)


class Emulate(Part):
    """Hosts without GPUs that this machine emulates, to test a cluster.

    The rate of each link and the number of cores of each host can be set.

    `rate` is a rate per direction, such as `100mbit`. `cpu` is the number of cores that may be busy at the same time.
    Both are one value for all hosts, or a list with one value per host. `delay_ms` is the one-way delay of a packet
    between any two hosts. The network of the hosts is isolated, so data must already be on the machine.
    """

    hosts: int = Field(ge=1, le=250)
    rate: str | Listed[str] | None = None  # None means unlimited
    cpu: float | Listed[float] | None = None  # None means all cores of the machine
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
        """Rate of the link of each host in bits/s per direction; None if unlimited."""
        rates = self.rate if isinstance(self.rate, tuple) else (self.rate,) * self.hosts
        return tuple(None if rate is None else bits_per_s(rate) for rate in rates)

    @property
    def cores(self) -> tuple[float | None, ...]:
        """Number of cores that may be busy on each host; None if unlimited."""
        return self.cpu if isinstance(self.cpu, tuple) else (self.cpu,) * self.hosts


_RATE = re.compile(r"(?P<number>\d+(\.\d+)?) ?(?P<unit>[kmg])bit(/s)?", re.IGNORECASE)
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9}
_LEAST, _MOST = 10**4, 4 * 10**11  # range of rates that `tc` can enforce


def bits_per_s(rate: str) -> int:
    """Convert a rate such as `100mbit` to bits per second, here 100,000,000.

    As in `tc`, kbit, mbit and gbit are 10³, 10⁶ and 10⁹ bits per second.

    Raises:
        ValueError: the text is not a rate; the message shows valid rates.
    """
    match = _RATE.fullmatch(rate.strip())
    speed = round(float(match["number"]) * _UNITS[match["unit"].lower()]) if match else 0
    if not _LEAST <= speed <= _MOST:
        raise InvalidValue(
            "cluster.rate_invalid",
            "{rate!r} is not a rate such as 25mbit or 1gbit. The units kbit, mbit and gbit are 10³, 10⁶ and 10⁹ bits "
            "per second, and rates range from 10kbit to 400gbit.",
            rate=rate,
        )
    return speed
