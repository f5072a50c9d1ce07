"""The commands find an accelerator that only a plugin of torch knows, and use it without another setting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commands import Outcome, ended, in_a_process, started
from paceline.elastic.forkserver import Forkserver, shared_pids
from paceline.run.record.run import Run
from paceline.run.record.utilization import utilization
from simulated.environment import Simulated
from small_jobs import small_job

DISCOVERED = """
import json, sys
from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Emulate
from paceline.cluster.discover import discover, environment
here, emulated = discover(), Cluster(emulate=Emulate(hosts=2))
print(json.dumps({
    "kind": here.kind, "devices": here.devices, "emulated": emulated.kind, "torch": "torch" in sys.modules,
    "gpus": environment()["gpus"],
}))
"""


FIGURES = """
from paceline.cluster.catalogue import Accelerator, LinkSpec
DEVICE = Accelerator(
    name="Simulated accelerator",
    kind="sim",
    peak_flops={"fp64": 5e10, "fp32": 1e11, "tf32": 1e11, "bf16": 2e11, "fp16": 2e11},
    memory_bytes=16 * 2**30,
    memory_bandwidth=10e9,
    inside=LinkSpec("memory", 1e9, 1e-3),
)
"""


def job_file(folder: Path, steps: int) -> Path:
    file = folder / f"{steps}_steps.yaml"
    file.write_text(small_job(stop={"steps": steps}).to_yaml())
    return file


def patiently(*arguments: object, folder: Path, **environment: str) -> Outcome:
    with started("paceline", *arguments, folder=folder, environment=environment) as process:
        return ended(process, deadline_s=300)


def losses(run: Run) -> list[float]:
    return [step["loss"] for step in run.steps()]


@pytest.mark.slow
def test_it_is_discovered_without_importing_torch_and_left_alone_where_that_is_asked_for(simulated: Simulated) -> None:
    def shown(**variables: str) -> subprocess.CompletedProcess[str]:
        environ = os.environ | simulated.environment(devices=3) | variables
        return subprocess.run(
            [sys.executable, "-c", DISCOVERED], env=environ, capture_output=True, text=True, timeout=100
        )

    def found(**variables: str) -> dict[str, Any]:
        return dict(json.loads(shown(**variables).stdout))

    gpu = {"name": "Simulated accelerator", "memory_bytes": 2**34}
    assert found() == {"kind": "sim", "devices": 3, "emulated": "cpu", "torch": False, "gpus": [gpu] * 3}
    left_alone = found(PACELINE_DEVICE="cpu")
    assert (left_alone["kind"], left_alone["gpus"]) == ("cpu", [])
    assert "PACELINE_DEVICE=xpu, but this machine has accelerators of type sim." in shown(PACELINE_DEVICE="xpu").stderr


def test_ranks_are_forked_as_the_seed_never_starts_it(simulated: Simulated) -> None:
    assert set(simulated.ranks(2, parents_pid)) <= set(shared_pids())


def test_a_seed_that_an_import_has_made_start_it_is_not_forked(simulated: Simulated, tmp_path: Path) -> None:
    (tmp_path / "starts.py").write_text("import torch\ntorch.ones(1, device='sim')\n")
    sim = simulated.environment()
    forkserver = Forkserver(os.environ | sim | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{sim['PYTHONPATH']}"})
    try:
        assert forkserver.wait_until_ready(60) is None
        forkserver.will_import(["starts"])
        assert "has started an accelerator" in str(forkserver.wait_until_ready(60))
    finally:
        forkserver.end()


def parents_pid() -> int:
    return os.getppid()


def test_a_job_trains_on_it_and_records_what_can_be_measured(simulated: Simulated, tmp_path: Path) -> None:
    run = trained(tmp_path, "sim", 8, **simulated.environment(order="random"))
    assert run.cluster.kind == "sim"
    assert len(losses(run)) == 8
    uses = [step["use"] for step in run.steps() if "use" in step]
    assert all(0 < use["gpu_memory_bytes"] <= use["gpu_peak_memory_bytes"] for use in uses)
    assert not {"gpu_percent", "energy_joules"} & {name for use in uses for name in use}, "nothing counts them"


@pytest.mark.slow
def test_a_resumed_run_has_the_losses_of_one_on_the_cores(simulated: Simulated, tmp_path: Path) -> None:
    sim = simulated.environment(order="random")
    trained(tmp_path, "sim", 6, **sim)
    run = trained(tmp_path, "sim", 10, "--resume", **sim)
    cpu = trained(tmp_path, "cpu", 10, PACELINE_DEVICE="cpu", **sim)
    assert (run.cluster.kind, cpu.cluster.kind) == ("sim", "cpu")
    assert len(losses(run)) == 10
    assert losses(run) == pytest.approx(losses(cpu), rel=1e-5)


def trained(folder: Path, name: str, steps: int, *options: str, **environment: str) -> Run:
    command = ["train", job_file(folder, steps), "--plan", "dp=2", "--run", name, *options]
    shown = in_a_process(*command, folder=folder, **environment)
    assert shown.code == 0, shown
    return Run(folder / name)


@pytest.mark.slow
def test_auto_says_which_figures_it_lacks_and_goes_on(simulated: Simulated, tmp_path: Path) -> None:
    sim = simulated.environment()
    shown = in_a_process("train", job_file(tmp_path, 6), folder=tmp_path, **sim)
    assert shown.code == 0, shown
    lacks = 'no plan can be predicted for "Simulated accelerator": its peak FLOP/s, memory bandwidth and links'
    assert shown.says(lacks, "going on from plan dp=2")
    own = {"PYTHONPATH": f"{entry_of_ones_own(tmp_path)}{os.pathsep}{sim['PYTHONPATH']}"}
    assert in_a_process("plan", job_file(tmp_path, 6), folder=tmp_path, **sim | own).says("optimality gap", "dp=2")
    planned = in_a_process("plan", job_file(tmp_path, 6), folder=tmp_path, **sim)
    assert lacks in planned.error
    assert "docs/how-to/add_a_device.md" in planned.error


def test_a_run_on_devices_with_a_known_peak_has_an_mfu_also_after_a_resume(
    simulated: Simulated, tmp_path: Path
) -> None:
    sim = simulated.environment()
    own = sim | {"PYTHONPATH": f"{entry_of_ones_own(tmp_path)}{os.pathsep}{sim['PYTHONPATH']}"}
    trained(tmp_path, "sim", 8, **own)
    run = trained(tmp_path, "sim", 16, "--resume", **own)
    begun = [event for event in run.events() if event["event"] in ("start", "resume")]
    assert [event["peak_flops"] for event in begun] == [2 * 1e11, 2 * 1e11]
    assert begun[0]["flops"]["weights"] > 0
    assert utilization(run.events(), run.speed) == pytest.approx(
        run.throughput * begun[0]["flops"]["weights"] / 2e11, rel=1e-6
    )


def entry_of_ones_own(folder: Path) -> Path:
    about = folder / "figures-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: figures\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[paceline.hardware]\nSimulated accelerator = figures:DEVICE\n")
    (folder / "figures.py").write_text(FIGURES)
    return folder


@pytest.mark.slow
def test_the_doctor_says_what_it_can_do_and_how_fast_it_is(simulated: Simulated, tmp_path: Path) -> None:
    shown = patiently("doctor", "--json", folder=tmp_path, **simulated.environment())
    assert shown.code == 0, shown
    assert shown.says("sim:0", "sim:1", "torch on sim", "collectives", "simccl", "paceline can train here")
    *screen, last = shown.out.splitlines()
    assert max(map(len, screen)) <= 100
    assert not any("shared memory" in why for why in json.loads(last)["environment"]["not_measured"])
    figures = json.loads(last)["figures"]
    assert {"sim0_matmul_fp32_gflops", "sim1_copy_gigabytes_per_s", "simccl_all_reduce_1KiB_us"} <= figures.keys()


@pytest.mark.slow
def test_links_between_accelerators_are_measured_beside_those_between_cores(
    simulated: Simulated, tmp_path: Path
) -> None:
    options = ["--collectives", "all_reduce", "--sizes", "1KiB", "--json"]
    shown = patiently("links", *options, folder=tmp_path, **simulated.environment())
    assert shown.code == 0, shown
    figures = json.loads(shown.out.splitlines()[-1])["figures"]
    assert {"simccl_all_reduce_1KiB_us", "gloo_all_reduce_1KiB_us"} <= figures.keys()


@pytest.mark.slow
def test_a_benchmark_measures_it_and_has_a_page(simulated: Simulated, tmp_path: Path) -> None:
    options = ["--repeat", "1", "--steps", "8", "--out", "bench"]
    shown = patiently("bench", "scaling", job_file(tmp_path, 8), *options, folder=tmp_path, **simulated.environment())
    assert shown.code == 0, shown
    report = json.loads((tmp_path / "bench" / "report.json").read_text())
    assert report["kind"] == "sim"
    assert {setting["devices"] for setting in report["settings"]} == {1, 2}
    assert all(rank["figures"]["gpu_memory_bytes"] > 0 for setting in report["settings"] for rank in setting["ranks"])
    assert all(setting["memory"]["measured"]["activations"] > 0 for setting in report["settings"])
    assert "2 × Simulated accelerator" in (tmp_path / "bench" / "report.html").read_text()
