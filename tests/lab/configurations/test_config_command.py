"""`paceline config explain` and `paceline config write` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from commands import paceline

FILES = Path(__file__).with_name("files")


def test_a_configuration_is_predicted_and_something_better_is_named(tmp_path: Path) -> None:
    file = FILES / "megatron_llama_8b.sh"
    shown = paceline("config", "explain", file, "--cluster", "8xH100-SXM", "--json", folder=tmp_path)
    assert shown.code == 0, shown.err
    assert shown.says("Megatron-LM", "where the step goes", "what would be better", "use_invented_kernels")
    values = json.loads(shown.out.splitlines()[-1])
    assert values["not_understood"] == ["use_invented_kernels"]
    assert values["own"]["plan"] == "fsdp=4 tp=2 zero=1 sequence=on remat=selective microbatches=32"
    assert values["gain"] >= 0


def test_a_model_is_named_where_the_configuration_has_none(tmp_path: Path) -> None:
    command = ("config", "explain", FILES / "deepspeed_zero3.json", "--cluster", "2x8xA100-SXM-80")
    unnamed = paceline(*command, folder=tmp_path)
    assert unnamed.code == 1
    assert "--model" in unnamed.error
    wrong = paceline(*command, "--model", "llamma-3.1-8b", folder=tmp_path)
    assert wrong.code == 1
    assert "llama-3.1-8b" in wrong.error.lower()
    named = paceline(*command, "--model", "llama-3.1-8b", folder=tmp_path)
    assert named.code == 0, named.err
    assert named.says("8.03 billion parameters", "DeepSpeed")


def test_a_configuration_for_more_ranks_than_there_are_devices_is_an_error(tmp_path: Path) -> None:
    shown = paceline("config", "explain", FILES / "nemo_mixture.yaml", "--cluster", "8xH100-SXM", folder=tmp_path)
    assert shown.code == 1
    assert "64 ranks" in shown.error


def test_the_better_plan_is_written_for_another_system_than_it_was_read_from(tmp_path: Path) -> None:
    command = ("config", "explain", FILES / "megatron_llama_8b.sh", "--cluster", "8xH100-SXM")
    shown = paceline(*command, "--write", "torchtitan", "better.toml", folder=tmp_path)
    assert shown.code == 0, shown.err
    assert "data_parallel_shard_degree" in (tmp_path / "better.toml").read_text()


def test_an_option_that_would_have_no_effect_is_refused(tmp_path: Path) -> None:
    command = ("config", "explain", FILES / "megatron_llama_8b.sh", "--cluster", "8xH100-SXM")
    shown = paceline(*command, "--page", "p.html", folder=tmp_path, columns=200)
    assert shown.code == 2
    assert shown.says("--page")


def test_a_configuration_needs_a_cluster(tmp_path: Path) -> None:
    shown = paceline("config", "explain", FILES / "nemo_mixture.yaml", folder=tmp_path, columns=200)
    assert shown.code == 2
    assert shown.says("--cluster")


def test_the_fastest_plan_that_the_other_system_supports_is_written(tmp_path: Path) -> None:
    """The fastest plan of this job divides the batch into microbatches of 8/3 samples."""
    job = Path(__file__).parents[3] / "examples" / "plan" / "llama_70b.yaml"
    shown = paceline("config", "write", job, "megatron", "out.sh", "--cluster", "16x8xH100-SXM", folder=tmp_path)
    assert shown.code == 0, shown.err
    assert "--micro-batch-size" in (tmp_path / "out.sh").read_text()


def test_the_plan_is_written_for_another_system(tmp_path: Path) -> None:
    shape = {"layers": 4, "hidden": 1024, "heads": 16, "seq": 1024, "vocab": 32000}
    job: dict[str, object] = {
        "name": "gpt",
        "model": {"transformer": shape},
        "data": "synthetic",
        "loss": "cross_entropy",
    }
    job |= {"optimizer": {"name": "adamw", "lr": 0.001}, "global_batch": 32, "precision": "bf16", "stop": {"steps": 9}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    command = ("config", "write", "job.yaml", "megatron", "out.sh", "--cluster", "1x4xA100-SXM-80")
    shown = paceline(*command, folder=tmp_path)
    assert shown.code == 0, shown.err
    assert shown.says("wrote", "out.sh")
    assert "--num-layers 4" in (tmp_path / "out.sh").read_text()
