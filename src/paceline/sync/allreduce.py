"""Replicated data parallelism: the gradients of all replicas are summed in every step.

The bucketing follows Li et al., 2020, "PyTorch Distributed" (arXiv:2006.15704): gradients gather in flat buckets in the
order in which the backward pass makes them, and a full bucket is sent while the remaining gradients are computed, where
that pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.comm.allreduce.algorithms import Algorithm, algorithm_for
from paceline.comm.bucket import Bucket, CommThread, Memory
from paceline.comm.group import Group
from paceline.device import is_accelerator
from paceline.errors import SyncError
from paceline.planning.sync_info import bucket_bytes_between_hosts
from paceline.sync.rows import numbers_of, sum_rows
from paceline.sync.rule import Reduction, Replica, SyncRule, Traffic, broadcast_state, not_by_the_engine, ring_bytes

if TYPE_CHECKING:
    from paceline.sync.compress import CodecChooser, SumCoder

BUCKET_BYTES = 25 * 2**20  # on accelerators: DDP's default; large enough for bandwidth, small enough to start early


class AllReduce(SyncRule):
    """Sum the gradients of all replicas after every backward pass.

    Gradients are moved into flat buckets as the backward pass makes them, so a rank never holds them twice. A parameter
    that no replica used keeps `grad=None`, as in a single process. With gradient accumulation only the last backward
    pass communicates.

    Args:
        algorithm: how a sum is made (see `paceline.comm.allreduce.algorithms`): flat, ring, hierarchical, or auto.
        compress: what is sent of the gradients (see `paceline.sync.compress`): none, a codec, or auto. Losses and votes
            go as they are.
    """

    def __init__(self, algorithm: str = "auto", compress: str = "none") -> None:
        self.algorithm_name, self.compress = algorithm, compress
        self.buckets: list[Bucket] = []
        self.hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.streams: list[BucketStream] = []
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
        self.streams = self.streams_over(dp)
        first = self.streams[0]
        # several streams each have a count of their own
        self.rows_traffic = replica.traffic if len(self.streams) == 1 else Traffic()
        limit = (BUCKET_BYTES if accelerated else self._between_hosts()) if self.overlap else None
        self.buckets = _bucketize(replica, [stream.algorithm for stream in self.streams], limit)
        self.scalars = _scalars(self.buckets[-1], replica.scalar_count)
        if not dp.is_fake:
            self.tell(first.algorithm.why)
        if self.compress == "auto":
            from paceline.sync.compress import CodecChooser

            self.choice = CodecChooser(first.algorithm, [(b.flat, b.views) for b in self.buckets])
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
            return Reduction(numbers_of(self.parameters), scalars)
        if scalars is not self.scalars:
            self.scalars.copy_(scalars)
        summed = [number for number, bucket in enumerate(self.buckets) if not self._left_out(bucket)]
        for number in summed:
            bucket = self.buckets[number]
            if bucket.pending is None:
                bucket.take_all()  # all of them, or those of earlier passes that the last one did not reach
                bucket.fill()
                if self.overlap:
                    self._begin(number)
                else:
                    self._stream(number).sum(bucket, _name(number))
        rows = self._sum_rows()
        for bucket in self.buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
        for number in summed:
            self.buckets[number].hand_out()
        if len(self.streams) > 1:
            replica.traffic.become([self.rows_traffic, *(stream.traffic for stream in self.streams)])
        if self.choice is not None and not self.choice.decided:
            self._choose()
        for stream in self.streams:
            if stream.compressor is not None and stream.compressor.messages:
                for message in stream.compressor.messages:
                    replica.log(message)
                stream.compressor.messages.clear()
        return Reduction(self.gradients + rows, self.scalars)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for stream in self.streams:
            if stream.compressor is not None:
                state |= {
                    f"lane{stream.number}/{key}": tensor for key, tensor in stream.compressor.state_dict().items()
                }
        if self.choice is not None and self.choice.decided:
            state |= {"auto": self.choice.codec, "replicas": self.replica.dp.size}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        codec = state.get("auto")
        if self.choice is not None and codec is not None and state["replicas"] == self.replica.dp.size:
            self.choice.decide(codec, "As before the run was resumed")
            self.replica.log(self.choice.message)
            self._compress_by(codec)
        for stream in self.streams:
            start = f"lane{stream.number}/"
            kept = {key.removeprefix(start): value for key, value in state.items() if key.startswith(start)}
            if stream.compressor is not None and kept:
                stream.compressor.load_state_dict(kept)

    def detach(self) -> None:
        for hook in self.hooks:
            hook.remove()
        for number, bucket in enumerate(self.buckets):
            self._stream(number).algorithm.release(bucket.flat)
        for stream in self.streams:
            stream.close()

    # What is sent

    def overlap_pays(self, dp: Group) -> bool:
        """True if sums run beside the backward pass.

        Two ranks of one host share their cores: sending while computing only slows the computing there.
        """
        return dp.spans_hosts or (is_accelerator(dp.device) and self.compress == "none")

    def tell(self, why: str) -> None:
        """Note in the record how sums are made, where that is not plain."""
        dp = self.replica.dp
        if not dp.spans_hosts and self.algorithm_name == "auto":
            return
        if self.overlap and is_accelerator(dp.device):
            why = f"{dp.transport.name} sums while the backward pass computes"
            if self.algorithm_name != "auto":
                why += f"; {self.algorithm_name} is for a divided model or a codec"
        self.replica.log(f"sync=allreduce: {why}")

    def streams_over(self, dp: Group) -> list[BucketStream]:
        """The streams that sum the buckets; `overlap` is known."""
        if not self.overlap or is_accelerator(dp.device):
            return [BucketStream(dp, self.algorithm_name, own_thread=False, traffic=self.replica.traffic)]
        first = BucketStream(dp.copy(), self.algorithm_name, own_thread=True)
        dp.links = first.group.links  # measured once
        return [first, BucketStream(dp.copy(), self.algorithm_name, own_thread=True, number=1)]

    def _prepare_dry_run(self) -> None:
        """Use a plain sum in a dry run.

        It has no other ranks to measure and no numbers to code.
        """
        if self.compress != "none":
            self.replica.log(
                f"compress={self.compress}: not part of a dry run; bytes sent along dp are counted without it"
            )
        self.algorithm_name, self.compress = "flat", "none"

    def _compress_by(self, codec: str) -> None:
        for stream in self.streams:
            stream.compress_by(codec)

    def _choose(self) -> None:
        """Report the finished step to `compress=auto` and use the codec that it chooses next."""
        assert self.choice is not None
        before = self.choice.codec
        codec = self.choice.step_done()
        if codec != before:
            self._compress_by(codec)
        if self.choice.decided:
            self.replica.log(self.choice.message)

    # One bucket

    def _collect(self, bucket: Bucket, i: int, parameter: Tensor) -> None:
        """Move a new gradient into its bucket, and send the bucket when it is full."""
        self._check_by_the_engine(parameter)
        if self.replica.backward.gradients != "collected":
            return
        if bucket.pending is not None:
            raise SyncError(
                "a parameter got a second gradient after its bucket had been sent (a re-entrant activation checkpoint "
                "does that); use torch.utils.checkpoint with use_reentrant=False"
            )
        bucket.take(i, parameter)
        if self.overlap and self.replica.backward.last:
            bucket.whole.add(i)
            self._begin_full_buckets()

    def _check_by_the_engine(self, parameter: Tensor) -> None:
        if self.replica.backward.gradients == "refused":
            raise not_by_the_engine()

    def _between_hosts(self) -> int:
        """Bytes of a bucket; links between hosts are slower, so sending begins earlier."""
        own = sum(p.numel() * p.element_size() for p in self.parameters if p not in self.replica.rows)
        return int(bucket_bytes_between_hosts(own))

    def _sum_rows(self) -> list[Tensor]:
        """Sum the sparse gradients, whose few rows are sent as they are."""
        only, dp = self.replica.backward.only, self.replica.dp
        tables = [p for p in self.rows if only is None or p in only]
        if not tables:
            return []
        with self.rows_traffic.counting(dp):
            return sum_rows(tables, dp)

    def _begin_full_buckets(self) -> None:
        """Send full buckets, in bucket order only.

        Every rank must start the same collectives in the same order, whatever it computed first. The last bucket
        carries the scalars, which are complete only after the backward pass.
        """
        for number, bucket in enumerate(self.buckets[:-1]):
            if bucket.pending is None and not self._left_out(bucket):
                if len(bucket.whole) < len(bucket.parameters):
                    return
                bucket.fill()
                self._begin(number)

    def _left_out(self, bucket: Bucket) -> bool:
        """True if the backward pass concerned other buckets' parameters only; the same on all ranks."""
        only = self.replica.backward.only
        return only is not None and bool(bucket.parameters) and only.isdisjoint(bucket.parameters)

    def _begin(self, number: int) -> None:
        """Have a bucket summed while the backward pass goes on."""
        self._stream(number).begin(self.buckets[number], _name(number))

    def _stream(self, number: int) -> BucketStream:
        """The stream of a bucket; streams take the buckets in turn."""
        return self.streams[number % len(self.streams)]


