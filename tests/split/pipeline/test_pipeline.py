"""A model in stages learns what it learns in one process, in float64.

Losses, gradients, weights, buffers and output.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.comm import Group
from paceline.errors import DataError, PlanError
from paceline.planning.limits import fitting_microbatches
from paceline.planning.plan import Plan
from paceline.split.layout import whole_parts
from paceline.split.pipeline import Pipeline
from pipelines import CASES, CPU, alone, assert_same, fill, logits_of, on_meta, piped, vectors
from ranks import Backend, RankError, Ranks
from refusals import raises

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "dualpipe")


def piped_in_turn(plans: list[str]) -> list[dict[str, Any]]:
    return [piped("gpt", plan) for plan in plans]


@pytest.mark.parametrize(
    ("backend", "schedules"),
    [
        ("shm", ["1f1b", "interleaved virtual=3", "zero-bubble"]),
        ("gloo", ["dualpipe"]),
        pytest.param("gloo", ["gpipe", "interleaved"], marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_every_schedule_with_a_tied_head(ranks: Ranks, backend: Backend, schedules: list[str]) -> None:
    """Else a schedule would train another model, or the embedding would miss the gradient of the head."""
    plans = [f"pp=2 microbatches=4 schedule={schedule} {_CUTS[schedule]}" for schedule in schedules]
    expected = alone(CASES["gpt"])
    for found in zip(*ranks(2, piped_in_turn, plans, backend=backend), strict=True):
        assert_same(list(found), expected)


_CUTS = {
    "gpipe": "cut=blocks.3",
    "1f1b": "cut=blocks.3",
    "interleaved": "cut=blocks.1,blocks.2,blocks.4",
    "interleaved virtual=3": "cut=blocks.1,blocks.2,blocks.3,blocks.4,head",
    "zero-bubble": "cut=blocks.1,blocks.2,blocks.4",
    "dualpipe": "cut=blocks.1,blocks.2,blocks.4",
}


@pytest.mark.parametrize(
    "schedule",
    ["1f1b", "zero-bubble", pytest.param("dualpipe", marks=pytest.mark.slow)],
    ids=["a stage a rank", "two stages a rank", "two stages a rank, both ways at once"],
)
def test_a_plain_sequence_cut_by_cost_with_a_smaller_last_batch(ranks: Ranks, schedule: str) -> None:
    """The last batch of an epoch has one sample, fewer microbatches than the schedule takes.

    Then comes a full one again.
    """
    found = ranks(2, piped, "mlp", f"pp=2 microbatches=4 schedule={schedule}", (8, 1, 8), backend="shm")
    assert_same(found, alone(CASES["mlp"], sizes=(8, 1, 8)))
    assert all(rank["bubble_s"] > 0 for rank in found)
    assert found[0]["lines"] == found[1]["lines"], "ranks that cut differently would wait for each other for ever"


@pytest.mark.slow
def test_four_stages_of_uneven_size(ranks: Ranks) -> None:
    found = ranks(4, piped, "gpt", "pp=4 microbatches=4 cut=blocks.1,blocks.2,head", backend="shm")
    assert [rank["blocks"] for rank in found] == [1, 1, 3, 0]
    assert_same(found, alone(CASES["gpt"]))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit", "resnet", "mixtral", "t5"])
def test_model_families(ranks: Ranks, name: str, schedule: str) -> None:
    """ResNet: batch norm as in one process that accumulates over the same microbatches.

    Running statistics included.
    """
    parts = 4 if schedule == "dualpipe" else 2
    plan = f"pp=2 microbatches={parts} schedule={schedule}"
    assert_same(ranks(2, piped, name, plan, backend="shm"), alone(CASES[name], parts))


@pytest.mark.parametrize(
    ("name", "cut"),
    [("t5", "decoder.block.1"), pytest.param("resnet", "resnet.encoder.stages.1.layers.0", marks=pytest.mark.slow)],
)
def test_what_is_more_than_a_chain_of_blocks(ranks: Ranks, name: str, cut: str) -> None:
    """T5: four tensors cross, one of them by way of the stage; ResNet: buffers stay with their stage."""
    assert_same(ranks(2, piped, name, f"pp=2 microbatches=2 cut={cut}", backend="shm"), alone(CASES[name], 2))


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        pytest.param("aside", "zero-bubble", marks=pytest.mark.slow),
        # torch.export gives a layer another name at its second call; the weights and gradients are those of one
        ("aside_twice", "1f1b"),
        # gradients stop only where the model stops them; in-place changes stay
        pytest.param("aside_constant", "1f1b", marks=pytest.mark.slow),
    ],
)
def test_models_that_only_a_traced_graph_shows_are_exported(ranks: Ranks, name: str, schedule: str) -> None:
    found = ranks(2, piped, name, f"pp=2 microbatches=2 schedule={schedule}")
    assert "torch.export" in found[0]["lines"][0]
    assert_same(found, alone(CASES[name], 2))


def test_code_between_modules_decides_by_the_values_that_the_whole_model_has(ranks: Ranks) -> None:
    """A mask that is looked at crosses to the later stages: a stand-in of zeros would mask everything there."""
    assert_same(ranks(2, piped, "masked", "pp=2 microbatches=2 cut=blocks.2"), alone(CASES["masked"], 2))


class Shared(nn.Module):
    """One layer, used by every block."""

    def __init__(self) -> None:
        super().__init__()
        one = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Sequential(one, nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.never = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.full((6,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def shared_everywhere() -> list[Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Shared().double()
    skeleton = on_meta(model)
    parts = whole_parts(skeleton)
    group = Group(rank, size, dist.group.WORLD, hosts=(0,) * size)
    case = CASES["mlp"]
    pipeline = Pipeline(skeleton, parts, Plan.parse(f"pp={size}"), group, case.batch(0, 2), case.call, device=CPU)
    fill(pipeline, parts, model)
    pipeline.forward_backward(vectors(0), 4, lambda output, part, i: output.square().sum())
    pipeline.after_backward()
    case.call(model, vectors(0)).square().sum().backward()
    own = pipeline.named_parameters()
    for name, p in model.named_parameters():
        if name in own:
            assert (p.grad is None) == (own[name].grad is None), name
            assert p.grad is None or torch.allclose(own[name].grad, p.grad, rtol=1e-9), name  # type: ignore[arg-type]
    return [
        sorted(own),
        {n: p.stages for n, p in parts.items() if p.stages > 1},
        sorted(n for n, p in parts.items() if p.writes),
    ]


def test_parameters_that_stages_share_and_those_nobody_uses(ranks: Ranks) -> None:
    """Shared and unused parameters survive a cut.

    Otherwise one would drift between the stages, the other be lost from checkpoints.
    """
    found = ranks(3, shared_everywhere)
    assert all(
        stages == {"blocks.0.0.weight": 3, "blocks.0.0.bias": 3} | ({"scale": 2} if rank != 1 else {})
        for rank, (_, stages, _) in enumerate(found)
    )
    written = sorted(name for _, _, names in found for name in names)
    assert written == sorted(n for n, _ in Shared().named_parameters())


def raises_in_a_loss(what: str) -> None:
    case = CASES["mlp"]
    group = Group(dist.get_rank(), 2, dist.group.WORLD, hosts=(0, 0))
    skeleton = on_meta(case.model())
    pipeline = Pipeline(
        skeleton, whole_parts(skeleton), Plan.parse("pp=2 cut=4"), group, case.batch(0, 2), case.call, device=CPU
    )
    fill(pipeline, whole_parts(skeleton), case.model())

    def loss(output: Any, part: Any, index: int) -> torch.Tensor:
        raise DataError("test.planted", "label 11 is out of range")

    pipeline.forward_backward(vectors(0), 3 if what == "uneven" else 4, loss)


def test_an_error_in_the_loss_is_shown_as_it_is(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="DataError: label 11 is out of range"):
        ranks(2, raises_in_a_loss, "loss", deadline_s=20)


def test_uneven_microbatches_are_refused(ranks: Ranks) -> None:
    with raises(RankError, "plan.microbatches_uneven", microbatches="3", rows="8"):
        ranks(2, raises_in_a_loss, "uneven")


def evaluated() -> Any:
    """Several batches of different sizes, none waited for."""
    case, size = CASES["gpt"], dist.get_world_size()
    group = Group(dist.get_rank(), size, dist.group.WORLD, hosts=(0,) * size)
    skeleton, model = on_meta(case.model()), case.model()
    parts = whole_parts(skeleton)
    pipeline = Pipeline(
        skeleton, parts, Plan.parse("pp=2 schedule=zero-bubble"), group, case.batch(0, 2), case.call, device=CPU
    )
    fill(pipeline, parts, model)
    outputs = [pipeline.forward(case.batch(step, rows)) for step, rows in enumerate((4, 4, 1))]
    pipeline.close()
    return [
        torch.allclose(logits_of(o), case.call(model, case.batch(step, len(o))))
        for step, o in enumerate(outputs)
        if o is not None
    ]


def test_evaluation(ranks: Ranks) -> None:
    assert ranks(2, evaluated, backend="shm") == [[True] * 3, []]  # V: the last stage is on rank 0


class Looks(nn.Module):
    """Decides by what its blocks compute."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            if x.sum() > 0:
                x = -x
        return x


