"""Replicated data parallelism: one sum of the gradients over all replicas per step, overlapped with the backward pass where that pays.

The bucketing follows Li et al., 2020, "PyTorch Distributed" (arXiv:2006.15704): gradients gather in flat buckets in the order in which
the backward pass makes them, and a full bucket travels while the rest is still being computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.bucket import Bucket
from paceline.errors import SyncError
from paceline.sync.rule import Replica, SyncRule

BUCKET_BYTES = 25 * 2**20  # DDP's default; large enough for bandwidth, small enough to start early


class AllReduce(SyncRule):
    """Sum the gradients of all replicas after every backward pass.

    Gradients are moved into flat buckets as the backward pass makes them, so a rank never holds them twice. A parameter that
    no replica used keeps `grad=None`, as in a single process. With gradient accumulation only the last backward pass communicates.
    """

    def attach(self, replica: Replica) -> None:
        self.replica = replica
        self.buckets: list[Bucket] = []
        self.hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.parameters = replica.trainable
        _broadcast(replica)
        if replica.dp.size == 1:
            return
        whole = replica.parameters is None
        # Two ranks of one host share their cores: sending while computing only slows the computing there.
        self.overlap = whole and (replica.dp.device.type == "cuda" or replica.dp.spans_hosts)
        self.buckets = _bucketize(replica, BUCKET_BYTES if self.overlap else None)
        if whole:
            self.hooks = [
                p.register_post_accumulate_grad_hook(partial(self._collect, b, i)) for b in self.buckets for i, p in enumerate(b.parameters)
            ]
        replica.gradients = [b.flat[: b.gradient_size] for b in self.buckets if b.gradient_size]

    def after_backward(self) -> None:
        replica = self.replica
        if replica.dp.size == 1:
            replica.gradients = [p.grad for p in self.parameters if p.grad is not None]
            return
        for bucket in self.buckets:
            if bucket.pending is None:
                if not self.hooks:
                    bucket.take_all()
                bucket.fill()
                if self.overlap:
                    bucket.send(replica.dp)
                else:
                    replica.dp.all_reduce(bucket.flat)  # nothing is left to be done beside it
        for bucket in self.buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
            bucket.hand_out()

    def after_step(self, step: int) -> None:
        """Nothing: replicas that took the same step from the same weights agree already."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to take over: the rule remembers nothing from step to step."""

    def detach(self) -> None:
        for hook in self.hooks:
            hook.remove()
        for bucket in self.buckets:
            self.replica.dp.release(bucket.flat)

    def _collect(self, bucket: Bucket, i: int, parameter: Tensor) -> None:
        """Move a gradient that the backward pass just made into its bucket; send the bucket when it is full."""
        if bucket.pending is not None:
            raise SyncError(
                "a parameter got a second gradient after its bucket had been sent (a re-entrant activation checkpoint does that); "
                "use torch.utils.checkpoint with use_reentrant=False"
            )
        bucket.take(i, parameter)
        if self.overlap and self.replica.last_backward:
            self._send_full_buckets()

    def _send_full_buckets(self) -> None:
        """Send in bucket order only: every rank must start the same collectives in the same order, whatever it computed first."""
        for bucket in self.buckets[:-1]:  # the last one carries the notes, which are complete only after the backward pass
            if bucket.pending is None:
                if len(bucket.seen) < len(bucket.parameters):
                    return
                bucket.fill()
                bucket.send(self.replica.dp)


def _broadcast(replica: Replica) -> None:
    """Give every replica the weights and buffers of the first, many small ones in one collective."""
    if replica.dp.size == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in replica.tensors():
        by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
    for tensors in by_dtype.values():
        for together in _in_parts(tensors, BUCKET_BYTES):
            flat = torch.cat([t.reshape(-1) for t in together])
            replica.dp.broadcast(flat, root=0)
            for tensor, part in zip(together, flat.split([t.numel() for t in together]), strict=True):
                tensor.copy_(part.view_as(tensor))


def _in_parts(tensors: list[Tensor], limit_bytes: int) -> Iterator[list[Tensor]]:
    """Neighbours of about `limit_bytes` in all, so that what is sent is never a second copy of the model."""
    part: list[Tensor] = []
    size = 0
    for tensor in tensors:
        part.append(tensor)
        size += tensor.numel() * tensor.element_size()
        if size >= limit_bytes:
            yield part
            part, size = [], 0
    if part:
        yield part


def _bucketize(replica: Replica, limit_bytes: int | None) -> list[Bucket]:
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
    buckets = [Bucket.of(group, replica.dp, replica.notes if group is groups[-1] else None) for group in groups]
    last = buckets[-1]
    replica.notes = last.flat[last.gradient_size : last.gradient_size + len(replica.notes)]
    return buckets