def _name(number: int) -> str:
    return f"bucket{number}"


def _bucketize(replica: Replica, memories: Sequence[Memory], limit_bytes: int | None) -> list[Bucket]:
    """Buckets in reverse order of the parameters, about the order of their gradients.

    The scalars are in the last one.
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
        groups.append([])  # half precision would round the scalars: they get a bucket of their own
    return [
        Bucket.of(group, memories[i % len(memories)], replica.scalar_count if group is groups[-1] else 0)
        for i, group in enumerate(groups)
    ]


def _scalars(bucket: Bucket, count: int) -> Tensor:
    """The engine's numbers, which stand behind the gradients of the last bucket."""
    return bucket.flat[bucket.gradient_size : bucket.gradient_size + count]


class BucketStream:
    """Sums buckets over a group in the order of arrival, the same on every rank.

    A sum ends with a wait for its slowest message. Where two streams share a link, the buckets of one fill the pauses
    of the other.

    Args:
        group: the ranks that sum.
        name: name of the all-reduce algorithm.
        own_thread: True for a stream with its own thread; the group is then a copy, which `close` ends.
        number: tells streams apart; the random numbers of each are its own.
        traffic: where bytes are counted; None for a count of its own.

    Attributes:
        compressor: codec of the buckets; None sends them as they are.
        traffic: bytes sent by this stream.
    """

    def __init__(
        self,
        group: Group,
        name: str,
        *,
        own_thread: bool,
        number: int = 0,
        traffic: Traffic | None = None,
    ) -> None:
        self.group, self.number, self.traffic = group, number, traffic or Traffic()
        self.algorithm: Algorithm = self.algorithm_over(group, name)
        self.compressor: SumCoder | None = None
        self._thread = CommThread(f"paceline-sync-{number}") if own_thread else None

    def algorithm_over(self, group: Group, name: str) -> Algorithm:
        """The all-reduce algorithm of that name over the group."""
        return algorithm_for(group, name)

    def compress_by(self, codec: str) -> None:
        """Use this codec from now on; "none" sends buckets as they are."""
        from paceline.sync.compress import Compressor  # most runs do without

        self.compressor = None if codec == "none" else Compressor(codec, self.group, self.traffic, seed=self.number)

    def begin(self, bucket: Bucket, name: str) -> None:
        """Start to sum a bucket; its `pending` tells when it is done."""
        if self._thread is not None:
            bucket.pending = self._thread.start(lambda: self.sum(bucket, name))
            return
        with self._counting(bucket):
            bucket.send(self.group)

    def sum(self, bucket: Bucket, name: str) -> None:
        """Sum a bucket now. `name` is the key of its error feedback."""
        if self.compressor is not None:
            self.compressor.sum(name, bucket.flat, bucket.views)  # what follows the gradients is summed exactly
            return
        with self._counting(bucket):
            self.algorithm.all_reduce(bucket.flat)

    def close(self) -> None:
        """End the thread and free this stream's resources, after the buckets' memory was released."""
        if self._thread is not None:
            self._thread.close()
        self.algorithm.close()
        if self._thread is not None:
            self.group.close()

    def _counting(self, bucket: Bucket) -> AbstractContextManager[None]:
        """Count what an exact sum sends, and what a ring sends at least."""
        return self.traffic.counting(self.group, ring_bytes(bucket.flat.nbytes, self.group.size))
