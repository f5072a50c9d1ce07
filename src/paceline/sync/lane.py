"""The way of buckets over the network: one after the other on connections of their own, beside the computation or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.cluster.doctor.link_speed import Links
from paceline.comm.allreduce.algorithms import Algorithm, Auto, algorithm_for
from paceline.comm.bucket import Bucket
from paceline.comm.group import Group
from paceline.comm.worker import Worker
from paceline.sync.traffic import Traffic

if TYPE_CHECKING:
    from paceline.sync.compress import Compressor


class Lane:
    """Sums buckets over a group, in the order in which they come, which is the same on every rank.

    A sum ends with a wait for its slowest message. Where two lanes share a link, the buckets of one fill the pauses of the other.

    Args:
        group: of the ranks that add up.
        name: of the algorithm.
        beside: whether the lane has a thread of its own, and the group is a copy that it closes at its end.
        number: tells lanes apart; the random numbers of each are its own.
        links: measured before; None has `auto` measure them.

    Attributes:
        compressor: what codes the buckets; None sends them as they are.
        traffic: what went over this lane.
    """

    def __init__(self, group: Group, name: str, *, beside: bool, number: int = 0, links: Links | None = None) -> None:
        self.group, self.number, self.traffic = group, number, Traffic()
        self.algorithm: Algorithm = algorithm_for(group, name, links)
        self.compressor: Compressor | None = None
        self._worker = Worker(f"paceline-sync-{number}") if beside else None

    @property
    def links(self) -> Links | None:
        """How fast the links between hosts are, where `auto` has measured them."""
        return self.algorithm.links if isinstance(self.algorithm, Auto) else None

    def compress_by(self, codec: str) -> None:
        """Use this codec from now on; "none" sends buckets as they are."""
        from paceline.sync.compress import Compressor  # most runs do without

        self.compressor = None if codec == "none" else Compressor(codec, self.group, self.traffic, seed=self.number)

    def begin(self, bucket: Bucket, name: str) -> None:
        """Start to sum a bucket; its `pending` tells when it is done."""
        if self._worker is not None:
            bucket.pending = self._worker.start(lambda: self.sum(bucket, name))
            return
        before = self.group.sent_bytes
        bucket.send(self.group)
        self._count(bucket, before)

    def sum(self, bucket: Bucket, name: str) -> None:
        """Sum a bucket, now. `name` is what error feedback is kept under."""
        if self.compressor is not None:
            self.compressor.sum(name, bucket.flat, bucket.views)  # what follows the gradients is summed exactly
            return
        before = self.group.sent_bytes
        self.algorithm.all_reduce(bucket.flat)
        self._count(bucket, before)

    def close(self) -> None:
        """End the thread and what was made for this lane; the memory of its buckets is released before."""
        if self._worker is not None:
            self._worker.close()
        self.algorithm.close()
        if self._worker is not None:
            self.group.close()

    def _count(self, bucket: Bucket, before: int) -> None:
        """What an exact sum sent, and what a ring sends at least."""
        size = self.group.size
        self.traffic.sent_bytes += self.group.sent_bytes - before
        self.traffic.plain_bytes += 2 * (size - 1) * bucket.flat.nbytes // size
