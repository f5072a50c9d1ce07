"""Adapters: only they are trained and saved, every plan trains the same ones, and they leave a run in peft's layout."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import Dataset
from typer.testing import CliRunner

import paceline
from paceline.cli import app
from paceline.errors import CheckpointError, JobError, LaunchError, RunError
from paceline.job.job import Job
from paceline.planning.model.model_info import model_info
from paceline.run.build import seed_all
from paceline.run.convert import export
from paceline.run.record.run import Run
from paceline.run.saved_model import evaluated, whole_model
from refusals import assert_problem, raises

SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


class Fatal(Dataset[tuple[Tensor, Tensor]]):
    """Random tokens; the first process that reads the last sample after a step dies."""

    def __init__(self, mark: str) -> None:
        self.tokens = torch.randint(64, (32, 9), generator=torch.Generator().manual_seed(5))
        self.mark, self.reads = Path(mark) if mark else None, 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        if self.mark is not None and self.reads > 12 and os.environ.get("RANK") == "1" and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.tokens[index, :-1], self.tokens[index, 1:]


class FatalPairs(Fatal):
    """Pairs of such sequences, with the labels of the last four tokens."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens, following = (torch.stack([each, each.flip(0)]) for each in super().__getitem__(index))
        return tokens, torch.where(torch.arange(8) < 4, -100, following)


class Normalized(nn.Module):
    """A classifier with a batch norm; `writes` lets the forward pass change a frozen parameter."""

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.seen, self.writes = nn.Parameter(torch.zeros(8)), writes

    def forward(self, tokens: Tensor) -> Tensor:
        values = tokens.to(self.seen.dtype)
        if self.training and self.writes:
            self.seen.data.add_(0.1)
        found: Tensor = self.head(self.norm(self.first(values - self.seen)).relu())
        return found


