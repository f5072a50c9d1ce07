"""Configuration of Megatron-LM: arguments in a launch script, a YAML file, or a NeMo file."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

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
    ranks_per_host,
    refuse,
)

NAME = "Megatron-LM"
# keys that affect neither speed nor memory, such as data, learning-rate schedules, logging, saving and rendezvous
_QUIET = (
    r"(lr|min_lr|decoupled_(min_)?lr|weight_decay|adam_.*|sgd_.*|clip_grad|seed|init_method.*|betas|eps|sched.*)",
    r"(lr_.*|start_weight_decay|end_weight_decay|weight_decay_incr_style|norm_epsilon|layernorm_epsilon|name)",
    r"(data_path|.*data_.*path|data_cache_path|mock_data|split|tokenizer.*|vocab_file|merge_file|num_workers|dataloader.*)",
    r"(save.*|load.*|no_load.*|no_save.*|ckpt.*|finetune|log_.*|eval_.*|tensorboard.*|wandb.*|timing.*|exit_.*)",
    r"(master_addr|master_port|node_rank|rdzv.*|distributed_.*|local_rank|max_restarts|tee|redirects|standalone)",
    r"(max_position_embeddings|rotary_.*|use_rotary.*|no_position_embedding|no_create_attention.*|no_mmap.*|tiktoken.*)",
    r"(moe_aux_loss_coeff|moe_z_loss_coeff|moe_router_load_balancing_type|moe_router_(dtype|score.*|enable.*|bias.*))",
    r"(qk_layernorm|normalization|apply_layernorm_1p|attention_softmax_in_fp32|no_async.*|make_vocab.*|cpu_offloading_.*)",
    r"(train_samples|lr_decay_samples|manual_gc.*|empty_unused.*|profile.*|no_check.*|enable_experimental|use_mcore_models)",
    r"(transformer_impl|fp8_amax.*|fp8_margin|fp8_interval|mtp_loss_scaling_factor|exp_manager.*|description|restore.*)",
    r"(exp_manager|run|hydra|logger|enable_checkpointing|use_distributed_sampler|max_epochs|val_check_interval|accelerator)",
    r"(strategy|benchmark|limit_.*|replace_sampler_ddp|enable_model_summary|warmup_steps|constant_steps|tensor_.*_logger)",
)
_NOTED = {
    r"overlap_grad_reduce|overlap_grad_sync": "sums of gradients overlap the backward pass in every prediction",
    r"overlap_param_gather|overlap_param_sync|overlap_p2p_comm.*": "predicted as paceline overlaps it",
    r"tp_comm_overlap.*|ub_tp_comm_overlap": "tensor-parallel sums are predicted as they are without it",
    r"use_flash_attn|attention_backend|flash_attention": "attention is predicted as one fused kernel",
    r"cross_entropy_fusion_impl|.*_fusion|masked_softmax.*": "kernels are predicted as torch's",
    r"moe_grouped_gemm|moe_permute.*|moe_token_dispatcher_type|moe_enable_deepep": "experts are one kernel here",
    r"moe_expert_capacity_factor|moe_pad_.*|moe_token_drop.*|moe_router_(group|num|topk_).*": "tokens spread evenly",
    r"grad_reduce_in_bf16|accumulate_allreduce.*|grad_allreduce.*": "gradients are predicted in fp32",
    r"fp8_param_gather|fp8_recipe|fp8_wgrad|no_fp8_wgrad|first_last_layers_bf16": "predicted by the precision alone",
    r"use_tp_pp_dp_mapping|rank_order": "ranks are placed as paceline places them",
    r"calculate_per_token_loss|check_for_nan.*|no_rope_fusion|disable_bias_linear|add_bias_linear|bias": "of no weight",
    r"recompute_(method|num_layers|modules)|activations_checkpoint_(method|num_layers)": "full is predicted as "
    "recomputing all blocks",
    r"attention_dropout|hidden_dropout|ffn_dropout": "dropout is predicted where any is above 0",
    r"num_layers_in_(first|last)_pipeline_stage|decoder_(first|last).*|account_for_.*": "stages are cut evenly",
    r"delay_wgrad_compute|.*graph.*|megatron_amp_O2|.*communicator.*": "not in the prediction",
}
# vocabulary sizes that a tokenizer implies, in tokens, padded to a multiple of 128
_VOCABULARIES = {"GPT2BPETokenizer": 50304, "Llama2Tokenizer": 32000}


def read(file: Path, text: str) -> Configuration:
    """Read a Megatron-LM configuration from a script, a list of arguments, or a YAML file.

    Raises:
        PlanError: the file is not YAML, or a value is not valid for its key.
    """
    notes: list[str] = []
    if file.suffix.lower() in (".yaml", ".yml"):
        try:
            values = flattened(yaml.safe_load(text) or {})
        except yaml.YAMLError as error:
            raise PlanError("config.not_yaml", "{file} is not valid YAML: {error}", file=file, error=error) from None
    else:
        values, notes = arguments(text)
    return configured(values, notes)


def configured(values: dict[str, Any], notes: Sequence[str] = ()) -> Configuration:
    """Build a Megatron-LM configuration from arguments whose names are written with underscores.

    Raises:
        PlanError: a value is not valid for its key.
    """
    keys = Keys(NAME, values, _QUIET, _NOTED)
    found = _configuration(keys)
    return keys.configuration([*notes, *_problems(found, keys)], **found)


def _configuration(keys: Keys) -> dict[str, Any]:
    pp = keys.degree("pipeline_model_parallel_size")
    layers, virtual = keys.number("num_layers"), keys.number("virtual_pipeline_model_parallel_size")
    if (each := keys.number("num_layers_per_virtual_pipeline_stage")) and layers:
        virtual = layers // pp // each
    virtual = keys.number("num_virtual_stages_per_pipeline_rank") or virtual or 1
    sharded = keys.flag("use_distributed_optimizer") or "distributed" in keys.text("optim.name")
    fully = keys.flag("use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp")
    strategy = keys.text("data_parallel_sharding_strategy")
    zero = {"optim": 1, "optim_grads": 2}.get(strategy, 3) if fully else 1
    hosts = keys.number("nnodes", "num_nodes")
    on_each = keys.number("nproc_per_node", "trainer.devices", "gpus_per_node")
    return {
        "dimensions": _dimensions(keys),
        "ranks": keys.number("world_size") or ((hosts or 1) * on_each if on_each else None),
        "replicas": 1 if sharded or fully else REST,
        "shard": REST if sharded or fully else 1,
        "zero": zero,
        "tp": keys.degree("tensor_model_parallel_size"),
        "pp": pp,
        "cp": keys.degree("context_parallel_size"),
        "ep": keys.degree("expert_model_parallel_size"),
        "sequence": keys.flag("sequence_parallel"),
        "offload": keys.flag("optimizer_cpu_offload"),
        "schedule": "interleaved" if virtual > 1 else "1f1b",
        "virtual": virtual,
        "remat": _remat(keys),
        "microbatch": keys.number("micro_batch_size"),
        "global_batch": keys.number("global_batch_size"),
        "precision": _precision(keys),
        "optimizer": keys.text("optimizer").replace("distributed_fused_", "") or "adam",
        "learning_rate": keys.real("lr", 1e-4),
        "steps": keys.number("train_iters", "max_steps"),
    }


def _dimensions(keys: Keys) -> dict[str, Any]:
    gated = keys.flag("swiglu") or "swiglu" in keys.text("activation") or keys.flag("gated_linear_unit")
    experts = keys.number("num_experts", "num_moe_experts") or 0
    learned = keys.text("position_embedding_type") in ("", "learned_absolute")
    tied = not keys.flag("untie_embeddings_and_output_weights")
    share = keys.given("share_embeddings_and_output_weights")
    dropped = keys.real("attention_dropout", 0.1) > 0 or keys.real("hidden_dropout", 0.1) > 0
    values: dict[str, Any] = {
        "layers": keys.number("num_layers"),
        "hidden": keys.number("hidden_size"),
        "ffn": keys.number("ffn_hidden_size"),
        "heads": keys.number("num_attention_heads"),
        "kv_heads": keys.number("num_query_groups"),
        "head_dim": keys.number("kv_channels"),
        "seq": keys.number("seq_length", "encoder_seq_length"),
        "vocab": keys.number("vocab_size", "padded_vocab_size") or _VOCABULARIES.get(keys.text("tokenizer_type")),
    }
    keys.flag("group_query_attention")
    if values["layers"] is None:
        return {"seq": values["seq"]}
    values |= {"gated": gated, "tied": tied if share is None else bool(share), "positions": learned}
    values |= {"dropout": dropped and not gated, **_experts(keys, experts), **_latent(keys, values)}
    if values.get("head_dim") and values["hidden"] and values["head_dim"] * (values["heads"] or 1) == values["hidden"]:
        del values["head_dim"]
    return {key: value for key, value in values.items() if value is not None}


def _experts(keys: Keys, experts: int) -> dict[str, Any]:
    if not experts:
        return {}
    values = {
        "experts": experts,
        "top_k": keys.number("moe_router_topk") or 2,
        "expert_ffn": keys.number("moe_ffn_hidden_size"),
        "shared_ffn": keys.number("moe_shared_expert_intermediate_size"),
        "mtp": keys.number("mtp_num_layers"),
    }
    every = keys.text("moe_layer_freq")
    if every.isdecimal():
        values["moe_every"] = int(every)
    elif "*" in every:  # for example ([0]*3+[1]*58)
        dense = every.partition("[0]*")[2]
        values["dense_layers"] = int("".join(c for c in dense.partition("+")[0] if c.isdecimal()) or 0)
    return {key: value for key, value in values.items() if value is not None and key in Dimensions.model_fields}


def _latent(keys: Keys, values: dict[str, Any]) -> dict[str, Any]:
    if not keys.flag("multi_latent_attention"):
        return {}
    mla = {
        "q_rank": keys.number("q_lora_rank"),
        "kv_rank": keys.number("kv_lora_rank") or 512,
        "nope": keys.number("qk_head_dim") or 128,
        "rope": keys.number("qk_pos_emb_head_dim") or 64,
        "value": keys.number("v_head_dim") or 128,
    }
    values.pop("head_dim", None)
    values.pop("kv_heads", None)
    return {"mla": {key: value for key, value in mla.items() if value is not None}}


def _remat(keys: Keys) -> str:
    granularity = keys.text("recompute_granularity", "activations_checkpoint_granularity")
    if granularity == "full":
        return "block"
    return "selective" if granularity == "selective" or keys.flag("recompute_activations") else "none"


def _precision(keys: Keys) -> str:
    if keys.text("fp8_format", "fp8") not in ("", "False", "false"):
        keys.flag("bf16")
        return "fp8"
    stated = keys.text("trainer.precision", "precision").removesuffix("-mixed")
    if keys.flag("bf16") or "bf16" in stated:
        return "bf16"
    return "fp16" if keys.flag("fp16") or stated == "16" else "fp32"


def _problems(found: dict[str, Any], keys: Keys) -> list[str]:
    """Describe combinations of arguments that Megatron-LM refuses or ignores."""
    told, model = [], found["dimensions"]
    layers, tp, pp = model.get("layers"), found["tp"], found["pp"]
    if keys.flag("bf16") and keys.flag("fp16"):
        told.append("--bf16 and --fp16 exclude each other")
    if found["sequence"] and tp == 1:
        told.append("--sequence-parallel does nothing without tensor parallelism")
    if model.get("experts") and tp > 1 and not found["sequence"]:
        told.append("a mixture of experts with tensor parallelism needs --sequence-parallel")
    if found["ep"] > 1 and model.get("experts", 0) % found["ep"]:
        told.append(f"{model.get('experts', 0)} experts do not divide among {found['ep']} expert-parallel ranks")
    if layers and layers % (pp * found["virtual"]):
        told.append(f"{layers} layers do not divide into {pp} × {found['virtual']} stages")
    if model.get("heads", 0) % tp:
        told.append(f"{model['heads']} heads do not divide among {tp} tensor-parallel ranks")
    if found["virtual"] > 1 and pp == 1:
        told.append("virtual stages need a pipeline")
    if keys.flag("overlap_param_gather") and found["shard"] == 1:
        told.append("--overlap-param-gather needs --use-distributed-optimizer")
    if keys.number("expert_tensor_parallel_size") not in (None, tp) and model.get("experts"):
        told.append("experts are predicted with the tensor parallelism of the other layers")
    return told


# Writing


def write(plan: Plan, job: Job, dimensions: Dimensions | None, per_host: int) -> Written:
    """Write a plan as a script with Megatron-LM arguments.

    Args:
        per_host: number of devices per host.

    Raises:
        PlanError: Megatron-LM does not support the plan; the error lists all reasons.
    """
    no_schedule = plan.pp > 1 and plan.schedule not in ("1f1b", "interleaved")
    cannot = {
        "dp beside fsdp: it shards over all data-parallel ranks": plan.dp > 1 and plan.fsdp > 1,
        f"schedule={plan.schedule}: it has 1f1b and interleaved": no_schedule,
        "cut: its stages are even": bool(plan.cut),
        "offload of parameters": plan.offload,
        "compile": plan.compile != "off",
    }
    refuse(NAME, plan, job, cannot)
    stages = getattr(plan, "virtual", 2) if plan.schedule == "interleaved" and plan.pp > 1 else 1
    flags: dict[str, Any] = {
        "tensor-model-parallel-size": plan.tp,
        "pipeline-model-parallel-size": plan.pp,
        "context-parallel-size": plan.cp,
        "expert-model-parallel-size": plan.ep,
        **({"num-virtual-stages-per-pipeline-rank": stages} if stages > 1 else {}),
        **({"sequence-parallel": True} if plan.sequence and plan.tp > 1 else {}),
        **_sharding(plan),
        **({"recompute-granularity": "full", "recompute-method": "uniform"} if plan.remat == "block" else {}),
        **({"recompute-num-layers": 1} if plan.remat == "block" else {}),
        **({"recompute-granularity": "selective"} if plan.remat == "selective" else {}),
        "micro-batch-size": microbatch_of(plan, job),
        "global-batch-size": job.global_batch,
        **({"bf16": True} if plan.precision_for(job) == "bf16" else {}),
        "optimizer": "sgd" if job.optimizer.name == "sgd" else "adam",
        "lr": job.optimizer.lr,
        **({"train-iters": job.stop.steps} if job.stop.steps else {}),
        **_model_flags(dimensions),
    }
    lines = [f"--{name}" if value is True else f"--{name} {value}" for name, value in flags.items()]
    on_each = ranks_per_host(plan.ranks, per_host)
    start = f"#!/bin/sh\n# {plan.ranks} ranks: {plan}\nGPUS_PER_NODE={on_each}\nNNODES={plan.ranks // on_each}\n"
    launch = "torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py"
    return Written(start + " \\\n    ".join([launch, *lines]) + "\n", ".sh")


def _sharding(plan: Plan) -> dict[str, Any]:
    if plan.fsdp == 1:
        return {}
    if plan.zero == 1:
        return {"use-distributed-optimizer": True, "overlap-grad-reduce": True, "overlap-param-gather": True}
    strategy = {2: "optim_grads", 3: "optim_grads_params"}[plan.zero]
    return {"use-megatron-fsdp": True, "data-parallel-sharding-strategy": strategy, "use-distributed-optimizer": True}


def _model_flags(dimensions: Dimensions | None) -> dict[str, Any]:
    if dimensions is None:
        return {}
    one = dimensions
    flags: dict[str, Any] = {
        "num-layers": one.layers,
        "hidden-size": one.hidden,
        "ffn-hidden-size": one.feed_forward,
        "num-attention-heads": one.heads,
        "seq-length": one.seq,
        "max-position-embeddings": one.seq,
        "vocab-size": one.vocab,
    }
    if one.kv_heads and one.kv_heads != one.heads:
        flags |= {"group-query-attention": True, "num-query-groups": one.kv_heads}
    flags |= {} if one.positions else {"position-embedding-type": "rope"}
    flags |= {"swiglu": True, "disable-bias-linear": True} if one.gated else {}
    flags |= {} if one.tied else {"untie-embeddings-and-output-weights": True}
    if not one.dropout or one.gated:
        flags |= {"attention-dropout": 0.0, "hidden-dropout": 0.0}
    flags |= {"kv-channels": one.head_dim} if one.head_dim else {}
    if one.mla:
        ranks = {"q-lora-rank": one.mla.q_rank, "kv-lora-rank": one.mla.kv_rank, "v-head-dim": one.mla.value}
        widths = {"qk-head-dim": one.mla.nope, "qk-pos-emb-head-dim": one.mla.rope}
        flags |= {"multi-latent-attention": True, **{name: rank for name, rank in ranks.items() if rank}, **widths}
    if one.experts:
        flags |= {"num-experts": one.experts, "moe-router-topk": one.top_k}
        flags |= {"moe-ffn-hidden-size": one.expert_ffn} if one.expert_ffn else {}
        flags |= {"moe-shared-expert-intermediate-size": one.shared_width} if one.shared_width else {}
    return flags


_COMMENT = re.compile(r"(?m)(?:^|(?<=\s))#[^\n]*")
_ASSIGNED = re.compile(
    r"(?ms)^[ \t]*(?:export[ \t]+|local[ \t]+)?(?P<name>[A-Za-z_]\w*)(?P<more>\+?)=(?:"
    r"\((?P<list>.*?)\)[ \t]*$|\"(?P<double>(?:[^\"\\]|\\.)*)\"|'(?P<single>[^']*)'|"
    r"(?P<plain>(?:\$\(\([^)]*\)+|[^\s;])*))"
)
_ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)")
_VARIABLE = re.compile(r"\$(?:\{(?P<name>\w+)(?:\[[@*]\])?(?::?[-=](?P<default>[^}]*))?\}|(?P<plain>\w+))")
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
}
_NUMBER = re.compile(r"-(?:\d|\.\d)")


def arguments(text: str) -> tuple[dict[str, Any], list[str]]:
    """Parse the flags and values of a script, and list what was not evaluated.

    Names are returned with underscores. The value is True for a flag without a value, and a list for several values.
    """
    plain = _COMMENT.sub("", text).replace("\\\n", " ")
    variables: dict[str, str] = {}
    for match in _ASSIGNED.finditer(plain):
        raw = next(
            part for part in (match["list"], match["double"], match["single"], match["plain"]) if part is not None
        )
        value = raw if match["single"] is not None else expanded(raw, variables)
        variables[match["name"]] = f"{variables.get(match['name'], '')} {value}" if match["more"] else value
    commands = [line for line in _ASSIGNED.sub("", plain).splitlines() if "--" in line or "$" in line]
    words = " ".join(expanded(line, variables) for line in commands if ".py" in line or "torchrun" in line)
    if "--" not in words:
        words = " ".join([*variables.values(), *(expanded(line, variables) for line in commands)])
    flags = _flags(words)
    notes = []
    if re.search(r"(?m)^\s*(?:if|case|elif)\b", plain):
        notes.append("conditions of the script are not evaluated: the arguments of all branches are read")
    if unresolved := sorted(set(re.findall(r"\$\{?(\w+)", words))):
        notes.append(f"not set in the script: {', '.join(unresolved)}")
    return {name: value for name, value in flags.items() if "$" not in str(value)}, notes


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Expand known shell variables, and arithmetic over known variables, in a text."""

    def value(match: re.Match[str]) -> str:
        name = match["name"] or match["plain"]
        if name in variables:
            return variables[name]
        default = match["default"]
        return match[0] if default is None else expanded(default.strip("\"'"), variables)

    text = _VARIABLE.sub(value, text)
    return _ARITHMETIC.sub(lambda match: _computed(match[1], variables) or match[0], text)


def _computed(text: str, variables: Mapping[str, str]) -> str | None:
    """Evaluate arithmetic over whole numbers and variables; return None if it cannot be evaluated."""

    def of(node: ast.AST) -> int:
        if isinstance(node, ast.Expression):
            return of(node.body)
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return int(variables[node.id])
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](of(node.left), of(node.right))
        raise ValueError(text)

    try:
        return str(of(ast.parse(text.strip(), mode="eval")))
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError):
        return None


def _flags(text: str) -> dict[str, Any]:
    try:
        words = shlex.split(text)
    except ValueError:  # a quotation mark is not closed
        words = text.replace('"', " ").replace("'", " ").split()
    words = [part for word in words for part in (word.split() if word.startswith("--") else [word])]
    flags: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            flags[name] = value if equals else True
        elif word.endswith(".py") or (word.startswith("-") and not _NUMBER.match(word)):
            name = ""  # the name of the launched script, or a short option
        elif name:
            before = flags[name]
            flags[name] = word if before is True else [*before, word] if isinstance(before, list) else [before, word]
    return flags
