"""Witness of a run under `paceline chaos`: samples of each step, addresses of weights."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from paceline.engine.engine import Engine
from paceline.split.parts import local
from paceline.training.record.callback import Callback, StepInfo
from paceline.training.record.run import JsonLines

WITNESS = "PACELINE_WITNESS"  # a folder; set by `paceline chaos` alone


class Witness(Callback):
    """Writes a file per process: addresses of weights, then a line per step."""

    def __init__(self, engine: Engine) -> None:
        self.loader = engine.loader
        self.lines = JsonLines(Path(os.environ[WITNESS]) / f"{os.getpid()}.jsonl", lossy=True)
        weights = [local(parameter).detach() for parameter in engine.named_parameters().values()]
        places = [[tensor.data_ptr(), tensor.nbytes, tensor.element_size()] for tensor in weights]
        self.lines.write(json.dumps({"weights": places}))

    def on_step(self, info: StepInfo) -> None:
        """Write down the samples of a step."""
        seen = {"step": info.result.step, "time": time.time(), "samples": self.loader.indices}
        self.lines.write(json.dumps(seen, default=str))

    def close(self) -> None:
        """See `Callback`."""
        self.lines.close()
