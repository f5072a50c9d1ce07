"""Parameter server, synchronous: servers sum what all replicas push, and every replica gets the sum (Li et al., 2014).

Bounded staleness and asynchronous updates, for which servers own the parameters, are in `training/served/`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.comm.allreduce.algorithms import Algorithm
from paceline.comm.group import Group
from paceline.device import is_accelerator
from paceline.sync.allreduce import AllReduce, BucketStream
from paceline.sync.compress.alone import Feedback
from paceline.sync.diloco import DiLoCo
from paceline.sync.rule import Reduction
from paceline.sync.traffic import Traffic
from paceline_server.sync.server_sum import ServerSum


class ServerSums(AllReduce):
    """Push the gradients of every replica to servers, and get their sums from them.

    The result is that of `allreduce`, in buckets that are pushed while the backward pass goes on where replicas are on
    several hosts. The servers are threads of the first `servers` replicas' ranks, each with a part of every bucket, and
    end with them: what a lost rank has served is served by the ranks of the next generation.

    Args:
        servers: how many share the sums. Other arguments are those of the rule's other forms.
        compress: code of what replicas push; the sums come back as they are.
    """

    def __init__(self, *, servers: int, compress: str = "none", **_: object) -> None:
        super().__init__(compress=compress)
        self.servers = servers

    def overlap_pays(self, dp: Group) -> bool:
        return dp.spans_hosts and not is_accelerator(dp.device)

    def streams_over(self, dp: Group) -> list[BucketStream]:
        if dp.is_fake:
            return super().streams_over(dp)
        return [ServerStream(dp, self.servers, self.compress, own_thread=self.overlap)]

    def after_backward(self, step: int, scalars: Tensor) -> Reduction:
        agreement = super().after_backward(step, scalars)
        self.replica.traffic.become(stream.traffic for stream in self.streams)
        return agreement

    def tell(self, why: str) -> None:
        self.replica.log(f"sync=server: {why}")


class ServerStream(BucketStream):
    """Sums buckets on servers."""

    algorithm: ServerSum

    def __init__(self, group: Group, servers: int, compress: str, *, own_thread: bool) -> None:
        self.servers, self.compress = servers, compress
        super().__init__(group, "server", own_thread=own_thread)

    def algorithm_over(self, group: Group, name: str) -> Algorithm:
        return ServerSum(group, self.servers, self.compress)

    def compress_by(self, codec: str) -> None:
        self.compressor = None if codec == "none" else CodedSums(codec, self.algorithm, self.traffic)


class CodedSums:
    """Sums on servers of tensors that ranks code before they push them.

    Its methods are those of a `Compressor`.
    """

    def __init__(self, codec: str, algorithm: ServerSum, traffic: Traffic) -> None:
        self.algorithm, self.traffic = algorithm, traffic
        self.messages: list[str] = []
        self._code = Feedback(codec, seed=algorithm.group.rank, traffic=traffic)

    def sum(self, name: str, flat: Tensor, views: Sequence[Tensor]) -> None:
        """Replace `flat` by its sum over the ranks; what follows the views is summed exactly."""
        numel = sum(view.numel() for view in views)
        with self.traffic.counting(self.algorithm.group, flat.nbytes):
            self.algorithm.coded_sum(name, flat, numel, self._code)

    def state_dict(self) -> dict[str, Tensor]:
        """Error feedback and random state of this rank."""
        return self._code.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over what `state_dict` gave."""
        self._code.load_state_dict(state)


class ServerDeltas(DiLoCo):
    """Push the change of the parameters in `period` steps, and take the outer step.

    The rule is `diloco` with its sums made on servers.
    """

    algorithm: ServerSum | Group

    def __init__(
        self, *, period: int, servers: int, lr: float, momentum: float, compress: str = "none", **_: object
    ) -> None:
        super().__init__(period, fragments=1, overlap=0, lr=lr, momentum=momentum, compress=compress)
        self.servers = servers

    def algorithm_over(self, group: Group) -> Algorithm:
        return ServerSum(group, self.servers, self.compress)

    def compressed(self, codec: str) -> CodedSums:
        assert isinstance(self.algorithm, ServerSum), "there are several replicas"
        return CodedSums(codec, self.algorithm, self.replica.traffic)

    def sum(self, tensor: Tensor) -> None:
        with self.replica.traffic.counting(self.group):
            self.algorithm.all_reduce(tensor)
