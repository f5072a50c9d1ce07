"""Models leave paceline in what others read, and come in from it, whatever plan held them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from commands import write_job
from paceline.errors import JobError, RunError
from paceline.job.job import Job
from paceline.run import convert
from paceline.run.convert import export, export_hf, fitted, load_weights, weights_from
from paceline.split.layout import Part, ShardLayout, tied_names
from paceline.state.shard import MeshCoordinate
from paceline.state.writer import Snapshot
from ranks import Ranks
from refusals import raises
from single_process_mesh import meshes, own_parts, parts_of, random_tensors, save_all
from small_jobs import new_run, points, small_job, train_as_rank

SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("causal_lm", {**SMALL, "tie_word_embeddings": True}),
    "gpt2": ("causal_lm", {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}),
    "bert": ("masked_lm", SMALL),
    "t5": ("seq2seq_lm", {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}),
    # fuses what is published apart
    "mixtral": ("causal_lm", {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4}),
    "resnet": ("image_classification", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}),  # has buffers
}


def run_of(folder: Path, family: str) -> tuple[Path, nn.Module]:
    """A run directory with a checkpoint of a model of transformers, and the model."""
    task, config = FAMILIES[family]
    (folder / "config.json").write_text(json.dumps({"model_type": family, **config}))
    write_job(folder / "job.yaml", model={"hf": str(folder / "config.json"), "task": task})
    torch.manual_seed(3)
    model = Job.load(folder / "job.yaml").model.build()
    own = {
        f"buffer/{name}": tensor
        for name, tensor in persistent(model).items()
        if name not in dict(model.named_parameters())
    }
    shared = {f"model/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    save_all(folder / "checkpoints", 1, [Snapshot(shared, own, aliases=tied_names(model))])
    return folder, model


def persistent(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and saved buffer once."""
    kept = model.state_dict().keys()
    return {n: t for n, t in (*model.named_parameters(), *model.named_buffers()) if n in kept}


