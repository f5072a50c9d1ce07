"""`paceline serve`: modules for other processes, over TLS or a Unix socket."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import torch

import paceline_server as remote
from commands import ended, paceline, started
from paceline.errors import PacelineError
from paceline.wire.key import read_key
from refusals import raises

RANKING = """
from torch import nn

def Tower(width):
    return nn.Linear(width, 1)
"""


def test_a_module_is_served_over_tls_to_those_who_have_the_key(tmp_path: Path) -> None:
    (tmp_path / "ranking.py").write_text(RANKING)
    for name in ("run.key", "other.key"):
        assert paceline("key", name, folder=tmp_path).code == 0
    command = ("paceline", "serve", "ranking.py:Tower", "--listen", "127.0.0.1:0", "--key", "run.key")
    with started(*command, folder=tmp_path, environment={"PYTHONUNBUFFERED": "1"}) as process:
        assert process.stdout is not None
        [port] = re.findall(r"serving ranking\.py:Tower at 127\.0\.0\.1:(\d+)", process.stdout.readline())
        address = f"127.0.0.1:{port}"
        with raises(PacelineError, "channel.key_differs"):
            remote.connect("intruder", address, read_key(tmp_path / "other.key"), deadline_s=20).close()
        with remote.connect("host", address, read_key(tmp_path / "run.key"), deadline_s=20):
            tower = remote.module("host", "ranking.py:Tower", 4)
            there = remote.optimizer(tower, "sgd", lr=1.0)
            x = torch.ones(2, 4, requires_grad=True)
            before = tower(x)
            before.sum().backward()
            there.step()
            assert x.grad is not None
            after = tower(x)
            assert torch.allclose(before - after, torch.full((2, 1), 4.0 * 2 + 2))  # of the weights, of the bias
            with raises(PacelineError, "remote.raised_on_host"):
                remote.module("host", "torch.nn:Linear", 4, 1)
        process.send_signal(signal.SIGTERM)
        shown = ended(process)
    assert shown.code == 0, shown.err
    assert "run's key: 1" in shown.out


def test_an_import_path_is_needed(tmp_path: Path) -> None:
    shown = paceline("serve", "mine", "--listen", "page.sock", folder=tmp_path)
    assert shown.code == 1
    assert "is not an import path" in shown.error
