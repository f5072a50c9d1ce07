"""What the tests of pipelines share.

Models of many shapes, their meta copies, and a few steps of training, whole or in stages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from model_families import hugging_face
from paceline.comm import Group
from paceline.job.zoo.models import GPT
from paceline.planning.plan import Plan
from paceline.split.layout import Parts, replace_tensors, whole_parts
from paceline.split.pipeline import Pipeline

Weights = dict[str, Tensor]
ROWS, STEPS, CPU = 8, 3, torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A model, its batches, and how the model's output becomes a loss (a mean over the samples)."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Any]
    loss: Callable[[Any, Any], Tensor]
    with_labels: bool = False

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().double()

    def call(self, model: Any, batch: Any) -> Any:
        if isinstance(batch, dict):
            return model(**{k: v for k, v in batch.items() if self.with_labels or k != "labels"})
        return model(*batch[:-1])


def tokens(step: int, rows: int = ROWS) -> dict[str, Tensor]:
    ids = torch.randint(0, 60, (rows, 10), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.roll(-1, 1)}


def pairs(step: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    batch = tokens(step, rows)
    return batch["input_ids"], batch["labels"]


def masked_tokens(step: int, rows: int = ROWS) -> dict[str, Tensor]:
    batch = tokens(step, rows)
    return {**batch, "attention_mask": (torch.arange(10) < 7 + torch.arange(rows)[:, None] % 4).long()}


def images(step: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 3, 16, 16, generator=generator, dtype=torch.float64), torch.randint(
        0, 4, (rows,), generator=generator
    )


def vectors(step: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 6, generator=generator, dtype=torch.float64), torch.randint(
        0, 4, (rows,), generator=generator
    )


def classes(output: Any, batch: Any) -> Tensor:
    """Cross-entropy of logits of any number of dimensions."""
    logits = logits_of(output)
    target = batch["labels"] if isinstance(batch, dict) else batch[-1]
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def logits_of(output: Any) -> Tensor:
    """Of a plain tensor, a dictionary or Hugging Face's."""
    logits: Tensor = output if isinstance(output, Tensor) else output["logits"]
    return logits


def gpt() -> nn.Module:
    return GPT(vocab=60, context=16, layers=5, hidden=16, heads=2)


def mlp() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(6, 6), nn.Tanh())), nn.Linear(6, 4))


HUGGING_FACE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "mixtral": (
        "MixtralForCausalLM",
        {"num_key_value_heads": 1, "num_local_experts": 4, "experts_implementation": "eager"},
    ),
    "bert": ("BertForMaskedLM", {}),
    "vit": ("ViTForImageClassification", {"image_size": 16, "patch_size": 8, "num_labels": 4}),
    "gpt2": ("GPT2LMHeadModel", {}),
    "resnet": (
        "ResNetForImageClassification",
        {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [2, 2], "layer_type": "basic", "num_labels": 4},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {"d_kv": 8, "d_ff": 32, "num_layers": 3, "num_decoder_layers": 3, "decoder_start_token_id": 0},
    ),
}


def huggingface(name: str, **settings: Any) -> nn.Module:
    kind, own = HUGGING_FACE[name]
    return hugging_face(kind, **{"vocab_size": 60, "num_hidden_layers": 5} | own | settings)


class Aside(nn.Module):
    """Its blocks leave something aside for the head, and so return less than what comes of them.

    Only a traced graph shows it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(60, 16)
        self.blocks = nn.ModuleList(AsideBlock() for _ in range(4))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 60, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        aside: list[Tensor] = []
        x = self.tokens(ids)
        for block in self.blocks:
            x = x + block(x, aside)
        return {"logits": self.head(self.norm(x)) * (1 + torch.stack(aside).mean())}


class AsideBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, aside: list[Tensor]) -> Tensor:
        hidden = torch.tanh(self.up(x))
        aside.append(hidden.square().mean())
        y: Tensor = self.down(hidden)
        return y


class Masked(nn.Module):
    """A model whose code drops a mask if nothing is masked, as ViLT's does."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = MaskedTokens(60, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 60)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x, mask = self.tokens(ids)
        scale = 1.0 if mask.all() else mask.unsqueeze(-1) * 0.5
        for block in self.blocks:
            x = x + torch.tanh(block(x)) * scale
        return {"logits": self.head(x)}


class MaskedTokens(nn.Embedding):
    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(ids), ids >= 0


class AsideTwice(Aside):
    """A model whose blocks call one layer twice, with different shapes.

    DeBERTa does so with its projections.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AsideTwiceBlock() for _ in range(4))


class AsideTwiceBlock(AsideBlock):
    def forward(self, x: Tensor, aside: list[Tensor]) -> Tensor:
        first = torch.tanh(self.up(x[:, 0]))
        y: Tensor = super().forward(x, aside) + self.down(first).unsqueeze(1)
        return y


class AsideConstant(Aside):
    """Its blocks use torch.no_grad.

    For a scale, for a running mean that they keep, and to change in place what has a gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AsideConstantBlock() for _ in range(4))


class AsideConstantBlock(AsideBlock):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x: Tensor, aside: list[Tensor]) -> Tensor:
        with torch.no_grad():
            scale = 1 + self.down.weight.abs().mean() + x.square().mean()
            self.mean.lerp_(scale, 0.1)
        y = super().forward(x, aside) * scale / self.mean.clone()
        with torch.no_grad():
            y = y.clamp_(-0.05, 0.05)
        return y + x


