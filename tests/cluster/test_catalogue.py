"""Predictions stand on the catalogue.

A device taken for another, or a figure of another kind, and every plan for it is wrong.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from paceline.cluster.catalogue import CATALOGUE, Accelerator, at_power
from paceline.cluster.named import INSTANCES, accelerator, known
from paceline.errors import ClusterError
from refusals import raises

ROOT = Path(__file__).parents[2]


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
        ("TPU v6e (Trillium)", "TPU-v6e"),
        ("TPU v7x (Ironwood)", "TPU-v7x"),
        ("Ironwood", "TPU-v7x"),
        ("TPU v4-128", "TPU-v4"),
        ("TPUv3-8", "TPU-v3"),
        ("v5litepod-256", "TPU-v5e"),
        ("DGX-GB300", "GB300"),
        ("NVIDIA GB200 NVL72", "GB200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("DGX-1 V100-SXM2-16GB", "V100-SXM-16"),
        ("DGX-2 V100-SXM3-32GB", "V100-SXM-32"),
        ("Tesla V100", "V100-SXM-32"),
        ("Tesla P100-SXM2-16GB", "P100"),
        ("NVIDIA GH200 480GB", "GH200-96"),
        ("NVIDIA GH200 144G HBM3e", "GH200-144"),
        ("NVIDIA H200 NVL", "H200-NVL"),
        ("H800 SXM", "H800-SXM"),
        ("H20-96GB", "H20"),
        ("NVIDIA A800-SXM4-80GB", "A800-SXM-80"),
        ("H100-95GB HBM2e lower-TDP", "H100-SXM-96"),
        ("H100-96GB HBM2e 2.4TB/s 500W (Grand Teton)", "H100-SXM-96"),
        ("L40S-48GB", "L40S"),
        ("NVIDIA L20", "L20"),
        ("A40", "A40"),
        ("RTX 5090", "RTX-5090"),
        ("3090", "RTX-3090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("MI355X 288GB", "MI355X"),
        ("AMD Instinct MI250X 128GB", "MI250X"),
        ("Trainium2", "Trainium-2"),
        ("trn2.48xlarge", "Trainium-2"),
        ("trn1.32xlarge", "Trainium-1"),
        ("Gaudi2", "Gaudi-2"),
        ("HL-225", "Gaudi-2"),
        ("Intel Gaudi 3", "Gaudi-3"),
        ("Ascend 910B", "Ascend-910B"),
        ("Huawei Ascend 910B3", "Ascend-910B3"),
        ("Atlas 800T A2", "Ascend-910B"),
        ("Ascend 910C 128GB", "Ascend-910C"),
        ("CloudMatrix384", "Ascend-910C"),
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
    "name",
    [
        "H1000",
        "A1000",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "abacus",
        "",
        "NVIDIA RTX 6000 Ada Generation",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "RTX 3090 Ti",
        "DeepSeek V3",
    ],
)
def test_a_device_that_is_not_there_is_not_taken_for_another(name: str) -> None:
    with raises(ClusterError, "cluster.device_unknown"):
        accelerator(name)


def test_the_nearest_names_are_told() -> None:
    with raises(ClusterError, "cluster.device_unknown"):
        accelerator("H1000")
    with raises(ClusterError, "cluster.device_unknown"):
        accelerator("RTX 4099")


@pytest.mark.parametrize("device", CATALOGUE.values(), ids=lambda device: device.name)
def test_every_figure_has_a_source_and_is_of_the_right_size(device: Accelerator) -> None:
    assert {"all", "network", "latency"} <= device.sources.keys()
    assert {"fp64", "fp32", "tf32", "bf16", "fp16"} <= device.peak_flops.keys()
    assert device.peak_flops["fp64"] <= device.peak_flops["fp32"] <= device.peak_flops["tf32"]
    assert device.peak_flops["fp32"] <= device.peak_flops["bf16"]
    for narrow, wide in (("fp8", "bf16"), ("fp4", "fp8")):
        if narrow in device.peak_flops:
            assert device.peak_flops[narrow] >= device.peak_flops[wide]
    assert 0.5 < device.sustained <= 1
    assert (device.sustained < 1) <= ("sustained" in device.sources)
    assert device.machine == 0 or device.per_host % device.machine == 0
    if device.kind != "cpu":
        assert device.generation
        assert device.power_w is None or 50 < device.power_w < 2000
        assert 1e9 < device.host_link.bandwidth < device.memory_bandwidth
        assert 8 * 2**30 <= device.host_memory_bytes <= 2**39
        assert 1e12 < device.peak_flops["fp32"] < device.memory_bandwidth * 1e3
        assert device.memory_bandwidth > device.inside.bandwidth > device.network.bandwidth  # bytes, not bits
        assert 1e-7 < device.inside.latency_s < device.network.latency_s < 1e-3


def test_a_precision_that_a_device_lacks_is_an_error_with_those_it_has() -> None:
    assert CATALOGUE["H100-SXM"].peak("fp8") == pytest.approx(1979e12, rel=1e-3)
    with raises(ClusterError, "cluster.precision_unsupported", device="A100-SXM-80", precision="fp8"):
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


def test_every_device_that_a_published_table_names_is_known() -> None:
    names = {
        cells["gpu"]
        for table in (ROOT / "benchmarks").rglob("*.csv")
        for cells in csv.DictReader(table.open())
        if cells.get("gpu")
    }
    assert len(names) > 5
    assert [name for name in sorted(names) if known(name) is None] == []


def test_a_power_in_a_name_is_a_cap_that_slows_products_and_nothing_else() -> None:
    full, capped = CATALOGUE["H100-SXM"], accelerator("H100 500W")
    assert (capped.power_w, capped.memory_bytes, capped.inside) == (500, full.memory_bytes, full.inside)
    assert 0.6 < capped.sustained / full.sustained < 0.95
    assert accelerator(capped.name) == capped
    assert capped.name == "H100-SXM 500W"


@pytest.mark.parametrize("watts", [100, 350, 500, 699, 900, 5000])
def test_more_power_is_never_slower_and_never_faster_than_the_peak(watts: float) -> None:
    device = CATALOGUE["H100-SXM"]
    assert at_power(device, watts).sustained <= at_power(device, watts + 1).sustained <= 1
    assert (at_power(device, watts).sustained < device.sustained) == (watts < 700)


def test_a_device_whose_power_is_unknown_is_not_slowed() -> None:
    assert at_power(CATALOGUE["TPU-v5p"], 100) == CATALOGUE["TPU-v5p"]
    with raises(ClusterError, "cluster.power_not_positive", device="H100-SXM", watts=0):
        at_power(CATALOGUE["H100-SXM"], 0)


@pytest.mark.parametrize(
    ("spelling", "gib", "bandwidth", "name"),
    [
        ("H100-96GB HBM2e 2.4TB/s 500W (Grand Teton)", 96, 2.4e12, "H100-SXM-96"),
        ("NVIDIA A100-SXM-64GB", 64, 2039e9, "A100-SXM-80 64GB"),
        ("H100 SXM 64GB 2020GB/s", 64, 2.02e12, "H100-SXM 64GB 2.02TB/s"),
        ("H20 141GB 4.8TB/s", 141, 4.8e12, "H20 141GB 4.8TB/s"),
        ("B200 192GB", 180, 8e12, "B200"),
        ("MI250X 128GB", 64, 1638e9, "MI250X"),
        ("NVIDIA GH200 480GB", 96, 4e12, "GH200-96"),
    ],
)
def test_another_memory_in_a_name_is_taken_and_a_sheets_rounding_is_not(
    spelling: str, gib: float, bandwidth: float, name: str
) -> None:
    device = accelerator(spelling)
    assert (device.name, device.memory_bytes, device.memory_bandwidth) == (name, int(gib * 2**30), bandwidth)
    assert accelerator(device.name) == device


def test_dies_and_cores_that_frameworks_see_are_the_devices() -> None:
    """A card's or chip's figures for each of its parts would be twice too many."""
    assert CATALOGUE["MI250X"].peak_flops["bf16"] == pytest.approx(383e12 / 2)
    assert CATALOGUE["TPU-v3"].peak_flops["bf16"] == pytest.approx(123e12 / 2)
    assert CATALOGUE["Trainium-1"].peak_flops["bf16"] * CATALOGUE["Trainium-1"].per_host == pytest.approx(3040e12)
    assert CATALOGUE["TPU-v7x"].peak_flops["bf16"] == 2307e12


@pytest.mark.parametrize(
    ("spelling", "entry", "gbps"),
    [
        ("p4d.24xlarge", "A100-SXM-40", 50),
        ("AWS p3.16xlarge", "V100-SXM-16", 3.125),
        ("a2-ultragpu-8g", "A100-SXM-80", 12.5),
        ("a3-megagpu-8g", "H100-SXM", 200),
        ("Standard_ND96amsr_A100_v4", "A100-SXM-80", 200),
        ("p5.48xlarge", "H100-SXM", 400),
        ("g5.48xlarge", "A10G", 12.5),
        ("trn1n.32xlarge", "Trainium-1", 50),
    ],
)
def test_a_clouds_machine_type_is_its_device_with_its_network(spelling: str, entry: str, gbps: float) -> None:
    """p4d has a quarter of the network of a DGX A100."""
    device = accelerator(spelling)
    assert device.peak_flops == CATALOGUE[entry].peak_flops
    assert device.network.bandwidth * 8 / 1e9 == gbps
    assert accelerator(device.name) == device


def test_every_machine_type_names_an_entry_and_is_found_by_its_own_name() -> None:
    for name, instance in INSTANCES.items():
        assert accelerator(name).memory_bytes == CATALOGUE[instance.device].memory_bytes
        assert accelerator(accelerator(name).name) == accelerator(name)


def test_devices_of_a_domain_or_a_mesh_are_joined_as_their_vendors_join_them() -> None:
    """Hosts of one domain, taken for hosts on a network, would exchange experts many times too slowly."""
    domains = {name: CATALOGUE[name].per_host for name in ("GB200", "GB300", "Ascend-910C")}
    assert domains == {"GB200": 72, "GB300": 72, "Ascend-910C": 768}
    assert all(CATALOGUE[name].machine for name in domains)
    for name in ("MI300X", "MI325X", "MI355X", "Gaudi-2", "Gaudi-3", "Ascend-910B"):
        assert CATALOGUE[name].mesh
        assert CATALOGUE[name].per_host == 8
