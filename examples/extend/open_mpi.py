"""A launch engine: ranks that Open MPI has started, `mpirun -n 4 paceline train job.yaml`."""

import os

from paceline.cluster.launch_engines import LaunchEngine
from paceline.rank_environment import RankEnvironment


class OpenMPI(LaunchEngine):
    """One process per rank; over several hosts, `-x MASTER_ADDR=…` says where rank 0 is."""

    def detect(self) -> bool:
        return "OMPI_COMM_WORLD_RANK" in os.environ

    def place(self) -> RankEnvironment:
        mpi = {name.removeprefix("OMPI_COMM_WORLD_"): value for name, value in os.environ.items()}
        return RankEnvironment(
            rank=int(mpi["RANK"]),
            world_size=int(mpi["SIZE"]),
            local_rank=int(mpi["LOCAL_RANK"]),
            local_world_size=int(mpi["LOCAL_SIZE"]),
            master_address=os.environ.get("MASTER_ADDR", "127.0.0.1"),
            master_port=int(os.environ.get("MASTER_PORT", "29511")),
        )


ENGINE = OpenMPI()
