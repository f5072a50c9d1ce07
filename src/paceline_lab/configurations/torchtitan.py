"""torchtitan's TOML configuration."""

from __future__ import annotations

import tomllib
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

NAME = "torchtitan"
_SCHEDULES = {"1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved", "zbvzerobubble": "zero-bubble"}
_SCHEDULES |= {"dualpipev": "dualpipe"}
_WRITTEN = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "zero-bubble": "ZBVZeroBubble"}
_WRITTEN |= {"dualpipe": "DualPipeV"}
# model flavors whose dimensions the catalogue lists under another model name
_FLAVORS = {"deepseek_v3-16B": "deepseek-v2-lite"}
_QUIET = (
    r"(job|profiling|metrics|checkpoint|lr_scheduler|comm|experimental|fault_tolerance|validation|debug|memory_estimation)"
    r"\..*",
    r"model\.(tokenizer_path|hf_assets_path|print_after_conversion|tokenizer)",
    r"optimizer\.(beta1|beta2|eps|weight_decay)",
    r"training\.(dataset.*|max_norm|seed|deterministic|gc_.*|debug.*|warmup_steps)",
    r"(activation_checkpoint\.(preserve_rng_state|determinism_check|debug|early_stop|per_op.*|visualize.*)|compile\.backend)",
)
_NOTED = {
    r"optimizer\.(implementation|early_step_in_backward)": "not in the prediction",
    r"parallelism\.fsdp_reshard_after_forward": "parameters are gathered again in every backward pass",
    r"parallelism\.(enable_async_tensor_parallel|disable_loss_parallel|context_parallel_.*)": "as paceline does it",
    r"parallelism\.(enable_compiled_autograd|pipeline_parallel_(schedule_csv|split_points)|module_fqns.*)": "not "
    "in the prediction",
    r"parallelism\.pipeline_parallel_layers_per_stage": "looped schedules are predicted with two stages on each rank",
    r"activation_checkpoint\.selective_ac_option": "selective is predicted as paceline's remat=selective",
    r"parallelism\.pipeline_parallel_(first|last)_stage_less_layers": "stages are cut evenly",
    r"training\.(mixed_precision_reduce|dtype|enable_cpu_.*)": "gradients are predicted in fp32",
    r"(float8|quantize|mx)\..*": "predicted by the precision alone",
    r"compile\.components": "the whole model is predicted as compiled",
}


