"""Launch engine: the program that starts the processes of a run."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.rank_environment import RankEnvironment


@dataclass(frozen=True)
class HostPlace:
    """Place of a host process among the hosts of its run.

    Attributes:
        number: of this host, from 0; host 0 coordinates the run.
        count: number of hosts, at least 2.
        coordinator: address or name of host 0.
        port: where host 0 listens.
        name: of this host.
        engine: name of the engine that started the process: "slurm", "ssh", "hosts" (by hand), …
        run_name: the engine's name or number of the run, for messages.
        least: number of hosts with which a run begins that takes in the others when they come; 0 is all.
    """

    number: int
    count: int
    coordinator: str
    port: int
    name: str
    engine: str
    run_name: str = ""
    least: int = 0


class LaunchEngine:
    """Starter of a run's processes: torchrun, MPI, a cluster's scheduler, or paceline itself.

    It starts one process per rank, each with a `place()`, or one per host, each with a place among the `hosts()`. The
    latter is a host process: it starts the ranks of its host.
    """

    def detect(self) -> bool:
        """True if this engine started this process, by the environment that it leaves."""
        raise NotImplementedError

    def place(self) -> RankEnvironment | None:
        """This process's rank and rendezvous; None where paceline starts the ranks.

        Raises:
            LaunchError: the environment is incomplete.
        """
        return None

    def hosts(self) -> HostPlace | None:
        """This host's place among several; None in a rank or with one host.

        Raises:
            LaunchError: the environment is incomplete, or contradicts itself.
        """
        return None

    def note(self) -> str | None:
        """Line to show before a run starts, where the engine offers more than is used."""
        return None

    def tell_failure(self, text: str, time_s: float) -> None:
        """Report why this rank ends, in the engine's own form, if it has one. Raises OSError where it cannot."""
