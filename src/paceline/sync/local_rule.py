"""What rules have in common whose replicas train alone for some steps: local gradients, and agreement for a moment when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from paceline.comm.allreduce.algorithms import Algorithm, algorithm_for
from paceline.comm.group import Group
from paceline.sync.fragments import Flat, by_dtype
from paceline.sync.rule import Replica, SyncRule
from paceline.sync.start import start_alike


class LocalRule(SyncRule):
    """Each replica takes the step of its own gradient; its parameters are brought together in some steps only.

    Only parameters are. Batch-norm statistics stay each replica's own, as under every rule (an evaluation averages them), and so does what
    the optimizer keeps.
    """

    alike = True  # whether all replicas have the same parameters now; the same on all ranks

    def attach(self, replica: Replica) -> None:
        start_alike(replica)
        replica.agreed = False
        replica.notes = replica.notes.double()  # they travel alone, and need not match the gradients
        self.replica, self.parameters = replica, replica.trainable
        self.group = self.connections(replica.dp)
        self.algorithm: Algorithm | Group = algorithm_for(self.group, "auto") if self.group.size > 1 else self.group

    def connections(self, dp: Group) -> Group:
        """Over which the parameters go."""
        return dp

    def agrees_in(self, step: int) -> bool:
        """Whether the replicas tell each other of their losses and votes in a step; at least once per period."""
        raise NotImplementedError

    def after_backward(self) -> None:
        replica = self.replica
        replica.gradients = [p.grad for p in self.parameters if p.grad is not None]
        replica.agreed = self.agrees_in(replica.step)
        if replica.agreed and len(replica.notes):
            replica.dp.all_reduce(replica.notes)
        self.alike = False

    @contextmanager
    def in_agreement(self) -> Iterator[None]:
        """The mean of all replicas' parameters, whatever the step is: no replica's work since the last agreement is left out of it."""
        self.rest()
        if self.alike:
            yield
            return
        own = [p.detach().clone() for p in self.parameters]
        for alike in by_dtype(self.parameters):
            flat = Flat.of(alike, torch.cat([p.detach().reshape(-1) for p in alike]))
            self.sum(flat.values)
            flat.values.div_(self.replica.dp.size)
            flat.give()
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(list[Tensor](self.parameters), own)

    def rest(self) -> None:
        """Return when nothing is under way beside the training."""

    def sum(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the replicas, and note what that took to send: 2 (n - 1) / n of it, by any algorithm."""
        self.algorithm.all_reduce(tensor)
        size, traffic = self.replica.dp.size, self.replica.traffic
        sent = 2 * (size - 1) * tensor.nbytes // size
        traffic.sent_bytes += sent
        traffic.plain_bytes += sent

    def detach(self) -> None:
        if not isinstance(self.algorithm, Group):
            self.algorithm.close()
        if self.group is not self.replica.dp:
            self.group.close()
