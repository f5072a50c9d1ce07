"""Launch engine: the program that starts the processes of a run."""

from __future__ import annotations

import os
import socket
import zlib
from dataclasses import dataclass

from paceline.errors import LaunchError
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


HOSTS, HOST_NUMBER, COORDINATOR, ENGINE, HOST_DEVICES = (
    "PACELINE_HOSTS",
    "PACELINE_HOST_NUMBER",
    "PACELINE_COORDINATOR",
    "PACELINE_ENGINE",  # set by the engines that set the other three: ssh, Ray
    "PACELINE_HOST_DEVICES",  # number to use of those of the host
)
MOST_HOSTS = 65_536
# Clear of the ports that torchrun (29500) and its store (29400) take, and below those that systems give out.
_FIRST_PORT, _PORTS = 29_600, 1_000


def number_from(name: str, advice: str) -> int:
    """The number in a variable.

    Raises:
        LaunchError: it is not set, or is not a number from 0 to `MOST_HOSTS`.
    """
    return _number(name, os.environ.get(name), advice)


def _number(name: str, text: str | None, advice: str) -> int:
    if text is None:
        raise LaunchError(f"{name} is not set. {advice}")
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and int(text) <= MOST_HOSTS):
        raise LaunchError(f'{name} is "{text[:40]}", not a number from 0 to {MOST_HOSTS}. {advice}')
    return int(text)


def place_from(
    number_name: str, count_name: str, engine: str, advice: str, *, coordinator: str, run_name: str, name: str = ""
) -> HostPlace | None:
    """Place among the hosts by two variables; None where there is one host.

    Args:
        coordinator: `ADDRESS` or `ADDRESS:PORT`; PACELINE_COORDINATOR, where it is set, has precedence.
        run_name: of it the port is made where none is named.

    Raises:
        LaunchError: a variable is not set or not a number, the number is not below the count, no address is known.
    """
    number, (least, count) = number_from(number_name, advice), _least_and_count(count_name, advice)
    if number >= count:
        raise LaunchError(
            f"{number_name} is {number}, but {count_name} is {count}: hosts have the numbers 0 to count - 1. {advice}"
        )
    if count == 1:
        return None
    address, port = address_from(coordinator, default_port(engine, run_name))
    return HostPlace(number, count, address, port, name or socket.gethostname(), engine, run_name, least)


def _least_and_count(name: str, advice: str) -> tuple[int, int]:
    """Least and largest number of hosts; the least is 0 where all are needed."""
    text = os.environ.get(name)
    first, dots, last = (text or "").partition("..")
    if not dots:
        return 0, _number(name, text, advice)
    least, count = _number(name, first, advice), _number(name, last, advice)
    if not 1 <= least <= count:
        raise LaunchError(f'{name} is "{text}": the first number is the least that a run begins with, as in 2..8.')
    return least, count


def address_from(coordinator: str, port: int) -> tuple[str, int]:
    """Address and port of host 0, from PACELINE_COORDINATOR or else from what the engine says.

    Raises:
        LaunchError: neither says one, or the port is not one.
    """
    text = os.environ.get(COORDINATOR) or coordinator
    address, colon, after = text.rpartition(":")
    if not colon or text.endswith("]") or (":" in address and not address.startswith("[")):  # no port, perhaps IPv6
        address, after = text, str(port)
    address = address.removeprefix("[").removesuffix("]")
    if not address:
        raise LaunchError(
            f"No address of host 0 is known. Set {COORDINATOR}=ADDRESS:PORT on every host, e.g. 10.0.0.1:{port}."
        )
    if not (after.isascii() and after.isdecimal() and 0 < int(after[:9]) < 65_536):
        raise LaunchError(f'The port of host 0 is "{after[:40]}" (in "{text[:80]}"), not a number from 1 to 65535.')
    return address, int(after)


def default_port(engine: str, run_name: str) -> int:
    """Port of host 0 for engines that name none; two runs rarely share one."""
    return _FIRST_PORT + zlib.crc32(f"{engine} {run_name}".encode()) % _PORTS
