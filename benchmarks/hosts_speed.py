"""Speed of what several hosts need: encryption between ranks, and unauthenticated peers at their doors.

    python benchmarks/hosts.py [--json]

Needs root: the hosts of the second figure are emulated on this machine. Figures, of fp32 all-reduces of two ranks of
one thread each:
- `tcp_to_gloo_loopback_16mib`, `tcp_to_gloo_loopback_1kib`: gloo's time / that of `transport=tcp` with `encrypt=off`,
  on loopback. `encrypted_to_gloo_loopback_16mib`, `encrypted_to_gloo_loopback_1kib`: the same, encrypted.
- `encrypted_share_loopback`, `encrypted_share_1gbit`: the time with `encrypt=off` / encrypted, 16 MiB, on loopback and
  between two hosts joined by links of 1 Gbit/s.
- `flood_share`: steps per second while 10,000 connections of unauthenticated peers connect to both ranks' ports /
  without them. A step is some arithmetic and an encrypted all-reduce of 1 MiB. Half of the unauthenticated peers say
  nothing and stay, the others begin a TLS handshake; the flooding process is held to a tenth of a core.
- `first_step_8_hosts_to_1`: time to the first step of 8 ranks on 8 emulated hosts / on one host (`hosts_start.py`).

The same processes hold a group of each kind, and these take turns, in blocks of calls of about 50 ms. A block's time is
that of its slowest rank; each ratio is of neighbouring blocks, the median with its 95 % interval. Before any time is
taken, every result is held to gloo's.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import ssl
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from collectives import KIB, MIB, calls_in, size_text, timed
from hosts_start import first_step_ratio
from measure import environment_line, parser_of, print_figures
from paceline.cluster.emulate import EmulatedHost, Emulation
from paceline.cluster.host import Emulate
from paceline.comm import tcp
from paceline.comm.backend import joined
from paceline.comm.tcp import TcpProcessGroup
from paceline.rank_environment import ENCRYPT
from paceline.stats import Interval, median_interval
from paceline.wire.key import RunKey
from served import Ranks

SCRIPT = str(Path(__file__).with_name("hosts.py"))
GLOO, PLAIN, SEALED = "gloo", "encrypt=off", "encrypted"
FORMS = (GLOO, PLAIN, SEALED)
LOOPBACK, RATE = "loopback", "1gbit"
SIZES = {LOOPBACK: (KIB, 16 * MIB), RATE: (16 * MIB,)}
STARTS, BLOCKS, BLOCK_S = 3, 12, 0.05
FLOOD_BLOCKS, FLOOD_BLOCK_S, UNAUTHENTICATED, FLOODER_SHARE = 6, 2.0, 10_000, 0.1
Times = dict[str, list[float]]  # seconds a call of every block, by form; the i-th blocks are neighbours


def main() -> None:
    """Measure, print the tables, and with --json a last line for machines."""
    parser = parser_of(__doc__)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--flood", metavar="ADDRESS:PORT,…", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
    elif arguments.flood:
        flood([(host, int(port)) for host, port in (one.rsplit(":", 1) for one in arguments.flood.split(","))])
    else:
        report(arguments.json)


def report(as_json: bool) -> None:
    """All figures."""
    found: dict[tuple[str, int], Times] = {(place, size): {} for place, sizes in SIZES.items() for size in sizes}
    for _ in range(STARTS):
        for place in SIZES:
            with ranks_at(place) as ranks:
                for size in SIZES[place]:
                    for form, blocks_s in all_reduces(ranks, size).items():
                        found[place, size].setdefault(form, []).extend(blocks_s)
    flooded = median_interval([share for _ in range(STARTS) for share in steps_with_unauthenticated_peers()])
    started = first_step_ratio()
    print("all-reduce, fp32, 2 ranks: milliseconds a call; gloo's time / ours; encrypt=off / encrypted (95 % interval)")
    for (place, size), times_s in found.items():
        print("\n".join(lines(place, size, times_s)))
    print(f"steps per second with {UNAUTHENTICATED} unauthenticated peers / without: {flooded}")
    print(f"time to the first step on 8 hosts / on one: {started}")
    print(environment_line())
    if as_json:
        print_figures(figures(found, flooded, started))


def figures(found: dict[tuple[str, int], Times], flooded: Interval, started: Interval) -> dict[str, float]:
    """The numbers by name."""
    large, small, far = found[LOOPBACK, 16 * MIB], found[LOOPBACK, KIB], found[RATE, 16 * MIB]
    named = {
        "tcp_to_gloo_loopback_16mib": ratio(large, GLOO, PLAIN),
        "tcp_to_gloo_loopback_1kib": ratio(small, GLOO, PLAIN),
        "encrypted_to_gloo_loopback_16mib": ratio(large, GLOO, SEALED),
        "encrypted_to_gloo_loopback_1kib": ratio(small, GLOO, SEALED),
        "encrypted_share_loopback": ratio(large, PLAIN, SEALED),
        "encrypted_share_1gbit": ratio(far, PLAIN, SEALED),
        "flood_share": flooded,
        "first_step_8_hosts_to_1": started,
    }
    return {name: round(interval.middle, 4) for name, interval in named.items()}


def ratio(times_s: Times, over: str, under: str) -> Interval:
    """The first form's time / the second's, over neighbouring blocks."""
    return median_interval([a / b for a, b in zip(times_s[over], times_s[under], strict=True)])


def lines(place: str, size: int, times_s: Times) -> Iterator[str]:
    """One for each form."""
    for form in FORMS:
        said = f"  {place:9} {size_text(size):7} {form:12} {statistics.median(times_s[form]) * 1e3:9.3f}"
        if form != GLOO:
            said += f"   {ratio(times_s, GLOO, form)!s:24}"
        if form == SEALED:
            said += f"   {ratio(times_s, PLAIN, SEALED)}"
        yield said


@contextmanager
def ranks_at(place: str) -> Iterator[Ranks]:
    """Two ranks on this machine as it is, or on two hosts with links of a rate."""
    command = [SCRIPT, "--serve"]
    if place == LOOPBACK:
        with Ranks(command, ranks=2) as ranks:
            yield ranks
        return
    with Emulation(Emulate(hosts=2, rate=place)) as emulation:
        hosts: Sequence[EmulatedHost] = emulation.hosts
        with Ranks(command, ranks=2, hosts=hosts) as ranks:
            yield ranks


def all_reduces(ranks: Ranks, size: int) -> Times:
    """The forms in turns; of each block the slowest rank's time."""
    answers: list[Times] = ranks.ask({"all_reduce": size})
    return {form: [max(both) for both in zip(*(answer[form] for answer in answers), strict=True)] for form in FORMS}


