"""A cluster: *where* a job runs.

Discovered on this machine, or read from YAML; it says nothing of what runs and how.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from paceline.device import CPU, GPU
from paceline.errors import ClusterError
from paceline.units import count, size

T = TypeVar("T")
# torch's type of a device: `cuda` (also AMD's), `xpu`, `mps`, a plugin's own; `cpu` is a core
Kind = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
_Tuple = Annotated[tuple[T, ...], Field(strict=False)]  # YAML has only lists


class _Part(BaseModel):
    """Strict keys and values (a number in quotes is not a number), frozen once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Device(_Part):
    """A device of one rank: an accelerator, or one core of a host without any."""

    index: int = Field(ge=0)  # as torch numbers it on its host
    kind: Kind = GPU
    name: str
    memory_bytes: int = Field(ge=1)  # a core's is its equal share of the host's
    bf16: bool | None = None  # arithmetic in hardware; None where unknown
    graphs: bool | None = None  # torch can replay its kernels as graphs; None where it was not asked


class Link(_Part):
    """A link between hosts or between devices.

    Between hosts: `loopback`, or `ethernet` for any other interface; between devices: `nvlink`, `pcie`.

    Named after the interface (`eth0`), the two devices (`cuda:0-cuda:1`), or the device and what it is plugged into
    (`cuda:0-switch`). `channel:1` is what was measured to host 1, through the channel of the host processes.
    """

    name: str
    kind: Literal["loopback", "ethernet", "nvlink", "pcie", "measured"]
    # Gbit/s each way, as the driver states it; None where it states nothing
    bandwidth_gbps: float | None = Field(None, gt=0)
    latency_ms: float | None = Field(None, gt=0)  # one way, where it was measured
    # how many times the rates of all hosts together are what the switches above them carry; …
    oversubscription: float = Field(1.0, ge=1, allow_inf_nan=False)
    oversubscribed_beyond: int = Field(1, ge=1)  # … among more than so many hosts


class Host(_Part):
    """One machine, or the part of it that control groups and affinity leave to us."""

    name: str
    cores: int = Field(ge=1)  # logical, as many as may be busy at once
    memory_bytes: int = Field(ge=1)
    cpu: str = "CPU"
    cpu_bf16: bool | None = None  # arithmetic in hardware; None where unknown
    cpu_avx512: bool | None = None  # x86's vectors of 512 bits
    affinity: _Tuple[_Tuple[int]] = ()
    """Ids of the usable logical cores, grouped by physical core; empty where unknown."""
    gpus: _Tuple[Device] = ()
    links: _Tuple[Link] = ()

    @model_validator(mode="after")
    def _parts_agree(self) -> Host:
        named = sum(map(len, self.affinity))
        if self.affinity and self.cores > named:
            raise ValueError(f"host {self.name} has {self.cores} cores, but its affinity names only {named}")
        if not all(self.affinity):
            raise ValueError(
                f"the affinity of host {self.name} has an empty list; each one holds the cores of one physical core"
            )
        if any(gpu.kind == CPU for gpu in self.gpus):
            raise ValueError(
                f"host {self.name} has a device of kind cpu among its GPUs; its cores are devices by themselves"
            )
        if len(kinds := sorted({gpu.kind for gpu in self.gpus})) > 1:
            raise ValueError(f"host {self.name} has GPUs of several kinds ({', '.join(kinds)}); torch uses one of them")
        return self

    @property
    def kind(self) -> Kind:
        """Torch's type of its devices."""
        return self.gpus[0].kind if self.gpus else CPU

    @property
    def has_accelerators(self) -> bool:
        """True if ranks compute on accelerators here, not on cores."""
        return bool(self.gpus)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The accelerators; on a host without any, its usable cores, one device each."""
        share = max(1, self.memory_bytes // self.cores)
        return self.gpus or tuple(
            Device(index=i, kind=CPU, name=self.cpu, memory_bytes=share, bf16=self.cpu_bf16) for i in range(self.cores)
        )

    @property
    def physical_cores(self) -> int:
        """Number of usable physical cores; hyper-threads share the arithmetic units of one."""
        return min(self.cores, len(self.affinity) or self.cores)


class Emulate(_Part):
    """Hosts emulated on this machine, without GPUs, to try out a cluster.

    Links have a given rate, hosts a given number of cores.

    `rate` (`100mbit`, each way) and `cpu` (cores that may be busy at once) are one value for all hosts or a list with
    one for each. `delay_ms` is the one-way delay of a packet from any host to any other. The hosts' network is not
    connected to any other, so data must be on the machine before.
    """

    hosts: int = Field(ge=1, le=250)
    rate: str | _Tuple[str] | None = None  # None: as fast as the machine
    cpu: float | _Tuple[float] | None = None  # None: all of the machine's
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
                raise ValueError(
                    f"{one!r} is not a number of cores; a host may keep busy e.g. 2 or 0.5, and 0.05 at least"
                )
        return cpu

    @model_validator(mode="after")
    def _one_for_each_host(self) -> Emulate:
        for key, value in (("rate", self.rate), ("cpu", self.cpu)):
            if isinstance(value, tuple) and len(value) != self.hosts:
                raise ValueError(
                    f"{key} lists {len(value)} values, but there are {self.hosts} hosts: give one for each, "
                    "or one for all"
                )
        return self

    @property
    def rates_bps(self) -> tuple[int | None, ...]:
        """Bits/s of each host's link, each way; None where it is not limited."""
        rates = self.rate if isinstance(self.rate, tuple) else (self.rate,) * self.hosts
        return tuple(None if rate is None else bits_per_s(rate) for rate in rates)

    @property
    def cores(self) -> tuple[float | None, ...]:
        """Number of cores that each host may keep busy; None means unlimited."""
        return self.cpu if isinstance(self.cpu, tuple) else (self.cpu,) * self.hosts