def assert_same(one: nn.Module, other: nn.Module) -> None:
    assert one.state_dict().keys() == other.state_dict().keys()
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_transformers_goes_out_to_its_layout_and_comes_back(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if family == "gpt2":
        monkeypatch.setattr(convert, "HF_SHARD", "10KB")  # so that there are several files and an index
    run, model = run_of(tmp_path, family)
    out = tmp_path / "exported"
    export_hf(run, out)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []
    back, report = type(model).from_pretrained(out, output_loading_info=True)  # type: ignore[attr-defined]
    assert not any(report.values()), report
    assert_same(back, model)

    torch.manual_seed(4)
    fresh, undivided = Job.load(run / "job.yaml").model.build(), without_memory(run)
    load_weights(persistent(fresh), None, fitted(weights_from(out), undivided))
    assert_same(fresh, model)
    assert "Writing" not in capfd.readouterr().err, "a progress bar is on the screen"


def without_memory(run: Path) -> nn.Module:
    with torch.device("meta"):
        return Job.load(run / "job.yaml").model.build()


@pytest.mark.parametrize("degrees", [{"fsdp": 2, "tp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_a_divided_checkpoint_is_exported_as_the_model_that_it_is_of(tmp_path: Path, degrees: dict[str, int]) -> None:
    full = random_tensors()
    snapshots = []
    for mesh in meshes(**degrees):
        parts = parts_of(mesh)
        shared = {f"model/{name}": tensor for name, tensor in own_parts(full, parts).items()}
        coordinate, aliases = MeshCoordinate.of(mesh), {"model/head": "model/embedding"}
        snapshots.append(
            Snapshot(shared, aliases=aliases, parts={f"model/{n}": p for n, p in parts.items()}, coordinate=coordinate)
        )
    save_all(tmp_path / "checkpoints", 1, snapshots)
    export(tmp_path, tmp_path / "model.safetensors")
    exported = load_file(tmp_path / "model.safetensors")
    assert exported.keys() == {*full, "head"}
    assert all(torch.equal(exported[name], tensor) for name, tensor in full.items())
    assert torch.equal(exported["head"], full["embedding"])


def test_no_more_than_one_tensor_is_in_memory_during_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that trains divided may be larger than the memory of the machine that exports it."""
    import weakref

    alive: list[weakref.ref[Tensor]] = []
    empty = torch.empty

    def counted(*arguments: Any, **keywords: Any) -> Tensor:
        assert not [r for r in alive if r() is not None], "the tensor before is still there"
        tensor: Tensor = empty(*arguments, **keywords)
        alive.append(weakref.ref(tensor))
        return tensor

    save_all(tmp_path, 1, [Snapshot({f"model/{i}": torch.full((1000,), float(i)) for i in range(4)})])
    monkeypatch.setattr(torch, "empty", counted)
    export(tmp_path, tmp_path / "model.safetensors")
    assert len(alive) == 4
    monkeypatch.undo()
    assert [t[0].item() for _, t in sorted(load_file(tmp_path / "model.safetensors").items())] == [0.0, 1.0, 2.0, 3.0]


def test_every_rank_reads_its_part_of_one_file(tmp_path: Path) -> None:
    full = random_tensors()
    save_file(full, tmp_path / "model.safetensors")
    source = weights_from(tmp_path / "model.safetensors")
    for mesh in meshes(tp=2, fsdp=2):
        parts = parts_of(mesh)
        own = {name: torch.zeros(part.layout.shape, dtype=torch.float32) for name, part in parts.items()}
        load_weights(own, parts, source)
        assert all(torch.equal(own[name], part.layout.take(full[name]).float()) for name, part in parts.items())


class Tied(nn.Module):
    def __init__(self, width: int = 4, extra: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 7, bias=extra)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("left_out", ["embedding.weight", "head.weight", None])
def test_a_tied_weight_may_stand_in_a_file_under_any_of_its_names(tmp_path: Path, left_out: str | None) -> None:
    model, fresh = Tied(), Tied()
    save_file({n: t.clone() for n, t in model.state_dict().items() if n != left_out}, tmp_path / "model.safetensors")
    load_weights(
        persistent(fresh),
        {"norm.weight": Part("norm.weight", ShardLayout.whole((4,)))},
        fitted(weights_from(tmp_path / "model.safetensors"), fresh),
    )
    assert_same(fresh, model)


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: Tied(extra=True), "model.weights_differ"),
        (lambda: nn.Linear(3, 3), "model.weights_differ"),
        (lambda: Tied(width=5), "model.weights_differ"),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_weights_of_another_model_are_refused_with_what_differs(
    tmp_path: Path, make: Callable[[], nn.Module], code: str
) -> None:
    file = tmp_path / "model.safetensors"
    save_file({n: t.clone() for n, t in Tied().state_dict().items()}, file)
    with raises(JobError, code):
        fitted(weights_from(file), make())


def test_published_weights_of_another_size_are_refused_with_what_differs(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path, "mixtral")
    export_hf(run, tmp_path / "exported")
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "vocab_size": 63}))
    with raises(JobError, "model.weights_differ"):
        fitted(weights_from(tmp_path / "exported"), without_memory(run))


def test_what_holds_no_weights_is_named(tmp_path: Path) -> None:
    with raises(JobError, "model.weights_not_found", what="does not exist"):
        weights_from(tmp_path / "nowhere")
    with raises(JobError, "model.weights_not_found"):
        weights_from(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"half a header")
    with raises(JobError, "model.weights_unreadable"):
        weights_from(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with raises(JobError, "model.weights_index_invalid"):
        weights_from(tmp_path)


def test_a_model_that_is_none_of_transformers_has_no_such_layout(tmp_path: Path) -> None:
    with raises(RunError, "export.no_job"):
        export_hf(tmp_path, tmp_path / "exported")
    write_job(tmp_path / "job.yaml")
    with raises(RunError, "export.not_hugging_face"):
        export_hf(tmp_path, tmp_path / "exported")
    (tmp_path / "exported").mkdir()
    with raises(RunError, "export.folder_exists"):
        export_hf(tmp_path, tmp_path / "exported")


@pytest.mark.parametrize("plan", ["dp=2", "dp=2 sync=local:3"])
def test_the_exported_model_is_the_one_that_the_run_evaluated(tmp_path: Path, ranks: Ranks, plan: str) -> None:
    """Each replica has batch-norm statistics of its own; an evaluation averages them, and so must an export."""
    job = small_job(
        model={"factory": "small_jobs:with_dropout"}, data=points(held_out=0.3, samples=100), stop={"steps": 10}
    )
    run = new_run(tmp_path / "run", job, plan)
    ranks(2, train_as_rank, run.path)
    export(run.path, tmp_path / "model.safetensors")
    model = job.model.build().eval()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    held_out = job.data.build(input_shape=None, seed=job.seed).held_out
    assert held_out is not None
    inputs, labels = torch.utils.data.default_collate([held_out[i] for i in range(len(held_out))])  # type: ignore[arg-type]
    with torch.inference_mode():
        loss = nn.functional.cross_entropy(model(inputs), labels).item()
    assert loss == pytest.approx(run.metrics["loss"], rel=1e-6)
