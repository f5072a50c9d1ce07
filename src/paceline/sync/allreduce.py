"""Replicated data parallelism: one sum of the gradients over all replicas per step, overlapped with the backward pass where that pays.

The bucketing follows Li et al., 2020, "PyTorch Distributed" (arXiv:2006.15704): gradients gather in flat buckets in the order in which
the backward pass makes them, and a full bucket travels while the rest is still being computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.comm.algorithms import Algorithm, algorithm_for
from paceline.comm.bucket import Bucket
from paceline.comm.worker import Worker
from paceline.errors import SyncError
from paceline.sync.rule import Replica, SyncRule
from paceline.sync.start import start_alike

if TYPE_CHECKING:
    from paceline.sync.compress import Choice, Compressor

BUCKET_BYTES = 25 * 2**20  # on GPUs: DDP's default; large enough for bandwidth, small enough to start early
BUCKET_BYTES_BETWEEN_HOSTS = 4 * 2**20  # their links are slower: sending begins earlier, and a message is still long against its latency


class AllReduce(SyncRule):
    """Sum the gradients of all replicas after every backward pass.

    Gradients are moved into flat buckets as the backward pass makes them, so a rank never holds them twice. A parameter that
    no replica used keeps `grad=None`, as in a single process. With gradient accumulation only the last backward pass communicates.

    Args:
        algorithm: how a sum is made (see `paceline.comm.algorithms`): flat, ring, tree, hierarchical, or auto.
        compress: what is sent of the gradients (see `paceline.sync.compress`): none, a codec, or auto. Losses and votes go as they are.
    """

    def __init__(self, algorithm: str = "auto", compress: str = "none") -> None:
        self.algorithm_name, self.compress = algorithm, compress
        self.buckets: list[Bucket] = []
        self.hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.compressor: Compressor | None = None
        self.choice: Choice | None = None
        self.worker: Worker | None = None

    def attach(self, replica: Replica) -> None:
        self.replica, self.parameters = replica, replica.trainable
        start_alike(replica)
        if replica.dp.size == 1:
            return
        if replica.dp.rehearsed:
            self._rehearse()
        on_gpu, whole = replica.dp.device.type == "cuda", replica.parameters is None
        # Two ranks of one host share their cores: sending while computing only slows the computing there.
        self.overlap = whole and (replica.dp.spans_hosts or (on_gpu and self.compress == "none"))
        beside = self.overlap and not on_gpu  # then the sums have connections of their own
        self.group = replica.dp.copy() if beside else replica.dp
        self.worker = Worker() if beside else None
        self.algorithm: Algorithm = algorithm_for(self.group, self.algorithm_name)
        limit = (BUCKET_BYTES if on_gpu else BUCKET_BYTES_BETWEEN_HOSTS) if self.overlap else None
        self.buckets = _bucketize(replica, self.algorithm, limit)
        if not replica.dp.rehearsed and (replica.dp.spans_hosts or self.algorithm_name != "auto"):
            replica.said.append(f"sync=allreduce: {self.algorithm.why}")
        if self.compress == "auto":
            from paceline.sync.compress import Choice

            self.choice = Choice(self.algorithm, [(b.flat, b.views) for b in self.buckets])
        else:
            self._compress_by(self.compress)
        if whole:
            self.hooks = [
                p.register_post_accumulate_grad_hook(partial(self._collect, b, i)) for b in self.buckets for i, p in enumerate(b.parameters)
            ]
        replica.gradients = [b.gradients for b in self.buckets if b.gradient_size]

    def after_backward(self) -> None:
        replica = self.replica
        if replica.dp.size == 1:
            replica.gradients = [p.grad for p in self.parameters if p.grad is not None]
            return
        for number, bucket in enumerate(self.buckets):
            if bucket.pending is None:
                if not self.hooks:
                    bucket.take_all()
                bucket.fill()
                if self.overlap:
                    self._begin(number)
                else:
                    self._sum(number)
        for bucket in self.buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
        for bucket in self.buckets:
            bucket.hand_out()
        if self.choice is not None and not self.choice.decided:
            self._choose()
        if self.compressor is not None and self.compressor.said:
            replica.said += self.compressor.said
            self.compressor.said.clear()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = dict(self.compressor.state_dict()) if self.compressor is not None else {}
        if self.choice is not None and self.choice.decided:
            state |= {"auto": self.choice.codec, "replicas": self.replica.dp.size}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        codec = state.get("auto")
        if self.choice is not None and codec is not None and state["replicas"] == self.replica.dp.size:
            self.choice.decide(codec, "As before the run was resumed")
            self.replica.said.append(self.choice.said)
            self._compress_by(codec)
        if self.compressor is not None and (tensors := {k: v for k, v in state.items() if isinstance(v, Tensor)}):
            self.compressor.load_state_dict(tensors)

    def detach(self) -> None:
        for hook in self.hooks:
            hook.remove()
        if self.worker is not None:
            self.worker.close()
        for bucket in self.buckets:
            self.algorithm.release(bucket.flat)
        if self.replica.dp.size > 1:
            self.algorithm.close()
        if self.worker is not None:
            self.group.close()

    # What is sent

    def _rehearse(self) -> None:
        """Without other ranks nothing can be measured, and without numbers nothing coded: count a plain sum."""
        if self.compress != "none":
            self.replica.said.append(f"compress={self.compress}: not rehearsed; what is sent along dp is counted without it")
        self.algorithm_name, self.compress = "flat", "none"

    def _compress_by(self, codec: str) -> None:
        from paceline.sync.compress import Compressor  # most runs do without

        self.compressor = None if codec == "none" else Compressor(codec, self.group, self.replica.traffic)

    def _choose(self) -> None:
        """Have `compress=auto` look at the step that ends, and say what to send in the next one."""
        assert self.choice is not None
        before = self.choice.codec
        codec = self.choice.step_done()
        if codec != before:
            self._compress_by(codec)
        if self.choice.decided:
            self.replica.said.append(self.choice.said)

    # One bucket

    def _collect(self, bucket: Bucket, i: int, parameter: Tensor) -> None:
        """Move a gradient that the backward pass just made into its bucket; send the bucket when it is full."""
        if bucket.pending is not None:
            raise SyncError(
                "a parameter got a second gradient after its bucket had been sent (a re-entrant activation checkpoint does that); "
                "use torch.utils.checkpoint with use_reentrant=False"
            )
        bucket.take(i, parameter)
        if self.overlap and self.replica.last_backward:
            self._begin_full_buckets()

    def _begin_full_buckets(self) -> None:
        """Send in bucket order only: every rank must start the same collectives in the same order, whatever it computed first."""
        for number, bucket in enumerate(
            self.buckets[:-1]
        ):  # the last one carries the notes, which are complete only after the backward pass
            if bucket.pending is None:
                if len(bucket.seen) < len(bucket.parameters):
                    return
                bucket.fill()
                self._begin(number)

    def _begin(self, number: int) -> None:
        """Have a bucket summed while the backward pass goes on."""
        bucket = self.buckets[number]
        if self.worker is not None:
            bucket.pending = self.worker.start(partial(self._sum, number))
            return
        with self._counted(bucket.flat):
            bucket.send(self.group)

    def _sum(self, number: int) -> None:
        """Sum a bucket over the replicas, now."""
        bucket = self.buckets[number]
        if self.compressor is not None:
            self.compressor.sum(f"bucket{number}", bucket.flat, bucket.views)  # what follows the gradients is summed exactly
            return
        with self._counted(bucket.flat):
            self.algorithm.all_reduce(bucket.flat)

    @contextmanager
    def _counted(self, tensor: Tensor) -> Iterator[None]:
        """Count what an exact sum sends, and what a ring would have sent at least."""
        before, size = self.group.sent_bytes, self.group.size
        yield
        self.replica.traffic.sent_bytes += self.group.sent_bytes - before
        self.replica.traffic.plain_bytes += 2 * (size - 1) * tensor.nbytes // size


def _bucketize(replica: Replica, algorithm: Algorithm, limit_bytes: int | None) -> list[Bucket]:
    """Buckets in reverse order of the parameters, which is about the order of their gradients; the notes ride in the last one."""
    groups: list[list[nn.Parameter]] = []
    size = 0
    for parameter in reversed(replica.trainable):
        nbytes = parameter.numel() * parameter.element_size()
        if not groups or groups[-1][0].dtype != parameter.dtype or (limit_bytes and size + nbytes > limit_bytes):
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += nbytes
    if not groups or groups[-1][0].dtype not in (torch.float32, torch.float64):
        groups.append([])  # half precision would round the notes: they get a bucket of their own
    buckets = [Bucket.of(group, algorithm, replica.notes if group is groups[-1] else None) for group in groups]
    last = buckets[-1]
    replica.notes = last.flat[last.gradient_size : last.gradient_size + len(replica.notes)]
    return buckets
