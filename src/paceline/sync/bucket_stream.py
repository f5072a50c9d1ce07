"""Streams that send buckets in order over connections of their own, also during computation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.cluster.doctor.link_speed import GroupLinks
from paceline.comm.allreduce.algorithms import Algorithm, Auto, algorithm_for
from paceline.comm.bucket import Bucket
from paceline.comm.comm_thread import CommThread
from paceline.comm.group import Group
from paceline.sync.traffic import Traffic

if TYPE_CHECKING:
    from paceline.sync.compress import Compressor


class BucketStream:
    """Sums buckets over a group in the order of arrival, the same on every rank.

    A sum ends with a wait for its slowest message. Where two streams share a link, the buckets of one fill the pauses
    of the other.

    Args:
        group: the ranks that sum.
        name: name of the all-reduce algorithm.
        own_thread: True for a stream with its own thread; the group is then a copy, which `close` ends.
        number: tells streams apart; the random numbers of each are its own.
        links: measured before; None has `auto` measure them.

    Attributes:
        compressor: codec of the buckets; None sends them as they are.
        traffic: bytes sent by this stream.
    """

    def __init__(
        self, group: Group, name: str, *, own_thread: bool, number: int = 0, links: GroupLinks | None = None
    ) -> None:
        self.group, self.number, self.traffic = group, number, Traffic()
        self.algorithm: Algorithm = algorithm_for(group, name, links)
        self.compressor: Compressor | None = None
        self._thread = CommThread(f"paceline-sync-{number}") if own_thread else None

    @property
    def links(self) -> GroupLinks | None:
        """Speed of the links between hosts, if `auto` has measured them."""
        return self.algorithm.links if isinstance(self.algorithm, Auto) else None

    def compress_by(self, codec: str) -> None:
        """Use this codec from now on; "none" sends buckets as they are."""
        from paceline.sync.compress import Compressor  # most runs do without

        self.compressor = None if codec == "none" else Compressor(codec, self.group, self.traffic, seed=self.number)

    def begin(self, bucket: Bucket, name: str) -> None:
        """Start to sum a bucket; its `pending` tells when it is done."""
        if self._thread is not None:
            bucket.pending = self._thread.start(lambda: self.sum(bucket, name))
            return
        before = self.group.sent_bytes
        bucket.send(self.group)
        self._count(bucket, before)

    def sum(self, bucket: Bucket, name: str) -> None:
        """Sum a bucket now. `name` is the key of its error feedback."""
        if self.compressor is not None:
            self.compressor.sum(name, bucket.flat, bucket.views)  # what follows the gradients is summed exactly
            return
        before = self.group.sent_bytes
        self.algorithm.all_reduce(bucket.flat)
        self._count(bucket, before)

    def close(self) -> None:
        """End the thread and free this stream's resources, after the buckets' memory was released."""
        if self._thread is not None:
            self._thread.close()
        self.algorithm.close()
        if self._thread is not None:
            self.group.close()

    def _count(self, bucket: Bucket, before: int) -> None:
        """Count what an exact sum sent, and what a ring sends at least."""
        size = self.group.size
        self.traffic.sent_bytes += self.group.sent_bytes - before
        self.traffic.plain_bytes += 2 * (size - 1) * bucket.flat.nbytes // size