class Odd(nn.Module):
    """Its blocks return something that is not a tensor."""

    class Box:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

    class Block(nn.Module):
        def __init__(self, looks: bool) -> None:
            super().__init__()
            self.looks = looks
            self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, box: Odd.Box) -> Odd.Box:
            y = self.down(self.up(box.x))
            return Odd.Box(-y if self.looks and y.sum() > 0 else y)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Odd.Block(i == 3) for i in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        box = Odd.Box(x)
        for block in self.blocks:
            box = block(box)
        return box.x


def refused(cases: list[tuple[str, str]]) -> list[str]:
    texts = []
    for kind, plan in cases:
        case = CASES[kind] if kind in CASES else CASES["mlp"]
        skeleton = on_meta(Looks().double() if kind == "looks" else Odd().double() if kind == "odd" else case.model())
        group = Group(dist.get_rank(), 2, dist.group.WORLD, hosts=(0, 0))
        try:
            Pipeline(skeleton, whole_parts(skeleton), Plan.parse(plan), group, case.batch(0, 2), case.call, device=CPU)
            texts.append("nothing was wrong")
        except PlanError as error:
            texts.append(str(error))
    return texts


def test_cuts_that_cannot_be_are_named(ranks: Ranks) -> None:
    """Before any weight has memory, and on every rank alike: a rank that went on alone would wait for ever."""
    expected = {
        ("looks", "pp=2"): ["its code depends on values", "torch.export cannot trace", "or train without pp"],
        ("odd", "pp=2"): ["blocks.3 (Block) cannot be traced", "arguments other than tensors"],
        ("gpt", "pp=2 cut=block.2"): ['there is no module "block.2" in the model. Did you mean "blocks.2"?'],
        ("gpt", "pp=2 cut=blocks.1,blocks.2"): ["2 stages have 1 cut between them, and there are 2: cut=blocks.2."],
        ("gpt", "pp=2 schedule=interleaved cut=blocks.2,blocks.1,blocks.3"): [
            "called in the order blocks.1,blocks.2,blocks.3"
        ],
        ("gpt", "pp=2 fsdp=2 schedule=zero-bubble"): [
            "would shard tokens.weight twice, because two stages on one rank share this weight",
            "schedule=1f1b, gpipe or interleaved",
        ],
        ("mlp", "pp=2 cut=0"): ["nothing is computed before 0"],
    }
    first, second = ranks(2, refused, list(expected))
    assert first == second
    for text, words in zip(first, expected.values(), strict=True):
        assert all(word in text for word in words), text


def test_microbatches_that_fit_every_reader() -> None:
    assert fitting_microbatches([12, 8], 8) == 4
    assert fitting_microbatches([7, 0], 4) == 1
    assert fitting_microbatches([16], 8) == 8
