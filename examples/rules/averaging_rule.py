"""A synchronisation rule of one's own: plain averaging of the gradients after the backward pass. `pip install examples/rules` adds it."""

from __future__ import annotations

import torch

from paceline.sync import Replica, SyncRule, start_alike


class Averaging(SyncRule):
    """`sync=averaging`: every gradient is averaged over the replicas, one after the other, when the backward pass is done."""

    def attach(self, replica: Replica) -> None:
        self.replica = replica
        start_alike(replica)  # every replica gets the first one's weights

    def after_backward(self) -> None:
        replica, before = self.replica, self.replica.dp.sent_bytes
        for parameter in replica.trainable:
            if parameter.grad is None:  # not used on this replica, but maybe on another one: all must make the same calls
                parameter.grad = torch.zeros_like(parameter)
            replica.dp.all_reduce(parameter.grad)  # a sum: the engine has weighted each replica's gradient by its share of the batch
        replica.dp.all_reduce(replica.notes)  # the engine's own numbers: the loss, votes, times
        replica.gradients = [p.grad for p in replica.trainable if p.grad is not None]
        replica.traffic.sent_bytes += replica.dp.sent_bytes - before  # for the meter