def read(file: Path, text: str) -> Configuration:
    """Read a torchtitan configuration from a TOML file.

    Raises:
        PlanError: the file is not TOML, or a value is not valid for its key.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError("config.not_toml", "{file} is not valid TOML: {error}", file=file, error=error) from None
    return configured(values)


def configured(values: dict[str, Any]) -> Configuration:
    """Build a torchtitan configuration from the sections of its file.

    Raises:
        PlanError: a value is not valid for its key.
    """
    keys = Keys(NAME, flattened(values), _QUIET, _NOTED)
    problems: list[str] = []
    pp = keys.degree("parallelism.pipeline_parallel_degree")
    schedule, virtual = _schedule(keys, pp, problems)
    tp = keys.degree("parallelism.tensor_parallel_degree")
    # default values in torchtitan's job_config.py
    local = keys.number("training.local_batch_size", "training.batch_size") or 8
    of_pipe = keys.number("parallelism.pipeline_parallel_microbatch_size") or 1
    converters = keys.given("model.converters") or []
    name, flavor = keys.text("model.name"), keys.text("model.flavor")
    known = f"{name or 'llama3'}-{flavor or 'debugmodel'}"
    whole = keys.number("training.global_batch_size")
    mode = keys.text("activation_checkpoint.mode") or "selective"
    remat = {"none": "none", "full": "block", "selective": "selective"}.get(mode)
    if remat is None:
        problems.append(f"activation_checkpoint.mode = {mode} is not one of none, selective, full")
    replicate = keys.number("parallelism.data_parallel_replicate_degree") or 1
    shard = keys.number("parallelism.data_parallel_shard_degree")
    if pp > 1 and local % of_pipe:
        problems.append(f"local_batch_size {local} does not divide into microbatches of {of_pipe}")
    params = keys.text("training.mixed_precision_param") or "bfloat16"
    cp, ep = keys.degree("parallelism.context_parallel_degree"), keys.degree("parallelism.expert_parallel_degree")
    if keys.degree("parallelism.expert_tensor_parallel_degree") not in (1, tp):
        problems.append("expert_tensor_parallel_degree is 1 or the tensor_parallel_degree")
    if keys.flag("parallelism.enable_async_tensor_parallel") and not keys.flag("compile.enable", "training.compile"):
        problems.append("enable_async_tensor_parallel needs compile.enable")
    return keys.configuration(
        problems,
        dimensions={"seq": keys.number("training.seq_len") or 2048},
        model_name=_FLAVORS.get(known, known) if name or flavor else "",
        replicas=replicate,
        shard=REST if shard in (None, -1) else shard,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        zero=3,
        sequence=tp > 1,  # torchtitan's tensor parallelism always uses sequence parallelism
        offload=keys.flag("training.enable_cpu_offload"),
        schedule=schedule,
        virtual=virtual,
        remat=remat or "none",
        compiled=keys.flag("compile.enable", "training.compile"),
        microbatch=of_pipe if pp > 1 else local,
        microbatches=None if whole and whole > 0 else local // of_pipe if pp > 1 else 1,
        global_batch=whole if whole and whole > 0 else None,
        precision="fp8" if "float8" in str(converters) else {"bfloat16": "bf16", "float32": "fp32"}.get(params, params),
        optimizer=keys.text("optimizer.name") or "AdamW",
        learning_rate=keys.real("optimizer.lr", 8e-4),
        steps=keys.number("training.steps"),
    )


def _schedule(keys: Keys, pp: int, problems: list[str]) -> tuple[str, int]:
    stated = keys.text("parallelism.pipeline_parallel_schedule") or "1F1B"
    schedule = _SCHEDULES.get(stated.lower())
    if schedule is None:
        problems.append(f"the schedule {stated} is predicted as 1F1B")
        schedule = "1f1b"
    return (schedule, 2) if schedule == "interleaved" and pp > 1 else (schedule, 1)


def write(plan: Plan, job: Job, dimensions: Dimensions | None, per_host: int) -> Written:
    """Write a plan as a torchtitan configuration.

    Raises:
        PlanError: torchtitan does not support the plan; the error names every reason.
    """
    virtual = getattr(plan, "virtual", 2)
    cannot = {
        f"zero={plan.zero}: it shards parameters as well (zero=3)": plan.fsdp > 1 and plan.zero < 3,
        "tp without sequence=on": plan.tp > 1 and not plan.sequence,
        "cut": bool(plan.cut),
        f"virtual={virtual}": virtual != 2 and plan.pp > 1,
    }
    refuse(NAME, plan, job, cannot)
    microbatch = microbatch_of(plan, job)
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": plan.dp,
        "data_parallel_shard_degree": plan.fsdp * plan.ep,  # experts are divided among the sharding ranks
        "tensor_parallel_degree": plan.tp,
        "pipeline_parallel_degree": plan.pp,
        "context_parallel_degree": plan.cp,
        "expert_parallel_degree": plan.ep,
    }
    if plan.pp > 1:
        parallelism |= {
            "pipeline_parallel_schedule": _WRITTEN[plan.schedule],
            "pipeline_parallel_microbatch_size": microbatch,
        }
    return Written(_toml(plan, job, dimensions, parallelism, microbatch), ".toml", f"on {plan.ranks} ranks")


def _toml(plan: Plan, job: Job, dimensions: Dimensions | None, parallelism: dict[str, Any], microbatch: int) -> str:
    local = microbatch * plan.microbatches if plan.pp > 1 else microbatch
    precision = {"bf16": "bfloat16", "fp32": "float32"}[plan.precision_for(job)]
    modes = {"none": "none", "selective": "selective", "block": "full"}
    groups: dict[str, dict[str, Any]] = {
        "optimizer": {"name": "AdamW" if job.optimizer.name != "adam" else "Adam", "lr": job.optimizer.lr},
        "training": {
            "local_batch_size": local,
            "global_batch_size": job.global_batch,
            **({"seq_len": dimensions.seq} if dimensions else {}),
            **({"steps": job.stop.steps} if job.stop.steps else {}),
            "mixed_precision_param": precision,
            **({"enable_cpu_offload": True} if plan.offload else {}),
        },
        "parallelism": parallelism,
        "activation_checkpoint": {"mode": modes[plan.remat]},
        "compile": {"enable": plan.compile != "off"},
    }
    lines = [f"# {plan.ranks} ranks: {plan}", "# [model] name and flavor are yours to add"]
    for name, values in groups.items():
        lines += ["", f"[{name}]", *(f"{key} = {_value(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)
