"""DeepSpeed's JSON configuration, which does not contain the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.errors import PlanError
from paceline.job.job import Job
from paceline.job.model import Dimensions
from paceline.planning.plan import Plan
from paceline_lab.configurations.configuration import (
    REST,
    Configuration,
    Keys,
    Written,
    flattened,
    microbatch_of,
    refuse,
)

NAME = "DeepSpeed"
_QUIET = (
    r"(optimizer\.params\.(?!lr).*|scheduler\..*|gradient_clipping|steps_per_print|wall_clock_breakdown|dump_state)",
    r"(tensorboard\..*|wandb\..*|csv_monitor\..*|comet\..*|flops_profiler\..*|comms_logger\..*|checkpoint\..*|seed)",
    r"(zero_allow_untested_optimizer|zero_force_ds_cpu_optimizer|data_types\..*|elasticity\..*|autotuning\..*)",
    r"(fp16\.(auto_cast|loss_scale.*|initial_scale_power|hysteresis|consecutive_hysteresis|min_loss_scale))",
    r"(zero_optimization\.(stage3_gather_16bit.*|ignore_unused_parameters|elastic_checkpoint|round_robin_gradients))",
    r"(.*\.(pin_memory|nvme_path|buffer_count|buffer_size|fast_init|max_in_cpu|pipeline_read|pipeline_write|ratio))",
)
_NOTED = {
    r"zero_optimization\.(overlap_comm|contiguous_gradients|reduce_scatter|allgather_part.*|use_multi_rank.*)": "sums "
    "of gradients overlap the backward pass in every prediction",
    r"zero_optimization\.(.*bucket_size|stage3_.*|sub_group_size|param_persistence.*|prefetch.*)": "parameters are "
    "gathered block by block in every prediction",
    r"zero_optimization\.zero_quantized_(weights|gradients)": "sums and gathers are predicted without quantisation",
    r"(prescale_gradients|gradient_predivide_factor|sparse_gradients|communication_data_type)": "of no weight here",
    r"disable_allgather": "of no weight here",
    r"activation_checkpointing\..*": "the model's code says what is recomputed: name it with remat=block in --what-if",
    r"(compile\..*|aio\..*|amp\..*)": "not in the prediction",
}


def read(file: Path, text: str) -> Configuration:
    """Read a DeepSpeed configuration from a JSON file.

    Raises:
        PlanError: the file is not JSON, or a value is not valid for its key.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError("config.not_json", "{file} is not valid JSON: {error}", file=file, error=error) from None
    if not isinstance(values, dict):
        raise PlanError(
            "config.deepspeed_invalid",
            "{file}: a DeepSpeed configuration must be a mapping of keys to values",
            file=file,
        )
    return of_values(values)


def of_values(values: dict[str, Any]) -> Configuration:
    """Build a DeepSpeed configuration from the values of a file or of a section.

    Raises:
        PlanError: a value is not valid for its key.
    """
    keys = Keys(NAME, flattened(values), _QUIET, _NOTED)
    stage = keys.number("zero_optimization.stage") or 0
    parts = keys.number("zero_hpz_partition_size", "mics_shard_size")
    offloaded = {key: keys.text(f"offload_{key}.device", f"cpu_offload_{key}") for key in ("optimizer", "param")}
    on = {key for key, device in offloaded.items() if device not in ("", "none", "None")}
    shard = {"replicas": REST, "shard": 1}
    if stage:
        shard = {"replicas": REST, "shard": parts} if parts and parts > 1 else {"replicas": 1, "shard": REST}
    bf16, fp16 = keys.flag("bf16.enabled", "bfloat16.enabled"), keys.flag("fp16.enabled")
    micro, count = keys.number("train_micro_batch_size_per_gpu"), keys.number("gradient_accumulation_steps")
    whole = keys.number("train_batch_size")
    problems = []
    if bf16 and fp16:
        problems.append("bf16 and fp16 exclude each other")
    if "param" in on and stage != 3:
        problems.append("offload_param needs stage 3")
    if "optimizer" in on and not stage:
        problems.append("offload_optimizer needs ZeRO: stage 1, 2 or 3")
    if "optimizer" in on and "param" not in on and stage == 3:
        problems.append(
            "the optimizer alone is offloaded: predicted with parameters, gradients and states in host memory"
        )
    return keys.configuration(
        problems,
        dimensions={},
        **shard,
        zero=max(stage, 1),
        tp=keys.degree("tensor_parallel.autotp_size", "tensor_parallel.tp_size"),
        cp=keys.degree("sequence_parallel_size"),
        offload=bool(on),
        microbatch=micro,
        microbatches=count or (1 if micro and not whole else None),
        global_batch=whole,
        precision="bf16" if bf16 else "fp16" if fp16 else "fp32",
        optimizer=keys.text("optimizer.type") or "adamw",
        learning_rate=keys.real("optimizer.params.lr", 1e-4),
    )


def write(plan: Plan, job: Job, dimensions: Dimensions | None, per_host: int) -> Written:
    """Write a plan as a DeepSpeed configuration.

    Raises:
        PlanError: DeepSpeed does not support the plan; the error names every reason.
    """
    cannot = {
        f"pp={plan.pp}: its pipelines are in the model's code": plan.pp > 1,
        f"ep={plan.ep}: experts are in the model's code": plan.ep > 1,
        f"tp={plan.tp}: it divides layers of Hugging Face models alone, by AutoTP": plan.tp > 1,
        f"cp={plan.cp}: its sequence parallelism (Ulysses) is in the model's code": plan.cp > 1,
        f"dp={plan.dp} beside fsdp={plan.fsdp} with zero={plan.zero}: parts of the ranks need stage 3": plan.dp > 1
        and plan.fsdp > 1
        and plan.zero < 3,
        f"remat={plan.remat}: call model.gradient_checkpointing_enable()": plan.remat != "none",
        f"offload with zero={plan.zero}: parameters need stage 3": plan.offload and plan.zero < 3,
        "compile": plan.compile != "off",
    }
    refuse(NAME, plan, job, cannot)
    zero: dict[str, Any] = {"stage": plan.zero if plan.fsdp > 1 else 0, "overlap_comm": True}
    if plan.fsdp > 1 and plan.dp > 1:
        zero["mics_shard_size"] = plan.fsdp
    if plan.fsdp > 1 and plan.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        zero |= {"offload_param": {"device": "cpu", "pin_memory": True}} if plan.zero == 3 else {}
    kind = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "lamb": "Lamb"}.get(job.optimizer.name, "AdamW")
    values: dict[str, Any] = {
        "train_batch_size": job.global_batch,
        "train_micro_batch_size_per_gpu": microbatch_of(plan, job),
        "gradient_accumulation_steps": plan.microbatches,
        "bf16": {"enabled": plan.precision_for(job) == "bf16"},
        "zero_optimization": zero,
        "optimizer": {"type": kind, "params": {"lr": job.optimizer.lr}},
        **({"gradient_clipping": job.clip_norm} if job.clip_norm else {}),
    }
    return Written(json.dumps(values, indent=2) + "\n", ".json", f"on {plan.ranks} ranks")
