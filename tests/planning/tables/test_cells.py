"""Cells as people write them: misread ones put a whole table's predictions off, and nothing says so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.catalogue import CATALOGUE
from paceline.planning.tables import cells as read
from paceline.planning.tables.cells import UnusableError, number, whole


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,024", 1024),
        ("7.5e9", 7.5e9),
        ("175B", 175e9),
        ("250k-class (150257 in estimates)", 250e3),
        ("8K", 8e3),
        ("", None),
        ("V not stated", None),
        ("v4", None),
    ],
)
def test_numbers_are_found_in_what_people_write(text: str, value: float | None) -> None:
    assert number(text) == value


@given(st.integers(0, 10**12))
def test_any_whole_number_is_read_with_and_without_its_commas(value: int) -> None:
    assert whole({"n": str(value)}, "n") == whole({"n": f"{value:,}"}, "n") == value


@given(st.text())
def test_no_text_makes_a_reader_fail(text: str) -> None:
    cells = dict.fromkeys(("precision", "act_ckpt", "zero_fsdp", "notes", "framework", "interconnect"), text)
    number(text)
    read.precision(cells, CATALOGUE["H100-SXM"])
    read.products(cells)
    read.moment_bytes(cells)
    read.recomputed(cells)
    read.sequence(cells)
    read.sharding(text, "none")
    read.between_bytes_per_s(text, 8)
    assert 0 < read.fabric_share(text) <= 1


def test_what_is_not_stated_is_an_error_that_names_the_column() -> None:
    with pytest.raises(UnusableError, match="global_batch is not stated"):
        whole({"global_batch": "per recipe"}, "global_batch")
    assert whole({}, "tp", 1) == 1


@pytest.mark.parametrize(
    ("text", "gigabits_per_device"),
    [
        ("400Gb/s RDMA per GPU", 400),
        ("8x200Gb/s HDR IB per node", 200),
        ("NVLink; 4x100Gb/s Omni-Path", 50),
        ("NVSwitch; 8x400Gb/s NDR", 400),
        ("100GbE", 12.5),
        ("1600 Gbps EFA", 200),
        ("NVLink 600 GB/s", None),
        ("not stated", None),
    ],
)
def test_a_rate_is_a_hosts_unless_the_text_says_a_devices(text: str, gigabits_per_device: float | None) -> None:
    """A device's 400 Gb/s read as its host's made every plan over hosts eight times too slow."""
    found = read.between_bytes_per_s(text, 8)
    assert found == (None if gigabits_per_device is None else pytest.approx(gigabits_per_device * 1e9 / 8))


def test_fabrics_whose_packets_processors_carry_reach_less_of_their_rate() -> None:
    shares = [read.fabric_share(text) for text in ("4x100Gb/s Omni-Path", "100 Gb/s EFA", "8x200Gb/s HDR IB")]
    assert shares[0] < shares[1] < shares[2] == 1.0


@pytest.mark.parametrize(
    ("text", "sharding"),
    [
        ("FSDP over 48", "zero3"),
        ("HSDP: fsdp within a slice", "hybrid"),
        ("FULL_SHARD", "zero3"),
        ("SHARD_GRAD_OP", "zero2"),
        ("ZeRO-1", "zero1"),
        ("dist-opt=True", "zero1"),
        ("optim_grads_params", "zero3"),
        ("optim_grads", "zero2"),
        ("DDP", "none"),
        ("", "zero1"),
        ("per recipe", "zero1"),
    ],
)
def test_sharding_is_read_by_any_of_its_names_and_else_is_the_frameworks(text: str, sharding: str) -> None:
    assert read.sharding(text, "zero1") == sharding


@pytest.mark.parametrize(
    ("text", "products"),
    [
        ("bf16", ""),
        ("fp8 rowwise", "fp8-row"),
        ("float8 (rowwise)", "fp8-row"),
        ("fp8 (current scaling)", "fp8"),
        ("fp8 blockwise 128x128", "fp8-block"),
        ("MXFP8", "mxfp8"),
        ("NVFP4", "fp4"),
        ("int8 (AQT)", "int8"),
    ],
)
def test_products_have_the_precision_and_the_scales_that_are_written(text: str, products: str) -> None:
    assert read.products({"precision": text}) == products


@pytest.mark.parametrize(
    ("text", "device", "precision"),
    [
        ("bf16", "A100-SXM-80", "bf16"),
        ("mixed", "V100-SXM-32", "fp16"),
        ("AMP", "H100-SXM", "bf16"),
        ("fp8 rowwise", "H100-SXM", "bf16"),
        ("fp16 with fp32 grad", "A100-SXM-80", "fp16"),
        ("fp32", "V100-SXM-32", "fp32"),
        ("TF32", "A100-SXM-80", "tf32"),
        ("", "TPU-v4", "bf16"),
    ],
)
def test_activations_have_the_precision_that_is_written_or_the_devices_usual_one(
    text: str, device: str, precision: str
) -> None:
    assert read.precision({"precision": text}, CATALOGUE[device]) == precision


@pytest.mark.parametrize(
    ("text", "remat"),
    [
        ("selective(op)", "selective"),
        ("save_qkv_proj", "selective"),
        ("minimal", "selective"),
        ("full", "block"),
        ("every layer", "block"),
        ("none", "none"),
        ("no full recompute", "none"),
        ("per recipe", "unknown"),
        ("not stated", "unknown"),
        ("", "unknown"),
    ],
)
def test_recomputation_that_is_not_stated_is_unknown_not_none(text: str, remat: str) -> None:
    """Taken for none, runs of large models would be refused as too large."""
    assert read.recomputed({"act_ckpt": text}) == remat


@pytest.mark.parametrize(
    ("notes", "size"),
    [("8-bit Adam", 1.0), ("bf16 optimizer states", 2.0), ("Adam moments in bf16", 2.0), ("Adam", 4.0)],
)
def test_narrow_moments_are_read_from_the_notes(notes: str, size: float) -> None:
    assert read.moment_bytes({"notes": notes, "precision": "bf16"}) == size


def test_sequence_parallelism_is_read_and_its_absence_too() -> None:
    assert read.sequence({"act_ckpt": "seq+selective"})
    assert read.sequence({"notes": "with sequence-parallel"})
    assert not read.sequence({"notes": "no sequence parallelism; sequence-parallel=False"})
    assert not read.sequence({})
