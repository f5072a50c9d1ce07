"""Watching a forward pass finds what crosses a cut, and says why there cannot be one.

Nothing is computed, nothing is changed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.split.forward_trace import Cut, ForwardTrace
from paceline.split.record_forward import trace_forward
from paceline.split.stages import copied
from pipelines import CASES, CPU, on_meta


def call(model: Any, batch: Any) -> Any:
    return model(*batch[:-1])


def traced(model: nn.Module, *inputs: Tensor, whole: frozenset[str] = frozenset()) -> ForwardTrace:
    return trace_forward(model.to("meta"), (*inputs, torch.zeros(len(inputs[0]))), call, CPU, whole=set(whole))


def crossing(trace: ForwardTrace, before: str) -> list[tuple[int, ...]]:
    cut = trace.cut(before)
    assert isinstance(cut, Cut), cut
    return [value.shape.size for value in cut.values]


class Skips(nn.Module):
    """The first layer's output is added to the last one's input; a parameter of the model's own before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.ones(4))
        self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 5)
        self.d = nn.Linear(5, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        x = x + self.start + positions
        first = self.a(x)
        y = self.c(F.relu(self.b(first)))
        if positions.sum() > 100:  # of no parameter, so its value is there
            raise AssertionError
        scaled: Tensor = self.d(y + first) * self.start[:3]
        return scaled


def test_a_skip_connection_crosses_every_cut_between() -> None:
    trace = traced(Skips(), torch.randn(2, 4))
    assert crossing(trace, "b") == [(2, 5)]
    assert sorted(crossing(trace, "c")) == [(2, 5), (2, 6)]
    assert sorted(crossing(trace, "d")) == [(2, 5), (2, 5)]


def test_parameters_are_told_by_their_use() -> None:
    trace = traced(Skips(), torch.randn(2, 4))
    cut = trace.cut("d")
    assert isinstance(cut, Cut)
    assert trace.used(-1, cut.time) >= {"start", "a.weight", "b.weight", "c.bias"}
    assert trace.used(cut.time, ForwardTrace.END) == {"start", "d.weight", "d.bias"}


def test_why_there_is_no_cut() -> None:
    trace = traced(Skips(), torch.randn(2, 4))
    assert trace.cut("unused") == "unused is not called in the forward pass"
    assert trace.cut("a") == "nothing is computed before a"


class Draws(nn.Module):
    """Random numbers of the model's own code: every stage would draw others."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(4)
        noisy: Tensor = self.b(self.a(x + noise)) + noise
        return noisy


def test_random_numbers_on_both_sides_of_a_cut_are_refused() -> None:
    problem = traced(Draws(), torch.randn(2, 4)).cut("b")
    assert isinstance(problem, str)
    assert "each stage would draw its own" in problem


class Routes(nn.Module):
    """A module that looks at values: which rows go through is decided by a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(4, 1), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (self.gate(x)[:, 0] > 0).nonzero().flatten()
        return x.index_add(0, chosen, self.up(x[chosen]))


def test_a_module_that_looks_at_values_is_run_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Routes(), nn.Linear(4, 2))
    remembered: dict[str, Any] = {}
    trace = trace_forward(
        model.to("meta"), (torch.randn(3, 4), torch.zeros(3)), call, CPU, whole=set(), remembered=remembered
    )
    assert crossing(trace, "2") == [(3, 4)]
    assert {"1.gate.weight", "1.up.bias"} <= trace.used(-1, ForwardTrace.END)
    assert "1" in remembered
    again = trace_forward(model, (torch.randn(7, 4), torch.zeros(7)), call, CPU, whole=set(), remembered=remembered)
    assert crossing(again, "2") == [(7, 4)]


def test_the_model_is_as_before() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    before = {n: b.clone() for n, b in model.named_buffers()}
    x = torch.randn(3, 4)
    state = torch.random.get_rng_state()
    trace_forward(model, (x, torch.zeros(3)), call, CPU, whole=set())
    assert all("forward" not in m.__dict__ for m in model.modules())
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert isinstance(model[0].weight, nn.Parameter)


def test_activations_have_the_type_that_autocast_gives_them() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with torch.autocast("cpu", torch.bfloat16):
        trace = traced(model, torch.randn(3, 4))
    cut = trace.cut("1")
    assert isinstance(cut, Cut)
    assert cut.values[0].shape.dtype == torch.bfloat16


def test_a_hugging_face_model_is_cut_between_its_blocks() -> None:
    """Masks, rotary positions and caches are the model's own code's business; one tensor crosses."""
    case = CASES["llama"]
    trace = trace_forward(on_meta(case.model()), case.batch(0, 2), case.call, CPU, whole=set())
    assert crossing(trace, "model.layers.2") == [(2, 10, 16)]


def test_a_copy_is_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[1].weight = nn.Parameter(torch.ones(2, 4))
    model[0].__dict__["kept"] = model[0].forward
    copy = copied(model)
    assert isinstance(copy, nn.Sequential)
    assert copy[0] is not model[0]
    assert copy[0].weight is model[0].weight
    assert copy[0].__dict__["kept"].__self__ is copy[0]
    del copy[1].bias
    assert model[1].bias is not None
