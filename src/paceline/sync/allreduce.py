"""Replicated data parallelism: the gradients of all replicas are summed in every step.

The bucketing follows Li et al., 2020, "PyTorch Distributed" (arXiv:2006.15704). Gradients are collected in flat buckets
in the order in which the backward pass computes them. If it saves time, a full bucket is sent while the backward pass
computes the remaining gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.comm.allreduce import Algorithm, algorithm_for, close_algorithm
from paceline.comm.comm_thread import CommThread
from paceline.comm.group import Bucket, Group
from paceline.device import is_accelerator
from paceline.errors import SyncError
from paceline.planning.sync_info import bucket_bytes_between_hosts
from paceline.sync.rows import dense_and_sparse, sum_rows
from paceline.sync.rule import Reduction, Replica, SyncRule, Traffic, broadcast_state, not_by_the_engine, ring_bytes

if TYPE_CHECKING:
    from paceline.sync.compress import CodecChooser, SumCoder

BUCKET_BYTES = 25 * 2**20  # on accelerators: default of DDP, large enough for bandwidth and small enough to start early


class AllReduce(SyncRule):
    """Sum the gradients of all replicas after every backward pass.

    Gradients are moved into flat buckets as soon as the backward pass computes them, so a rank never stores two copies.
    A parameter that no replica used keeps `grad=None`, as in a single process. With gradient accumulation, only the
    last backward pass communicates.

    Args:
        algorithm: all-reduce algorithm (see `paceline.comm.allreduce`): flat, ring, hierarchical, or auto.
        compress: compression of the gradients (see `paceline.sync.compress`): none, a codec, or auto. Losses and votes
            are never compressed.
    """

    def __init__(self, algorithm: str = "auto", compress: str = "none") -> None:
        self.algorithm_name, self.compress = algorithm, compress
        self.buckets: list[Bucket] = []
        self.hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.lanes: list[Lane] = []
        self._sums: list[Callable[[], None]] = []  # by bucket: function that sums it exactly
        self.choice: CodecChooser | None = None

    def attach(self, replica: Replica) -> None:
        self.replica, self.parameters = replica, replica.trainable
        broadcast_state(replica)
        dp = replica.dp
        self.rows = [p for p in self.parameters if p in replica.rows]
        if dp.size == 1:
            return
        if dp.is_fake:
            self._prepare_dry_run()
        accelerated, whole = is_accelerator(dp.device), replica.parameters is None
        self.overlap = whole and self.overlap_pays(dp)
        self.lanes, why = self.lanes_over(dp)
        # several lanes have counters of their own
        self.rows_traffic = replica.traffic if len(self.lanes) == 1 else Traffic()
        limit = (BUCKET_BYTES if accelerated else self._between_hosts()) if self.overlap else None
        self.buckets = _bucketize(replica, [lane.algorithm for lane in self.lanes], limit)
        self._sums = [self._lane(number).prepared_sum(bucket) for number, bucket in enumerate(self.buckets)]
        last = self.buckets[-1]
        self.scalars = last.flat[last.gradient_size :][: replica.scalar_count]  # the scalars follow the gradients
        if not dp.is_fake:
            self.tell(why)
        if self.compress == "auto":
            from paceline.sync.compress import CodecChooser

            first = self.lanes[0]
            self.choice = CodecChooser(first.group, first.algorithm, [(b.flat, b.views) for b in self.buckets])
        else:
            self._compress_by(self.compress)
        if whole:
            self.hooks = [
                p.register_post_accumulate_grad_hook(partial(self._collect, b, i))
                for b in self.buckets
                for i, p in enumerate(b.parameters)
            ]
            self.hooks += [p.register_post_accumulate_grad_hook(self._check_by_the_engine) for p in self.rows]
        self.gradients = [b.gradients for b in self.buckets if b.gradient_size]

    def after_backward(self, step: int, scalars: Tensor) -> Reduction:
        replica = self.replica
        if replica.dp.size == 1:
            gradients, sparse = dense_and_sparse(self.parameters)
            return Reduction(gradients, scalars, sparse=sparse)
        if scalars is not self.scalars:
            self.scalars.copy_(scalars)
        summed = [number for number, bucket in enumerate(self.buckets) if not self._left_out(bucket)]
        for number in summed:
            bucket = self.buckets[number]
            if bucket.pending is None:
                bucket.take_all()  # all gradients, or those of earlier passes that the last pass did not compute
                bucket.fill()
                if self.overlap:
                    self._begin(number)
                else:
                    self._sum(number)
        rows = self._sum_rows()
        for bucket in self.buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
        for number in summed:
            self.buckets[number].hand_out()
        if len(self.lanes) > 1:
            replica.traffic.become([self.rows_traffic, *(lane.traffic for lane in self.lanes)])
        if self.choice is not None and not self.choice.decided:
            self._choose()
        for lane in self.lanes:
            if lane.compressor is not None and lane.compressor.messages:
                for message in lane.compressor.messages:
                    replica.log(message)
                lane.compressor.messages.clear()
        return Reduction(self.gradients + rows, self.scalars)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for number, lane in enumerate(self.lanes):
            if lane.compressor is not None:
                state |= {f"lane{number}/{key}": tensor for key, tensor in lane.compressor.state_dict().items()}
        if self.choice is not None and self.choice.decided:
            state |= {"auto": self.choice.codec, "replicas": self.replica.dp.size}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        codec = state.get("auto")
        if self.choice is not None and codec is not None and state["replicas"] == self.replica.dp.size:
            self.choice.decide(codec, "As before the run was resumed")
            self.replica.log(self.choice.message)
            self._compress_by(codec)
        for number, lane in enumerate(self.lanes):
            start = f"lane{number}/"
            kept = {key.removeprefix(start): value for key, value in state.items() if key.startswith(start)}
            if lane.compressor is not None and kept:
                lane.compressor.load_state_dict(kept)

    def detach(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self._sums.clear()  # the functions refer to shared memory
        for number, bucket in enumerate(self.buckets):
            self._lane(number).algorithm.release(bucket.flat)
        for lane in self.lanes:
            if lane.thread is not None:
                lane.thread.close()
            close_algorithm(lane.algorithm)
            if lane.group is not self.replica.dp:
                lane.group.close()

    # Lanes and compression

    def overlap_pays(self, dp: Group) -> bool:
        """Return True if gradients are summed during the backward pass.

        Ranks on one host share the host's cores, so communication during the backward pass would slow the computation.
        """
        return dp.spans_hosts or (is_accelerator(dp.device) and self.compress == "none")

    def tell(self, why: str) -> None:
        """Record how gradients are summed, unless the rule uses the default."""
        dp = self.replica.dp
        if not dp.spans_hosts and self.algorithm_name == "auto":
            return
        if self.overlap and is_accelerator(dp.device):
            why = f"{dp.transport.name} sums while the backward pass computes"
            if self.algorithm_name != "auto":
                why += f"; {self.algorithm_name} is for a divided model or a codec"
        self.replica.log(f"sync=allreduce: {why}")

    def coder(self, codec: str, lane: Lane, number: int) -> SumCoder:
        """Create the compressor of a lane; `number` is the seed of its random rounding."""
        from paceline.sync.compress import Compressor  # most runs do not need it

        return Compressor(codec, lane.group, lane.traffic, seed=number)

    def lanes_over(self, dp: Group) -> tuple[list[Lane], str]:
        """Create the lanes that sum the buckets, and return the reason for their algorithm.

        The method reads `overlap`. A sum ends with a wait for its slowest message. With two lanes, one lane can use the
        link while the other lane waits.
        """
        if not self.overlap or is_accelerator(dp.device):
            algorithm, why = algorithm_for(dp, self.algorithm_name)
            return [Lane(dp, algorithm, self.replica.traffic)], why
        first, second = dp.copy(), dp.copy()
        algorithm, why = algorithm_for(first, self.algorithm_name)
        dp.links = second.links = first.links  # measured only once
        lanes = [Lane(first, algorithm), Lane(second, algorithm_for(second, self.algorithm_name)[0])]
        for number, lane in enumerate(lanes):
            lane.thread = CommThread(f"paceline-sync-{number}")
        return lanes, why

    def _prepare_dry_run(self) -> None:
        """Use uncompressed, flat sums in a dry run.

        A dry run has no links to other ranks to measure, and no values to compress.
        """
        if self.compress != "none":
            self.replica.log(
                f"compress={self.compress}: not part of a dry run; bytes sent along dp are counted without it"
            )
        self.algorithm_name, self.compress = "flat", "none"

    def _compress_by(self, codec: str) -> None:
        for number, lane in enumerate(self.lanes):
            lane.compressor = None if codec == "none" else self.coder(codec, lane, number)

    def _choose(self) -> None:
        assert self.choice is not None
        before = self.choice.codec
        codec = self.choice.step_done()
        if codec != before:
            self._compress_by(codec)
        if self.choice.decided:
            self.replica.log(self.choice.message)

    # One bucket

    def _collect(self, bucket: Bucket, i: int, parameter: Tensor) -> None:
        self._check_by_the_engine(parameter)
        if self.replica.backward.gradients != "collected":
            return
        if bucket.pending is not None:
            raise SyncError(
                "ranks.second_gradient",
                "a parameter got a second gradient after its bucket had been sent (re-entrant activation "
                "checkpointing causes this). Use torch.utils.checkpoint with use_reentrant=False.",
            )
        bucket.take(i, parameter)
        if self.overlap and self.replica.backward.last:
            bucket.whole.add(i)
            self._begin_full_buckets()

    def _check_by_the_engine(self, parameter: Tensor) -> None:
        if self.replica.backward.gradients == "refused":
            raise not_by_the_engine()

    def _between_hosts(self) -> int:
        """Return the bucket size for the slower links between hosts; sending starts earlier."""
        own = sum(p.numel() * p.element_size() for p in self.parameters if p not in self.replica.rows)
        return int(bucket_bytes_between_hosts(own))

    def _sum_rows(self) -> list[Tensor]:
        only, dp = self.replica.backward.only, self.replica.dp
        tables = [p for p in self.rows if only is None or p in only]
        if not tables:
            return []
        with self.rows_traffic.counting(dp):
            return sum_rows(tables, dp)

    def _begin_full_buckets(self) -> None:
        """Send full buckets in bucket order.

        Every rank must start the same collectives in the same order, even if its gradients are ready in another order.
        The last bucket is not sent here, because it contains the scalars, which are complete only after the backward
        pass.
        """
        for number, bucket in enumerate(self.buckets[:-1]):
            if bucket.pending is None and not self._left_out(bucket):
                if len(bucket.whole) < len(bucket.parameters):
                    return
                bucket.fill()
                self._begin(number)

    def _left_out(self, bucket: Bucket) -> bool:
        """Return True if no rank's backward pass has gradients for this bucket."""
        only = self.replica.backward.only
        return only is not None and bool(bucket.parameters) and only.isdisjoint(bucket.parameters)

    def _begin(self, number: int) -> None:
        """Start to sum a bucket during the backward pass; `bucket.pending` waits for the result."""
        bucket, lane = self.buckets[number], self._lane(number)
        if lane.thread is not None:
            bucket.pending = lane.thread.start(partial(self._sum, number))
            return
        with lane.counting(bucket):
            bucket.pending = lane.group.start_all_reduce(bucket.flat)

    def _sum(self, number: int) -> None:
        bucket, lane = self.buckets[number], self._lane(number)
        if lane.compressor is not None:  # the scalars that follow the gradients are summed exactly
            lane.compressor.sum(f"bucket{number}", bucket.flat, bucket.views)
            return
        before = lane.group.sent_bytes
        self._sums[number]()
        lane.traffic.add(lane.group.sent_bytes - before, ring_bytes(bucket.flat.nbytes, lane.group.size))

    def _lane(self, number: int) -> Lane:
        return self.lanes[number % len(self.lanes)]


