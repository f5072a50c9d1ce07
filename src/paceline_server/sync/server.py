"""The forms of the sync rule `server` (Li et al., 2014).

Without a staleness, servers sum the pushes of all replicas and return the sum (`ServerSums`, or with a period
`ServerDeltas`). With a staleness (Ho et al., 2013), servers own the parameters and the optimizer, and take a step for
every push. `Served` and `ServedDeltas` are then the worker's side, and `paceline_server/training` has the workers'
loop.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.cluster.machine import own_address
from paceline.comm.allreduce import Algorithm, OwnAllReduce
from paceline.comm.comm_thread import CommThread, Task
from paceline.comm.group import Group, Op
from paceline.comm.shm.process_group import SharedMemory
from paceline.device import is_accelerator
from paceline.errors import ChannelError, LaunchError, PlanError, ServerLost, ServerRefused, SyncError
from paceline.files import scratch_folder
from paceline.rank_environment import RankEnvironment, is_our_rank
from paceline.sync.allreduce import AllReduce, Lane
from paceline.sync.compress.alone import Feedback, decoder
from paceline.sync.diloco import DiLoCo
from paceline.sync.rows import numbers_of
from paceline.sync.rule import Reduction, Replica, SyncRule, Traffic
from paceline.wire.key import RunKey, name_of, own_key
from paceline.wire.status import GenerationOver, generation_is_over, generations_are_watched
from paceline_server.client import place_of
from paceline_server.parameters.client import ServerClient
from paceline_server.parameters.process import ParameterServer
from paceline_server.parameters.settings import ServerSettings, TensorSpec


class ServerSums(AllReduce):
    """Sync rule that sums the gradients of all replicas on servers.

    The result equals the result of `allreduce`. The ranks of the first `servers` replicas are the servers, and each
    server sums a part of every bucket. If all replicas share memory, a server sums in shared memory while its replica
    waits. Otherwise, buckets are pushed to threads of the servers' ranks. Between CPUs of several hosts, the pushes
    overlap the backward pass. A server ends with its rank. If the rank is lost, the ranks of the next generation take
    over the server's part.

    Args:
        servers: number of servers.
        compress: codec of pushes. Sums are returned uncompressed.
    """

    def __init__(self, *, servers: int, compress: str = "none", **_: object) -> None:
        super().__init__(compress=compress)
        self.servers = servers

    def overlap_pays(self, dp: Group) -> bool:
        return dp.spans_hosts and not is_accelerator(dp.device)

    def lanes_over(self, dp: Group) -> tuple[list[Lane], str]:
        if dp.is_fake:
            return super().lanes_over(dp)
        servers = server_sum(dp, self.servers, self.compress)
        thread = CommThread("paceline-sync-0") if self.overlap else None
        why = f"{servers.servers} of {dp.size} ranks serve{servers.how}"
        return [Lane(dp, servers, self.replica.traffic, thread=thread)], why

    def coder(self, codec: str, lane: Lane, number: int) -> CodedSums:
        assert isinstance(lane.algorithm, ServerSum)
        return CodedSums(codec, lane.algorithm, lane.traffic)

    def tell(self, why: str) -> None:
        self.replica.log(f"sync=server: {why}")


class CodedSums:
    """Sums on servers for tensors that ranks encode before the push.

    The interface is the same as for a `Compressor`.
    """

    def __init__(self, codec: str, algorithm: ServerSum, traffic: Traffic) -> None:
        self.algorithm, self.traffic = algorithm, traffic
        self.messages: list[str] = []
        self._code = Feedback(codec, seed=algorithm.group.rank, traffic=traffic)

    def sum(self, name: str, flat: Tensor, views: Sequence[Tensor]) -> None:
        """Replace `flat` with its sum over the ranks. Values after the views are summed exactly."""
        numel = sum(view.numel() for view in views)
        with self.traffic.counting(self.algorithm.group, flat.nbytes):
            self.algorithm.coded_sum(name, flat, numel, self._code)

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's error feedback and random state."""
        return self._code.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load a state that `state_dict` returned."""
        self._code.load_state_dict(state)


class ServerDeltas(DiLoCo):
    """Sync rule that sums parameter changes of `period` steps, and takes the outer step.

    This is the rule `diloco` with sums on servers.
    """

    def __init__(
        self, *, period: int, servers: int, lr: float, momentum: float, compress: str = "none", **_: object
    ) -> None:
        super().__init__(period, fragments=1, overlap=0, lr=lr, momentum=momentum, compress=compress)
        self.servers = servers

    def algorithm_over(self, group: Group) -> Algorithm:
        return server_sum(group, self.servers, self.compress)

    def compressed(self, codec: str) -> CodedSums:
        assert isinstance(self.algorithm, ServerSum), "there are several replicas"
        return CodedSums(codec, self.algorithm, self.replica.traffic)

    def sum(self, tensor: Tensor) -> None:
        with self.replica.traffic.counting(self.group):
            self.algorithm.all_reduce(tensor)


def server_sum(group: Group, servers: int, compress: str = "none") -> ServerSum:
    """Create the sums on servers, in shared memory if all ranks share memory.

    Every rank of the group must call this.

    Args:
        compress: codec of the pushes of `coded_sum`.
    """
    kind = MemorySum if isinstance(group.transport, SharedMemory) else ServiceSum
    return kind(group, min(servers, group.size), compress)


class ServerSum(OwnAllReduce):
    """All-reduce through servers in the group's first ranks.

    Each server sums a part of every tensor, so all ranks get bit-equal results.

    Attributes:
        servers: number of servers.
        how: where the servers sum, for the run's record.
    """

    name = "server"
    how = ""

    def __init__(self, group: Group, servers: int, compress: str) -> None:
        super().__init__(group)
        self.servers, self.compress = servers, compress

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        """Replace `tensor` on every rank with the sum or mean over the ranks.

        Raises:
            SyncError: a rank did not arrive, or a server is lost.
        """
        if op == "max":
            raise SyncError("server.no_maxima", "servers can compute sums and means, but not maxima")
        flat = tensor.detach().contiguous().view(-1)
        flat = flat.cpu() if is_accelerator(flat.device) else flat
        self.sum_parts(flat, [None] * self.servers)
        self.group.count(tensor.nbytes, reduced_bytes=tensor.nbytes)
        if op == "mean":
            flat.div_(self.group.size)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat.view(tensor.shape))

    def coded_sum(self, name: str, flat: Tensor, numel: int, code: Feedback) -> None:
        """Replace `flat` on every rank with its sum, with encoded pushes.

        The first `numel` numbers are encoded. Sums are returned uncompressed.

        Args:
            name: name of the tensor, for error feedback.

        Raises:
            SyncError: a rank did not arrive, or a server is lost.
        """
        # servers add encoded numbers as fp32; numbers that are not finite are not encoded
        numbers = flat[:numel].to("cpu", torch.float32, copy=True)
        tail = flat[numel:].to("cpu", copy=True)
        parts = numbers.tensor_split(self.servers)
        coded = [code.encode(f"{name}.{i}", part) for i, part in enumerate(parts)]
        self.sum_parts(numbers, coded)
        self.sum_parts(tail, [None] * self.servers)
        flat[:numel].copy_(numbers)
        flat[numel:].copy_(tail)
        sent_bytes = tail.nbytes + sum(
            part.nbytes if one is None else one.nbytes for part, one in zip(parts, coded, strict=True)
        )
        self.group.count(sent_bytes, reduced_bytes=flat.nbytes)

    def sum_parts(self, flat: Tensor, coded: Sequence[Tensor | None]) -> None:
        """Replace a flat tensor with its sum over the ranks.

        Args:
            coded: the encoded part for each server; None for a part that is not encoded.
        """
        raise NotImplementedError


class MemorySum(ServerSum):
    """Sums on servers in the shared memory of a host.

    Nothing is pushed or pulled. Each server reads its part of every rank's tensor and writes the sum, while the other
    ranks wait. Small tensors are summed by every rank.
    """

    how = " in shared memory"

    def __init__(self, group: Group, servers: int, compress: str) -> None:
        super().__init__(group, servers, compress)
        self._decode = None if compress == "none" else decoder(compress)
        self._memory = group.copy()  # in this group, only the servers sum large tensors
        assert isinstance(self._memory.transport, SharedMemory)
        self._memory.transport.reduce_on(servers)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._memory.empty(numel, dtype)

    def release(self, tensor: Tensor) -> None:
        self._memory.release(tensor)

    def sum_parts(self, flat: Tensor, coded: Sequence[Tensor | None]) -> None:
        for part, one in zip(flat.tensor_split(self.servers), coded, strict=True):
            if one is not None and self._decode is not None:
                part.copy_(self._decode(one, part.numel()))
        self._memory.all_reduce(flat)

    def close(self) -> None:
        """Release the shared memory."""
        self._memory.close()


_LEAVE_S = 5.0
_LOOK_S = 0.05  # interval at which a wait checks if the generation has ended
_SUMS_OF_A_RANK = 2  # maximum number of concurrent sums
_sockets = count()  # numbers for the sums of this process


class ServiceSum(ServerSum):
    """Sums on servers in threads of the group's first ranks.

    All ranks push to the servers, and each server adds in rank order.
    """

    def __init__(self, group: Group, servers: int, compress: str) -> None:
        super().__init__(group, servers, compress)
        self._held = ExitStack()
        self._numbers = count()
        # only another thread can cancel a sum for which other ranks do not arrive
        self._beside = CommThread("paceline-sums") if generations_are_watched() else None
        with self._held as held:
            key = _key_of(group)
            own = self._serve(group, key) if group.rank < servers else None
            addresses = [address for address in group.gather_json(own) if address is not None]
            self.client = held.enter_context(_client(group, addresses, key))
            self._held = held.pop_all()

    def sum_parts(self, flat: Tensor, coded: Sequence[Tensor | None]) -> None:
        number = next(self._numbers)
        try:
            if self._beside is None:
                self._sum(number, flat, coded)
            else:
                self._wait(self._beside.start(partial(self._sum, number, flat, coded)))
        except GenerationOver:
            raise
        except (ChannelError, ServerLost, ServerRefused) as error:
            if generation_is_over():
                raise GenerationOver(
                    "server.sum_interrupted", "rank {rank}: a sum on the servers was interrupted", rank=self.group.rank
                ) from error
            raise SyncError(
                "server.sum_failed",
                "rank {rank}: sum {number} on the servers failed: {error}",
                rank=self.group.rank,
                number=number,
                error=error,
            ) from error

    def close(self) -> None:
        """Leave the servers, and end this rank's server."""
        self._held.close()
        if self._beside is not None:
            self._beside.close()

    def _sum(self, number: int, flat: Tensor, coded: Sequence[Tensor | None]) -> None:
        place = {"index": self.group.rank, "members": self.group.size}
        begun = [
            self.client.begin_sum(number, part, **place, bucket=i, coded=one)
            for i, (part, one) in enumerate(zip(flat.tensor_split(self.servers), coded, strict=True))
            if part.numel()
        ]
        for result in begun:
            result()

    def _wait(self, task: Task) -> None:
        """Wait for sums, or until the generation ends."""
        while not task.done.wait(_LOOK_S):
            if generation_is_over():
                self.client.close()
                raise GenerationOver(
                    "server.sum_interrupted", "rank {rank}: a sum on the servers was interrupted", rank=self.group.rank
                )
        task.wait()

    def _serve(self, group: Group, key: RunKey | None) -> str:
        """Start a server in threads of this process, and return its address."""
        where: tuple[str, int] | Path
        if group.spans_hosts:
            where = own_address(), 0
        else:
            where = self._socket()
        threads = 2 * _SUMS_OF_A_RANK * group.size + 8
        decode = None if self.compress == "none" else decoder(self.compress)
        server = self._held.enter_context(
            ParameterServer(
                where,
                key,
                _settings(self.servers),
                part=group.rank,
                servers=self.servers,
                threads=threads,
                decode=decode,
            )
        )
        self._held.callback(_await_leave, server)
        return name_of(server.address)

    def _socket(self) -> Path:
        """Choose a socket in the launcher's folder, which remains after a rank is killed."""
        error_file = RankEnvironment.from_env().error_file if is_our_rank() else None
        if error_file is None:
            return self._held.enter_context(scratch_folder()) / "server"
        return error_file.with_name(f"sums-{os.getpid()}-{next(_sockets)}")


