"""Witness of a run under `paceline chaos`: samples of each step, addresses of weights.

Its folder is not on the disk of the run, which may be full.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from paceline.engine.engine import Engine
from paceline.run.record.callback import Callback, StepInfo
from paceline.run.record.run import JsonLines
from paceline.split.layout import local

WITNESS = "PACELINE_WITNESS"  # a folder; set by `paceline chaos` alone


class Witness(Callback):
    """Writes a file per process: addresses of weights, then a line per step.

    Args:
        writes_starts: whether this rank also says from which step the ranks go on.
    """

    def __init__(self, engine: Engine, *, writes_starts: bool) -> None:
        self.loader, self.writes_starts = engine.loader, writes_starts
        self.lines = JsonLines(Path(os.environ[WITNESS]) / f"{os.getpid()}.jsonl", lossy=True)
        weights = [local(parameter).detach() for parameter in engine.named_parameters().values()]
        places = [[tensor.data_ptr(), tensor.nbytes, tensor.element_size()] for tensor in weights]
        self.lines.write(json.dumps({"weights": places}))

    def on_start(self, step: int) -> None:
        """Write down that steps after this one are trained anew."""
        if self.writes_starts:
            self.lines.write(json.dumps({"from": step, "time": time.time()}))

    def on_step(self, info: StepInfo) -> None:
        """Write down the samples of a step."""
        seen = {"step": info.result.step, "time": time.time(), "samples": self.loader.indices}
        self.lines.write(json.dumps(seen, default=str))

    def close(self) -> None:
        """See `Callback`."""
        self.lines.close()
