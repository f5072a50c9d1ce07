"""The mesh: one `DeviceMesh` with all axes of a plan, and its process groups."""

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
    """The ranks of a run as a grid, with the coordinate of this rank.

    Attributes:
        sizes: number of ranks along each axis of `AXES`.
        place: this rank's coordinate along each axis.
        world: all ranks.
    """

    sizes: dict[str, int]
    place: dict[str, int]
    world: Group
    _devices: DeviceMesh | None
    _groups: dict[tuple[str, ...], Group]

    @classmethod
    def of(cls, plan: Plan, world: Group) -> Mesh:
        """Build the mesh of a plan and all of its groups. Every rank calls this.

        Raises:
            PlanError: the plan's degrees do not multiply to the number of ranks.
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
        """Return the group of ranks that differ from this one along `axes` only.

        `axes` is one axis or `DATA_AXES`, or `REPLICA` if the sync rule may need it.
        """
        return self._groups[axes]

    def devices(self, axis: str) -> DeviceMesh:
        """The one-dimensional `DeviceMesh` along an axis."""
        assert self._devices is not None, "a single rank has no mesh"
        return self._devices[axis]

    def size(self, *axes: str) -> int:
        """Number of ranks along the given axes."""
        return prod(self.sizes[axis] for axis in axes)

    @property
    def data_rank(self) -> int:
        """This rank's data-parallel rank.

        Ranks that divide layers, sequences or matrices among them share one data-parallel rank.
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
        """The host of the first rank of each data-parallel rank."""
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
