"""MPI: mpirun of Open MPI or MPICH, with one process per host."""

from __future__ import annotations

import os
import re

from paceline.cluster.launch_engines.engine import HostPlace, LaunchEngine
from paceline.cluster.launch_engines.variables import number_from, place_from
from paceline.errors import LaunchError

_OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS")
_URI_OF_MPIRUN, _URI_HERE = "OMPI_MCA_orte_hnp_uri", "OMPI_MCA_orte_local_daemon_uri"
_ADVICE = "Start one process on every host: mpirun --map-by ppr:1:node paceline … (Open MPI), mpiexec -ppn 1 (MPICH)."


class Mpi(LaunchEngine):
    """mpirun or mpiexec with one process per host; MPI itself is not used."""

    def detect(self) -> bool:
        return _OPEN_MPI[1] in os.environ or (_MPICH[1] in os.environ and not _set_by_srun())

    def hosts(self) -> HostPlace | None:
        number, count, here = _OPEN_MPI if _OPEN_MPI[1] in os.environ else _MPICH
        if here in os.environ and number_from(here, _ADVICE) > 1:
            raise LaunchError(
                f"mpirun started {os.environ[here]} processes on this host ({here}), but paceline is started once per "
                f"host, and starts the ranks itself. {_ADVICE}"
            )
        return place_from(
            number,
            count,
            "mpi",
            _ADVICE,
            coordinator=_address_of_mpirun(),
            run_name=os.environ.get("PMIX_NAMESPACE", ""),
        )


def _set_by_srun() -> bool:
    """True if PMI's variables are of a job step of Slurm."""
    pairs = (("PMI_RANK", "SLURM_PROCID"), ("PMI_SIZE", "SLURM_STEP_NUM_TASKS"))
    return all(other in os.environ and os.environ.get(own) == os.environ[other] for own, other in pairs)


def _address_of_mpirun() -> str:
    """Address of the host that mpirun runs on; empty if unknown or not host 0."""
    uri = os.environ.get(_URI_OF_MPIRUN, "")  # "jobid.0;tcp://10.0.0.1,10.1.0.1:40123"
    is_first = os.environ.get("OMPI_COMM_WORLD_RANK") == "0"
    if is_first and os.environ.get(_URI_HERE, uri) != uri:
        return ""  # mpirun was told to start nothing on its own host
    found = re.search(r"tcp://([0-9.]+)[,:]", uri)
    return found[1] if found else ""
