"""Layouts of rows: what a table states is in the plan, and what it does not follows from its framework."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.planning.cost import frameworks as known
from paceline.planning.cost.layout import Layout
from paceline.planning.tables.cells import UnusableError
from paceline.planning.tables.layouts import framework_of, layout_of

CELLS = {
    "model": "GPT 7B",
    "n_params": "6.9e9",
    "n_layers": "32",
    "hidden": "4096",
    "n_heads": "32",
    "seq_len": "2048",
    "vocab": "50257",
    "gpu": "A100-SXM-80GB",
    "gpus_per_node": "8",
    "interconnect": "NVLink; 8x200Gb/s HDR IB per node",
    "n_gpus": "64",
    "tp": "2",
    "pp": "4",
    "micro_batch": "1",
    "global_batch": "64",
    "precision": "bf16",
    "act_ckpt": "full",
    "framework": "Megatron-LM",
    "step_time_s": "9.5",
}


def layout(**cells: str) -> Layout:
    return layout_of({**CELLS, **cells}, [])


def framework(**cells: str) -> Any:
    row = {**CELLS, **cells}
    return framework_of(row, layout(**cells).machines.device)


def test_a_row_is_the_plan_that_it_states() -> None:
    found = layout()
    assert (found.tp, found.pp, found.data_ranks, found.microbatches, found.samples) == (2, 4, 8, 8, 1.0)
    assert found.remat == "block"
    assert found.machines.hosts == 8
    assert found.machines.between.bandwidth == 25e9
    assert found.cut == (9, 8, 8, 9)  # Megatron's: embedding and head come on top of equal numbers of layers


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"n_gpus": "63"}, "63 GPUs are not a multiple"),
        ({"n_gpus": "", "dp": ""}, "n_gpus is not stated"),
        ({"global_batch": ""}, "global_batch is not stated"),
    ],
)
def test_a_row_that_states_too_little_says_what(changed: dict[str, str], what: str) -> None:
    with pytest.raises(UnusableError, match=what):
        layout(**changed)


def test_a_batch_in_tokens_is_one_in_samples() -> None:
    assert layout(global_batch="131,072 tokens").global_batch == 64


@pytest.mark.parametrize(
    ("text", "degrees"),
    [
        ("FSDP over 16", (16, 4, 3)),
        ("HSDP: fsdp within a host", (8, 8, 3)),
        ("full_shard", (64, 1, 3)),
        ("shard_grad_op", (64, 1, 2)),
        ("none", (1, 64, 3)),
    ],
)
def test_ranks_shard_the_state_as_stated(text: str, degrees: tuple[int, int, int]) -> None:
    found = layout(tp="1", pp="1", zero_fsdp=text, framework="FSDP", micro_batch="", act_ckpt="none")
    assert (found.fsdp, found.dp, found.zero) == degrees


def test_a_distributed_optimizer_shards_over_dp() -> None:
    assert layout(zero_fsdp="dist-opt=True").zero_dp
    assert not layout(zero_fsdp="none").zero_dp


def test_experts_are_folded_where_the_framework_does_so() -> None:
    mixture = {"model": "Mixtral 8x7B", "hidden": "", "n_layers": "", "n_params": "", "n_heads": "", "vocab": ""}
    folded = layout(**mixture, ep="8", framework="Megatron Core, NeMo", gpu="H100", seq_len="4096")
    assert (folded.expert_ranks, folded.ep) == (8, 1)
    other = layout(**mixture, ep="8", framework="torchtitan", gpu="H100", seq_len="4096")
    assert (other.expert_ranks, other.ep) == (0, 8)
    assert layout(ep="8").ep == 1, "a model without experts has none to divide"


def test_interleaved_stages_are_as_many_as_stated_or_as_divide_the_layers() -> None:
    assert (layout(vpp="2").chunks, layout(vpp="2").schedule) == (2, "interleaved")
    assert layout(schedule="interleaved 1F1B").chunks == 4
    assert layout(vpp="16").chunks == 8, "no stage is without a layer"


def test_adapters_are_read_with_their_rank() -> None:
    assert layout(notes="LoRA, rank 16").lora == 16
    assert layout(model="GPT 7B LoRA").lora == 32
    assert layout().lora == 0


def test_recomputation_that_is_not_stated_is_the_least_that_fits() -> None:
    """As its users would have it: the run was made, so it fitted."""
    roomy, tight = (
        layout(act_ckpt="per recipe", framework="FSDP", tp="1", pp="1", micro_batch=size, global_batch="4096")
        for size in ("1", "64")
    )
    assert roomy.remat == "none"
    assert tight.remat == "block"


def test_devices_on_pcie_have_no_nvlink() -> None:
    assert layout(interconnect="PCIe; 100GbE").machines.device.inside.bandwidth < 50e9
    assert layout(interconnect="NVLink, PCIe 4").machines.device.inside.bandwidth > 200e9


def test_one_of_a_hosts_cards_is_meant_where_infiniband_is_stated_without_a_number() -> None:
    assert layout(interconnect="NVSwitch + HDR InfiniBand 200 Gb/s").machines.between.bandwidth == 25e9
    assert layout(interconnect="100GbE").machines.between.bandwidth == pytest.approx(12.5e9 / 8)


@pytest.mark.parametrize(
    ("cells", "found"),
    [
        ({"framework": "torchtitan"}, known.TORCHTITAN),
        ({"framework": "torchtitan; torch.compile"}, known.TORCHTITAN_COMPILED),
        ({"framework": "MaxText", "gpu": "TPU v5p"}, known.MAXTEXT),
        ({"framework": "Megatron-DeepSpeed"}, known.MEGATRON_DEEPSPEED),
        ({"framework": "DeepSpeed 0.9"}, known.DEEPSPEED),
        ({"framework": "llm-foundry (Composer)"}, known.COMPOSER),
        ({"framework": "LiBai"}, known.ONEFLOW),
        ({"framework": "Megatron-LM"}, known.MEGATRON_LM),
        ({"framework": "Megatron-LM core_v0.6"}, known.MEGATRON_CORE),
        ({"framework": "NeMo", "gpu": "H100"}, known.MEGATRON_CORE),
        ({"framework": "Megatron Bridge; 26.06 NeMo", "gpu": "GB200"}, known.MEGATRON_CORE),
        (
            {"framework": "Megatron Bridge; 26.06 NeMo", "gpu": "GB200", "precision": "MXFP8"},
            known.MEGATRON_CORE_FUSED,
        ),
        ({"framework": "house stack", "zero_fsdp": "FSDP"}, known.FSDP),
        ({"framework": "house stack", "zero_fsdp": "DDP"}, known.DDP),
        ({"framework": "house stack"}, known.OTHER),
    ],
)
def test_frameworks_are_known_by_name_version_and_device(cells: dict[str, str], found: known.Framework) -> None:
    cells = {"tp": "1", "pp": "1", **cells}
    assert framework(**cells).name == found.name


def test_no_attention_is_fused_before_ampere() -> None:
    assert not framework(framework="FSDP", gpu="V100-SXM-32GB", precision="fp16").profile.flash
    assert framework(framework="FSDP").profile.flash
    assert framework(framework="Megatron-LM", notes="flash-attention").profile.flash
    assert not framework(framework="FSDP", notes="no flash attention").profile.flash


def test_traffic_of_tp_is_hidden_where_the_row_says_so() -> None:
    assert framework(notes="tp-comm-overlap=True").profile.overlaps_tp > 0
    assert framework().profile.overlaps_tp == 0
