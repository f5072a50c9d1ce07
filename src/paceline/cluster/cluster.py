"""A cluster describes *where* a job runs.

A cluster is discovered on this machine or read from YAML. It is independent of the job and the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import Field, ValidationError, model_validator

from paceline.cluster.host import Emulate, Host, Kind, Listed, Part
from paceline.cluster.machine import emulated_hosts
from paceline.cluster.named import described, domains, hosts_of, known, read_name
from paceline.errors import ClusterError, InvalidValue
from paceline.units import count, size
from paceline.yaml_file import FileKind, explain, read_yaml, to_yaml

_FILES = (".yaml", ".yml", ".json")


class Cluster(Part):
    """The hosts that a job may use.

    Attributes:
        name: name of the cluster in messages.
        hosts: the hosts, with their cores, memory, devices and links.
        emulate: hosts to emulate on this machine, instead of `hosts`.
        catalogue: a name such as `64x8xH100-SXM, 400gbit`, instead of `hosts`. Such a cluster can be used only for
            planning.
        price_per_hour: price of one device for an hour, in any currency.
        failures_per_host_day: number of failures per host and day; after a failure, the host or a rank on the host is
            restarted.

    Raises:
        ClusterError: a value is invalid, or a device is not in the catalogue.

    Example:
        >>> paceline.Cluster(catalogue="8xH100-SXM")
        <Cluster 8xH100-SXM: 1 host of 8 × H100-SXM (80 GiB)>
    """

    name: str = "this cluster"
    hosts: Listed[Host] = ()
    emulate: Emulate | None = None
    catalogue: str | None = None
    price_per_hour: float | None = Field(None, ge=0, allow_inf_nan=False)
    failures_per_host_day: float | None = Field(None, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _from_the_catalogue(self) -> Cluster:
        """Derive hosts, price and name from the text of `catalogue`."""
        if self.catalogue is None:
            return self
        if self.hosts or self.emulate:
            raise InvalidValue(
                "cluster.catalogue_with_hosts",
                "the name of a cluster from the catalogue determines its hosts. Leave `hosts` and `emulate` out.",
            )
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
            object.__setattr__(self, "hosts", emulated_hosts(self.emulate))
        if not self.hosts:
            raise InvalidValue(
                "cluster.no_hosts",
                "a cluster needs at least one host. List `hosts`, emulate some with emulate: {{hosts: 2}}, or name "
                "them with catalogue: 2x8xH100-SXM, 400gbit.",
            )
        if self.emulate and self.emulate.hosts != len(self.hosts):
            raise InvalidValue(
                "cluster.emulated_hosts_differ",
                "emulate creates {emulated} hosts, but {listed} are listed. Leave `hosts` out.",
                emulated=self.emulate.hosts,
                listed=len(self.hosts),
            )
        twice = [name for name, count in Counter(host.name for host in self.hosts).items() if count > 1]
        if twice:
            raise InvalidValue(
                "cluster.host_twice", "two hosts are named {name!r}. Give each host a different name.", name=twice[0]
            )
        if len(kinds := sorted({host.kind for host in self.hosts_in_use})) > 1:
            raise InvalidValue(
                "cluster.several_kinds",
                "the hosts have GPUs of several kinds ({kinds}), but a run can use only one kind",
                kinds=list(kinds),
            )
        return self

    @classmethod
    def load(cls, file: str | Path) -> Cluster:
        """Read a cluster from a YAML file.

        Raises:
            ClusterError: the file cannot be read, or a key or value is invalid. The message names the line, and the
                nearest key for a misspelled one.
        """
        example = "`emulate: {hosts: 4, rate: 100mbit}`, or `catalogue: 64x8xH100-SXM, 400gbit`"
        kind = FileKind("cluster", "hosts, emulate or catalogue", example, ClusterError)
        values, positions = read_yaml(Path(file), kind)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            problems = explain(error.errors(include_url=False), cls, positions, name="cluster")
            raise ClusterError.of_problems(problems) from None
        # this machine cannot emulate the hosts, or a device is not in the catalogue
        except ClusterError as error:
            key = "catalogue" if "catalogue" in values else "emulate"
            raise ClusterError.of_error(error, positions.place((key,))[1]) from error

    def __repr__(self) -> str:
        """Describe the hosts and devices in one line."""
        return f"<Cluster {self.describe()}>"

    __str__ = __repr__

    def to_yaml(self) -> str:
        """Format the cluster as YAML, without defaults; `Cluster.load` restores an equal cluster."""
        data = self.model_dump(mode="json", exclude_defaults=True, exclude={"hosts"} if self.only_planned else None)
        return to_yaml(data, flow=True)

    @property
    def only_planned(self) -> bool:
        """True if the cluster comes from the catalogue, without real machines."""
        return self.catalogue is not None

    @property
    def kind(self) -> Kind:
        """Type of the devices that ranks use, as in torch."""
        return self.hosts_in_use[0].kind

    @property
    def has_accelerators(self) -> bool:
        """True if any host has accelerators; ranks then run only on accelerators."""
        return any(host.has_accelerators for host in self.hosts)

    @property
    def hosts_in_use(self) -> tuple[Host, ...]:
        """Hosts on which ranks can run.

        These are the hosts with accelerators, or all hosts if no host has accelerators.
        """
        return tuple(host for host in self.hosts if host.has_accelerators == self.has_accelerators)

    @property
    def devices(self) -> int:
        """Number of devices for ranks: all GPUs, or all usable cores without GPUs."""
        return sum(self.devices_per_host)

    @property
    def devices_per_host(self) -> tuple[int, ...]:
        """Number of devices for ranks on each host.

        The number is 0 for a host without GPUs in a cluster with GPUs.
        """
        return tuple(len(host.devices) if host.has_accelerators == self.has_accelerators else 0 for host in self.hosts)

    def describe(self) -> str:
        """Describe the cluster in one line: `this machine: 2 cores (AMD EPYC), 24 GiB memory, no GPU`."""
        if self.catalogue is not None:
            return f"{self.name}: {described(read_name(self.catalogue)._replace(price_per_hour=self.price_per_hour))}"
        cores = sum(host.cores for host in self.hosts)
        memory = size(sum(host.memory_bytes for host in self.hosts))
        hosts = f"{len(self.hosts)} hosts, " if len(self.hosts) > 1 else ""
        gpus = _tally(f"{gpu.name} ({size(gpu.memory_bytes)})" for host in self.hosts for gpu in host.gpus)
        cpus = ", ".join(dict.fromkeys(host.cpu for host in self.hosts))
        machines = f"{self.name}: {hosts}{count(cores, 'core')} ({cpus}), {memory} memory, {gpus or 'no GPU'}"
        return f"{machines}; {_emulated(self.emulate)}" if self.emulate else machines

    def ranks_per_host(self, ranks: int) -> list[int]:
        """Return the number of ranks on each host if there are `ranks` ranks; see `spread`."""
        return spread(ranks, self.devices_per_host)


def spread(ranks: int, devices_per_host: Sequence[int]) -> list[int]:
    """Distribute ranks over hosts in order; return the number of ranks per host.

    Each device gets as few ranks as possible, and hosts are filled one after the other.
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


def cluster_from(text: str | Path) -> Cluster:
    """Return the cluster that a YAML file or a name describes.

    The option `--cluster` accepts both.

    Raises:
        ClusterError: the file cannot be read, or the name is invalid. A name is invalid if its numbers of hosts and
            devices are impossible, a device is not in the catalogue (the message shows the nearest names), or a word is
            neither a rate nor a price.
    """
    path = Path(text)
    if isinstance(text, Path) or path.suffix.lower() in _FILES or path.is_file():
        return Cluster.load(path)
    return Cluster(catalogue=text)


def devices_of_a_domain(cluster: Cluster) -> int | None:
    """Return the number of devices in each domain of joined hosts; None without such domains."""
    hosts = cluster.hosts_in_use
    names = {(gpu.name, len(host.gpus)) for host in hosts for gpu in host.gpus}
    if len(names) != 1:
        return None
    [(name, each)] = names
    if (device := known(name)) is None:
        return None
    count, joined = domains(device, len(hosts), each)
    return joined if count < len(hosts) else None
