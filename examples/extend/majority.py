"""A sync rule.

Replicas vote on the sign of each gradient (Bernstein et al., 2018, signSGD with majority vote, arXiv:1802.04434).
"""

from torch import Tensor

from paceline.sync import Reduction, Replica, SyncRule, broadcast_state


class Majority(SyncRule):
    """Replace every gradient by the sign that most replicas have, times `size`."""

    def __init__(self, size: float) -> None:
        self.size = size

    def attach(self, replica: Replica) -> None:
        self.replica = replica
        broadcast_state(replica)

    def after_backward(self, step: int, scalars: Tensor) -> Reduction:
        gradients = [p.grad for p in self.replica.trainable if p.grad is not None]
        for gradient in gradients:
            gradient.sign_()
            self.replica.dp.all_reduce(gradient)
            gradient.sign_().mul_(self.size)
        self.replica.dp.all_reduce(scalars)
        return Reduction(gradients, scalars)
