"""How the samples of an epoch are dealt to the replicas."""

from __future__ import annotations

from typing import ClassVar, Literal

from paceline.job.spec import Spec


class PartitionSpec(Spec):
    """`partition: stratified`, or `{kind: uniform, weights: [1, 0.5]}`."""

    short: ClassVar[str | None] = "kind"
    kind: Literal["uniform", "hierarchical", "stratified"] = "uniform"
    weights: tuple[float, ...] | None = None
    host_files: bool = False
