"""`paceline links`: every transport at every size, checked, on the screen, as JSON and as a page.

And what it does not understand.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from commands import ended, in_a_process, paceline, started
from paceline.cluster.cluster import Cluster
from paceline.cluster.discover import discover
from paceline.run.links import COLLECTIVES, algorithms_of, ranks_of, transports_of


def test_every_collective_is_measured_and_checked_on_this_machine(tmp_path: Path) -> None:
    arguments = ["--transports", "gloo,shm", "--sizes", "1KiB,1 MiB", "--out", tmp_path / "links.html", "--json"]
    shown = paceline("links", *arguments, folder=tmp_path)
    assert shown.code == 0, shown.err
    assert shown.says(
        "all-reduce", "send and receive", "of the limit", "copy between processes of a host", "none wrong"
    )
    assert re.search(r"bus [MG]B/s", shown.out)  # by how fast the machine is
    *screen, last = shown.out.splitlines()
    assert max(map(len, screen)) <= 116
    record = json.loads(last)
    figures = record["figures"]
    for transport in ("gloo", "shm"):
        for collective in COLLECTIVES:
            for size in ("1KiB", "1MiB"):
                name = f"{transport}_{collective}_{size}"
                assert figures[f"{name}_us"] > 0
                assert figures[f"{name}_share_of_limit"] > 0
    n = record["environment"]["links"]["ranks"]
    bus, algorithm = (figures[f"gloo_all_reduce_1MiB_{kind}_gigabytes_per_s"] for kind in ("bus", "algorithm"))
    assert bus / algorithm == pytest.approx(2 * (n - 1) / n)
    assert record["environment"]["torch"].startswith("2.")
    assert "All-reduce" in (tmp_path / "links.html").read_text()


@pytest.mark.slow
@pytest.mark.needs_root
@pytest.mark.needs_iproute2
def test_slow_emulated_hosts_are_measured_against_their_link_in_bounded_time(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("emulate: {hosts: 2, rate: 25mbit}\n")
    arguments = [
        "--cluster",
        "cluster.yaml",
        "--transports",
        "gloo",
        "--collectives",
        "all_reduce",
        "--algorithms",
        "flat,ring",
    ]
    shown = paceline("links", *arguments, "--sizes", "64KiB,256KiB,1MiB,16MiB", "--json", folder=tmp_path)
    assert shown.code == 0, shown.err
    assert shown.says(
        "2 ranks on 2 hosts",
        "stated 25 Mbit/s",
        "half a round trip",
        "left out, as one call would take longer",
        "16MiB",
    )
    figures = json.loads(shown.out.splitlines()[-1])["figures"]
    assert 0.6 * 3.125e-3 < figures["limit_stream_gigabytes_per_s"] < 3.2e-3
    for name in ("gloo_all_reduce_1MiB", "gloo_all_reduce_ring_1MiB"):
        assert 0.3 < figures[f"{name}_share_of_limit"] < 1.4
    assert "gloo_all_reduce_16MiB_us" not in figures


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["--transports", "gloo,mpi"], ["'mpi' is not one of shm, gloo, tcp", "--transports"]),
        (["--transports", "shm,tcp"], ["tcp carries messages between hosts only", "--transports"]),
        (["--collectives", "allreduce"], ["'allreduce' is not one of all_reduce", "--collectives"]),
        (["--algorithms", "star"], ["'star' is not one of flat, ring", "--algorithms"]),
        (["--sizes", "64KB"], ["'64KB' is not a size such as 64KiB", "--sizes"]),
        (["--sizes", "0"], ["'0' is not a size", "--sizes"]),
        (["--ranks", "1"], ["--ranks"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_it_does_not_understand_is_an_error_of_the_command_line(
    arguments: list[str], texts: list[str], tmp_path: Path
) -> None:
    shown = paceline("links", *arguments, folder=tmp_path, columns=200)
    assert shown.code == 2
    assert shown.says(*texts, "--help")


@pytest.mark.slow
def test_a_transport_that_fails_is_named_and_costs_no_other(tmp_path: Path) -> None:
    """Ranks whose files may not grow have no shared memory."""
    broken = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))\n"
    (tmp_path / "sitecustomize.py").write_text(broken)
    arguments = ["--transports", "shm,gloo", "--collectives", "broadcast", "--sizes", "1KiB", "--json"]
    shown = in_a_process("links", *arguments, folder=tmp_path, PYTHONPATH=str(tmp_path))
    assert shown.code == 1
    assert shown.says("shm could not be measured", "transport=shm is not available")
    record = json.loads(shown.out.splitlines()[-1])
    assert record["figures"]["gloo_broadcast_1KiB_us"] > 0
    assert list(record["environment"]["links"]["not_measured"]) == ["shm"]


@pytest.mark.slow
def test_the_ranks_of_a_torchrun_measure_as_well(tmp_path: Path) -> None:
    command = [
        "-m",
        "paceline",
        "links",
        "--transports",
        "gloo",
        "--collectives",
        "all_reduce,send_receive",
        "--sizes",
        "1KiB",
        "--json",
    ]
    with started("torchrun", "--standalone", "--nproc-per-node", 2, *command, folder=tmp_path) as process:
        shown = ended(process)
    assert shown.code == 0, shown.err
    assert shown.out.count('{"figures"') == 1, "rank 0 speaks for all"
    assert json.loads(shown.out.splitlines()[-1])["figures"]["gloo_send_receive_1KiB_us"] > 0


def test_what_a_cluster_can_have_is_what_is_measured() -> None:
    here = discover()
    emulated = Cluster.model_validate({"emulate": {"hosts": 3}})
    assert transports_of(here)[-2:] == ("shm", "gloo")
    assert transports_of(emulated) == ("gloo", "tcp")
    assert algorithms_of(here) == ("flat",)
    assert algorithms_of(emulated) == ("flat", "ring", "hierarchical")
    assert ranks_of(here) >= 2
    assert ranks_of(emulated) == 3 * len(emulated.hosts[0].devices)