class Classes(Dataset[tuple[Tensor, Tensor]]):
    """Random tokens of three classes."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.arange(1, 9) + index, torch.tensor(index % 3)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=64, num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=False, **SIZES
    )
    folder = tmp_path_factory.mktemp("base") / "model"
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def job(base: Path, **keys: Any) -> Job:
    lora = {"r": 4, "alpha": 8, **keys.pop("lora", {})}
    given: dict[str, Any] = {
        "model": {"hf": str(base)},
        "adapter": {"lora": lora},
        "data": {"kind": "synthetic", "samples": 32, "shape": [8], "vocab": 64, "held_out": 0.25},
        "loss": "cross_entropy",
        "optimizer": {"name": "adamw", "lr": 1e-2},
        "global_batch": 8,
        "precision": "fp64",
        "stop": {"steps": 3},
    }
    return Job(**{**given, **keys})


@pytest.fixture(scope="module")
def alone(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return paceline.train(job(base), "dp=1", run=tmp_path_factory.mktemp("alone") / "run")


@pytest.mark.parametrize("plan", ["dp=2", "fsdp=2", "tp=2", "pp=2 microbatches=2"])
def test_every_plan_trains_the_adapters_of_one_process(plan: str, alone: Run, base: Path, tmp_path: Path) -> None:
    run = paceline.train(job(base), plan, run=tmp_path / "run")
    torch.testing.assert_close(losses(run), losses(alone), rtol=1e-10, atol=0)
    found, expected = saved(run, tmp_path / "own"), saved(alone, tmp_path / "alone")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize("plan", ["fsdp=2", "tp=2"])
def test_every_plan_trains_the_lengths_of_dora(plan: str, base: Path, tmp_path: Path) -> None:
    dora = job(base, lora={"dora": True})
    alone, divided = (paceline.train(dora, how, run=tmp_path / how) for how in ("dp=1", plan))
    torch.testing.assert_close(losses(divided), losses(alone), rtol=1e-10, atol=0)
    found, expected = saved(divided, tmp_path / "own"), saved(alone, tmp_path / "alone")
    assert any("magnitude" in name for name in expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-8, atol=1e-11, msg=name)


@pytest.mark.parametrize("plan", ["dp=1", "tp=2"])
def test_a_run_on_a_quantized_base_is_evaluated_merged_and_refused_beside_another_base(
    plan: str, base: Path, tmp_path: Path
) -> None:
    own = tmp_path / "model"
    wide = transformers.AutoConfig.from_pretrained(base, hidden_size=128, intermediate_size=128, head_dim=32)
    transformers.LlamaForCausalLM(wide).save_pretrained(own)
    run = paceline.train(job(own, quantize="nf4", precision="fp32"), plan, run=tmp_path / "run")
    assert evaluated(run, "held_out")["loss"] == pytest.approx(run.metrics["loss"], rel=1e-5)
    run_cli("export", str(run.path), str(tmp_path / "merged"), "--merge", "--layout", "hf")
    run_cli("export", str(run.path), str(tmp_path / "adapter"), "--adapter")
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").float()
        expected = whole_model(run).float().eval()(tokens).logits
        torch.testing.assert_close(merged(tokens).logits, expected, rtol=1e-4, atol=1e-5)
        plain = transformers.AutoModelForCausalLM.from_pretrained(own)
        before = plain(tokens).logits
        adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()(tokens).logits
    assert 0 < float((adapted - expected).norm()) < 0.5 * float((before - expected).norm())
    weights = load_file(own / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] *= 1.5
    save_file(weights, own / "model.safetensors", metadata={"format": "pt"})
    with raises(CheckpointError, "checkpoint.of_other_base"):
        whole_model(run)


def test_only_adapters_are_trained_saved_and_counted(alone: Run, base: Path, tmp_path: Path) -> None:
    assert all(".lora_A." in name or ".lora_B." in name for name in saved(alone, tmp_path / "weights"))
    info = model_info(job(base).model)
    trained = sum(shape.numel for shape in info.parameters if shape.trainable)
    assert trained == sum(tensor.numel() for tensor in saved(alone, tmp_path / "again").values())
    assert trained < info.numel / 2


def test_an_evaluation_adds_the_base_to_the_adapters(alone: Run) -> None:
    assert evaluated(alone, "held_out")["loss"] == pytest.approx(alone.metrics["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("plan", "other", "own"),
    [
        ("fsdp=2", "dp=2", {}),
        ("dp=1", "fsdp=2", {"quantize": "nf4"}),
        ("dp=1", "fsdp=2", {"loss": "dpo"}),
        ("dp=1", "fsdp=2", {"loss": "dpo", "adapter": None}),
    ],
    ids=str,
)
def test_a_resumed_run_under_another_plan_continues_exactly(
    plan: str, other: str, own: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    if "loss" in own:
        own = {**own, "data": {"kind": "dataset", "factory": f"{__file__}:FatalPairs", "args": {"mark": ""}}}
    alone = paceline.train(job(base, **own), "dp=1", run=tmp_path / "alone")
    run = paceline.train(job(base, **own, stop={"steps": 2}), plan, run=tmp_path / "run")
    run = paceline.train(job(base, **own), other, run=run.path, resume=True)
    torch.testing.assert_close(losses(run), losses(alone), rtol=1e-10, atol=0)


def test_other_base_weights_are_refused(base: Path, tmp_path: Path) -> None:
    own = tmp_path / "model"
    transformers.LlamaForCausalLM.from_pretrained(base).save_pretrained(own)
    run = paceline.train(job(own, stop={"steps": 1}), "dp=1", run=tmp_path / "run")
    weights = load_file(own / "model.safetensors")
    weights["model.norm.weight"][0] += 1e-3
    save_file(weights, own / "model.safetensors", metadata={"format": "pt"})
    with raises(LaunchError, "checkpoint.of_other_base"):
        paceline.train(job(own), "dp=1", run=run.path, resume=True)
    with raises(CheckpointError, "checkpoint.of_other_base"):
        whole_model(run)


@pytest.mark.parametrize(
    ("plan", "own"),
    [
        ("dp=2", {}),
        ("dp=2 tp=2", {}),
        ("fsdp=2", {}),
        ("dp=2", {"quantize": "nf4"}),
        ("dp=2", {"loss": "dpo"}),
        ("dp=2", {"loss": "dpo", "adapter": None}),
    ],
    ids=str,
)
def test_a_killed_rank_costs_no_step(plan: str, own: dict[str, Any], base: Path, tmp_path: Path) -> None:
    code = f"{Path(__file__)}:{'FatalPairs' if 'loss' in own else 'Fatal'}"
    data = {"kind": "dataset", "factory": code, "args": {"mark": str(tmp_path / "killed")}, "held_out": 0}
    keys = {"stop": {"steps": 6}, "checkpoint": {"memory_every_steps": 1}, **own}
    whole = paceline.train(job(base, data=data | {"args": {"mark": ""}}, **keys), "dp=1", run=tmp_path / "whole")
    run = paceline.train(job(base, data=data, **keys), plan, run=tmp_path / "run")
    assert (tmp_path / "killed").exists()
    assert [event for event in run.events() if event["event"] in ("lost", "healed", "went_back")]
    torch.testing.assert_close(losses(run), losses(whole), rtol=1e-9, atol=0)


def test_peft_loads_the_exported_adapters_with_equal_logits(alone: Run, base: Path, tmp_path: Path) -> None:
    run_cli("export", str(alone.path), str(tmp_path / "adapter"), "--adapter")
    own = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        expected = whole_model(alone).float().eval()(tokens).logits
        torch.testing.assert_close(own.eval()(tokens).logits, expected)
        assert not torch.allclose(expected, transformers.AutoModelForCausalLM.from_pretrained(base)(tokens).logits)


def test_merged_adapters_are_a_plain_model(alone: Run, tmp_path: Path) -> None:
    run_cli("export", str(alone.path), str(tmp_path / "merged"), "--merge", "--layout", "hf")
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        expected = whole_model(alone).float().eval()(tokens).logits
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").float()
        torch.testing.assert_close(merged(tokens).logits, expected, rtol=1e-4, atol=1e-5)


def test_an_export_must_say_what_becomes_of_adapters(alone: Run, tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["export", str(alone.path), str(tmp_path / "model.safetensors")])
    assert found.exit_code
    assert isinstance(found.exception, RunError)
    assert_problem(found.exception, "export.adapter_or_merge")


def test_a_new_head_is_trained_and_exported_with_the_adapters(base: Path, tmp_path: Path) -> None:
    model = {"hf": str(base), "task": "sequence_classification", "args": {"num_labels": 3, "pad_token_id": 0}}
    data = {"kind": "dataset", "factory": f"{Path(__file__)}:Classes", "held_out": 0}
    found = job(base, lora={"train": ["score"]}, model=model, data=data, loss="cross_entropy")
    run = paceline.train(found, "dp=1", run=tmp_path / "run")
    assert "score.weight" in saved(run, tmp_path / "weights")
    run_cli("export", str(run.path), str(tmp_path / "adapter"), "--adapter")
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=3, pad_token_id=0)
    own = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    tokens = torch.arange(1, 9)[None]
    with torch.no_grad():
        torch.testing.assert_close(own(tokens).logits, whole_model(run).float().eval()(tokens).logits)


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({"targets": ["q_porj"]}, "job.pattern_unmatched"),
        ({"train": ["scoer"]}, "job.pattern_unmatched"),
        ({"train": ["q_proj"]}, "adapter.trained_twice"),
        ({"dora": True, "targets": ["embed_tokens"]}, "adapter.dora_of_layer"),
    ],
)
def test_patterns_that_fit_no_layer_are_refused(keys: dict[str, Any], code: str, base: Path) -> None:
    with raises(JobError, code):
        job(base, lora=keys).model.build()


def normalized(base: Path, **keys: Any) -> Job:
    """A job that trains an adapter beside `Normalized`."""
    model = {"factory": f"{__file__}:Normalized", "args": {"writes": keys.pop("writes", False)}}
    data = {"kind": "dataset", "factory": f"{__file__}:Classes", "held_out": 0}
    return job(base, model=model, data=data, lora={"targets": ["first"]}, **keys)


def test_statistics_of_a_frozen_layer_are_saved_and_exported_with_the_adapters(base: Path, tmp_path: Path) -> None:
    alone = paceline.train(normalized(base), "dp=1", run=tmp_path / "alone")
    run = paceline.train(normalized(base, stop={"steps": 2}), "dp=1", run=tmp_path / "run")
    run = paceline.train(normalized(base), "dp=1", run=run.path, resume=True)
    assert run.losses == alone.losses
    run_cli("export", str(run.path), str(tmp_path / "adapter"), "--adapter")
    seed_all(run.job.seed)
    own = peft.PeftModel.from_pretrained(Normalized(), tmp_path / "adapter").eval()
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        torch.testing.assert_close(own(tokens), whole_model(run).float().eval()(tokens))


@pytest.mark.parametrize("plan", ["dp=1", "dp=2"])
def test_a_forward_pass_that_changes_a_frozen_parameter_beside_adapters_is_refused(
    plan: str, base: Path, tmp_path: Path
) -> None:
    with raises(LaunchError, "adapter.base_changed", step=1, name="seen"):
        paceline.train(normalized(base, writes=True), plan, run=tmp_path / "run")


def test_freeze_beside_an_adapter_is_refused(base: Path) -> None:
    with raises(JobError, "adapter.with_freeze"):
        job(base, model={"hf": str(base), "freeze": ["embed_tokens"]})


def losses(run: Run) -> Tensor:
    return torch.tensor(run.losses, dtype=torch.float64)


def saved(run: Run, file: Path) -> dict[str, Tensor]:
    export(run.path, file)
    return load_file(file)


def run_cli(*arguments: str) -> None:
    found = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert found.exit_code == 0, found.output
