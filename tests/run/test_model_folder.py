"""An exported Hugging Face folder is complete: weights, settings, tokenizer and a card with what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from commands import paceline, write_job
from paceline.errors import RunError
from paceline.job.job import Job
from paceline.run.convert import export_hf
from paceline.run.model_folder import CARD
from paceline.run.record.run import Run
from paceline.split.layout import tied_names
from paceline.state.writer import Snapshot
from refusals import raises
from single_process_mesh import save_all
from small_tokenizers import END, PAD, save_tokenizer

LLAMA = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
BERT = {key: LLAMA[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("causal_lm", {**LLAMA, "tie_word_embeddings": True}),
    "llama": ("causal_lm", {**LLAMA, "tie_word_embeddings": False}),
    "gpt2": (
        "causal_lm",
        {"model_type": "gpt2", "vocab_size": 320, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
    ),
    "bert": (
        "sequence_classification",
        {"model_type": "bert", "num_labels": 3, "num_hidden_layers": 2, **BERT},
    ),
}
SETTINGS = {"temperature": 0.7, "do_sample": True, "eos_token_id": 0, "max_new_tokens": 17}
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"


def base_folder(folder: Path, config: dict[str, Any]) -> Path:
    """A folder with a configuration, a tokenizer with a chat template, generation settings and a card; no weights."""
    save_tokenizer(folder, names={"eos_token": END, "pad_token": PAD, "chat_template": TEMPLATE})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(SETTINGS))
    (folder / "modeling_own.py").write_text("raise SystemExit('code of the folder was run')")
    (folder / CARD).write_text("---\nlicense: apache-2.0\n---\nThe base.\n")
    return folder


def classes(task: str) -> Any:
    import transformers

    return {
        "causal_lm": transformers.AutoModelForCausalLM,
        "sequence_classification": transformers.AutoModelForSequenceClassification,
    }[task]


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_computes_the_logits_of_the_run_from_its_exported_folder(tmp_path: Path, family: str) -> None:
    task, config = FAMILIES[family]
    base = base_folder(tmp_path / "base", config)
    (tmp_path / "run").mkdir()
    job = Job.load(
        write_job(tmp_path / "run" / "job.yaml", model={"hf": str(base / "config.json"), "task": task}),
    )
    torch.manual_seed(5)
    model = job.model.build().eval()
    shared = {f"model/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    save_all(tmp_path / "run" / "checkpoints", 1, [Snapshot(shared, {}, aliases=tied_names(model))])

    export_hf(tmp_path / "run", tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.py")), "code was copied"
    back, report = classes(task).from_pretrained(tmp_path / "out", output_loading_info=True, local_files_only=True)
    assert not any(report.values()), report
    tokens = torch.randint(0, 300, (3, 11))
    with torch.inference_mode():
        assert torch.equal(back.eval()(tokens).logits, model(tokens).logits)


def trained(folder: Path, **job: Any) -> Run:
    base = base_folder(folder / "base", LLAMA)
    (folder / "text <b>.txt").write_text("The boats lay on the sand, and the river was low that summer.\n\n" * 60)
    file = write_job(
        folder / "job.yaml",
        **{
            "model": {"hf": str(base / "config.json"), "task": "causal_lm"},
            "data": {
                "kind": "tokens",
                "path": "text <b>.txt",
                "format": "lines",
                "tokenizer": str(base),
                "context": 16,
            },
            "loss": "cross_entropy",
            "optimizer": {"name": "adamw", "lr": 0.01},
            "global_batch": 8,
            "stop": {"steps": 8},
            **job,
        },
    )
    outcome = paceline("train", file, "--plan", "dp=1", "--run", "run", folder=folder)
    assert outcome.code == 0, outcome.err
    return Run(folder / "run")


def test_the_card_states_what_was_measured_and_no_path_of_the_user(tmp_path: Path) -> None:
    run = trained(tmp_path)
    export_hf(run.path, tmp_path / "out")
    card = (tmp_path / "out" / CARD).read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["pipeline_tag"] == "text-generation"
    assert front["license"] == "unknown", "paceline cannot know the license"
    assert "apache-2.0" in card, "the license of the base is not mentioned"
    for number in (run.losses[-1], run.metrics["loss"]):
        assert f"{number:.6g}" in card
    assert str(tmp_path) not in card
    assert "<b>" not in card.replace("\\<b\\>", ""), "markup from a file's name reaches the page"

    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert tokenizer.eos_token == END
    spoken = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert spoken == "user: hello"
    settings = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert (settings.max_new_tokens, settings.temperature) == (17, 0.7)

    (tmp_path / "out" / "own.txt").write_text("mine")
    with raises(RunError, "export.folder_exists"):
        export_hf(run.path, tmp_path / "out")
    assert (tmp_path / "out" / "own.txt").read_text() == "mine"


def test_a_run_whose_record_is_incomplete_is_still_exported(tmp_path: Path) -> None:
    """The card leaves out what is unknown; it never stands between a user and the weights."""
    run = trained(tmp_path)
    for name in ("environment.json", "events.jsonl", "cluster.yaml", "plan.txt", "steps/rank-0.jsonl"):
        (run.path / name).write_text("\x00[[[")
    export_hf(run.path, tmp_path / "out")
    assert "validation" not in (tmp_path / "out" / CARD).read_text()
