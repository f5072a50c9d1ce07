"""Gradient averaging, the simplest exact sync rule.

Read this rule first. `allreduce` computes the same result, but with buckets and partly during the backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.sync.rule import Reduction, Replica, SyncRule, broadcast_state


class Averaging(SyncRule):
    """Sum the gradients over the replicas after the backward pass, one gradient at a time."""

    def attach(self, replica: Replica) -> None:
        self.replica = replica
        # Every replica starts with the first replica's weights.
        broadcast_state(replica)

    def after_backward(self, step: int, scalars: Tensor) -> Reduction:
        dp, only = self.replica.dp, self.replica.backward.only
        trained = [p for p in self.replica.trainable if only is None or p in only]
        with self.replica.traffic.counting(dp):
            # All ranks must make the same calls, even for a parameter that only some replicas used.
            # A parameter that no replica used keeps no gradient.
            used = scalars.new_tensor([float(p.grad is not None) for p in trained])
            dp.all_reduce(used)
            for parameter in [p for p, count in zip(trained, used.tolist(), strict=True) if count]:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
                # A sum, because the engine has weighted each replica's gradient by its share of the global batch.
                dp.all_reduce(parameter.grad)
            # The scalars of the engine, such as loss, votes and times.
            dp.all_reduce(scalars)
        return Reduction([p.grad for p in trained if p.grad is not None], scalars)
