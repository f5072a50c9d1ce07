"""`paceline doctor` on the machine that runs the tests.

It measures, it is honest about what it could not, and a script can read it.
"""

from __future__ import annotations

import io
import json
import signal
import subprocess
from pathlib import Path

import pytest

from commands import BIN, ended, in_a_process, processes_of, started, wait_for, words_of
from paceline.cli.doctor import _show_collectives, _show_local
from paceline.cluster.discover import discover
from paceline.cluster.probe import ProbedSpeed
from paceline.comm.measure.calls import CollectiveSpeed
from paceline.console import Console


def test_a_healthy_machine_is_described_and_measured(tmp_path: Path) -> None:
    with started("paceline", "doctor", "--json", folder=tmp_path) as process:
        shown = ended(process, deadline_s=110)  # it starts torch three times, and measures: 9 s on two quiet cores
    assert shown.code == 0, shown
    assert shown.says(
        "machine",
        "software",
        "system",
        "matrix product",
        "copy",
        "all-reduce",
        "paceline can train here",
    )
    *screen, last = shown.out.splitlines()
    assert max(map(len, screen)) <= 100
    record = json.loads(last)
    assert record.keys() == {"figures", "environment"}
    figures = record["figures"]
    assert {"cpu_matmul_fp32_gflops", "cpu_copy_gigabytes_per_s", "gloo_all_reduce_1KiB_us"} <= figures.keys()
    assert "gloo_all_reduce_16MiB_bus_gigabytes_per_s" in figures
    assert all(isinstance(value, float) and value > 0 for value in figures.values())
    environment = record["environment"]
    assert environment["torch"].startswith("2.")
    assert all("over shared memory: " in why for why in environment["not_measured"]), "which not every machine allows"
    assert {finding["level"] for finding in environment["doctor"]} <= {"ok", "note"}


def test_ctrl_c_ends_it_at_once(tmp_path: Path) -> None:
    with started("paceline", "doctor", folder=tmp_path) as process:
        wait_for(lambda: any("paceline.cluster.probe" in words_of(one) for one in processes_of(process)), process)
        process.send_signal(signal.SIGINT)
        assert ended(process, deadline_s=60).code == 130


def test_its_tables_fit_80_columns() -> None:
    screen = io.StringIO()
    console = Console(file=screen, width=80)
    local = [ProbedSpeed("matmul", "cpu", dtype, 16, 1e11) for dtype in ("fp32", "bf16")]
    _show_local(console, discover().hosts[0], [*local, ProbedSpeed("copy", "cpu", "fp32", 16, 1e10)])
    _show_collectives(console, [CollectiveSpeed(name, 8, 2**24, 0.123) for name in ("gloo", "shm")])
    shown = screen.getvalue()
    assert max(map(len, shown.splitlines())) <= 80
    for words in ("CPU, 16 threads", "100 GFLOP/s", "memory", "8 ranks", "16 MiB", "123,000 µs", "algorithm"):
        assert words in shown


def test_a_torch_that_cannot_be_imported_is_a_problem_and_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    shown = in_a_process("doctor", "--json", folder=tmp_path, PYTHONPATH=str(tmp_path))
    assert shown.code == 1
    assert shown.says(
        "problem", "libcudart.so.12", "nothing was measured", "1 problem keeps paceline from training here"
    )
    assert json.loads(shown.out.splitlines()[-1])["figures"] == {}
    assert "Traceback" not in shown.err


@pytest.mark.needs_root
@pytest.mark.slow
def test_ranks_that_could_not_meet_are_not_started(tmp_path: Path) -> None:
    # in a network namespace of its own, whose loopback is down
    alone = ["unshare", "--net", str(BIN / "paceline"), "doctor"]
    shown = subprocess.run(alone, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert shown.returncode == 1, shown
    for text in (
        "127.0.0.1 cannot be reached",
        "ip link set lo up",
        "see the problem with loopback above",
        "matrix product",
    ):
        assert text in shown.stdout


def test_what_is_missing_is_noted_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('not here')")  # spares the measuring
    shown = in_a_process(
        "doctor", folder=tmp_path, PYTHONPATH=str(tmp_path), OMP_NUM_THREADS="64", CXX="no-such-compiler"
    )
    assert shown.says("no-such-compiler (C++ compiler)", "apt install g++ python3-dev", "OMP_NUM_THREADS=64")