CASES = {
    "gpt": Case(gpt, pairs, classes),
    "aside": Case(Aside, pairs, classes),
    "masked": Case(Masked, pairs, classes),
    "aside_twice": Case(AsideTwice, pairs, classes),
    "aside_constant": Case(AsideConstant, pairs, classes),
    "mlp": Case(mlp, vectors, classes),
    **{
        name: Case(partial(huggingface, name), batch, classes, with_labels=name == "t5")
        for name, batch in {
            **dict.fromkeys(("llama", "bert"), masked_tokens),
            **dict.fromkeys(("gpt2", "mixtral", "t5"), tokens),
            **dict.fromkeys(("vit", "resnet"), images),
        }.items()
    },
}


def on_meta(model: nn.Module) -> nn.Module:
    """A copy whose parameters have no memory; what is tied stays so."""
    model = copy.deepcopy(model)
    replace_tensors(model, lambda p: nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad), None)
    return model


def fill(pipeline: Pipeline, parts: Parts, model: nn.Module) -> None:
    """Give a pipeline's stages the weights of a real model."""
    whole = dict(model.named_parameters())
    names = {p: name for name, p in pipeline.named_parameters().items()}

    def filled(p: nn.Parameter) -> nn.Parameter:
        own = parts[names[p]].layout.take(whole[names[p]].detach()).clone()
        return nn.Parameter(own, requires_grad=p.requires_grad)

    replace_tensors(nn.ModuleList(pipeline.stages), filled, None)


def alone(case: Case, microbatches: int = 4, sizes: tuple[int, ...] = (ROWS,) * STEPS) -> dict[str, Any]:
    """What one process learns, with the same microbatches (batch norm sees no others)."""
    model = case.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step, rows in enumerate(sizes):
        optimizer.zero_grad()
        losses.append(0.0)
        for part in _parts(case.batch(step, rows), min(microbatches, rows)):
            loss = case.loss(case.call(model, part), part) / min(microbatches, rows)
            loss.backward()
            losses[-1] += float(loss.detach())
        optimizer.step()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.eval()
    with torch.no_grad():
        output = case.call(model, case.batch(99, 4))
    logits = logits_of(output)
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return {
        "losses": losses,
        "grads": grads,
        "weights": weights,
        "logits": logits,
        "buffers": dict(model.named_buffers()),
    }


def piped(
    name: str, plan: str, sizes: tuple[int, ...] = (ROWS,) * STEPS, wrap: Callable[[Pipeline], None] | None = None
) -> dict[str, Any]:
    """The same on the ranks of a pipeline; each returns what it has."""
    case, settings = CASES[name], Plan.parse(plan)
    group = Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, hosts=(0,) * dist.get_world_size())
    model = case.model()
    skeleton = on_meta(model)
    parts = whole_parts(skeleton)
    pipeline = Pipeline(
        skeleton, parts, settings, group, case.batch(0, ROWS // settings.microbatches), case.call, device=CPU
    )
    if wrap is not None:
        wrap(pipeline)
    fill(pipeline, parts, model)
    parameters = pipeline.named_parameters()
    assert parameters.keys() == parts.keys()
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9)
    losses = []
    for step, rows in enumerate(sizes):
        optimizer.zero_grad()
        losses.append(_step(case, pipeline, case.batch(step, rows), min(settings.microbatches, rows)))
        optimizer.step()
    grads = {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}
    for stage in pipeline.stages:
        stage.eval()
    output = pipeline.forward(case.batch(99, 4))
    logits = None if output is None else logits_of(output)
    weights = {n: p.detach().clone() for n, p in parameters.items()}
    result: dict[str, Any] = {
        "losses": losses,
        "grads": grads,
        "weights": weights,
        "logits": logits,
        "buffers": pipeline.named_buffers(),
    }
    result |= {
        "bubble_s": pipeline.bubble_s,
        "lines": pipeline.lines,
        "writes": {n for n, p in parts.items() if p.writes},
        "blocks": len(pipeline.blocks()),
    }
    pipeline.close()
    return result


def _step(case: Case, pipeline: Pipeline, batch: Any, microbatches: int) -> float | None:
    seen: list[float] = []

    def loss(output: Any, part: Any, index: int) -> Tensor:
        assert index == len(seen)
        scaled = case.loss(output, part) / microbatches
        seen.append(float(scaled.detach()))
        return scaled

    pipeline.forward_backward(batch, microbatches, loss)
    pipeline.after_backward()
    assert len(seen) in (0, microbatches)
    return sum(seen) if seen else None


def _parts(batch: Any, parts: int) -> list[Any]:
    if isinstance(batch, dict):
        return [{k: v.chunk(parts)[i] for k, v in batch.items()} for i in range(parts)]
    return [tuple(t.chunk(parts)[i] for t in batch) for i in range(parts)]


def assert_same(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """All ranks together have what one process has.

    Losses, gradients, weights, output and buffers, each parameter saved once.
    """
    assert any(rank["losses"][0] is not None for rank in found)
    for rank in found:
        if rank["losses"][0] is not None:
            assert torch.allclose(torch.tensor(rank["losses"]), torch.tensor(expected["losses"]), rtol=1e-10)
            assert torch.allclose(rank["logits"], expected["logits"], rtol=1e-7, atol=1e-9)
        for what in ("grads", "weights", "buffers"):
            for name, own in rank[what].items():
                whole = expected[what][name]
                assert torch.allclose(own.double(), whole.double(), rtol=1e-7, atol=1e-9), (
                    what,
                    name,
                    (own - whole).abs().max(),
                )
    written = [name for rank in found for name in rank["writes"]]
    assert sorted(written) == sorted(expected["weights"])
    assert {n for rank in found for n in rank["grads"]} >= expected["grads"].keys()
