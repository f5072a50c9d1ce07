"""The engine that started this process."""

from __future__ import annotations

import os
from functools import cache

from paceline.cluster.launch_engines.by_hand import ByHand
from paceline.cluster.launch_engines.engine import HostPlace, LaunchEngine
from paceline.cluster.launch_engines.kubernetes import Kubernetes
from paceline.cluster.launch_engines.mpi import Mpi
from paceline.cluster.launch_engines.sky import Sky
from paceline.cluster.launch_engines.slurm import Slurm
from paceline.cluster.launch_engines.torchrun import Torchrun
from paceline.cluster.launch_engines.variables import ENGINE
from paceline.errors import LaunchError
from paceline.extensions import ExtensionPoint
from paceline.rank_environment import RANK, is_our_rank


class Local(LaunchEngine):
    """Paceline's own launcher, `launch/local.py`, on this machine or on emulated hosts."""

    def detect(self) -> bool:
        return True


# The first that started this process counts: what is started by hand or by MPI may well be inside a scheduler's job.
_BUILT_IN: dict[str, LaunchEngine] = {
    "torchrun": Torchrun(),
    "hosts": ByHand(),
    "sky": Sky(),
    "kubernetes": Kubernetes(),
    "mpi": Mpi(),
    "slurm": Slurm(),
    "local": Local(),
}
ENGINES = ExtensionPoint("launch engine", "paceline.engines", LaunchEngine, _BUILT_IN, LaunchError)


def own_engine() -> LaunchEngine:
    """The engine that started this process. Where that makes it a rank, its place is in the environment from here on.

    Raises:
        LaunchError: an engine of a package cannot be loaded, its environment is incomplete, or two engines contradict
            each other.
    """
    return ENGINES["local"] if is_our_rank() else _own_engine()


@cache
def _own_engine() -> LaunchEngine:
    engine = detected()
    if RANK not in os.environ and (place := engine.place()) is not None:
        os.environ.update(place.to_env())
    return engine


def is_rank() -> bool:
    """True in a rank process, of paceline's launcher or another engine such as torchrun."""
    if RANK not in os.environ:
        own_engine()
    return RANK in os.environ


def detected() -> LaunchEngine:
    """The engine that the environment shows, asked anew. Raises as `own_engine` does."""
    if RANK in os.environ:
        return ENGINES["torchrun"]
    for name in ENGINES.installed:
        if (engine := ENGINES[name]).detect():
            return engine
    found = [name for name, engine in ENGINES.built_in.items() if engine.detect()]
    _refuse_contradiction(found)
    return ENGINES[found[0]]


def _refuse_contradiction(found: list[str]) -> None:
    """Raise LaunchError if two engines say different places of this host.

    Not where the one is known to run inside the other.
    """
    first = found[0]
    if ENGINE in os.environ:  # set by paceline itself
        return
    inside = {("mpi", "slurm")}  # mpirun in an allocation
    places = {name: _place(name) for name in found if (first, name) not in inside}
    for name, other in places.items():
        own = places[first]
        if own and other and (own.number, own.count) != (other.number, other.count):
            raise LaunchError(
                f"This process is host {own.number} of {own.count} by the environment of {first}, and host "
                f"{other.number} of {other.count} by that of {name}. Unset the variables of the one that did not "
                f"start it ({_VARIABLES[first]}; {_VARIABLES[name]})."
            )


def _place(name: str) -> HostPlace | None:
    try:
        return ENGINES[name].hosts()
    except LaunchError:  # told by the engine that counts, when it is asked
        return None


_VARIABLES = {
    "hosts": "PACELINE_HOSTS, PACELINE_HOST_NUMBER",
    "sky": "SKYPILOT_NODE_RANK, …",
    "kubernetes": "JOB_COMPLETION_INDEX, PET_NNODES, PET_NODE_RANK",
    "mpi": "OMPI_COMM_WORLD_RANK or PMI_RANK, …",
    "slurm": "SLURM_STEP_ID, SLURM_NODEID, …",
}
