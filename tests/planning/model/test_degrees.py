"""What the planner believes of tensor parallelism is what the split does: at each degree, weight by weight."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.cluster import named_cluster
from paceline.comm import Group
from paceline.job.job import Job
from paceline.job.loss_items import call
from paceline.planning.model.forward_pass import batch_of
from paceline.planning.model.model_info import without_memory
from paceline.planning.plan import Plan
from paceline.planning.predict import layout_of
from paceline.split.layout import whole_parts
from paceline.split.tensor_parallel import shard_tensors

TRUNK = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    # two divide the vocabulary and the feed-forward layer, four do not
    "uneven": TRUNK | {"model_type": "llama", "vocab_size": 122, "intermediate_size": 66},
    # four ranks share two heads of keys and values, whose projections every rank holds whole
    "grouped": TRUNK | {"model_type": "llama", "vocab_size": 122, "intermediate_size": 64, "num_key_value_heads": 2},
    "tied": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 120},
    "mixture": TRUNK
    | {
        "model_type": "mixtral",
        "vocab_size": 122,
        "num_key_value_heads": 4,
        "intermediate_size": 64,
        "num_local_experts": 4,
    },
    "relative": TRUNK
    | {"model_type": "deberta-v2", "vocab_size": 120, "intermediate_size": 64, "relative_attention": True},
}


def job_of(folder: Path, name: str) -> Job:
    file = folder / f"{name}.json"
    file.write_text(json.dumps(MODELS[name]))
    task = "masked_lm" if name == "relative" else "causal_lm"
    data = {"kind": "synthetic", "shape": [16], "vocab": 120}
    return Job(
        model={"hf": str(file), "task": task},
        data=data,
        loss="cross_entropy",
        optimizer="sgd",
        global_batch=8,
        stop={"steps": 1},
    )


def divided_by_the_split(folder: Path, tp: int) -> dict[str, int]:
    """Elements of the matrices of each model that its split divides, of which every rank gets as many."""
    found = {}
    for name in MODELS:
        job = job_of(folder, name)
        model, loss = without_memory(job.model).train(), job.loss.build()
        sizes, parts = {name: p.shape for name, p in model.named_parameters()}, whole_parts(model)
        shard_tensors(model, parts, Group(0, tp), batch_of(job, 2), partial(call, loss=loss))
        found[name] = sum(size.numel() for name, size in sizes.items() if len(size) > 1 and "tp" in parts[name].sharded)
    return found


@pytest.mark.parametrize("tp", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_the_planner_counts_the_weights_that_the_split_divides(tp: int, tmp_path: Path) -> None:
    jobs, cluster = {name: job_of(tmp_path, name) for name in MODELS}, named_cluster("4xH100-SXM")
    split = divided_by_the_split(tmp_path, tp)
    for name, job in jobs.items():
        trace = layout_of(job, cluster, Plan.parse(f"tp={tp}")).trace
        assert sum(block.matrices for block in trace) - trace.tied == split[name] > 0, name
