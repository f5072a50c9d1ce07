"""Speed of collectives through paceline's shared memory, beside gloo.

gloo is PyTorch's transport for CPUs; all ranks are on one host.

    python benchmarks/collectives.py [--json]

Figures, of fp32 all-reduces of 1 KiB to 64 MiB on 2 and 4 ranks of one thread, called as users do:
`dist.all_reduce(tensor, group=…)`:
- `smallest_ratio_to_gloo`, `median_ratio_to_gloo`: gloo's time / ours, the smallest and the median over all sizes and
  both numbers of ranks; tensors that live in shared memory (from `Group.empty`, as paceline's gradients do).
- `smallest_ratio_to_gloo_private`, `median_ratio_to_gloo_private`: the same for ordinary tensors, which are copied in
  and out.
- `large_share_of_memory_bandwidth`: the least time that the memory allows / ours, in place, the smaller one of 16 and
  64 MiB, 2 ranks. An all-reduce of n bytes on W ranks has to read W n bytes and to write W n bytes. The bandwidth is
  that of all ranks (but no more than there are cores) copying private buffers of 64 MiB at once, bytes read + bytes
  written; copying takes turns with the all-reduces. More than 1 is possible: a copy has the processor read what it
  overwrites, which nobody counts, and a sum in place has read it anyway.

The same processes hold a group of each transport and take turns with them, in blocks of calls of about 20 ms. A block's
time is that of its slowest rank; each ratio is of neighbouring blocks. Before any time is taken, every result is held
to gloo's, and all ranks to the same bits. The processes are started anew several times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from measure import environment_line, parser_of, print_figures
from paceline.cluster.discover import discover
from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.stats import Interval, median_interval
from served import Ranks

TRANSPORT = "shm"
KIB, MIB = 2**10, 2**20
SIZES = [KIB * 4**i for i in range(9)]  # 1 KiB to 64 MiB
LARGE = 16 * MIB  # and more: held to the memory's bandwidth
OTHERS, OTHER_SIZES = ("broadcast", "all-gather", "reduce-scatter", "all-to-all", "send and back"), (KIB, MIB, 16 * MIB)
COPY_BYTES = 64 * MIB  # per buffer: more than caches hold
BLOCKS, STARTS, BLOCK_S = 8, 3, 0.02
GLOO, SHARED, PRIVATE, COPY = "gloo", "ours, in place", "ours, private", "copy"
Times = dict[str, list[float]]  # seconds a call of every block; the i-th blocks are neighbours in time


@dataclass(frozen=True)
class Case:
    """One collective on `numel` fp32 numbers (of a rank's larger buffer), in some forms that take turns."""

    collective: str
    numel: int
    forms: tuple[str, ...] = (GLOO, SHARED, PRIVATE)
    strided: bool = False  # every second column of a matrix instead of a contiguous tensor
    blocks: int = 8
    block_s: float = 0.02


def main() -> None:
    """Measure, print the tables, and with --json a last line for machines."""
    parser = parser_of(__doc__)
    parser.add_argument("--serve", metavar="TRANSPORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    found = {ranks: all_reduces(ranks) for ranks in (2, 4)}
    print(
        f"all-reduce, fp32: microseconds a call (median of {STARTS} x {BLOCKS} blocks), and gloo's time / ours "
        "(95 % interval)"
    )
    for ranks, by_size in found.items():
        print("\n".join(lines(ranks, by_size)))
    print("worst cases and the other collectives, ordinary tensors; the size is that of a rank's larger buffer")
    for ranks in (2, 3, 4):
        for line in other_lines(ranks):
            print(line, flush=True)
    print(environment_line())
    if arguments.json:
        print_figures(figures(found))


def all_reduces(ranks: int) -> dict[int, Times]:
    """The times of every size in bytes, over all starts."""
    found: dict[int, Times] = {size: {} for size in SIZES}
    for _ in range(STARTS):
        with served(ranks) as group:
            for size in SIZES:
                forms = (GLOO, SHARED, PRIVATE, COPY) if size >= LARGE else (GLOO, SHARED, PRIVATE)
                for form, times_s in measured(group, Case("all-reduce", size // 4, forms)).items():
                    found[size].setdefault(form, []).extend(times_s)
    return found


def other_cases(ranks: int) -> Iterator[tuple[str, Case]]:
    """What is not in the first table: sizes and layouts that fit badly, and the other collectives."""
    forms = (GLOO, PRIVATE)
    yield "all-reduce, 1,000,003 elements", Case("all-reduce", 1_000_003, forms)
    yield "all-reduce, every second column, 4 MiB", Case("all-reduce", MIB, forms, strided=True)
    if ranks == 3:
        for size in OTHER_SIZES:
            yield f"all-reduce, {size_text(size)}", Case("all-reduce", size // 4, forms)
        return
    for collective in OTHERS:
        for size in OTHER_SIZES:
            yield f"{collective}, {size_text(size)}", Case(collective, size // 4, forms)
    yield "barrier", Case("barrier", ranks, forms)


def served(ranks: int) -> Ranks:
    """`ranks` processes of this script that answer cases with times."""
    return Ranks([__file__, "--serve", TRANSPORT], ranks=ranks)


def measured(group: Ranks, case: Case) -> Times:
    """The times of a case: of each block those of the slowest rank."""
    answers: list[Times] = group.ask(asdict(case) | {"blocks": BLOCKS, "block_s": BLOCK_S})
    return {
        form: [max(block) for block in zip(*(answer[form] for answer in answers), strict=True)] for form in case.forms
    }


# What the times say


def ratios(times_s: Times, form: str) -> Interval:
    """Gloo's time / that of `form`, over neighbouring blocks."""
    return median_interval([a / b for a, b in zip(times_s[GLOO], times_s[form], strict=True)])


def share_of_bandwidth(ranks: int, size: int, times_s: Times) -> Interval:
    """The least time to read and write `ranks * size` bytes at the copies' speed / ours.

    The copies are those measured beside it; in place.
    """
    bytes_moved, bytes_copied = 2 * ranks * size, 2 * copying(ranks) * COPY_BYTES
    return median_interval(
        [bytes_moved / bytes_copied * a / b for a, b in zip(times_s[COPY], times_s[SHARED], strict=True)]
    )


def copying(ranks: int) -> int:
    """How many ranks copy at once when the memory's bandwidth is measured."""
    return min(ranks, discover().hosts[0].cores)


def figures(found: dict[int, dict[int, Times]]) -> dict[str, float]:
    """The figures of the issue, from the times by ranks and size."""
    rows = [times_s for by_size in found.values() for times_s in by_size.values()]
    shared, private = ([ratios(times_s, form).middle for times_s in rows] for form in (SHARED, PRIVATE))
    return {
        "smallest_ratio_to_gloo": min(shared),
        "median_ratio_to_gloo": statistics.median(shared),
        "large_share_of_memory_bandwidth": min(
            share_of_bandwidth(2, size, times_s).middle for size, times_s in found[2].items() if COPY in times_s
        ),
        "smallest_ratio_to_gloo_private": min(private),
        "median_ratio_to_gloo_private": statistics.median(private),
    }


def lines(ranks: int, by_size: dict[int, Times]) -> Iterator[str]:
    """The table of one number of ranks."""
    yield f"  {heading(ranks):28} {GLOO:>10} {SHARED:>15} {PRIVATE:>15}   {'ratio in place':30} ratio private"
    for size, times_s in by_size.items():
        gloo, shared, private = (f"{statistics.median(times_s[form]) * 1e6:.1f}" for form in (GLOO, SHARED, PRIVATE))
        yield (
            f"  {size_text(size):28} {gloo:>10} {shared:>15} {private:>15}   {ratios(times_s, SHARED)!s:30} "
            f"{ratios(times_s, PRIVATE)}"
        )
    for size, times_s in by_size.items():
        if COPY in times_s:
            bandwidth = 2 * copying(ranks) * COPY_BYTES / statistics.median(times_s[COPY]) / 1e9
            share = share_of_bandwidth(ranks, size, times_s)
            speed = f"{copying(ranks)} ranks, {bandwidth:.1f} GB/s read + written"
            yield f"  {size_text(size)} in place: {share} of what copying reaches ({speed})"


def other_lines(ranks: int) -> Iterator[str]:
    """The table of the worst cases and other collectives of one number of ranks."""
    yield f"  {heading(ranks):40} {GLOO:>10} {PRIVATE:>15}   ratio"
    with served(ranks) as group:
        for name, case in other_cases(ranks):
            times_s = measured(group, case)
            gloo, ours = (f"{statistics.median(times_s[form]) * 1e6:.1f}" for form in (GLOO, PRIVATE))
            yield f"  {name:40} {gloo:>10} {ours:>15}   {ratios(times_s, PRIVATE)}"


def heading(ranks: int) -> str:
    """What the ranks have to share."""
    cores = discover().hosts[0].cores
    return f"{ranks} ranks on {cores} cores"


def size_text(size: int) -> str:
    """As `64 KiB`."""
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


# In a rank


def serve(transport: str) -> None:
    """Answer the cases on stdin with this rank's times, one line of JSON each."""
    torch.set_num_threads(1)
    with joined(deadline_s=60, transport=transport) as ours:
        gloo = dist.new_group(backend="gloo")
        assert gloo is not None
        for line in sys.stdin:
            case = Case(**json.loads(line))
            print(json.dumps(times_of(case, ours, gloo)), flush=True)
        dist.destroy_process_group(gloo)


def times_of(case: Case, ours: Group, gloo: dist.ProcessGroup) -> Times:
    """Check the results of all forms, then let them take turns."""
    calls = {form: prepared(case, form, ours, gloo) for form in case.forms}
    if case.collective != "barrier":
        check(case, {form: call for form, call in calls.items() if form != COPY}, gloo)
    counts = {form: calls_in(case.block_s, call.run, gloo) for form, call in calls.items()}
    times_s: Times = {form: [] for form in calls}
    for block in range(case.blocks):
        turn = block % len(calls)
        for form in [*calls][turn:] + [*calls][:turn]:
            times_s[form].append(timed(calls[form].run, counts[form], gloo))
    return times_s


@dataclass(frozen=True)
class Call:
    """A collective ready to be called: what it reads, what it writes, and the call."""

    source: Tensor
    result: Tensor
    run: Callable[[], object]


def prepared(case: Case, form: str, ours: Group, gloo: dist.ProcessGroup) -> Call:
    """The call of a form.

    Tensors hold zeros: sums that are repeated stay what they are, and a sum of zeros takes no less time.
    """
    if form == COPY:
        # zeros never written would all be one page
        source, result = torch.ones(COPY_BYTES // 4), torch.zeros(COPY_BYTES // 4)
        return Call(source, result, partial(result.copy_, source) if ours.rank < copying(ours.size) else lambda: None)
    if form == SHARED:
        tensor = ours.empty(case.numel, torch.float32)
        if ours.transport_note:  # it would not be in shared memory
            raise SystemExit(ours.transport_note)
    elif case.strided:
        tensor = torch.zeros(1024, 2 * case.numel // 1024)[:, ::2]
    else:
        tensor = torch.zeros(case.numel)
    group = gloo if form == GLOO else ours.backend
    assert group is not None
    if case.strided and form == GLOO:
        return Call(tensor, tensor, partial(through_a_copy, tensor, group))
    return collective(case.collective, tensor, group)


def through_a_copy(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """The all-reduce of a tensor with gaps on gloo.

    It takes such a tensor, but leaves a wrong result (torch 2.13).
    """
    whole = tensor.contiguous()
    dist.all_reduce(whole, group=group)
    tensor.copy_(whole)


def collective(name: str, tensor: Tensor, group: dist.ProcessGroup) -> Call:
    """The call as a user of torch.distributed writes it. `tensor` is the larger buffer of the two."""
    size, rank = group.size(), group.rank()
    part = tensor.new_zeros(tensor.numel() // size)
    if name == "all-reduce":
        return Call(tensor, tensor, partial(dist.all_reduce, tensor, group=group))
    if name == "broadcast":
        return Call(tensor, tensor, partial(dist.broadcast, tensor, group_src=0, group=group))
    if name == "all-gather":
        return Call(part, tensor, partial(dist.all_gather, list(tensor.chunk(size)), part, group=group))
    if name == "reduce-scatter":
        return Call(tensor, part, partial(dist.reduce_scatter, part, list(tensor.chunk(size)), group=group))
    if name == "all-to-all":
        result = torch.zeros_like(tensor)
        return Call(tensor, result, partial(dist.all_to_all_single, result, tensor, group=group))
    if name == "send and back":
        result = torch.zeros_like(tensor)
        return Call(tensor, result, partial(there_and_back, tensor, result, rank ^ 1, rank % 2 == 0, group))
    return Call(tensor, tensor, partial(dist.barrier, group=group))


def there_and_back(source: Tensor, result: Tensor, peer: int, first: bool, group: dist.ProcessGroup) -> None:
    """Ranks 0 and 1 (2 and 3, …) send each other a tensor, one after the other."""
    if first:
        dist.send(source, group_dst=peer, group=group)
        dist.recv(result, group_src=peer, group=group)
    else:
        dist.recv(result, group_src=peer, group=group)
        dist.send(source, group_dst=peer, group=group)


def check(case: Case, calls: dict[str, Call], gloo: dist.ProcessGroup) -> None:
    """Hold the results of all forms to gloo's, and those that all ranks get to the same bits.

    Raises:
        AssertionError: a result is wrong.
    """
    expected = None
    for form, call in calls.items():
        draw = torch.Generator().manual_seed(gloo.rank())
        call.source.copy_(torch.randn(call.source.shape, generator=draw))
        call.run()
        got = call.result.clone()
        expected = got if expected is None else expected
        if not torch.allclose(got, expected, rtol=1e-5, atol=1e-6):  # the order of the sums differs
            raise AssertionError(f"{case.collective}, {form}: rank {gloo.rank()} has another result than gloo's")
        if case.collective in ("all-reduce", "broadcast", "all-gather"):
            first = got.contiguous()
            dist.broadcast(first, group_src=0, group=gloo)
            if not torch.equal(first, got):
                raise AssertionError(f"{case.collective}, {form}: rank {gloo.rank()} has other bits than rank 0")
        call.source.zero_()
        call.result.zero_()


def calls_in(block_s: float, run: Callable[[], object], gloo: dist.ProcessGroup) -> int:
    """How many calls make a block, the same on every rank."""
    timed(run, 2, gloo)
    call_s = torch.tensor(timed(run, 3, gloo))
    dist.all_reduce(call_s, op=dist.ReduceOp.MAX, group=gloo)
    return max(1, round(block_s / call_s.item()))


def timed(run: Callable[[], object], calls: int, gloo: dist.ProcessGroup) -> float:
    """Seconds a call, begun by all ranks at the same time."""
    dist.barrier(group=gloo)
    started = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - started) / calls


if __name__ == "__main__":
    main()
