"""Horovod Elastic under the faults of `faults.py`: a replica that its launcher starts.

    PYTHON -m horovod.runner.launch … PYTHON benchmarks/faults_horovod.py FOLDER HOST…    (started by `faults.py`)

It trains the model of that benchmark on its quarter of the batch, commits its state at every step, and writes a line
for it. Settings are Horovod's own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn.functional as F

from double_cnn import build

CLASSES, SAMPLES = 10, 16


def main() -> None:
    """Train until killed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hvd.init()
    model = build()
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    number = sys.argv[2:].index(os.environ["HOROVOD_HOSTNAME"])

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train(state: Any) -> None:
        while True:
            images = torch.randn(SAMPLES, 3, 32, 32)
            optimizer.zero_grad()
            F.cross_entropy(model(images), torch.randint(CLASSES, (SAMPLES,))).backward()
            optimizer.step()
            state.step += 1
            state.commit()
            line = {"step": state.step, "time": time.time(), "replicas": hvd.size(), "pid": os.getpid()}
            lines.write(json.dumps(line) + "\n")
            lines.flush()

    with open(Path(sys.argv[1]) / f"replica-{number}.jsonl", "a") as lines:
        train(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0))


if __name__ == "__main__":
    main()
