"""Load of other processes during a run, and its possible cost to the run."""

from __future__ import annotations

import os
import resource
import time

import psutil

from paceline.cluster.cluster import Host
from paceline.elastic.forkserver import cpu_s
from paceline.stats import Interval

NOISE_CORES = 0.05  # what a machine's own housekeeping takes
WARN_CORES = 0.1
_MOST_STOLEN = 0.9


class OtherLoad:
    """A reading begins when this is made. Sees the CPU only: what others compute on a GPU is not in it."""

    def __init__(self, host: Host) -> None:
        self.cores = [core for group in host.affinity for core in group]
        self._started = time.monotonic()
        self._all_s, self._own_s = self._busy_s(), _own_cpu_s()

    def busy_cores(self) -> float | None:
        """Average number of cores kept busy by others; None if the system does not tell.

        Cores are those that we may use. The time of this process and of all that it started and waited for is taken
        off, and time that a hypervisor gave to others is in.
        """
        passed_s = time.monotonic() - self._started
        all_s, own_s = self._busy_s() - self._all_s, _own_cpu_s() - self._own_s
        if all_s < own_s / 2:  # the system counts something else, as some sandboxes do
            return None
        return max(0.0, all_s - own_s) / passed_s

    def _busy_s(self) -> float:
        """Busy seconds of the cores, without interrupts.

        Interrupts belong to no process and are largely our own traffic.
        """
        times = psutil.cpu_times(percpu=True)
        if self.cores and max(self.cores) < len(times):
            times = [times[core] for core in self.cores]
        return float(sum(t.user + t.system + getattr(t, "nice", 0.0) + getattr(t, "steal", 0.0) for t in times))


def stolen_share(other_cores: float | None, *, devices: int, cores: int) -> float:
    """Upper bound on a run's slowdown by others: the part of one core they took.

    All ranks wait for the slowest. What fits on the cores that the run leaves free costs nothing.
    """
    stolen = (other_cores or 0.0) - max(0, cores - devices)
    return min(stolen, _MOST_STOLEN) if stolen > NOISE_CORES else 0.0


def undisturbed(time_s: Interval, stolen: float) -> Interval:
    """Interval of the undisturbed time, extended downwards by what was stolen.

    Undisturbed runs may have been shorter, and not longer. Nothing is left out.
    """
    return Interval(time_s.low * (1 - stolen), time_s.middle, time_s.high)


def _own_cpu_s() -> float:
    # The forkserver, whose children the ranks are, is waited for only at the end.
    times = os.times()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return times.user + times.system + children.ru_utime + children.ru_stime + cpu_s()
