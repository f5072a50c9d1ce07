"""Local SGD: replicas average their parameters every `period` steps (Stich, 2019, arXiv:1805.09767)."""

from __future__ import annotations

from typing import Any

from paceline.sync.fragments import flats
from paceline.sync.local_rule import LocalRule
from paceline.sync.rule import Replica


class LocalSGD(LocalRule):
    """Average the parameters over the replicas after every `period` optimizer steps.

    Costs one sum of the parameters per `period` steps instead of one of the gradients per step. The result is not the
    one of synchronous SGD: hold it to convergence, not to parity. Only with a period of 1 and an optimizer that is
    linear in the gradient and keeps nothing (SGD without momentum), on equal shares of a batch, is it the same.
    """

    def __init__(self, period: int) -> None:
        self.period = period

    def attach(self, replica: Replica) -> None:
        super().attach(replica)
        self.flats = flats(self.parameters, self.algorithm)
        nbytes = sum(flat.values.nbytes for flat in self.flats)
        replica.log(f"sync=local: every rank's {nbytes:,} bytes of parameters are averaged every {self.period} steps")

    def agrees_in(self, step: int) -> bool:
        return step % self.period == 0

    def after_step(self, step: int) -> None:
        if not self.agrees_in(step):
            return
        for flat in self.flats:
            flat.copy_in()
            self.sum(flat.values)
        # not before all have arrived: the exchange may be broken off
        for flat in self.flats:
            flat.values.div_(self.replica.dp.size)
            flat.copy_out()
        self.identical = True

    def state_dict(self) -> dict[str, Any]:
        return {"alike": self.identical}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Without the key, the replicas have been given the same parameters.
        self.identical = state.get("alike", True)

    def detach(self) -> None:
        for flat in self.flats:
            self.algorithm.release(flat.values)
        super().detach()
