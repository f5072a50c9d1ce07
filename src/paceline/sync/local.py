"""Local SGD: replicas average their parameters every `period` steps (Stich, 2019, arXiv:1805.09767)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.allreduce import Algorithm, algorithm_for, close_algorithm
from paceline.comm.group import Group
from paceline.comm.interruption import settle
from paceline.partition import contiguous
from paceline.sync.rule import Reduction, Replica, SyncRule, broadcast_state, ring_bytes


class LocalRule(SyncRule):
    """Base class of rules that synchronize parameters only in some steps.

    Each replica updates with its own gradients and keeps its own optimizer state. Batch-norm statistics are also local;
    evaluations average them.
    """

    identical = True  # True if all replicas have the same parameters now; the same value on all ranks

    def attach(self, replica: Replica) -> None:
        broadcast_state(replica)
        self.replica, self.parameters = replica, replica.trainable
        self.group = self.connections(replica.dp)
        self.algorithm: Algorithm = self.algorithm_over(self.group) if self.group.size > 1 else self.group

    def connections(self, dp: Group) -> Group:
        """Return the group over which the parameters are sent."""
        return dp

    def algorithm_over(self, group: Group) -> Algorithm:
        """Return the all-reduce that sums over the replicas."""
        return algorithm_for(group, "auto")[0]

    def communicates_in(self, step: int) -> bool:
        """Return True if the replicas communicate in a step, at least once per period.

        In these steps, losses and votes are summed as well.
        """
        raise NotImplementedError

    def after_backward(self, step: int, scalars: Tensor) -> Reduction:
        everywhere = self.communicates_in(step)
        if everywhere and len(scalars):
            self.replica.dp.all_reduce(scalars)
        self.identical = False
        return Reduction([p.grad for p in self.parameters if p.grad is not None], scalars, everywhere)

    @contextmanager
    def shared_parameters(self) -> Iterator[None]:
        """Return a context in which every replica has the mean of the replicas' parameters.

        The mean includes the changes since the last exchange. Callers may enter the context after any step.
        """
        self.wait()
        if self.identical:
            yield
            return
        own = [p.detach().clone() for p in self.parameters]
        try:
            for same_dtype in by_dtype(self.parameters):
                # writes through `data` do not change the version counter, by which undo detects writes in forward
                held = [p.data for p in same_dtype]
                flat = FlatParameters.of(held, torch.cat([p.reshape(-1) for p in held]))
                self.sum(flat.values)
                flat.values.div_(self.replica.dp.size)
                flat.copy_out()
            yield
        finally:
            torch._foreach_copy_([p.data for p in self.parameters], own)

    def wait(self) -> None:
        """Wait until no exchange is in flight."""

    def outer_state(self) -> dict[str, Tensor]:
        """Return references to the state that all replicas share, except the parameters."""
        return {}

    def go_on(self, outer: dict[str, Tensor]) -> None:
        """Continue from an earlier `outer_state` with new replicas, whose parameters differ.

        Transfers in flight are dropped. The dropped changes remain in the local parameters and are sent in the next
        exchange.
        """
        self.identical = False

    def sum(self, tensor: Tensor) -> None:
        """Replace a tensor with its sum over the replicas."""
        with self.replica.traffic.counting(self.group, ring_bytes(tensor.nbytes, self.group.size)):
            self.algorithm.all_reduce(tensor)

    def detach(self) -> None:
        close_algorithm(self.algorithm)
        if self.group is not self.replica.dp:
            self.group.close()


@dataclass
class FlatParameters:
    """Parameters and a flat tensor for copies of their values.

    Attributes:
        values: the flat tensor.
        views: views of `values`, one per parameter, each in the parameter's shape.
    """

    parameters: list[Tensor]
    values: Tensor
    views: list[Tensor]

    @classmethod
    def of(cls, parameters: Sequence[Tensor], values: Tensor) -> FlatParameters:
        """Assign a part of `values` to each parameter, in order; the total sizes must match."""
        pieces = values.split([p.numel() for p in parameters])
        return cls(list(parameters), values, [piece.view(p.shape) for piece, p in zip(pieces, parameters, strict=True)])

    @torch.no_grad()
    def copy_in(self) -> None:
        """Copy the parameters into the flat tensor."""
        torch._foreach_copy_(self.views, self.parameters)

    @torch.no_grad()
    def copy_out(self) -> None:
        """Copy the flat tensor to the parameters."""
        torch._foreach_copy_(self.parameters, self.views)

    @torch.no_grad()
    def add(self) -> None:
        """Add the flat tensor to the parameters."""
        torch._foreach_add_(self.parameters, self.views)


def by_dtype(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters by dtype, and keep their order."""
    found: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(parameter.dtype, []).append(parameter)
    return list(found.values())


def cut(parameters: Sequence[nn.Parameter], count: int) -> list[list[nn.Parameter]]:
    """Divide parameters into at most `count` groups of neighbours.

    The largest group is as small as possible. A parameter is never divided, so most layers stay in one group.
    """
    if not parameters:
        return []
    lengths = contiguous([p.nbytes for p in parameters], min(count, len(parameters)))
    left = iter(parameters)
    return [list(islice(left, length)) for length in lengths]


class LocalSGD(LocalRule):
    """Average the parameters over the replicas after every `period` optimizer steps.

    The rule communicates once per `period` steps instead of in every step. The result differs from synchronous SGD, so
    check convergence instead of equality.

    The results are equal only with SGD without momentum, a period of 1, and equal shares of the batch.
    """

    def __init__(self, period: int) -> None:
        self.period = period

    def attach(self, replica: Replica) -> None:
        super().attach(replica)
        self.flats = []
        for alike in by_dtype(self.parameters):
            memory = self.algorithm.empty(sum(p.numel() for p in alike), alike[0].dtype)
            self.flats.append(FlatParameters.of(alike, memory))
        nbytes = sum(flat.values.nbytes for flat in self.flats)
        replica.log(f"sync=local: every rank's {nbytes:,} bytes of parameters are averaged every {self.period} steps")

    def communicates_in(self, step: int) -> bool:
        return step % self.period == 0

    def after_step(self, step: int) -> None:
        if not self.communicates_in(step):
            return
        for flat in self.flats:
            flat.copy_in()
            self.sum(flat.values)
        # parameters change only after all sums have arrived, because the exchange may be aborted
        settle(self.group.device)
        for flat in self.flats:
            flat.values.div_(self.replica.dp.size)
            flat.copy_out()
        self.identical = True

    def state_dict(self) -> dict[str, Any]:
        return {"alike": self.identical}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # without the key, all replicas were restored to the same parameters
        self.identical = state.get("alike", True)

    def detach(self) -> None:
        for flat in self.flats:
            self.algorithm.release(flat.values)
        super().detach()
