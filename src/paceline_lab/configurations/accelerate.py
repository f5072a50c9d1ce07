"""Accelerate's YAML configuration of PyTorch FSDP, DDP, DeepSpeed or Megatron-LM."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from paceline.errors import PlanError
from paceline.job.job import Job
from paceline.job.model import Dimensions
from paceline.planning.plan import Plan
from paceline_lab.configurations import deepspeed
from paceline_lab.configurations.configuration import (
    REST,
    Configuration,
    Keys,
    Written,
    flattened,
    microbatch_of,
    ranks_per_host,
    refuse,
    text_of,
)

NAME = "Accelerate"
_ZERO = {
    "full_shard": 3,
    "1": 3,
    "hybrid_shard": 3,
    "4": 3,
    "shard_grad_op": 2,
    "2": 2,
    "hybrid_shard_zero2": 2,
    "5": 2,
}
_QUIET = (
    r"(compute_environment|debug|downcast_bf16|enable_cpu_affinity|machine_rank|main_.*|rdzv_backend|same_network|tpu_.*)",
    r"(use_cpu|gpu_ids|commands|command_file|tpu_name|tpu_zone|fsdp_state_dict_type|fsdp_transformer_layer_cls.*)",
    r"(fsdp_cpu_ram_efficient_loading|fsdp_sync_module_states|fsdp_use_orig_params|fsdp_min_num_params|deepspeed_host.*)",
    r"(zero3_init_flag|zero3_save_16bit_model|deepspeed_multinode_launcher|gradient_clipping|megatron_lm_gradient_clip.*)",
    r"(dynamo_config\.dynamo_(mode|use_.*)|fsdp_config\.fsdp_ignored.*|.*nvme_path|aws_.*|ec2_.*|sagemaker.*|profile)",
)
_NOTED = {
    r"fsdp_(backward_prefetch|forward_prefetch|backward_prefetch_policy)": "the next block is gathered ahead in every "
    "prediction",
    r"fsdp_auto_wrap_policy": "parameters are gathered block by block in every prediction",
    r"fp8_config\..*": "predicted by the precision alone",
    r"parallelism_config_cp_comm_strategy|cp_comm_strategy": "predicted as a ring",
}


def read(file: Path, text: str) -> Configuration:
    """Read an Accelerate configuration from a YAML file.

    Raises:
        PlanError: the file is not YAML, a value is not valid for its key, or a referenced file cannot be read.
    """
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PlanError("config.not_yaml", "{file} is not valid YAML: {error}", file=file, error=error) from None
    if not isinstance(values, dict):
        raise PlanError(
            "config.accelerate_invalid",
            "{file}: an Accelerate configuration must be a mapping of keys to values",
            file=file,
        )
    keys = Keys(NAME, flattened(values), _QUIET, _NOTED)
    kind = keys.text("distributed_type").upper() or "NO"
    kinds = {"FSDP": _fsdp, "DEEPSPEED": _deepspeed, "MEGATRON_LM": _megatron}
    of_kind = kinds.get(kind, _ddp)(keys, file)
    ranks, hosts = keys.number("num_processes"), keys.number("num_machines") or 1
    stated = keys.text("mixed_precision")
    compiled = keys.text("dynamo_backend").lower() not in ("", "no", "eager")
    problems = list(of_kind.problems)
    if ranks and ranks % hosts:
        problems.append(f"num_processes {ranks} does not divide among num_machines {hosts}")
    if kind not in (*kinds, "NO", "MULTI_GPU", "MULTI_CPU"):
        problems.append(f"distributed_type {kind} is predicted as data parallel alone")
    own = keys.configuration(dimensions={})
    return replace(
        of_kind,
        system=f"{NAME}, {kind}" if kind in kinds else NAME,
        ranks=ranks,
        precision=of_kind.precision if stated in ("", "no", "False") else stated,
        compiled=compiled,
        read=(*own.read, *of_kind.read),
        noted=(*own.noted, *of_kind.noted),
        unknown=(*own.unknown, *of_kind.unknown),
        problems=tuple(problems),
    )


def _ddp(keys: Keys, file: Path) -> Configuration:
    count = keys.number("gradient_accumulation_steps")
    return Configuration(NAME, {}, replicas=REST, microbatches=count)


def _fsdp(keys: Keys, file: Path) -> Configuration:
    version = keys.number("fsdp_version") or 1
    strategy = keys.text("fsdp_sharding_strategy").lower()
    reshard = keys.given("fsdp_reshard_after_forward")
    zero = _ZERO.get(strategy, 3)
    if isinstance(reshard, bool) or str(reshard).lower() in ("true", "false"):
        zero = 3 if str(reshard).lower() == "true" else 2
    elif reshard is not None:
        strategy = str(reshard).lower()
        zero = _ZERO.get(strategy, 3)
    problems = []
    sizes = {name: keys.number(f"parallelism_config_{name}_size") for name in ("dp_replicate", "dp_shard", "tp", "cp")}
    meshed = any(size is not None for size in sizes.values())
    hybrid = strategy.startswith("hybrid") or strategy in ("4", "5")
    if hybrid and not meshed:
        problems.append("hybrid sharding: predicted as sharding within each host of the file's num_machines")
    if meshed and version < 2 and (sizes["tp"] or 1) * (sizes["cp"] or 1) > 1:
        problems.append("parallelism_config with tp or cp needs fsdp_version: 2")
    hosts = keys.number("num_machines") or 1
    none = strategy in ("no_shard", "3")
    return Configuration(
        NAME,
        {},
        replicas=REST if none else (sizes["dp_replicate"] or 1) if meshed else hosts if hybrid else 1,
        shard=1 if none else (sizes["dp_shard"] or 1) if meshed else REST,
        tp=sizes["tp"] or 1,
        cp=sizes["cp"] or 1,
        zero=zero,
        offload=keys.flag("fsdp_offload_params"),
        remat="block" if keys.flag("fsdp_activation_checkpointing") else "none",
        microbatches=keys.number("gradient_accumulation_steps"),
        problems=tuple(problems),
    )


def _deepspeed(keys: Keys, file: Path) -> Configuration:
    named = keys.text("deepspeed_config_file")
    if named:
        path = file.parent / named
        try:
            return deepspeed.of_values(json.loads(text_of(path)))
        except ValueError as error:
            raise PlanError("config.not_json", "{file} is not valid JSON: {error}", file=path, error=error) from None
    devices = {part: keys.text(f"offload_{part}_device") for part in ("optimizer", "param")}
    values = {
        "zero_optimization": {
            "stage": keys.number("zero_stage") or 0,
            **{f"offload_{part}": {"device": device} for part, device in devices.items() if device},
        },
        "gradient_accumulation_steps": keys.number("gradient_accumulation_steps"),
    }
    return replace(deepspeed.of_values(values), read=())


def _megatron(keys: Keys, file: Path) -> Configuration:
    sharded = keys.flag("megatron_lm_use_distributed_optimizer")
    recompute = keys.flag("megatron_lm_recompute_activations")
    return Configuration(
        NAME,
        {},
        replicas=1 if sharded else REST,
        shard=REST if sharded else 1,
        zero=1,
        tp=keys.degree("megatron_lm_tp_degree"),
        pp=keys.degree("megatron_lm_pp_degree"),
        sequence=keys.flag("megatron_lm_sequence_parallelism"),
        remat="selective" if recompute else "none",
        microbatches=keys.number("megatron_lm_num_micro_batches", "gradient_accumulation_steps"),
    )


def write(plan: Plan, job: Job, dimensions: Dimensions | None, per_host: int) -> Written:
    """Write a plan as an Accelerate configuration of PyTorch FSDP2.

    Raises:
        PlanError: Accelerate does not support the plan; the error names every reason.
    """
    is_ddp = plan.fsdp * plan.tp * plan.cp == 1
    cannot = {
        f"pp={plan.pp}: it has no pipelines with FSDP": plan.pp > 1,
        f"ep={plan.ep}: it does not divide experts": plan.ep > 1,
        f"zero={plan.zero}: FSDP2 has 2 and 3": plan.fsdp > 1 and plan.zero == 1,
        "sequence=on: its tensor parallelism keeps all tokens between matrices": plan.sequence and plan.tp > 1,
        f"remat={plan.remat}: it recomputes whole blocks": plan.remat == "selective",
        f"remat={plan.remat} without fsdp": plan.remat == "block" and is_ddp,
    }
    refuse(NAME, plan, job, cannot)
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if not is_ddp else "MULTI_GPU" if plan.ranks > 1 else "NO",
        "mixed_precision": "bf16" if plan.precision_for(job) == "bf16" else "no",
        "num_machines": plan.ranks // ranks_per_host(plan.ranks, per_host),
        "num_processes": plan.ranks,
        "gradient_accumulation_steps": plan.microbatches,
        **({"dynamo_config": {"dynamo_backend": "INDUCTOR"}} if plan.compile != "off" else {}),
    }
    if not is_ddp:
        values["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": plan.zero == 3,
            "fsdp_offload_params": plan.offload,
            "fsdp_activation_checkpointing": plan.remat == "block",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
        values["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": plan.dp,
            "parallelism_config_dp_shard_size": plan.fsdp,
            "parallelism_config_tp_size": plan.tp,
            "parallelism_config_cp_size": plan.cp,
        }
    batch = f"per-device batch {microbatch_of(plan, job)}"
    return Written(f"# {plan.ranks} ranks: {plan}; {batch}\n{yaml.safe_dump(values, sort_keys=False)}", ".yaml", batch)