def steps_with_unauthenticated_peers() -> list[float]:
    """Steps per second with unauthenticated peers / without, of neighbouring blocks."""
    with ranks_at(LOOPBACK) as ranks:
        doors = ",".join(f"127.0.0.1:{port}" for port in ranks.ask({"port": True}))
        ranks.ask({"steps_s": 1.0})
        command = [sys.executable, SCRIPT, "--flood", doors]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as flooder:
            assert flooder.stdin is not None
            assert flooder.stdout is not None
            flooder.stdout.readline()
            shares = []
            for _ in range(FLOOD_BLOCKS):
                alone = min(ranks.ask({"steps_s": FLOOD_BLOCK_S}))
                flooder.stdin.write(f"{UNAUTHENTICATED // FLOOD_BLOCKS}\n")
                flooder.stdin.flush()
                shares.append(min(ranks.ask({"steps_s": FLOOD_BLOCK_S})) / alone)
                flooder.stdout.readline()
            flooder.stdin.close()
    return shares


def flood(doors: list[tuple[str, int]]) -> None:
    """Connect as often as asked for, with a tenth of a core."""
    hello = _client_hello()
    there: list[socket.socket] = []
    print("ready", flush=True)
    for line in sys.stdin:
        started, used = time.monotonic(), time.process_time()
        for i in range(int(line)):
            intruder = socket.socket()
            intruder.setblocking(False)
            intruder.connect_ex(doors[i % len(doors)])
            there.append(intruder)
            if i % 4 >= 2 and len(there) > 20:  # that one is connected by now, if ever
                with suppress(OSError):
                    there[-20].send(hello)
            if len(there) > 500:
                there.pop(0).close()
            ahead_s = (time.process_time() - used) / FLOODER_SHARE - (time.monotonic() - started)
            if ahead_s > 0:
                time.sleep(ahead_s)
        print("done", flush=True)


