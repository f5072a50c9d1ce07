"""Predictions stand on the catalogue.

A device taken for another, or a figure of another kind, and every plan for it is wrong.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from paceline.cluster.catalogue.hardware import CATALOGUE, Accelerator, accelerator
from paceline.errors import ClusterError

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "hardware.md"
HEAD = (
    "| name | fp64 | fp32 | tf32 | bf16 | fp16 | fp8 | memory, GiB | its GB/s | in a host, GB/s | between "
    "hosts, Gbit/s | sources |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def row(device: Accelerator) -> str:
    """As docs/hardware.md has it."""
    peaks = [
        f"{device.peak_flops[p] / 1e12:.4g}" if p in device.peak_flops else ""
        for p in ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
    ]
    inside = (
        f"{device.inside.bandwidth / 1e9:g}, {device.inside.name}, {device.inside.latency_s * 1e6:g} µs, "
        f"{device.per_host} devices"
    )
    between = f"{device.network.bandwidth * 8 / 1e9:g}, {device.network.latency_s * 1e6:g} µs"
    sources = "; ".join(
        text if key == "all" else f"{key}: {text.removeprefix(f'{key}: ')}" for key, text in device.sources.items()
    )
    cells = (
        device.name,
        *peaks,
        f"{device.memory_bytes / 2**30:g}",
        f"{device.memory_bandwidth / 1e9:g}",
        inside,
        between,
        sources,
    )
    return f"| {' | '.join(cells)} |"


def test_the_table_in_the_documentation_is_the_catalogue() -> None:
    table = "\n".join([HEAD, *map(row, CATALOGUE.values())])
    assert table in DOCUMENT.read_text(), f"docs/hardware.md is behind; its table is\n{table}"


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("A100-SXM-80GB", "A100-SXM-80"),
        ("a100_80gb", "A100-SXM-80"),
        ("a100_40gb", "A100-SXM-40"),
        ("A100 (40/80GB variant not stated in repo)", "A100-SXM-80"),
        ("A100-80GB DGX A100", "A100-SXM-80"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM-40"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40"),
        ("H100-80GB HBM3 700W", "H100-SXM"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("H100-80GB DGX", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("DGX-2 V100-32GB", "V100-SXM-32"),
        ("V100-16GB DGX-1", "V100-SXM-16"),
        ("Tesla V100-PCIE-16GB", "V100-PCIe-16"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("Tesla T4", "T4"),
        ("AMD Instinct MI300X", "MI300X"),
        ("TPU v5p", "TPU-v5p"),
        ("v5litepod-16", "TPU-v5e"),
        ("cpu", "CPU"),
        ("CPU avx512", "CPU-AVX512"),
    ],
)
def test_a_device_is_known_by_what_torch_tables_and_people_call_it(spelling: str, name: str) -> None:
    assert accelerator(spelling).name == name


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_entry_is_found_by_its_own_name_in_any_case(name: str) -> None:
    assert accelerator(name).name == name
    assert accelerator(name.lower()).name == name


@pytest.mark.parametrize(
    "name", ["H1000", "A1000", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "abacus", "", "NVIDIA RTX 6000 Ada Generation"]
)
def test_a_device_that_is_not_there_is_not_taken_for_another(name: str) -> None:
    with pytest.raises(ClusterError, match="leave --cluster out on that machine"):
        accelerator(name)


def test_the_nearest_names_are_told() -> None:
    with pytest.raises(ClusterError, match=r"nearest there: .*H100-SXM"):
        accelerator("H1000")
    with pytest.raises(ClusterError, match="nearest there: RTX-4090"):
        accelerator("RTX 5090")


@pytest.mark.parametrize("device", CATALOGUE.values(), ids=lambda device: device.name)
def test_every_figure_has_a_source_and_is_of_the_right_size(device: Accelerator) -> None:
    assert {"all", "network", "latency"} <= device.sources.keys()
    assert {"fp64", "fp32", "tf32", "bf16", "fp16"} <= device.peak_flops.keys()
    assert device.peak_flops["fp64"] <= device.peak_flops["fp32"] <= device.peak_flops["tf32"]
    if device.kind != "cpu":
        assert 1e12 < device.peak_flops["fp32"] < device.memory_bandwidth * 1e3
        assert device.memory_bandwidth > device.inside.bandwidth > device.network.bandwidth  # bytes, not bits
        assert 1e-7 < device.inside.latency_s < device.network.latency_s < 1e-3


def test_a_precision_that_a_device_lacks_is_an_error_with_those_it_has() -> None:
    assert CATALOGUE["H100-SXM"].peak("fp8") == pytest.approx(1979e12, rel=1e-3)
    with pytest.raises(ClusterError, match="A100-SXM-80 does not compute in fp8; it has fp64, fp32"):
        CATALOGUE["A100-SXM-80"].peak("fp8")


def test_the_catalogue_agrees_with_the_figures_that_others_plan_with() -> None:
    """llm-analysis' tables; of links it has those of a bridge between two cards, which is not compared."""
    [table] = (ROOT / "benchmarks").rglob("calib_gpu_system_specs.csv")
    compared = 0
    for cells in csv.DictReader(table.open()):
        figures = json.loads(cells["json"])
        if cells["source"] != "llm-analysis" or cells["system"] in (
            "mi100-32gb",
            "mi210-64gb",
            "mi250-128gb",
            "mi250x-128gb",
        ):
            continue
        device = accelerator(cells["system"])
        assert device.memory_bandwidth == pytest.approx(figures["hbm_bandwidth_in_GB_per_sec"] * 1e9, rel=0.02)
        assert device.peak_flops["fp16"] == pytest.approx(figures["peak_fp16_TFLOPS"] * 1e12, rel=0.01)
        compared += 1
    assert compared >= 10
