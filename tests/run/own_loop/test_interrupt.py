"""Ctrl-C in a loop of one's own ends the ranks cleanly, and keeps the screen readable."""

from __future__ import annotations

import signal
from pathlib import Path

from commands import ended, started, wait_for

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
