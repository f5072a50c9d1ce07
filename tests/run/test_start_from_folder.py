"""A job that starts from a Hugging Face folder computes what transformers computes from this folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import paceline
from commands import write_job
from paceline.cluster.discover import discover
from paceline.errors import JobError, PlanError
from paceline.job.job import Job
from paceline.job.model import ModelSpec
from paceline.planning.check.plan_errors import refuse
from paceline.planning.plan import Plan
from paceline.planning.prediction import modelled
from paceline.run.build import load_published
from paceline.run.convert import export, fitted, weights_from
from paceline.state.reader import TensorPieces
from ranks import Ranks
from refusals import raises
from small_jobs import new_run, train_as_rank

VOCAB, TOKENS = 48, 16
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
# architecture: (settings of the configuration, task that the architecture implies)
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "LlamaForCausalLM": (GROUPED, "causal_lm"),
    "Qwen2ForCausalLM": ({**GROUPED, "tie_word_embeddings": True}, "causal_lm"),
    "Qwen3ForCausalLM": ({**GROUPED, "head_dim": 8, "tie_word_embeddings": True}, "causal_lm"),
    "GemmaForCausalLM": ({**GROUPED, "head_dim": 8}, "causal_lm"),
    "GPT2LMHeadModel": ({"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, "causal_lm"),
    "BertForMaskedLM": (SIZES, "masked_lm"),
    "ViTForImageClassification": (
        {**SIZES, "image_size": 16, "patch_size": 4, "num_labels": 10},
        "image_classification",
    ),
}
EXPERTS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3MoeForCausalLM": {
        **GROUPED,
        "head_dim": 8,
        "num_experts": 12,  # the names of the tenth and later experts sort before the third
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
}
PLANS = ["dp=2", "fsdp=2", "tp=2", "pp=2 microbatches=2"]
DROPOUT = ("attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob")


def model_folder(folder: Path, architecture: str, seed: int = 3, **settings: Any) -> Path:
    """Save a random model in several safetensors files."""
    import transformers

    transformers.logging.disable_progress_bar()  # its thread would outlive the test
    model_class = getattr(transformers, architecture)
    values = FAMILIES[architecture][0] | settings if architecture in FAMILIES else settings
    has = model_class.config_class().to_dict()
    dropout = {key: 0.0 for key in DROPOUT if key in has}
    torch.manual_seed(seed)
    model = model_class(model_class.config_class(**{"pad_token_id": None, **values, **dropout}))
    with torch.no_grad():
        for parameter in model.parameters():  # no vector is all zeros or ones, so an unread tensor is noticed
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size="20KB")
    return folder


def job_of(model: dict[str, Any], task: str, **changes: Any) -> Job:
    data: dict[str, Any] = {"kind": "synthetic", "samples": 8, "held_out": 0, "shape": [TOKENS], "vocab": VOCAB}
    if task == "image_classification":
        data = {"kind": "synthetic", "samples": 8, "held_out": 0, "shape": [3, 16, 16], "classes": 10}
    values: dict[str, Any] = {
        "model": model,
        "data": data,
        "loss": "cross_entropy",
        "optimizer": {"name": "sgd", "lr": 1e-30},  # no update changes a weight
        "global_batch": 8,
        "stop": {"steps": 1},
        "deadline_s": 60,
    }
    return Job(**(values | changes))


def published(folder: Path, architecture: str) -> Any:
    import transformers

    read = getattr(transformers, architecture).from_pretrained
    return read(folder, local_files_only=True, dtype=torch.float32).eval()


def samples(job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    data: Any = job.data.build(input_shape=job.model.input_shape(), seed=job.seed).train
    inputs, labels = zip(*(data[index] for index in range(8)), strict=True)
    return torch.stack(inputs), torch.stack([torch.as_tensor(label) for label in labels])


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_logits_equal_those_of_from_pretrained(tmp_path: Path, architecture: str) -> None:
    task = FAMILIES[architecture][1]
    folder = model_folder(tmp_path / "base", architecture)
    job = job_of({"hf": folder}, task)
    assert (job.model.task, job.model.folder) == (task, folder)
    torch.manual_seed(9)
    model: Any = job.model.build().eval()
    load_published(job, model)
    inputs, _ = samples(job)
    with torch.inference_mode():
        assert torch.equal(model(inputs).logits, published(folder, architecture)(inputs).logits)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_split_starts_from_the_folder(tmp_path: Path, ranks: Ranks, architecture: str, plan: str) -> None:
    folder = model_folder(tmp_path / "base", architecture)
    job = job_of({"hf": folder}, FAMILIES[architecture][1])
    run = new_run(tmp_path / "run", job, plan)
    ranks(2, train_as_rank, run.path)
    reference = published(folder, architecture)
    inputs, labels = samples(job)
    with torch.inference_mode():
        logits = reference(inputs).logits.flatten(0, -2)
    expected = torch.nn.functional.cross_entropy(logits, labels.flatten()).item()
    assert run.losses == pytest.approx([expected], rel=2e-6)
    export(run.path, tmp_path / "weights")
    own = load_file(tmp_path / "weights")
    for name, tensor in reference.state_dict().items():
        torch.testing.assert_close(own[name], tensor, rtol=0, atol=1e-20)


@pytest.mark.parametrize("architecture", EXPERTS)
def test_experts_are_stacked_from_published_tensors(tmp_path: Path, architecture: str) -> None:
    folder = model_folder(tmp_path / "base", architecture, **EXPERTS[architecture])
    assert any("experts.0." in name for name in weights_from(folder))  # one tensor per expert
    job = job_of({"hf": folder}, "causal_lm")
    model: Any = job.model.build().eval()
    assert isinstance(fitted(weights_from(folder), model), TensorPieces)  # transformers did not read the whole model
    load_published(job, model)
    inputs, _ = samples(job)
    with torch.inference_mode():
        assert torch.equal(model(inputs).logits, published(folder, architecture)(inputs).logits)


@pytest.mark.parametrize("plan", ["ep=2", "fsdp=2", "tp=2"])
def test_every_split_reads_its_part_of_stacked_experts(tmp_path: Path, ranks: Ranks, plan: str) -> None:
    architecture = "Qwen3MoeForCausalLM"
    folder = model_folder(tmp_path / "base", architecture, **EXPERTS[architecture])
    run = new_run(tmp_path / "run", job_of({"hf": folder}, "causal_lm"), plan)
    ranks(2, train_as_rank, run.path)
    export(run.path, tmp_path / "weights")
    own = load_file(tmp_path / "weights")
    for name, tensor in published(folder, architecture).state_dict().items():
        torch.testing.assert_close(own[name], tensor, rtol=0, atol=1e-20)


def test_experts_that_are_missing_are_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "base", "MixtralForCausalLM", **EXPERTS["MixtralForCausalLM"])
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    kept = {name: tensor for name, tensor in tensors.items() if "experts.3." not in name}
    save_file(kept, folder / "model.safetensors")
    job = job_of({"hf": folder}, "causal_lm")
    with raises(JobError, "model.weights_differ", wrong=re.compile("experts")):
        load_published(job, job.model.build())


def test_a_folder_without_weights_is_refused_unless_other_weights_are_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "base", "LlamaForCausalLM")
    for file in folder.glob("*.safetensors*"):
        file.rename(tmp_path / file.name)
    with raises(JobError, "model.folder_without_weights"):
        job_of({"hf": folder}, "causal_lm")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with raises(JobError, "model.weights_pickled", file="pytorch_model.bin"):
        job_of({"hf": folder}, "causal_lm")
    for model in ({"hf": folder / "config.json"}, {"hf": folder, "weights": tmp_path}):
        assert job_of(model, "causal_lm").model.task == "causal_lm"
    (folder / "config.json").unlink()
    with raises(JobError, "model.folder_without_config"):
        job_of({"hf": folder}, "causal_lm")


@pytest.mark.parametrize(
    ("architectures", "task"),
    [
        (["T5ForConditionalGeneration"], "seq2seq_lm"),
        (["BertForTokenClassification"], "token_classification"),
        (["BertForPreTraining"], None),
        (["BertModel"], None),
        ([], None),
        (None, None),
        ("LlamaForCausalLM", None),
    ],
)
def test_the_task_is_that_of_the_architectures(tmp_path: Path, architectures: Any, task: str | None) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "bert", "architectures": architectures}))
    if task is None:
        with raises(ValueError, "model.task_missing"):
            ModelSpec(hf=file)
    else:
        assert ModelSpec(hf=file).task == task
    assert ModelSpec(hf=file, task="masked_lm").task == "masked_lm"


def test_a_new_head_is_named_in_the_record_and_everything_else_is_loaded(tmp_path: Path, ranks: Ranks) -> None:
    folder = model_folder(tmp_path / "base", "BertForMaskedLM")
    changes = {"data": {"kind": "dataset", "factory": Labelled, "held_out": 0}}
    weights = []
    for name, plan in (("alone", "dp=2"), ("divided", "fsdp=2")):
        job = job_of({"hf": folder, "task": "sequence_classification"}, "masked_lm", **changes)
        run = new_run(tmp_path / name, job, plan)
        ranks(2, train_as_rank, run.path)
        [said] = [event["said"] for event in run.events() if event["event"] == "weights"]
        assert all(part in said[0] for part in ("classifier.weight", "bert.pooler.dense.weight"))
        export(run.path, tmp_path / f"{name}-weights")
        weights.append(load_file(tmp_path / f"{name}-weights"))
    reference = published(folder, "BertForMaskedLM").state_dict()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=0, atol=1e-20)  # heads of both plans are equal
        if name in reference:
            torch.testing.assert_close(tensor, reference[name], rtol=0, atol=1e-20)


class Labelled(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Random tokens with one of two classes."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.arange(index, index + TOKENS), index % 2


@pytest.mark.parametrize(
    ("saved", "architecture", "new"),
    [
        ("BertModel", "BertForMaskedLM", {"cls.predictions.transform.dense.weight"}),
        ("BertForMaskedLM", "BertForMaskedLM", set()),
        ("LlamaModel", "LlamaForCausalLM", {"lm_head.weight"}),
        ("LlamaForCausalLM", "LlamaForSequenceClassification", {"score.weight"}),
        ("GPT2Model", "GPT2LMHeadModel", set()),  # the head is tied to the embedding
    ],
)
def test_a_backbone_begins_a_model_with_a_head(tmp_path: Path, saved: str, architecture: str, new: set[str]) -> None:
    import transformers

    settings = {"Llama": GROUPED, "Bert": SIZES, "GPT2": FAMILIES["GPT2LMHeadModel"][0]}
    folder = model_folder(tmp_path, saved, **settings[re.match("Llama|Bert|GPT2", saved).group()])  # type: ignore[union-attr]
    config = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, architecture)(config)
    source = fitted(weights_from(folder), model)
    lacking = set(model.state_dict()) - set(source)
    assert new <= lacking
    assert bool(new) == bool(lacking)
    base = model.base_model_prefix
    assert all(not name.startswith(f"{base}.") for name in lacking)


def test_tensors_that_are_no_head_are_refused_by_name(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "base", "LlamaForCausalLM")
    single: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        single |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()

    def refused(tensors: dict[str, torch.Tensor], named: str, task: str = "causal_lm") -> None:
        save_file(tensors, folder / "model.safetensors")
        job = job_of({"hf": folder, "task": task}, "causal_lm")
        with raises(JobError, "model.weights_differ", wrong=re.compile(named)):
            load_published(job, job.model.build())

    norm = "model.layers.1.input_layernorm.weight"
    refused({n: t for n, t in single.items() if n != norm}, norm)
    refused({n: t for n, t in single.items() if n != norm}, norm, "sequence_classification")
    refused({n: t for n, t in single.items() if n != "lm_head.weight"}, "lm_head.weight is missing")
    refused({**single, "model.layers.1.extra": torch.zeros(2)}, "layers.1.extra is unknown")
    save_file({**single, "model.rotary_emb.inv_freq": torch.zeros(2)}, folder / "model.safetensors")
    job = job_of({"hf": folder}, "causal_lm")
    load_published(job, job.model.build())


def test_names_of_old_versions_are_read_in_part(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "base", "BertForMaskedLM")
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    expected = tensors["bert.embeddings.LayerNorm.weight"]
    old = {n.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): t for n, t in tensors.items()}
    save_file(old, folder / "model.safetensors")
    source = fitted(weights_from(folder), ModelSpec(hf=folder).build())
    assert isinstance(source, TensorPieces)  # transformers did not read the whole model
    assert torch.equal(source["bert.embeddings.LayerNorm.weight"], expected)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "model.quantized"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.Own"}}, "model.needs_own_code"),
    ],
)
def test_folders_that_cannot_be_trained_are_refused(tmp_path: Path, changes: dict[str, Any], code: str) -> None:
    folder = model_folder(tmp_path / "base", "LlamaForCausalLM")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with raises(JobError, code):
        ModelSpec(hf=folder).build()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_weights_in_bf16_need_a_precision_that_computes_in_bf16(tmp_path: Path, precision: str) -> None:
    folder = model_folder(tmp_path / "base", "LlamaForCausalLM")
    job = job_of({"hf": folder, "dtype": "bf16"}, "causal_lm", precision=precision)
    with raises(PlanError, "plan.dtype_and_precision"):
        refuse(job, Plan.parse("dp=1"), discover())
    refuse(job, Plan.parse("dp=1 precision=bf16"), discover())


@pytest.mark.parametrize("plan", ["dp=2", "fsdp=2", "tp=2", "pp=2 microbatches=2"])
def test_weights_in_bf16_are_exact_under_every_split(tmp_path: Path, plan: str) -> None:
    folder = model_folder(tmp_path / "base", "LlamaForCausalLM")
    optimizer = {"name": "adamw", "lr": 1e-3, "eps": 1e-3}
    job = job_of({"hf": folder, "dtype": "bf16"}, "causal_lm", optimizer=optimizer, stop={"steps": 3})
    assert paceline.check(job, f"{plan} precision=fp64", steps=3).holds


@pytest.mark.parametrize("state", [None, "bf16"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_predicted_memory_is_that_of_the_type_of_the_weights(tmp_path: Path, dtype: str, state: str | None) -> None:
    folder = model_folder(tmp_path / "base", "LlamaForCausalLM")
    optimizer = {"name": "adamw", "lr": 1e-3} | ({"state": state} if state else {})
    job = job_of({"hf": folder, "dtype": dtype}, "causal_lm", precision="bf16", optimizer=optimizer)
    model = job.model.build()
    update = job.optimizer.build(dict(model.named_parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    update.step()
    weights = sum(p.nbytes for p in model.parameters())
    moments = sum(
        value.nbytes
        for kept in update.state.values()
        for value in kept.values()
        if torch.is_tensor(value) and value.ndim
    )
    parts = modelled(job, discover(), Plan.parse("dp=1")).memory
    assert parts["parameters"] == parts["gradients"] == weights
    assert parts["optimizer"] == pytest.approx(moments, rel=0.02)


def test_dtype_and_attention_are_those_of_the_job(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "base", "LlamaForCausalLM")
    model: Any = ModelSpec(hf=folder, dtype="bf16", attention="eager").build()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    assert model(tokens, output_attentions=True).attentions[0] is not None  # only eager attention returns weights
    assert {p.dtype for p in ModelSpec(hf=folder).build().parameters()} == {torch.float32}


def test_the_old_place_of_freeze_is_refused_with_the_new_one(tmp_path: Path) -> None:
    with raises(JobError, "file.unknown_key", key="freeze", hint=re.compile("model: ")):
        Job.load(write_job(tmp_path / "job.yaml", freeze=["embed"]))
