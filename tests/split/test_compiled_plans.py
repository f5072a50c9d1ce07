"""Compiled models that a plan divides train as uncompiled ones, in graphs without breaks.

A graph break returns to Python in the middle of a block, which costs most of what the compiler gains.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.job.zoo.models import GPT
from ranks import run_joining

VOCAB, TOKENS, STEPS = 32, 8, 3


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def losses_under(plan: str) -> list[float]:
    """Return losses of some steps in float64; each depends on the gradients of all earlier steps."""
    torch.manual_seed(0)
    model = GPT(vocab=VOCAB, context=TOKENS, layers=2, hidden=16, heads=4).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    tokens = torch.randint(0, VOCAB, (8 * STEPS, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    data = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=8)
    engine: Any = paceline.setup(model, optimizer, loss=loss, loader=data, plan=plan, precision="fp64")
    losses = [float(engine.step(batch).loss) for batch in engine.loader]
    engine.close()
    return losses


def compiled_and_not(plan: str) -> tuple[list[float], list[float], dict[str, int], int]:
    """Return losses without and with the compiler, graph breaks by reason, and the number of graphs."""
    from torch._dynamo.utils import counters  # heavy

    expected = losses_under(plan)
    counters.clear()
    # the graphs are those of the default backend, which would spend minutes on code for them
    torch.compile = partial(torch.compile, backend="aot_eager")
    found = losses_under(f"{plan} compile=on")
    return expected, found, dict(counters["graph_break"]), counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "fsdp=2 remat=selective",
        "tp=2 sequence=on",
        "pp=2 microbatches=2",
        "fsdp=2 tp=2",
        "fsdp=2 pp=2 microbatches=2",
    ],
)
def test_a_compiled_divided_model_trains_as_an_uncompiled_one_without_graph_breaks(plan: str) -> None:
    ranks = 2 ** sum(key in plan for key in ("fsdp=", "tp=", "pp="))
    for expected, found, breaks, graphs in run_joining(ranks, compiled_and_not, plan, deadline_s=300.0):
        assert found == pytest.approx(expected, rel=1e-9)
        assert breaks == {}
        assert graphs > 0
