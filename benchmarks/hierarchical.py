"""Adding up over two hosts of two ranks each.

By host first (paceline's `hierarchical`), beside gloo's all-reduce over all ranks (`flat`).

    python benchmarks/hierarchical.py [--json]

Needs root: the hosts are emulated on this machine (network namespaces, links shaped by `tc tbf` to 1 Gbit/s each way).
Figures, of fp32 all-reduces of 16 MiB, in tensors that each form recommends (`empty`), the median over blocks that take
turns:
- `ratio_to_flat`: flat's time / hierarchical's.
- `share_of_link_limit`: the time that 2 (h - 1) / h x 16 MiB take at the link's rate, without any headers /
  hierarchical's time.
- `flat_link_bytes`, `hierarchical_link_bytes`: bytes that crossed each host's link each way, headers included / 2 (h -
  1) / h x 16 MiB.
- `median_error_of_formulas`: over all algorithms and 2 to 8 ranks, the median of measured / predicted time or its
  inverse, whichever is larger; predictions are those of `comm/links.py`, from latencies and bandwidths
  that ranks measured when they met.

A block's time is that of its slowest rank. Before any time is taken, every result is held to the exact one, and all
ranks to the same bits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256

import torch

from measure import environment_line, parser_of, print_figures
from paceline.cluster.emulate import Emulation
from paceline.cluster.host import Emulate
from paceline.comm import Group
from paceline.comm.allreduce import Algorithm, Auto
from paceline.comm.backend import joined
from paceline.stats import Interval, median_interval
from served import Ranks

HOSTS, RANKS_PER_HOST, NUMEL = 2, 2, 2**22
RATE, RATE_BPS = "1gbit", 10**9
BLOCKS, STARTS = 15, 3
FLAT, HIERARCHICAL = "flat", "hierarchical"
SCALING_RATE = "200mbit"  # eight hosts at 1 Gbit/s would be held up by this machine's cores
SCALING = ((2, 1), (4, 1), (8, 1), (2, 2), (2, 4), (4, 2))  # hosts, ranks on each
SCALING_SIZES, SCALING_BLOCKS = (2**12, 2**20), 7  # bytes
Times = dict[str, list[float]]  # seconds of each block


@dataclass(frozen=True)
class Case:
    """What the ranks are asked for: one all-reduce, after all have met."""

    algorithm: str
    numel: int
    check: bool = False


@dataclass(frozen=True)
class Found:
    """The main comparison.

    Times by algorithm, neighbours in time, and bytes over each link and way of one all-reduce.
    """

    times_s: Times
    link_bytes: dict[str, float]


@dataclass(frozen=True)
class Growth:
    """One algorithm on one arrangement of ranks: what was predicted and measured, in seconds."""

    algorithm: str
    hosts: int
    ranks_per_host: int
    nbytes: int
    predicted_s: float
    measured_s: Interval

    @property
    def error(self) -> float:
        """Measured / predicted."""
        return self.measured_s.middle / self.predicted_s


def main() -> None:
    """Measure, print the tables, and with --json a last line for machines."""
    parser = parser_of(__doc__)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    found = compare()
    print("\n".join(comparison_lines(found)), flush=True)
    growth = [row for hosts, ranks_per_host in SCALING for row in growths(hosts, ranks_per_host)]
    print("\n".join(growth_lines(growth)))
    print(environment_line())
    if arguments.json:
        print_figures(figures(found, growth))


def compare() -> Found:
    """Flat and hierarchical in turns, over all starts."""
    times_s: Times = {FLAT: [], HIERARCHICAL: []}
    link_bytes: dict[str, list[float]] = {FLAT: [], HIERARCHICAL: []}
    for _ in range(STARTS):
        with Emulation(Emulate(hosts=HOSTS, rate=RATE)) as emulation, ranks_on(emulation, RANKS_PER_HOST) as ranks:
            for name in times_s:
                checked(ranks, Case(name, NUMEL, check=True))
            for block in range(BLOCKS):
                for name in (FLAT, HIERARCHICAL) if block % 2 else (HIERARCHICAL, FLAT):
                    before = most_carried(emulation)
                    times_s[name].append(max(ranks.ask(asdict(Case(name, NUMEL)))))
                    link_bytes[name].append(most_carried(emulation) - before)
    return Found(times_s, {name: statistics.median(values) for name, values in link_bytes.items()})


def growths(hosts: int, ranks_per_host: int) -> Iterator[Growth]:
    """Every algorithm on one arrangement, in turns."""
    with Emulation(Emulate(hosts=hosts, rate=SCALING_RATE)) as emulation, ranks_on(emulation, ranks_per_host) as ranks:
        names = [FLAT, "ring", *([HIERARCHICAL] if ranks_per_host > 1 else [])]
        for nbytes in SCALING_SIZES:
            predicted_s = ranks.ask({"predict": nbytes})[0]
            times_s: Times = {name: [] for name in names}
            for block in range(SCALING_BLOCKS + 1):
                for name in names:
                    case = Case(name, nbytes // 4, check=block == 0)
                    if block == 0:
                        checked(ranks, case)
                    else:
                        times_s[name].append(max(ranks.ask(asdict(case))))
            for name in names:
                yield Growth(name, hosts, ranks_per_host, nbytes, predicted_s[name], median_interval(times_s[name]))


def ranks_on(emulation: Emulation, ranks_per_host: int) -> Ranks:
    """Processes of this script that answer cases with times, so many on each host."""
    hosts = [host for host in emulation.hosts for _ in range(ranks_per_host)]
    return Ranks([__file__, "--serve"], ranks=len(hosts), hosts=hosts)


def checked(ranks: Ranks, case: Case) -> None:
    """Have the ranks hold a result to the exact one.

    Raises:
        AssertionError: the ranks have different bits.
    """
    if len(set(ranks.ask(asdict(case)))) > 1:
        raise AssertionError(f"{case.algorithm}: the ranks have different bits")


def most_carried(emulation: Emulation) -> int:
    """Bytes that crossed the host's link that carried most, in the direction that carried most."""
    return max(max(link.sent_bytes, link.received_bytes) for link in emulation.carried().values())


