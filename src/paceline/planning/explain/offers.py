"""Offers of machines: what can be rented, at what price, and how much of it."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from paceline.cluster.cluster import Cluster
from paceline.cluster.named import named_cluster, read_name
from paceline.errors import ClusterError
from paceline.job.spec import Spec
from paceline.messages import explain
from paceline.yaml_file import FileKind, read_yaml

# the list that stands in where the user names none: prices of examples
EXAMPLES = Path(__file__).with_name("offers.yaml")


class Offer(Spec):
    """One kind of host that can be rented.

    `cluster` is the name of one host, such as `8xH100-SXM, 400gbit`; `price` and `spot` are of one device for an hour;
    `hosts` is the largest number to be had.
    """

    cluster: str
    price: float = Field(ge=0)
    hosts: int = Field(1, ge=1)
    name: str = ""
    spot: float | None = Field(None, ge=0)
    preemptions_per_host_day: float | None = Field(None, ge=0)
    failures_per_host_day: float | None = Field(None, ge=0)

    @field_validator("cluster")
    @classmethod
    def _one_host(cls, text: str) -> str:
        try:
            named = read_name(text)
        except ClusterError as error:
            raise ValueError(str(error)) from None
        if named.hosts > 1:
            raise ValueError(
                f'"{text}" is {named.hosts} hosts: name one, and put the largest number of them in `hosts`'
            )
        if named.price_per_hour is not None:
            raise ValueError(f'"{text}" has a price: put it in `price`')
        return text

    @property
    def title(self) -> str:
        """The offer's name, or that of its host."""
        return self.name or read_name(self.cluster).shape

    def of_hosts(self, hosts: int, failures_per_host_day: float | None = None) -> Cluster:
        """The cluster of so many of its hosts.

        Args:
            failures_per_host_day: where the offer names no rate of its own.
        """
        named, (_, *words) = read_name(self.cluster), self.cluster.split(",")
        text = ",".join((f"{hosts}x{named.per_host}x{named.device.name}", *words))
        rate = self.failures_per_host_day if self.failures_per_host_day is not None else failures_per_host_day
        return named_cluster(text).model_copy(update={"price_per_hour": self.price, "failures_per_host_day": rate})


class Offers(Spec):
    """A list of offers, with the date of its prices and their currency."""

    offers: tuple[Offer, ...] = Field(min_length=1)
    as_of: str = ""
    currency: str = ""


def read_offers(file: Path) -> Offers:
    """Read offers from YAML (`offers:`, a list) or CSV (a column for each key).

    Raises:
        ClusterError: the file cannot be read, or a key or value is wrong; names the line.
    """
    if file.suffix.lower() == ".csv":
        return _from_csv(file)
    example = '`offers: [{cluster: "8xH100-SXM, 400gbit", price: 2.5, hosts: 16}]`'
    values, positions = read_yaml(file, FileKind("list of offers", "offers", example, ClusterError))
    try:
        return Offers.model_validate(values)
    except ValidationError as error:
        raise ClusterError(explain(error.errors(include_url=False), Offers, positions, name="list of offers")) from None


def _from_csv(file: Path) -> Offers:
    try:
        with file.open(encoding="utf-8-sig", newline="") as text:
            rows = list(csv.DictReader(text, skipinitialspace=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ClusterError(f"{file} cannot be read as CSV: {error}") from None
    offers = []
    for line, row in enumerate(rows, 2):
        if None in row:
            raise ClusterError(
                f'{file}, line {line}: more values than columns; quote a name with a comma: "8xH100, 400gbit"'
            )
        values: dict[str, Any] = {key: value for key, value in row.items() if value not in (None, "")}
        try:
            offers.append(Offer.model_validate(values))
        except ValidationError as error:
            raise ClusterError(
                f"{file}, line {line}: {explain(error.errors(include_url=False), Offer, name='offer')}"
            ) from None
    if not offers:
        raise ClusterError(f"{file} has no offer: a first line with cluster,price,hosts and a line for each")
    return Offers(offers=tuple(offers))