def _client_hello() -> bytes:
    """How a TLS 1.3 handshake begins that will never end."""
    outgoing = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        RunKey.make().client_context().wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    return outgoing.read()


# In a rank


def serve() -> None:
    """Answer questions on stdin, one line of JSON each."""
    torch.set_num_threads(1)
    tcp.why_not_shared = lambda *_: "TCP is what is measured"  # type: ignore[attr-defined]
    with joined(deadline_s=60, transport="gloo"):
        groups: dict[str, Any] = {GLOO: dist.group.WORLD}
        for form, encrypt in ((PLAIN, "off"), (SEALED, "on")):
            os.environ[ENCRYPT] = encrypt
            groups[form] = dist.new_group(backend="tcp")
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line), groups)), flush=True)
        for form in (PLAIN, SEALED):
            dist.destroy_process_group(groups[form])


def answer(question: dict[str, float], groups: dict[str, Any]) -> object:
    """Times, steps per second, or the port that the encrypted group listens on."""
    if "all_reduce" in question:
        return times_of(int(question["all_reduce"]), groups)
    sealed = groups[SEALED]
    if "steps_s" in question:
        return steps_per_s(question["steps_s"], sealed)
    assert isinstance(sealed, TcpProcessGroup)
    return sealed.mesh.address[1]


def times_of(size: int, groups: dict[str, Any]) -> Times:
    """Check the results of all forms, then let them take turns."""
    gloo = groups[GLOO]
    expected = None
    for form, group in groups.items():
        tensor = torch.randn(size // 4, generator=torch.Generator().manual_seed(gloo.rank()))
        dist.all_reduce(tensor, group=group)
        expected = tensor if expected is None else expected
        if not torch.allclose(tensor, expected, rtol=1e-5, atol=1e-6):
            raise AssertionError(f"{form}: rank {gloo.rank()} has another result than gloo's")
    zeros = torch.zeros(size // 4)
    runs = {form: lambda group=group: dist.all_reduce(zeros, group=group) for form, group in groups.items()}
    counts = {form: calls_in(BLOCK_S, run, gloo) for form, run in runs.items()}
    times_s: Times = {form: [] for form in runs}
    for block in range(BLOCKS):
        turn = block % len(FORMS)
        for form in FORMS[turn:] + FORMS[:turn]:
            times_s[form].append(timed(runs[form], counts[form], gloo))
    return times_s


def steps_per_s(for_s: float, group: dist.ProcessGroup) -> float:
    """Arithmetic and an all-reduce, again and again, until rank 0 has had enough."""
    weights, gradients = torch.randn(256, 256), torch.zeros(MIB // 4)
    started, steps = time.perf_counter(), 0
    go_on = torch.ones(1)
    while go_on.item():
        for _ in range(4):
            torch.mm(weights, weights)
        dist.all_reduce(gradients, group=group)
        steps += 1
        if steps % 10 == 0:
            go_on.fill_(float(time.perf_counter() - started < for_s))
            dist.broadcast(go_on, 0, group=group)
    return steps / (time.perf_counter() - started)
