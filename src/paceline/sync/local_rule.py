"""Common base of rules whose replicas train alone for some steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from paceline.comm.allreduce.algorithms import Algorithm, algorithm_for
from paceline.comm.group import Group
from paceline.sync.fragments import FlatParameters, by_dtype
from paceline.sync.rule import Reduction, Replica, SyncRule
from paceline.sync.start import broadcast_state
from paceline.sync.traffic import ring_bytes


class LocalRule(SyncRule):
    """Base of rules that synchronise parameters in some steps only.

    Each replica takes the step of its own gradient. Batch-norm statistics stay each replica's own, as under every rule
    (an evaluation averages them), and so does the optimizer's state.
    """

    identical = True  # all replicas have the same parameters now; the same value on all ranks

    def attach(self, replica: Replica) -> None:
        broadcast_state(replica)
        self.replica, self.parameters = replica, replica.trainable
        self.group = self.connections(replica.dp)
        self.algorithm: Algorithm | Group = self.algorithm_over(self.group) if self.group.size > 1 else self.group

    def connections(self, dp: Group) -> Group:
        """The group that the parameters are sent over."""
        return dp

    def algorithm_over(self, group: Group) -> Algorithm:
        """The all-reduce that sums over the replicas."""
        return algorithm_for(group, "auto")

    def agrees_in(self, step: int) -> bool:
        """True if replicas share losses and votes in a step; at least once per period."""
        raise NotImplementedError

    def after_backward(self, step: int, scalars: Tensor) -> Reduction:
        everywhere = self.agrees_in(step)
        if everywhere and len(scalars):
            self.replica.dp.all_reduce(scalars)
        self.identical = False
        return Reduction([p.grad for p in self.parameters if p.grad is not None], scalars, everywhere)

    @contextmanager
    def in_agreement(self) -> Iterator[None]:
        """Within the context, parameters are the mean over all replicas, whatever the step.

        No replica's work since the last agreement is left out of it.
        """
        self.wait()
        if self.identical:
            yield
            return
        own = [p.detach().clone() for p in self.parameters]
        try:
            for same_dtype in by_dtype(self.parameters):
                # `data` keeps the count of writes, by which undoing a step tells what its forward pass has written
                held = [p.data for p in same_dtype]
                flat = FlatParameters.of(held, torch.cat([p.reshape(-1) for p in held]))
                self.sum(flat.values)
                flat.values.div_(self.replica.dp.size)
                flat.copy_out()
            yield
        finally:
            torch._foreach_copy_([p.data for p in self.parameters], own)

    def wait(self) -> None:
        """Return when no exchange is in flight."""

    def outer_state(self) -> dict[str, Tensor]:
        """State of the rule that is alike on all replicas, besides parameters; not copied."""
        return {}

    def go_on(self, outer: dict[str, Tensor]) -> None:
        """Go on with an earlier `outer_state` among other replicas, whose parameters differ.

        What was in flight is left out: replicas still have what they learned, and send it the next time.
        """
        self.identical = False

    def sum(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the replicas."""
        with self.replica.traffic.counting(self.group, ring_bytes(tensor.nbytes, self.group.size)):
            self.algorithm.all_reduce(tensor)

    def detach(self) -> None:
        if not isinstance(self.algorithm, Group):
            self.algorithm.close()
        if self.group is not self.replica.dp:
            self.group.close()
