"""torchft under the faults of `faults.py`: four replica groups of one rank each, on gloo, and its lighthouse.

    PYTHON benchmarks/faults_torchft.py replica FOLDER NUMBER LIGHTHOUSE    (started by `faults.py --torchft PYTHON`)

A replica trains the model of that benchmark on its quarter of the batch, and writes a line for every step that it
committed. Settings are torchft's own, but for the heartbeat time-out of its lighthouse, which is 1 s instead of 5.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from double_cnn import build

CLASSES, SAMPLES = 10, 16


def train(folder: Path, number: int, lighthouse: str) -> None:
    """Train until killed."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build()
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    def load(held: dict[str, Any]) -> None:
        model.load_state_dict(held["model"])
        inner.load_state_dict(held["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        state_dict=state,
        load_state_dict=load,
        min_replica_size=1,
        replica_id=f"replica_{number}_",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
    )
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    with open(folder / f"replica-{number}.jsonl", "a") as lines:
        while True:
            images = torch.randn(SAMPLES, 3, 32, 32)
            optimizer.zero_grad()
            F.cross_entropy(ddp(images), torch.randint(CLASSES, (SAMPLES,))).backward()
            before = manager.current_step()
            optimizer.step()
            if manager.current_step() > before:
                line = {"step": manager.current_step(), "time": time.time(), "replicas": manager.num_participants()}
                line["pid"] = os.getpid()
                lines.write(json.dumps(line) + "\n")
                lines.flush()


def serve(folder: Path) -> None:
    """Be the lighthouse until killed; its address is written to a file."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100, heartbeat_timeout_ms=1000, quorum_tick_ms=50
    )
    (folder / "lighthouse.part").write_text(server.address())
    (folder / "lighthouse.part").rename(folder / "lighthouse")
    while True:
        time.sleep(60)


if __name__ == "__main__":
    if sys.argv[1] == "replica":
        train(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        serve(Path(sys.argv[2]))
