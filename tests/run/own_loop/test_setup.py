"""`paceline.setup`: the same work on any number of ranks, or a clear error."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from commands import ended, started, wait_for
from paceline.errors import DataError, JobError, PacelineError, PlanError
from ranks import RankError, Ranks
from refusals import raises

FEATURES, CLASSES, SAMPLES = 6, 3, 50


def dataset() -> TensorDataset:
    return TensorDataset(
        torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(3)), torch.arange(SAMPLES) % CLASSES
    )


def arguments(**changes: Any) -> dict[str, Any]:
    """What `setup` is given, working but for the changes."""
    torch.manual_seed(1)
    model = nn.Linear(FEATURES, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(dataset(), batch_size=8, shuffle=True)
    return {"model": model, "optimizer": optimizer, "loss": F.cross_entropy, "loader": loader} | changes


def losses_of_a_loop(plan: str = "auto") -> list[float]:
    """Two epochs of a user's own loop."""
    engine = paceline.setup(**arguments(plan=plan))
    return [engine.step(batch).loss for _ in range(2) for batch in engine.loader]


def test_a_loop_of_ones_own_gives_the_same_losses_alone_and_on_two_ranks(ranks: Ranks) -> None:
    alone = losses_of_a_loop()
    assert len(alone) == 14
    for losses in ranks(2, losses_of_a_loop):
        assert losses == pytest.approx(alone, rel=1e-5)


def labels_in_order() -> list[list[int]]:
    engine = paceline.setup(**arguments(loader=DataLoader(dataset(), batch_size=8, shuffle=False)))
    return [[] if batch is None else engine.loader.indices for batch in engine.loader]


def test_a_loader_that_does_not_shuffle_keeps_its_order(ranks: Ranks) -> None:
    in_order = [list(range(first, min(first + 8, SAMPLES))) for first in range(0, SAMPLES, 8)]
    assert labels_in_order() == in_order
    first, second = ranks(2, labels_in_order)
    assert [a + b for a, b in zip(first, second, strict=True)] == in_order


def test_a_loader_that_shuffles_gives_every_sample_once_and_another_order_each_epoch() -> None:
    engine = paceline.setup(**arguments())
    orders = [[index for _ in engine.loader for index in engine.loader.indices] for _ in range(2)]
    assert [sorted(order) for order in orders] == [list(range(SAMPLES))] * 2
    assert orders[0] != orders[1]
    assert orders[0] != list(range(SAMPLES))


