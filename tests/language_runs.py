"""Runs of language models for tests: tiny models with a tokenizer, of which a checkpoint exists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from commands import paceline, write_job
from paceline.job.job import Job
from paceline.run.record.run import Run
from paceline.split.layout import tied_names
from paceline.state.writer import Snapshot
from single_process_mesh import save_all
from small_tokenizers import END, PAD, save_tokenizer

LLAMA = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 40,
    "initializer_range": 0.5,  # so that the text is not one repeated token
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 320,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 40,
    "initializer_range": 0.5,
}
T5 = {
    "model_type": "t5",
    "vocab_size": 320,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 2,
    "initializer_factor": 5.0,
}
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
WRITES = """
import torch
from torch import nn


class Writes(nn.Module):
    '''Writes given bytes, whatever it has read; each byte follows from the one before.'''

    def __init__(self, text):
        super().__init__()
        table = torch.zeros(256, 256)
        for before, after in zip(text.encode("latin-1"), text.encode("latin-1")[1:]):
            table[before, after] = 9.0
        self.table = nn.Parameter(table)

    def forward(self, tokens):
        return self.table[tokens]
"""


def run_of(folder: Path, **job: Any) -> Run:
    """A run that has saved its model once; nothing was trained."""
    folder.mkdir(exist_ok=True)
    file = write_job(folder / "job.yaml", **job)
    (folder / "plan.txt").write_text("dp=1\n")
    torch.manual_seed(7)
    model = Job.load(file).model.build()
    shared = {f"model/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    save_all(folder / "checkpoints", 1, [Snapshot(shared, {}, aliases=tied_names(model))])
    return Run(folder)


def hugging_face_run(folder: Path, config: dict[str, Any], task: str = "causal_lm", **data: Any) -> Run:
    base = save_tokenizer(
        folder / "base", names={"eos_token": END, "pad_token": PAD, "chat_template": TEMPLATE, "add_bos_token": "false"}
    )
    (base / "config.json").write_text(json.dumps(config))
    (folder / "text.txt").write_text("The boats lay on the sand.\n" * 9)
    return run_of(
        folder / "run",
        model={"hf": str(base / "config.json"), "task": task},
        data={"kind": "tokens", "path": str(folder / "text.txt"), "format": "lines", "context": 16, **data},
    )


def writing_run(folder: Path, text: str) -> Run:
    (folder / "writes.py").write_text(WRITES)
    (folder / "text.txt").write_text("abc" * 99)
    return run_of(
        folder / "run",
        model={"factory": str(folder / "writes.py:Writes"), "args": {"text": text}},
        data={"kind": "text", "path": str(folder / "text.txt"), "context": 8},
    )


PROMPTS = ["The river", "the boats lay"]


def text_job(folder: Path, **changed: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text("The boats lay on the sand, and the river was low. " * 40)
    return write_job(
        folder / "job.yaml",
        **{
            "model": {"zoo": "gpt", "args": {"layers": 2, "hidden": 16, "heads": 2, "context": 32}},
            "data": {"kind": "text", "path": "text.txt", "context": 32},
            "optimizer": {"name": "adamw", "lr": 0.02},
            "loss": "cross_entropy",
            "global_batch": 8,
            "stop": {"steps": 6},
            "evaluate": {"every_steps": 3, "prompts": PROMPTS, "max_new_tokens": 12},
            **changed,
        },
    )


def trained(file: Path, plan: str, name: str = "run") -> Run:
    outcome = paceline("train", file, "--plan", plan, "--run", name, folder=file.parent)
    assert outcome.code == 0, outcome.err
    return Run(file.parent / name)