class Cluster(_Part):
    """The hosts that a job may use. `name` is what messages call it.

    With `emulate` alone, the hosts are those that it stands for on this machine, which is asked when the cluster is
    made. With `catalogue` (`64x8xH100-SXM, 400gbit`) alone, they are as the catalogue of hardware has them: such a
    cluster can be planned for only. A price is of one device for an hour, in any currency.
    Failures are those after which a host, or a rank on it, has to be started again.
    """

    name: str = "this cluster"
    hosts: _Tuple[Host] = ()
    emulate: Emulate | None = None
    catalogue: str | None = None
    price_per_hour: float | None = Field(None, ge=0, allow_inf_nan=False)
    failures_per_host_day: float | None = Field(None, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _from_the_catalogue(self) -> Cluster:
        """Hosts, price and name that the text of `catalogue` stands for."""
        if self.catalogue is None:
            return self
        if self.hosts or self.emulate:
            raise ValueError("a cluster from the catalogue has its hosts from there: leave `hosts` and `emulate` out")
        from paceline.cluster.named import hosts_of, read_name

        named = read_name(self.catalogue)
        object.__setattr__(self, "hosts", hosts_of(named))
        if self.price_per_hour is None:
            object.__setattr__(self, "price_per_hour", named.price_per_hour)
        if "name" not in self.model_fields_set:
            object.__setattr__(self, "name", named.shape)
        return self

    @model_validator(mode="after")
    def _hosts_differ(self) -> Cluster:
        if self.emulate and not self.hosts:
            from paceline.cluster.discover import hosts_of

            object.__setattr__(self, "hosts", hosts_of(self.emulate))
        if not self.hosts:
            raise ValueError(
                "a cluster has at least one host: list `hosts`, or emulate some with emulate: {hosts: 2}, "
                "or name them with catalogue: 2x8xH100-SXM, 400gbit"
            )
        if self.emulate and self.emulate.hosts != len(self.hosts):
            raise ValueError(
                f"emulate stands for {self.emulate.hosts} hosts, but {len(self.hosts)} are listed: leave `hosts` out"
            )
        twice = [name for name, count in Counter(host.name for host in self.hosts).items() if count > 1]
        if twice:
            raise ValueError(f"two hosts are named {twice[0]!r}; give each a name of its own")
        if len(kinds := sorted({host.kind for host in self.hosts_in_use})) > 1:
            raise ValueError(f"the hosts have GPUs of several kinds ({', '.join(kinds)}), and a run uses one kind")
        return self

    @classmethod
    def load(cls, file: str | Path) -> Cluster:
        """Read a cluster from a YAML file.

        Raises:
            ClusterError: the file cannot be read, or a key or value is wrong. Names the line, and the nearest key for a
                misspelled one.
        """
        from paceline.messages import explain
        from paceline.yaml_file import FileKind, read_yaml

        example = "`emulate: {hosts: 4, rate: 100mbit}`, or `catalogue: 64x8xH100-SXM, 400gbit`"
        kind = FileKind("cluster", "hosts, emulate or catalogue", example, ClusterError)
        values, positions = read_yaml(Path(file), kind)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ClusterError(explain(error.errors(include_url=False), cls, positions, name="cluster")) from None
        # this machine cannot be what it is to emulate, or the catalogue has no such thing
        except ClusterError as error:
            key = "catalogue" if "catalogue" in values else "emulate"
            raise ClusterError(f"{positions.place((key,))[1]}: {error}") from error

    def to_yaml(self) -> str:
        """The cluster as YAML that `Cluster.load` reads back to an equal cluster (defaults omitted)."""
        from paceline.yaml_file import to_yaml

        data = self.model_dump(mode="json", exclude_defaults=True, exclude={"hosts"} if self.only_planned else None)
        return to_yaml(data, flow=True)

    @property
    def only_planned(self) -> bool:
        """True if the cluster is from the catalogue, without machines behind it."""
        return self.catalogue is not None

    @property
    def kind(self) -> Kind:
        """Torch's type of the devices that ranks compute on."""
        return self.hosts_in_use[0].kind

    @property
    def has_accelerators(self) -> bool:
        """True if any host has accelerators; ranks then run on these only."""
        return any(host.has_accelerators for host in self.hosts)

    @property
    def hosts_in_use(self) -> tuple[Host, ...]:
        """Hosts that ranks can run on: those with accelerators, or all where none has any."""
        return tuple(host for host in self.hosts if host.has_accelerators == self.has_accelerators)

    @property
    def devices(self) -> int:
        """Number of ranks that fit: all GPUs, or all usable cores if there are none."""
        return sum(self.devices_per_host)

    @property
    def devices_per_host(self) -> tuple[int, ...]:
        """Number of ranks that fit on each host.

        It is 0 for a host without GPUs in a cluster that has some.
        """
        return tuple(len(host.devices) if host.has_accelerators == self.has_accelerators else 0 for host in self.hosts)

    def describe(self) -> str:
        """One line for people: `this machine: 2 cores (AMD EPYC), 24 GiB memory, no GPU`."""
        if self.catalogue is not None:
            from paceline.cluster.named import described, read_name

            return f"{self.name}: {described(read_name(self.catalogue)._replace(price_per_hour=self.price_per_hour))}"
        cores = sum(host.cores for host in self.hosts)
        memory = size(sum(host.memory_bytes for host in self.hosts))
        hosts = f"{len(self.hosts)} hosts, " if len(self.hosts) > 1 else ""
        gpus = _tally(f"{gpu.name} ({size(gpu.memory_bytes)})" for host in self.hosts for gpu in host.gpus)
        cpus = ", ".join(dict.fromkeys(host.cpu for host in self.hosts))
        machines = f"{self.name}: {hosts}{count(cores, 'core')} ({cpus}), {memory} memory, {gpus or 'no GPU'}"
        return f"{machines}; {_emulated(self.emulate)}" if self.emulate else machines

    def ranks_per_host(self, ranks: int) -> list[int]:
        """Number of ranks on each host, of `ranks` in all; see `spread`."""
        return spread(ranks, self.devices_per_host)


def spread(ranks: int, devices_per_host: Sequence[int]) -> list[int]:
    """Number of ranks on each host, with hosts filled in order.

    Each device gets as many ranks as it takes for all to have a place.
    """
    left, placed = ranks, []
    per_device = -(-ranks // sum(devices_per_host))
    for capacity in devices_per_host:
        placed.append(min(capacity * per_device, left))
        left -= placed[-1]
    return placed


def _emulated(emulate: Emulate) -> str:
    rates = emulate.rate if isinstance(emulate.rate, tuple) else (emulate.rate,)
    links = " or ".join(dict.fromkeys(str(rate) for rate in rates))
    quotas = emulate.cpu if isinstance(emulate.cpu, tuple) else (emulate.cpu,)
    cores = " or ".join(dict.fromkeys(f"{cores:g}" for cores in quotas if cores is not None))
    delay = f", {emulate.delay_ms:g} ms from host to host" if emulate.delay_ms else ""
    return (
        "emulated on this "
        f"machine{f', links of {links}' if emulate.rate else ''}{delay}{f', cpu {cores}' if cores else ''}"
    )


def _tally(names: Iterable[str]) -> str:
    return ", ".join(f"{count} × {name}" for name, count in Counter(names).items())


_RATE = re.compile(r"(?P<number>\d+(\.\d+)?) ?(?P<unit>[kmg])bit(/s)?", re.IGNORECASE)
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9}
_LEAST, _MOST = 10**4, 4 * 10**11  # what `tc` can shape


def bits_per_s(rate: str) -> int:
    """`100mbit` as 100,000,000. In the words of `tc`: a kbit, mbit or gbit a second is 10³, 10⁶ or 10⁹ bits.

    Raises:
        ValueError: it is not a rate; with what would be one.
    """
    match = _RATE.fullmatch(rate.strip())
    speed = round(float(match["number"]) * _UNITS[match["unit"].lower()]) if match else 0
    if not _LEAST <= speed <= _MOST:
        raise ValueError(
            f"{rate!r} is not a rate such as 25mbit or 1gbit (kbit, mbit, gbit: 10³, 10⁶, 10⁹ bits a "
            "second, 10kbit to 400gbit)"
        )
    return speed
