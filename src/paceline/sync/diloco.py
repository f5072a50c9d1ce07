"""DiLoCo: replicas train alone for many steps, and an outer optimizer steps on how far they came.

After Douillard et al., 2023 (arXiv:2311.08105).
Streamed as in Douillard et al., 2025 (arXiv:2501.18512): the model is sent in fragments, each in steps of its own, while training goes on.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.comm.allreduce.algorithms import Algorithm
from paceline.comm.group import Group
from paceline.comm.worker import Task, Worker
from paceline.errors import PlanError
from paceline.sync.fragments import Flat, by_dtype, cut
from paceline.sync.local_rule import LocalRule
from paceline.sync.rule import Replica

if TYPE_CHECKING:
    from paceline.sync.compress import Compressor

_HALF = (torch.float16, torch.bfloat16)


class DiLoCo(LocalRule):
    """Every `period` steps, move the outer parameters along the mean way that the replicas came, and have these start from there again.

    The way (outer parameters minus local ones) is the gradient of the outer optimizer, SGD with Nesterov's momentum. With `overlap` it
    travels while training goes on, and arrives that many steps later: what a replica did meanwhile is kept, on top of the new outer
    parameters. (The paper mixes both by halves; so, a replica alone with lr=1 and no momentum loses nothing.) Everything happens in
    fixed steps, whose number does not depend on how fast the network is, so that a run can be repeated.

    Args:
        period: steps from one exchange of a parameter to the next.
        fragments: into how many runs of neighbouring parameters the model is cut; each has steps of its own within the period.
        overlap: steps from sending a fragment to using what came of it; less than the period.
        lr, momentum: of the outer optimizer.
        compress: what is sent of a way (see `paceline.sync.compress`): none or a codec.
    """

    def __init__(
        self, period: int, fragments: int = 1, overlap: int = 0, lr: float = 0.7, momentum: float = 0.9, compress: str = "none"
    ) -> None:
        if period < 1 or not 1 <= fragments <= period or not 0 <= overlap < period:
            raise PlanError(
                f"sync=diloco:{period},fragments={fragments},overlap={overlap}: the period is at least 1; fragments are sent in different "
                f"steps of it, so there are 1 to {period}, and arrive before they are sent again, so overlap is from 0 to {period - 1}"
            )
        self.period, self.overlap, self.lr, self.momentum, self.compress = period, overlap, lr, momentum, compress
        self.sent_in = [(k + 1) * period // fragments % period for k in range(fragments)]  # of each fragment, its step in a period
        self.worker: Worker | None = None
        self.compressor: Compressor | None = None

    def attach(self, replica: Replica) -> None:
        super().attach(replica)
        runs = cut(self.parameters, len(self.sent_in))  # where there are fewer than fragments, the last steps have nothing to send
        self.fragments = [Fragment(k, run, self.algorithm) for k, run in enumerate(runs)]
        if self.overlap:
            self.worker = Worker()
        if self.compress != "none" and replica.dp.size > 1:
            from paceline.sync.compress import Compressor

            self.compressor = Compressor(self.compress, self.group, replica.traffic)
        sizes = [f"{sum(way.values.nbytes for way in f.ways):,}" for f in self.fragments]
        later = f", and arrive {self.overlap} steps later" if self.overlap else ""
        replica.said.append(f"sync=diloco: fragments of {', '.join(sizes)} bytes are sent every {self.period} steps{later}")

    def connections(self, dp: Group) -> Group:
        return dp.copy() if self.overlap and dp.size > 1 else dp

    def agrees_in(self, step: int) -> bool:
        return step % self.period in self.sent_in

    def after_step(self, step: int) -> None:
        for fragment in self.fragments:
            if fragment.due == step:
                self._arrive(fragment)
            if step % self.period == self.sent_in[fragment.number]:
                self._send(fragment, step)
        self.alike = not self.overlap and len(self.sent_in) == 1 and self.agrees_in(step)

    def rest(self) -> None:
        for fragment in self.fragments:
            fragment.wait()

    def state_dict(self) -> dict[str, Any]:
        """A fragment that is on its way arrives first, and is kept for its step."""
        self.rest()
        state: dict[str, Any] = {"alike": self.alike}
        for fragment in self.fragments:
            state |= fragment.state_dict()
        if self.compressor is not None:
            state |= {f"compress/{key}": value for key, value in self.compressor.state_dict().items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rest()
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        self.alike = state.get("alike", True) or not tensors
        for fragment in self.fragments:
            fragment.load_state_dict(tensors)
        if self.compressor is not None and tensors:
            kept = {key.removeprefix("compress/"): value for key, value in tensors.items() if key.startswith("compress/")}
            self.compressor.load_state_dict(kept)

    def detach(self) -> None:
        self.rest()
        if self.worker is not None:
            self.worker.close()
        for fragment in self.fragments:
            for way in fragment.ways:
                self.algorithm.release(way.values)
        super().detach()

    # One fragment

    def _send(self, fragment: Fragment, step: int) -> None:
        fragment.leave()
        fragment.due = step + self.overlap
        if self.worker is not None:
            fragment.flight = self.worker.start(partial(self._exchange, fragment))
        else:
            self._exchange(fragment)
            self._arrive(fragment)

    def _exchange(self, fragment: Fragment) -> None:
        """Sum the ways over the replicas. May run beside the training."""
        for i, way in enumerate(fragment.ways):
            if self.compressor is None:
                self.sum(way.values)
            else:
                self.compressor.sum(f"fragment{fragment.number}.{i}", way.values, way.views)

    def _arrive(self, fragment: Fragment) -> None:
        """Take the outer step, and start from there."""
        fragment.wait()
        fragment.due = None
        fragment.step(self.lr, self.momentum, self.replica.dp.size)
        if self.overlap:
            fragment.merge()
        else:
            fragment.start_over()


class Fragment:
    """A run of parameters, with what the outer optimizer knows of them: a flat tensor of each kind per dtype.

    Attributes:
        ways: outer minus local parameters when they left; after the exchange, the sum over the replicas.
        outer, momentum: of the outer optimizer, in at least float32.
        left: the local parameters when they left, to be told from what came after.
        due: the step in which the way under way, or waiting, is used; None where there is none.
    """

    def __init__(self, number: int, parameters: list[nn.Parameter], memory: Algorithm | Group) -> None:
        self.number = number
        self.ways, self.left = [], []
        for alike in by_dtype(parameters):
            numel, dtype = sum(p.numel() for p in alike), alike[0].dtype
            wide = torch.float32 if dtype in _HALF else dtype
            self.ways.append(Flat.of(alike, memory.empty(numel, wide)))
            self.left.append(Flat.of(alike, torch.zeros(numel, dtype=wide, device=alike[0].device)))
        self.momentum = [torch.zeros_like(flat.values) for flat in self.left]
        self.outer = [Flat.of(flat.parameters, torch.zeros_like(flat.values)) for flat in self.left]
        for outer in self.outer:
            outer.take()
        self.due: int | None = None
        self.flight: Task | None = None

    def leave(self) -> None:
        """Note the way that this replica has come since its start."""
        for way, left, outer in zip(self.ways, self.left, self.outer, strict=True):
            left.take()
            torch.sub(outer.values, left.values, out=way.values)

    def wait(self) -> None:
        """Return when nothing is on its way."""
        if self.flight is not None:
            self.flight.wait()
            self.flight = None

    def step(self, lr: float, momentum: float, replicas: int) -> None:
        """Nesterov's SGD on the outer parameters, as in Sutskever et al. (2013), in the form that `torch.optim.SGD` has."""
        for way, outer, velocity in zip(self.ways, self.outer, self.momentum, strict=True):
            gradient = way.values.div_(replicas)
            velocity.mul_(momentum).add_(gradient)
            outer.values.sub_(gradient.add_(velocity, alpha=momentum), alpha=lr)

    def start_over(self) -> None:
        """Local parameters are the outer ones."""
        for outer in self.outer:
            outer.give()

    def merge(self) -> None:
        """Local parameters are the outer ones, and what this replica did since it sent its own."""
        for outer, left in zip(self.outer, self.left, strict=True):
            torch.sub(outer.values, left.values, out=left.values)
            left.add()

    def state_dict(self) -> dict[str, Tensor]:
        """Of this rank; what is on its way must have arrived."""
        kinds = {"outer": [flat.values for flat in self.outer], "momentum": self.momentum}
        state: dict[str, Tensor] = {}
        if self.due is not None:
            state[f"{self.number}/due"] = torch.tensor(self.due)
            kinds |= {"way": [flat.values for flat in self.ways], "left": [flat.values for flat in self.left]}
        return state | {f"{self.number}/{kind}/{i}": tensor for kind, tensors in kinds.items() for i, tensor in enumerate(tensors)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from `state`; without any, start anew from the parameters as they are."""
        due = state.get(f"{self.number}/due")
        self.due = None if due is None else int(due)
        for i, (outer, velocity) in enumerate(zip(self.outer, self.momentum, strict=True)):
            if f"{self.number}/outer/{i}" in state:
                outer.values.copy_(state[f"{self.number}/outer/{i}"])
                velocity.copy_(state[f"{self.number}/momentum/{i}"])
            else:
                outer.take()
                velocity.zero_()
        for kind, flats in (("way", self.ways), ("left", self.left)) if self.due is not None else ():
            for i, flat in enumerate(flats):
                flat.values.copy_(state[f"{self.number}/{kind}/{i}"])