def _await_leave(server: ParameterServer) -> None:
    """Wait a limited time until all clients leave, because they may still expect answers."""
    until = time.monotonic() + _LEAVE_S
    while server.callers and time.monotonic() < until and not generation_is_over():
        time.sleep(0.005)


def _client(group: Group, places: list[str], key: RunKey | None) -> ServerClient:
    return ServerClient(
        [[place_of(text)] for text in places],
        key,
        name=f"rank {group.rank}",
        settings=_settings(len(places)),
        deadline_s=group.deadline_s,
    )


def _settings(servers: int) -> ServerSettings:
    return ServerSettings(tensors=(TensorSpec("nothing", (servers,)),), optimizer={"name": "sgd"})


def _key_of(group: Group) -> RunKey | None:
    """Return the run's key, which connections between hosts require; None within a host.

    Raises:
        LaunchError: this process has no key.
    """
    if not group.spans_hosts:
        return None
    if (key := own_key()) is None:
        raise LaunchError(
            "server.no_key",
            "sync=server between hosts needs the run's key, but this process has none. Start the hosts with "
            "paceline train, or create a key file with `paceline key` and pass it to all of them "
            "(PACELINE_KEY_FILE).",
        )
    return key


class Served(SyncRule):
    """Sync rule with local gradients, which the workers' loop pushes to servers.

    A worker's group contains only its own ranks, so it shares no collectives with other workers.

    Attributes:
        has_servers: True once the workers' loop has servers for this rule.
    """

    def __init__(self, **_: object) -> None:
        self.has_servers = self._is_dry = False

    def attach(self, replica: Replica) -> None:
        self._is_dry = replica.world.is_fake
        if not self._is_dry and replica.dp.size > 1:
            raise PlanError(
                "server.staleness_in_loop",
                "under sync=server with a staleness, servers own the parameters and workers take parts of the "
                "batches when they are ready, which works only in paceline train. Use sync=server, with which all "
                "replicas take every step together.",
            )
        self.parameters = replica.trainable

    def step_optimizer(self, optimizer: Optimizer) -> None:
        if not self.has_servers and not self._is_dry:
            raise PlanError(
                "server.staleness_without_servers",
                "sync=server with a staleness uses separate server processes, which only paceline train starts",
            )

    def after_backward(self, step: int, scalars: Tensor) -> Reduction:
        return Reduction(numbers_of(self.parameters), scalars)


class ServedDeltas(Served):
    """Sync rule with rounds of local steps, whose change the workers' loop pushes.

    Servers take the outer step (DiLoCo: Douillard et al., 2023, arXiv:2311.08105) on each push. Between rounds, a
    worker keeps the state of its optimizer.

    Attributes:
        outer: state of the servers' optimizer at the last boundary, by parameter name; set only on the first worker.
    """

    def __init__(self, **arguments: object) -> None:
        super().__init__(**arguments)
        self.outer: dict[str, dict[str, Tensor]] = {}

    def step_optimizer(self, optimizer: Optimizer) -> None:
        super().step_optimizer(optimizer)
        if self.has_servers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {f"{key}/{name}": value for name, state in self.outer.items() for key, value in state.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.outer = {}
        for full, value in state.items():
            key, _, name = full.partition("/")
            self.outer.setdefault(name, {})[key] = value
