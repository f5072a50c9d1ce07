"""Lightning with paceline's strategy does what it does with its own, and local rules agree where others look."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DistributedSampler

PYTHON = Path(__file__).parents[2] / "build" / "frameworks" / "bin" / "python"
pytestmark = [pytest.mark.slow, pytest.mark.needs_frameworks]


def fitted(folder: Path, strategy: str | dict[str, Any], *more: object, epochs: int = 2) -> list[dict[str, Any]]:
    """What both ranks of `lightning_run.py` found."""
    folder.mkdir()
    given = strategy if isinstance(strategy, str) else json.dumps(strategy)
    script = str(Path(__file__).with_name("lightning_run.py"))
    shown = subprocess.run(
        [str(PYTHON), script, str(folder), given, str(epochs), *map(str, more)],
        env=os.environ | {"TMPDIR": str(folder), "XDG_CACHE_HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert shown.returncode == 0, shown.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_the_strategy_gives_ddps_losses_over_shared_memory_and_nearly_so_with_a_codec(tmp_path: Path) -> None:
    ddp, named, coded = (
        fitted(tmp_path / name, strategy)
        for name, strategy in (("ddp", "ddp"), ("named", "paceline"), ("coded", {"codec": "int8"}))
    )
    assert [ddp[0]["backend"], named[0]["backend"], coded[0]["backend"]] == ["gloo", "shm", "shm"]
    for rank in range(2):
        assert named[rank]["losses"] == pytest.approx(ddp[rank]["losses"], rel=1e-5)
        assert coded[rank]["losses"] == pytest.approx(ddp[rank]["losses"], rel=0.02)
        assert coded[rank]["losses"] != named[rank]["losses"]
    assert named[0]["val"] == pytest.approx(ddp[0]["val"], rel=1e-5)
    assert coded[0]["end"] == coded[1]["end"]


@pytest.mark.parametrize("rule", [{"sync": "local:7"}, {"sync": "diloco:7,lr=1,momentum=0", "codec": "int8"}])
def test_validation_and_checkpoints_of_a_local_rule_see_what_the_ranks_agree_on(
    rule: dict[str, str], tmp_path: Path
) -> None:
    ddp, (first, second) = fitted(tmp_path / "ddp", "ddp"), fitted(tmp_path / "local", rule)
    assert first["losses"] != ddp[0]["losses"]
    assert first["at_validation"] == second["at_validation"]  # 32 steps an epoch, so the ranks differ at its end
    assert first["saved"] == pytest.approx(first["at_validation"], rel=1e-9)
    assert first["end"] == second["end"] == pytest.approx(first["saved"], rel=1e-9)
    assert first["val"] == pytest.approx(ddp[0]["val"], rel=0.15)
    assert first["kept"] == {"step": 64}


def test_a_local_rule_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    rule = {"sync": "diloco:7,lr=1,momentum=0"}
    whole = fitted(tmp_path / "whole", rule, epochs=3)
    half = fitted(tmp_path / "half", rule, epochs=2)
    rest = fitted(tmp_path / "rest", rule, half[0]["path"], epochs=3)
    assert rest[0]["kept"] == {"step": 96}
    assert len(rest[0]["losses"]) == 32
    assert rest[0]["val"] == pytest.approx(whole[0]["val"], rel=0.05)


def test_a_mistake_is_told_before_anything_is_started(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match='unknown codec "int9"'):
        fitted(tmp_path / "wrong", {"codec": "int9"})


def test_items_give_the_gradient_of_the_mean_over_the_labels_of_all_ranks_and_accumulated_batches(
    tmp_path: Path,
) -> None:
    found = fitted(tmp_path / "items", {"items": True}, epochs=1)
    torch.manual_seed(0)
    inputs = torch.randn(2048, 64)
    labels = (inputs @ torch.randn(64, 10)).argmax(1)
    labels[torch.arange(2048) % 64 % 13 < torch.arange(2048) % 2 * 9] = -100
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    # Lightning's own order; a step has three batches of 32 samples of each rank
    rows: Any = range(2048)
    of_ranks = [list[int](DistributedSampler(rows, 2, rank)) for rank in range(2)]
    for batch in torch.tensor(of_ranks).T.flatten().split(3 * 64):
        F.cross_entropy(net(inputs[batch]), labels[batch]).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    end = sum(float(p.detach().double().sum()) for p in net.parameters())
    assert [rank["end"] for rank in found] == pytest.approx([end, end], rel=1e-6)


def test_items_are_refused_with_local_steps(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="items weighs"):
        fitted(tmp_path / "wrong", {"items": True, "sync": "local:8"})
