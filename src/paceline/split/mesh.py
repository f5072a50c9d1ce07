"""The mesh of a plan: a `DeviceMesh` with all axes, and its process groups."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.comm import Group
from paceline.errors import PlanError
from paceline.planning.limits import other_world
from paceline.planning.plan import AXES, DATA_AXES, REPLICA, Plan
from paceline.planning.sync_info import sync_info


@dataclass
class Mesh:
    """The ranks of a run as a grid, with this rank's coordinates.

    Attributes:
        sizes: number of ranks along each axis of `AXES`.
        place: this rank's coordinate along each axis.
        world: the group of all ranks.
    """

    sizes: dict[str, int]
    place: dict[str, int]
    world: Group
    _devices: DeviceMesh | None
    _groups: dict[tuple[str, ...], Group]

    @classmethod
    def of(cls, plan: Plan, world: Group) -> Mesh:
        """Build the mesh of a plan and all of its groups.

        Every rank must call this.

        Raises:
            PlanError: the product of the plan's degrees is not the number of ranks.
        """
        sizes = {axis: getattr(plan, axis) for axis in AXES}
        if reason := other_world(plan, world.size):
            raise PlanError.of_problems([reason])
        place, rest = {}, world.rank
        for axis in reversed(AXES):
            rest, place[axis] = divmod(rest, sizes[axis])
        divided = any(sizes[axis] > 1 for axis in REPLICA)
        devices = init_device_mesh(world.device.type, tuple(sizes.values()), mesh_dim_names=AXES) if divided else None
        mesh = cls(sizes, place, world, devices, {})
        by_replica = (REPLICA,) if sync_info(plan.sync).needs_inner else ()
        for axes in (*((axis,) for axis in AXES), DATA_AXES, *by_replica):
            mesh._groups[axes] = mesh._make_group(axes)
        return mesh

    def group(self, *axes: str) -> Group:
        """Return the group of ranks whose coordinates differ from this rank's only along `axes`.

        `axes` is one axis, `DATA_AXES`, or `REPLICA` if the sync rule needs a group of a replica's ranks.
        """
        return self._groups[axes]

    def group_over(self, *axes: str) -> Group:
        """Return the group of ranks along any axes; it is created if necessary.

        Every rank calls this.
        """
        longer = tuple(axis for axis in axes if self.sizes[axis] > 1) or axes[:1]
        if longer not in self._groups:
            self._groups[longer] = self._make_group(longer)
        return self._groups[longer]

    def devices(self, axis: str) -> DeviceMesh:
        """Return the one-dimensional `DeviceMesh` along an axis."""
        assert self._devices is not None, "a single rank has no mesh"
        return self._devices[axis]

    def size(self, *axes: str) -> int:
        """Return the number of ranks along the given axes."""
        return prod(self.sizes[axis] for axis in axes)

    @property
    def data_rank(self) -> int:
        """Data-parallel rank of this rank.

        Ranks that divide the layers, sequences or matrices of one replica have the same data-parallel rank.
        """
        number = 0
        for axis in DATA_AXES:
            number = number * self.sizes[axis] + self.place[axis]
        return number

    @property
    def data_ranks(self) -> int:
        """Number of data-parallel ranks, over which the global batch is divided."""
        return self.size(*DATA_AXES)

    @property
    def data_rank_hosts(self) -> tuple[int, ...]:
        """For each data-parallel rank, the host of its first rank."""
        strides = {axis: prod(self.sizes[later] for later in AXES[i + 1 :]) for i, axis in enumerate(AXES)}
        if len(self.world.hosts) != self.world.size:
            return (0,) * self.data_ranks
        return tuple(
            self.world.hosts[sum(strides[axis] * place for axis, place in zip(DATA_AXES, places, strict=True))]
            for places in product(*(range(self.sizes[axis]) for axis in DATA_AXES))
        )

    def _make_group(self, axes: tuple[str, ...]) -> Group:
        size, world = self.size(*axes), self.world
        if size == 1:
            return Group(device=world.device, deadline_s=world.deadline_s)
        if size == world.size:
            return world
        assert self._devices is not None
        if len(axes) == 1:
            backend = self._devices.get_group(axes[0])
        else:
            backend = self._devices[axes]._flatten("_".join(axes)).get_group()
        members = dist.get_process_group_ranks(backend)
        hosts = tuple(world.hosts[rank] for rank in members) if len(world.hosts) == world.size else (0,)
        return Group(members.index(world.rank), size, backend, None, world.deadline_s, hosts, world.device)