@dataclass
class Lane:
    """Communication lane that sums some of the buckets, in the same order on every rank.

    Attributes:
        traffic: counters of the bytes that this lane sends.
        compressor: compressor of the buckets; None sends uncompressed buckets.
        thread: thread that runs the sums during the backward pass; `group` is then a copy that only this thread uses.
    """

    group: Group
    algorithm: Algorithm
    traffic: Traffic = field(default_factory=Traffic)
    compressor: SumCoder | None = None
    thread: CommThread | None = None

    def prepared_sum(self, bucket: Bucket) -> Callable[[], None]:
        """Return a function that sums a bucket exactly."""
        if self.algorithm is self.group:
            return self.group.prepared_sum(bucket.flat)
        return partial(self.algorithm.all_reduce, bucket.flat)

    def counting(self, bucket: Bucket) -> AbstractContextManager[None]:
        """Count the bytes that an exact sum sends and a ring would send."""
        return self.traffic.counting(self.group, ring_bytes(bucket.flat.nbytes, self.group.size))


def _bucketize(replica: Replica, memories: Sequence[Algorithm], limit_bytes: int | None) -> list[Bucket]:
    """Assign parameters to buckets in reverse order, roughly the order of their gradients.

    The last bucket also contains the scalars.
    """
    groups: list[list[nn.Parameter]] = []
    size = 0

    def fits(parameter: nn.Parameter, nbytes: int) -> bool:
        last = groups[-1][0]
        same_kind = last.dtype == parameter.dtype and replica.owner.get(last) == replica.owner.get(parameter)
        return same_kind and not (limit_bytes and size + nbytes > limit_bytes)

    backwards = [p for p in replica.trainable[::-1] if p not in replica.rows]
    for parameter in sorted(backwards, key=lambda p: replica.owner.get(p, -1)):
        nbytes = parameter.numel() * parameter.element_size()
        if not groups or not fits(parameter, nbytes):
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += nbytes
    if not groups or groups[-1][0].dtype not in (torch.float32, torch.float64):
        groups.append([])  # half precision would round the scalars, so the scalars get a separate bucket
    return [
        Bucket.of(group, memories[i % len(memories)], replica.scalar_count if group is groups[-1] else 0)
        for i, group in enumerate(groups)
    ]