def test_the_loaders_own_ways_are_kept() -> None:
    def doubled(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack([2 * x for x, _ in samples]), torch.tensor([int(y) for _, y in samples])

    engine = paceline.setup(**arguments(loader=DataLoader(dataset(), batch_size=8, collate_fn=doubled, drop_last=True)))
    batches = list(engine.loader)
    assert len(batches) == SAMPLES // 8
    assert torch.equal(batches[0][0], 2 * dataset()[:8][0])


def test_the_model_stays_the_same_object_with_the_same_parameters() -> None:
    given = arguments()
    parameters = list(given["model"].parameters())
    engine = paceline.setup(**given)
    engine.step(next(iter(engine.loader)))
    assert engine.model is given["model"]
    assert all(one is other for one, other in zip(parameters, engine.model.parameters(), strict=True))


def test_a_fused_step_learns_the_same() -> None:
    def losses(plan: str) -> list[float]:
        engine = paceline.setup(**arguments(plan=plan))
        return [engine.step(batch).loss for batch in engine.loader]

    assert losses("dp=1 fused=on") == pytest.approx(losses("dp=1"), rel=1e-5)


def other_parameters() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


class NotFused(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.defaults.pop("fused")


@pytest.mark.parametrize(
    ("changes", "error", "code", "fields"),
    [
        ({"model": lambda x: x}, JobError, "setup.wrong_type", {"class_name": "function"}),
        ({"nonfinite": "rewind"}, JobError, "setup.nonfinite_invalid", {"nonfinite": "rewind"}),
        ({"nonfinite": "ignore"}, JobError, "setup.nonfinite_invalid", {"nonfinite": "ignore"}),
        ({"precision": "fp4"}, JobError, "setup.precision_invalid", {"precision": "fp4"}),
        ({"batch_norm": "global"}, JobError, "setup.batch_norm_invalid", {"batch_norm": "global"}),
        ({"clip_norm": 0.0}, JobError, "setup.clip_norm_invalid", {"clip_norm": 0.0}),
        ({"optimizer": other_parameters()}, JobError, "setup.optimizer_of_other_model", {}),
        ({"loss": DataLoader(dataset()), "loader": None}, JobError, "setup.loader_as_loss", {}),
        ({"loss": "mse"}, JobError, "setup.loss_invalid", {"class_name": "str"}),
        ({"loader": [1, 2]}, DataError, "data.not_a_loader", {"class_name": "list"}),
        (
            {"loader": DataLoader(dataset(), batch_size=64, drop_last=True)},
            DataError,
            "data.smaller_than_batch",
            {"samples": SAMPLES, "global_batch": 64},
        ),
        ({"plan": "dp=3"}, PlanError, "setup.ranks_differ", {"plan": "dp=3", "ranks": 3, "started": 1}),
        ({"plan": "num_workers=2"}, PlanError, "setup.num_workers", {"num_workers": 2}),
        ({"plan": "dp=tree"}, PlanError, "plan.wrong_value", {"key": "dp", "value": "tree"}),
        ({"plan": "dq=2"}, PlanError, "plan.unknown_key", {"key": "dq"}),
    ],
)
def test_what_cannot_work_is_said_with_what_to_do(
    changes: dict[str, Any], error: type[PacelineError], code: str, fields: dict[str, Any]
) -> None:
    with raises(error, code, **fields):
        paceline.setup(**arguments(**changes))


def test_an_optimizer_without_a_fused_step_is_named() -> None:
    model = nn.Linear(FEATURES, CLASSES)
    with raises(PlanError, "setup.not_fused", class_name="NotFused"):
        paceline.setup(**arguments(model=model, optimizer=NotFused(model.parameters()), plan="dp=1 fused=on"))


def test_a_parameter_that_the_fused_step_would_update_wrongly_is_named() -> None:
    model = nn.Linear(FEATURES, CLASSES)
    model.weight = nn.Parameter(torch.randn(CLASSES, 2 * FEATURES)[:, ::2])
    optimizer = torch.optim.AdamW(model.parameters())
    with raises(PlanError, "setup.fused_with_gaps", parameter="weight", shape=[CLASSES, FEATURES]):
        paceline.setup(**arguments(model=model, optimizer=optimizer, plan="dp=1 fused=on"))


def test_a_plan_for_fewer_ranks_than_were_started_says_which_would_do(ranks: Ranks) -> None:
    with raises(RankError, "setup.ranks_differ", how="plain python", plan="dp=1", ranks="1", started="2"):
        ranks(2, losses_of_a_loop, "dp=1")


SCRIPT = """
import os
import time
from pathlib import Path

import torch
from torch import nn

import paceline

model = nn.Linear(4, 2)
engine = paceline.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
rank = os.environ["RANK"]
try:
    while True:
        engine.backward(model(torch.ones(2, 4)).square().mean())
        engine.update()
        Path(f"trains-{rank}").touch()
        time.sleep(0.01)
finally:
    Path(f"cleaned-up-{rank}").touch()
"""


def test_ctrl_c_runs_the_users_cleanup_and_leaves_tracebacks_in_files(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(SCRIPT)
    with started("torchrun", "--nproc-per-node", 2, "loop.py", folder=tmp_path) as process:
        wait_for(lambda: all((tmp_path / f"trains-{rank}").exists() for rank in range(2)), process)
        process.send_signal(signal.SIGINT)  # torchrun passes it on
        outcome = ended(process)
    kept = tmp_path / "cache" / "paceline" / "traceback"
    for rank in range(2):
        assert (tmp_path / f"cleaned-up-{rank}").exists()
        assert "KeyboardInterrupt" in (kept / f"rank-{rank}.txt").read_text()
    assert outcome.err.count("paceline: ") == 1
    assert str(kept) in outcome.err
    assert "loop.py" not in outcome.err, "no rank's traceback is on the screen"


@pytest.mark.parametrize("plan", ["sync=local:2", "compress=int8"])
def test_fp16_refuses_rules_that_keep_errors_of_scaled_gradients(plan: str) -> None:
    with raises(PlanError, "setup.fp16_inexact", key=plan.partition("=")[0]):
        paceline.setup(**arguments(plan=plan, precision="fp16"))
