"""The ranks of slow_network.py.

They train by PyTorch's DDP, or by paceline's own loop under a plan, as far as they are asked to.

A question is a line of JSON on stdin, its answer one on stdout:
- `{"begin": name, "run": folder}`: `ddp` or `ddp-fp16`, or a run of paceline (`alone`: one of this rank's own); begins
  it anew.
- `{"steps": n}`: the losses of n steps, when each ended (seconds of the machine's clock), what the rule sent, and what
  it says of itself.
- `{"held_out": true}`: the loss on validation text, under the weights that the replicas agree on.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from measure import our_steps
from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.data.samples import held_out_batches
from paceline.job.job import Job
from paceline.job.loss import build_metrics
from paceline.planning.plan import Plan
from paceline.run.build import build_engine, built, loader_of, seed_all
from paceline.run.loop import Loop
from paceline.run.record.run import Run
from paceline.split.mesh import Mesh

DEADLINE_S = 300.0


def serve(transport: str) -> None:
    """Answer questions until there are no more."""
    torch.set_num_threads(1)
    with joined(deadline_s=DEADLINE_S, transport=transport) as group, ExitStack() as under_way:
        training: Training | None = None
        for line in sys.stdin:
            question = json.loads(line)
            if "begin" in question:
                under_way.close()
                training = under_way.enter_context(closing(begun(question["begin"], Path(question["run"]), group)))
                answer: dict[str, Any] = {"begun": question["begin"]}
            else:
                assert training is not None, "a question before anything was begun"
                answer = training.take(question["steps"]) if "steps" in question else {"loss": training.held_out()}
            print(json.dumps(answer), flush=True)


class Training:
    """One way to train, step by step.

    `losses`: yields the loss of each step that it takes; `said`: what a rule says of itself.
    """

    def __init__(self, losses: Generator[float, None, None], said: Sequence[str] = ()) -> None:
        self.losses, self.said = losses, said

    def take(self, steps: int) -> dict[str, Any]:
        """So many steps more."""
        began = time.monotonic()
        losses, ended = [], []
        for _ in range(steps):
            losses.append(next(self.losses))
            ended.append(time.monotonic())
        return {
            "began": began,
            "ended": ended,
            "losses": losses,
            "sent_bytes": self.sent_bytes(),
            "said": list(self.said),
        }

    def sent_bytes(self) -> int:
        """By the rule, since the beginning."""
        return 0

    def held_out(self) -> float:
        """Mean loss on the validation text."""
        raise NotImplementedError

    def close(self) -> None:
        """End it."""
        self.losses.close()


def begun(name: str, run: Path, group: Group) -> Training:
    """The training of that name, all ranks in step."""
    seed_all(0)
    training: Training
    if name.startswith("ddp"):
        training = ByHand(Run(run).job, group, fp16=name == "ddp-fp16")
    else:
        alone = name == "alone"
        training = Ours(Run(run / str(group.rank) if alone else run), Group() if alone else group)
    group.barrier()
    return training


class Ours(Training):
    """What `paceline train` does at every step, with its record."""

    def __init__(self, run: Run, group: Group) -> None:
        job = run.job
        torch.set_num_threads(run.plan.threads)
        self.data = job.data.build(input_shape=job.model.input_shape(), seed=job.seed)
        self.loop = Loop(run, build_engine(job, run.plan, built(job, run.plan), self.data, group), self.data, group)
        self.loop.events.progress = None  # under `paceline train` the launcher shows it, from another process
        super().__init__(our_steps(self.loop), self.loop.engine.messages)

    def sent_bytes(self) -> int:
        return self.loop.engine.replica.traffic.sent_bytes

    def held_out(self) -> float:
        engine, data_group = self.loop.engine, self.loop.engine.data_group
        assert self.data.held_out is not None
        batches = held_out_batches(self.data.held_out, batch=4, replica=data_group.rank, replicas=data_group.size)
        return engine.evaluate(batches, build_metrics((), engine.loss))["loss"]

    def close(self) -> None:
        super().close()
        self.loop.engine.close()
        self.loop.engine.loader.close()
        self.loop.checkpoints.writer.close()
        self.loop.close()


class ByHand(Training):
    """DistributedDataParallel over gloo, as people write it. `fp16`: with PyTorch's hook that sends half precision."""

    def __init__(self, job: Job, group: Group, *, fp16: bool) -> None:
        data = job.data.build(input_shape=job.model.input_shape(), seed=job.seed)
        self.model = DistributedDataParallel(job.model.build())
        if fp16:
            self.model.register_comm_hook(None, fp16_compress_hook)
        loader = loader_of(job, Mesh.of(Plan(dp=group.size), group), data)
        super().__init__(self._steps(job, loader))

    def _steps(self, job: Job, loader: Any) -> Generator[float, None, None]:
        optimizer = job.optimizer.build(self.model.parameters())
        for step, (tokens, target) in enumerate(_endless(loader)):
            for settings in optimizer.param_groups:
                settings["lr"] = job.optimizer.lr * job.schedule.factor_at(step, None)
            optimizer.zero_grad()
            loss = F.cross_entropy(self.model(tokens).flatten(0, 1), target.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), job.clip_norm or float("inf"))
            optimizer.step()
            yield loss.item()


def _endless(loader: Any) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from loader


if __name__ == "__main__":
    serve(sys.argv[1])
