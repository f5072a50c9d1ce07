"""torchrun: one process per rank, told by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""

from __future__ import annotations

import json
import os
from pathlib import Path

from paceline.cluster.launch_engines.engine import LaunchEngine
from paceline.rank_environment import RANK, RankEnvironment, is_our_rank


class Torchrun(LaunchEngine):
    """A torchrun, or whatever else sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""

    def detect(self) -> bool:
        return RANK in os.environ and not is_our_rank()

    def place(self) -> RankEnvironment | None:
        return RankEnvironment.from_env()

    def tell_failure(self, text: str, time_s: float) -> None:
        if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            facts = {"py_callstack": text.splitlines()[0], "timestamp": str(int(time_s))}
            Path(report).write_text(json.dumps({"message": {"message": text, "extraInfo": facts}}))
