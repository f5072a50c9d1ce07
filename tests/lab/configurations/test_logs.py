"""Logs of Megatron-LM and torchtitan are runs: their times, and the plan that they print or that is beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import paceline as command
from paceline.cluster.cluster import Cluster, cluster_from
from paceline.errors import PlanError
from paceline.planning.tables.layouts import Row
from paceline.run.tuning.calibrate import read_runs
from paceline_lab.configurations.systems import run_of_log
from refusals import raises

ARGUMENTS = {
    "bf16": True,
    "ffn_hidden_size": 14336,
    "global_batch_size": 128,
    "group_query_attention": True,
    "hidden_size": 4096,
    "kv_channels": 128,
    "micro_batch_size": 1,
    "moe_router_topk": 2,
    "num_attention_heads": 32,
    "num_experts": None,
    "num_layers": 32,
    "num_query_groups": 8,
    "pipeline_model_parallel_size": 1,
    "position_embedding_type": "rope",
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "multi_latent_attention": False,
    "seq_length": 8192,
    "sequence_parallel": True,
    "swiglu": True,
    "tensor_model_parallel_size": 2,
    "untie_embeddings_and_output_weights": True,
    "use_distributed_optimizer": True,
    "vocab_size": None,
    "world_size": 8,
}
CONFIGURATION = {
    "model": {"name": "llama3", "flavor": "8B"},
    "training": {"local_batch_size": 1, "seq_len": 8192, "steps": 100},
    "parallelism": {"data_parallel_shard_degree": -1, "tensor_parallel_degree": 1},
    "activation_checkpoint": {"mode": "selective"},
    "compile": {"enable": True},
}


def megatron(file: Path, seconds: list[float], *, arguments: bool = True, prefix: str = "") -> Path:
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in ARGUMENTS.items()]
    head = [
        "using world size: 8, data-parallel size: 4",
        "------------------------ arguments ------------------------",
        *lines,
        "-------------------- end of arguments ---------------------",
        " > padded vocab (size: 128256) with 0 dummy tokens (new size: 128256)",
    ]
    steps = [
        f" [2026-01-01 00:00:{at:02}] iteration {at:8}/     100 | consumed samples: {128 * at:12} | elapsed time per "
        f"iteration (ms): {1000 * each:.1f} | throughput per GPU (TFLOP/s/GPU): 400.0 | learning rate: 1.0E-04 | "
        f"global batch size:   128 | lm loss: 9.0E+00 |"
        for at, each in enumerate(seconds, 1)
    ]
    file.write_text("\n".join(prefix + line for line in [*(head if arguments else []), *steps]) + "\n")
    return file


def torchtitan(file: Path, rates: list[int], *, dump: str = "", device: str = "NVIDIA H100 80GB HBM3") -> Path:
    lines = [
        *([f"Running with args: {dump}"] if dump else []),
        f"CUDA capacity: {device} with 79.10GiB memory",
        "Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=8, cp=1, tp=1, ep=1",
        "Trainer is initialized with local batch size 1, global batch size 16, gradient accumulation steps 2, sequence "
        "length 8192, total steps 100 (warmup 20)",
    ]
    lines += [
        f"\x1b[31mstep: {at:2}  loss:  8.1383  grad_norm:  1.3149  memory: 47.05GiB(59.49%)  tps: {rate:,}  tflops: "
        f"390.00  mfu: 39.43%\x1b[39m"
        for at, rate in enumerate(rates, 1)
    ]
    file.write_text("".join(f"[rank0]:[titan] 2026-01-01 00:00:00,000 - root - INFO - {line}\n" for line in lines))
    return file


@pytest.fixture
def h100() -> Cluster:
    return cluster_from("8xH100-SXM")


def plan_of(row: Row) -> dict[str, object]:
    layout = row.layout
    return {axis: getattr(layout, axis) for axis in ("dp", "fsdp", "tp", "pp")} | {"mb": layout.microbatches}


@pytest.mark.parametrize("prefix", ["", "[default0]:", "0: "])
def test_a_log_of_megatron_has_its_plan_its_model_and_its_median_time(
    tmp_path: Path, h100: Cluster, prefix: str
) -> None:
    row = run_of_log(megatron(tmp_path / "run.log", [30.0, 6.1, 6.0, 6.2, 6.1, 6.0], prefix=prefix), h100)
    assert row.seconds == pytest.approx(6.05, abs=0.06)  # the first ones warm up
    assert plan_of(row) == {"dp": 1, "fsdp": 4, "tp": 2, "pp": 1, "mb": 32}
    assert row.layout.framework.name == "Megatron Core"
    assert row.layout.trace.parameters == pytest.approx(8.03e9, rel=0.01)
    assert row.layout.precision == "bf16"


def test_a_batch_that_grew_counts_with_its_last_size(tmp_path: Path, h100: Cluster) -> None:
    file = megatron(tmp_path / "run.log", [6.0] * 6)
    lines = file.read_text().splitlines()
    early = [line.replace("size:   128", "size:    64").replace("6000.0", "3000.0") for line in lines[-6:-3]]
    file.write_text("\n".join([*lines[:-6], *early, *lines[-3:]]))
    row = run_of_log(file, h100)
    assert row.seconds == pytest.approx(6.0)
    assert row.layout.global_batch == 128


def test_a_log_without_arguments_takes_the_script_beside_it_or_says_so(tmp_path: Path, h100: Cluster) -> None:
    file = megatron(tmp_path / "run.log", [6.0] * 6, arguments=False)
    with raises(PlanError, "log.no_arguments", script="run.sh"):
        run_of_log(file, h100)
    script = Path(__file__).with_name("files") / "megatron_llama_8b.sh"
    (tmp_path / "run.sh").write_text(script.read_text())
    assert plan_of(run_of_log(file, h100))["fsdp"] == 4


@pytest.mark.parametrize("dump", [json.dumps(CONFIGURATION, indent=2), str(CONFIGURATION)])
def test_a_log_of_torchtitan_has_its_plan_and_its_time_by_tokens_a_second(
    tmp_path: Path, h100: Cluster, dump: str
) -> None:
    rates = [900, 8000, 8200, 8100, 8100, 8100]
    row = run_of_log(torchtitan(tmp_path / "run.log", rates, dump=dump), h100)
    assert row.seconds == pytest.approx(16 * 8192 / 8100 / 8, rel=0.01)
    assert plan_of(row) == {"dp": 1, "fsdp": 8, "tp": 1, "pp": 1, "mb": 2}
    assert row.layout.framework.name == "torchtitan, compiled"


def test_a_log_of_torchtitan_takes_the_toml_file_beside_it_or_says_so(tmp_path: Path, h100: Cluster) -> None:
    file = torchtitan(tmp_path / "run.log", [8000] * 5)
    with raises(PlanError, "log.no_configuration", beside="run.toml"):
        run_of_log(file, h100)
    (tmp_path / "any.toml").write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 8192\n'
    )
    assert plan_of(run_of_log(file, h100))["fsdp"] == 8


def test_a_log_of_another_device_is_not_taken_for_this_ones(tmp_path: Path, h100: Cluster) -> None:
    file = torchtitan(tmp_path / "run.log", [8000] * 5, dump=json.dumps(CONFIGURATION), device="NVIDIA A100-SXM4-80GB")
    [skipped] = read_runs([file], h100).skipped
    assert "A100" in skipped.why
    assert "H100" in skipped.why


def test_a_log_needs_the_name_of_its_machines(tmp_path: Path) -> None:
    with raises(PlanError, "log.no_machines"):
        run_of_log(megatron(tmp_path / "run.log", [6.0] * 5), None)


def test_a_folder_of_logs_corrects_what_a_configuration_will_take(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for at in range(4):
        megatron(tmp_path / "logs" / f"{at}.log", [8.0] * 6)
    (tmp_path / "logs" / "other.log").write_text("nothing\n")
    script = Path(__file__).with_name("files") / "megatron_llama_8b.sh"
    call = ("config", "explain", script, "--cluster", "8xH100-SXM", "--json")
    plain = command(*call, folder=tmp_path)
    shown = command(*call, "--calibrate-on", "logs", folder=tmp_path)
    assert shown.code == 0, shown.err
    whole = " ".join(shown.out.split())
    assert "calibrated on 4 runs" in whole
    assert "not used: other.log" in whole

    def step_s(out: str) -> float:
        return float(json.loads(out.splitlines()[-1])["own"]["candidates"][0]["step_time_s"])

    assert abs(step_s(shown.out) - 8.0) < abs(step_s(plain.out) - 8.0)
    candidate = json.loads(shown.out.splitlines()[-1])["own"]["candidates"][0]
    assert candidate["interval_80_s"][0] < step_s(shown.out) < candidate["interval_80_s"][1]
    assert "4 measured runs of this software and hardware" in candidate["interval_rests_on"]