# What the times say


def least_bytes() -> float:
    """What has to cross each host's link, each way."""
    return 2 * (HOSTS - 1) / HOSTS * NUMEL * 4


def ratio(found: Found) -> Interval:
    """Flat's time / hierarchical's, over neighbouring blocks."""
    return median_interval([a / b for a, b in zip(found.times_s[FLAT], found.times_s[HIERARCHICAL], strict=True)])


def share(found: Found, name: str) -> Interval:
    """Of what the link allows."""
    return median_interval([least_bytes() * 8 / RATE_BPS / time_s for time_s in found.times_s[name]])


def figures(found: Found, growth: list[Growth]) -> dict[str, float]:
    """The figures of the issue, and what explains them."""
    return {
        "ratio_to_flat": ratio(found).middle,
        "share_of_link_limit": share(found, HIERARCHICAL).middle,
        "flat_link_bytes": found.link_bytes[FLAT] / least_bytes(),
        "hierarchical_link_bytes": found.link_bytes[HIERARCHICAL] / least_bytes(),
        "median_error_of_formulas": statistics.median(max(row.error, 1 / row.error) for row in growth),
    }


def comparison_lines(found: Found) -> Iterator[str]:
    """The table of the main comparison."""
    yield (
        f"all-reduce of 16 MiB fp32 on {HOSTS} hosts x {RANKS_PER_HOST} ranks, links of 1 Gbit/s (median of "
        f"{STARTS} x {BLOCKS} blocks)"
    )
    yield f"  {'':14} {'ms':>8} {'bytes over each link':>22} {'x the least':>12}   share of what the link allows"
    for name, times_s in found.times_s.items():
        carried = found.link_bytes[name]
        yield (
            f"  {name:14} {statistics.median(times_s) * 1e3:8.1f} {carried / 1e6:19.1f} MB "
            f"{carried / least_bytes():12.2f}   "
            f"{share(found, name)}"
        )
    yield f"  flat's time / hierarchical's: {ratio(found)}"


def growth_lines(growth: list[Growth]) -> Iterator[str]:
    """The table of how times grow with the ranks."""
    yield (
        f"growth with the ranks, links of {SCALING_RATE}: ms measured (median of {SCALING_BLOCKS}, 95 % interval) "
        "and predicted"
    )
    yield f"  {'hosts x ranks':14} {'size':>8} {'algorithm':14} {'measured':>28} {'predicted':>10} {'ratio':>7}"
    for row in growth:
        where, size = f"{row.hosts} x {row.ranks_per_host}", f"{row.nbytes // 1024} KiB"
        interval = row.measured_s
        measured = f"{interval.middle * 1e3:.2f} [{interval.low * 1e3:.2f}, {interval.high * 1e3:.2f}]"
        yield f"  {where:14} {size:>8} {row.algorithm:14} {measured:>28} {row.predicted_s * 1e3:10.2f} {row.error:7.2f}"


# In a rank


def serve() -> None:
    """Answer the questions on stdin with this rank's times, one line of JSON each."""
    torch.set_num_threads(1)
    with joined(deadline_s=60, transport="gloo") as group:
        auto = Auto(group)
        tensors: dict[tuple[str, int], torch.Tensor] = {}
        for line in sys.stdin:
            question = json.loads(line)
            if "predict" in question:
                predicted_s = {name: auto.links.all_reduce_s(name, question["predict"]) for name in auto.choices}
                print(json.dumps(predicted_s), flush=True)
                continue
            case = Case(**question)
            algorithm, key = auto.choices[case.algorithm], (case.algorithm, case.numel)
            if key not in tensors:
                tensors[key] = algorithm.empty(case.numel, torch.float32)
            answer = digest(algorithm, tensors[key], group) if case.check else time_s(algorithm, tensors[key], group)
            print(json.dumps(answer), flush=True)
        auto.close()


def time_s(algorithm: Algorithm, tensor: torch.Tensor, group: Group) -> float:
    """The time of an all-reduce of zeros, which stay what they are."""
    group.barrier()
    started = time.perf_counter()
    algorithm.all_reduce(tensor)
    return time.perf_counter() - started


def digest(algorithm: Algorithm, tensor: torch.Tensor, group: Group) -> str:
    """Hold a result to the exact one, and say which bits it has.

    Raises:
        AssertionError: it is wrong.
    """
    expected = torch.zeros(len(tensor), dtype=torch.float64)
    for rank in range(group.size):
        part = torch.randn(len(tensor), generator=torch.Generator().manual_seed(rank))
        expected += part
        if rank == group.rank:
            tensor.copy_(part)
    algorithm.all_reduce(tensor)
    if not torch.allclose(tensor.double(), expected, rtol=1e-5, atol=1e-5):
        raise AssertionError(f"{algorithm}: rank {group.rank} has a wrong sum")
    bits = sha256(tensor.numpy().tobytes()).hexdigest()
    tensor.zero_()
    return bits


if __name__ == "__main__":
    main()
