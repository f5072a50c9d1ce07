"""DiLoCo: replicas train independently for many steps, and an outer optimizer applies their mean change.

See Douillard et al., 2023 (arXiv:2311.08105). Streaming follows Douillard et al., 2025 (arXiv:2501.18512): the model is
divided into fragments, which are sent in different steps during training.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.comm.allreduce import Algorithm
from paceline.comm.comm_thread import CommStream, CommThread, StreamTask, Task
from paceline.comm.group import Group
from paceline.comm.interruption import settle
from paceline.device import has_streams
from paceline.sync.local import FlatParameters, LocalRule, by_dtype, cut
from paceline.sync.rule import Replica

if TYPE_CHECKING:
    from paceline.sync.compress import SumCoder

_HALF = (torch.float16, torch.bfloat16)


class DiLoCo(LocalRule):
    """Apply an outer optimizer to the replicas' mean pseudo-gradient every `period` steps.

    The pseudo-gradient is the outer parameters minus the local parameters. The outer optimizer is SGD with Nesterov
    momentum. The outer optimizer uses the pseudo-gradient as its gradient, and the replicas continue from the result.

    With `overlap`, a pseudo-gradient is sent while training continues, and the result is applied `overlap` steps later.
    The changes that a replica made in the meantime are added to the new outer parameters. (The paper averages outer and
    local parameters instead. Without this averaging, a single replica with lr=1 and no momentum trains exactly as
    without DiLoCo.)

    Fragments are sent and applied in fixed steps, regardless of the speed of the network, so runs are reproducible.

    Args:
        period: number of steps between two exchanges of a parameter. See `planning/sync_info.py` for limits and
            defaults of all arguments.
        fragments: number of groups of adjacent parameters into which the model is divided. Each group is sent in its
            own step of the period.
        overlap: number of steps between the sending of a fragment and the use of its result; less than `period`.
        lr: learning rate of the outer optimizer.
        momentum: momentum of the outer optimizer.
        compress: codec of the pseudo-gradients (see `paceline.sync.compress`), or `none`.
    """

    def __init__(self, period: int, *, fragments: int, overlap: int, lr: float, momentum: float, compress: str) -> None:
        self.period, self.overlap, self.lr, self.momentum, self.compress = period, overlap, lr, momentum, compress
        # step within the period in which each fragment is sent
        self.sent_in = [(k + 1) * period // fragments % period for k in range(fragments)]
        self.beside: CommThread | CommStream | None = None
        self.compressor: SumCoder | None = None

    def attach(self, replica: Replica) -> None:
        super().attach(replica)
        # with fewer parameters than fragments, some steps have nothing to send
        runs = cut(self.parameters, len(self.sent_in))
        self.fragments = [Fragment(k, run, self.algorithm) for k, run in enumerate(runs)]
        if self.overlap:
            device = replica.dp.device
            self.beside = CommStream(device) if has_streams(device) else CommThread()
        if self.compress != "none" and replica.dp.size > 1:
            self.compressor = self.compressed(self.compress)
        sizes = [f"{sum(delta.values.nbytes for delta in f.pseudo_gradients):,}" for f in self.fragments]
        later = f", and arrive {self.overlap} steps later" if self.overlap else ""
        replica.log(f"sync=diloco: fragments of {', '.join(sizes)} bytes are sent every {self.period} steps{later}")

    def compressed(self, codec: str) -> SumCoder:
        """Create the compressor of the pseudo-gradients."""
        from paceline.sync.compress import Compressor

        return Compressor(codec, self.group, self.replica.traffic)

    def connections(self, dp: Group) -> Group:
        return dp.copy() if self.overlap and dp.size > 1 else dp

    def communicates_in(self, step: int) -> bool:
        return step % self.period in self.sent_in

    def after_step(self, step: int) -> None:
        for fragment in self.fragments:
            if fragment.due == step:
                self._apply(fragment)
            if step % self.period == self.sent_in[fragment.number]:
                self._send(fragment, step)
        self.identical = not self.overlap and len(self.sent_in) == 1 and self.communicates_in(step)

    def wait(self) -> None:
        for fragment in self.fragments:
            fragment.wait()

    def outer_state(self) -> dict[str, Tensor]:
        return {key: value for fragment in self.fragments for key, value in fragment.outer_state().items()}

    def go_on(self, outer: dict[str, Tensor]) -> None:
        super().go_on(outer)
        for fragment in self.fragments:
            fragment.load_state_dict(outer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the rule.

        The method first waits for transfers in flight. The results of these transfers are saved, and are applied in the
        step in which they are due.
        """
        self.wait()
        state: dict[str, Any] = {"alike": self.identical}
        for fragment in self.fragments:
            state |= fragment.state_dict()
        if self.compressor is not None:
            state |= {f"compress/{key}": value for key, value in self.compressor.state_dict().items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wait()
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        self.identical = state.get("alike", True) or not tensors
        for fragment in self.fragments:
            fragment.load_state_dict(tensors)
        if self.compressor is not None and tensors:
            kept = {
                key.removeprefix("compress/"): value for key, value in tensors.items() if key.startswith("compress/")
            }
            self.compressor.load_state_dict(kept)

    def detach(self) -> None:
        try:
            self.wait()
        finally:  # transfers in flight may have been aborted
            if self.beside is not None:
                self.beside.close()
            for fragment in self.fragments:
                for delta in fragment.pseudo_gradients:
                    self.algorithm.release(delta.values)
            super().detach()

    # One fragment

    def _send(self, fragment: Fragment, step: int) -> None:
        fragment.take_snapshot()
        fragment.due = step + self.overlap
        if self.beside is not None:
            fragment.in_flight = self.beside.start(partial(self._exchange, fragment))
        else:
            self._exchange(fragment)
            self._apply(fragment)

    def _exchange(self, fragment: Fragment) -> None:
        for i, delta in enumerate(fragment.pseudo_gradients):
            if self.compressor is None:
                self.sum(delta.values)
            else:
                self.compressor.sum(f"fragment{fragment.number}.{i}", delta.values, delta.views)

    def _apply(self, fragment: Fragment) -> None:
        fragment.wait()
        settle(self.group.device)
        fragment.due = None
        fragment.step(self.lr, self.momentum, self.replica.dp.size)
        if self.overlap:
            fragment.merge()
        else:
            fragment.start_over()


class Fragment:
    """Group of adjacent parameters with outer optimizer state, in one flat tensor per dtype.

    Attributes:
        pseudo_gradients: outer minus local parameters at the snapshot; after the exchange, their sum over the replicas.
        outer: outer parameters, in at least float32.
        momentum: momentum of the outer optimizer, in at least float32.
        snapshot: local parameters at the time when the fragment was sent; later local changes are measured from them.
        due: step in which the pending result is applied; None if no result is pending.
    """

    def __init__(self, number: int, parameters: list[nn.Parameter], memory: Algorithm) -> None:
        self.number = number
        self.pseudo_gradients, self.snapshot = [], []
        for same_dtype in by_dtype(parameters):
            numel, dtype = sum(p.numel() for p in same_dtype), same_dtype[0].dtype
            wide = torch.float32 if dtype in _HALF else dtype
            self.pseudo_gradients.append(FlatParameters.of(same_dtype, memory.empty(numel, wide)))
            self.snapshot.append(
                FlatParameters.of(same_dtype, torch.zeros(numel, dtype=wide, device=same_dtype[0].device))
            )
        self.momentum = [torch.zeros_like(flat.values) for flat in self.snapshot]
        self.outer = [FlatParameters.of(flat.parameters, torch.zeros_like(flat.values)) for flat in self.snapshot]
        for outer in self.outer:
            outer.copy_in()
        self.due: int | None = None
        self.in_flight: Task | StreamTask | None = None

    def take_snapshot(self) -> None:
        """Copy the local parameters and compute the pseudo-gradient."""
        for delta, snapshot, outer in zip(self.pseudo_gradients, self.snapshot, self.outer, strict=True):
            snapshot.copy_in()
            torch.sub(outer.values, snapshot.values, out=delta.values)

    def wait(self) -> None:
        """Wait for the transfer in flight, if there is one."""
        if self.in_flight is not None:
            self.in_flight.wait()
            self.in_flight = None

    def step(self, lr: float, momentum: float, replicas: int) -> None:
        """Apply SGD with Nesterov momentum to the outer parameters.

        The update is the Nesterov update of `torch.optim.SGD` (Sutskever et al., 2013).
        """
        for delta, outer, velocity in zip(self.pseudo_gradients, self.outer, self.momentum, strict=True):
            gradient = delta.values.div_(replicas)
            velocity.mul_(momentum).add_(gradient)
            outer.values.sub_(gradient.add_(velocity, alpha=momentum), alpha=lr)

    def start_over(self) -> None:
        """Set the local parameters to the outer parameters."""
        for outer in self.outer:
            outer.copy_out()

    def merge(self) -> None:
        """Set the local parameters to the outer parameters plus this replica's change since the snapshot."""
        for outer, snapshot in zip(self.outer, self.snapshot, strict=True):
            torch.sub(outer.values, snapshot.values, out=snapshot.values)
            snapshot.add()

    def outer_state(self) -> dict[str, Tensor]:
        """Return the outer parameters and their momentum."""
        return self._named({"outer": [flat.values for flat in self.outer], "momentum": self.momentum})

    def state_dict(self) -> dict[str, Tensor]:
        """Return the fragment's state on this rank; the transfer must have finished."""
        if self.due is None:
            return self.outer_state()
        ways = {"way": self.pseudo_gradients, "left": self.snapshot}
        in_flight = self._named({kind: [flat.values for flat in flats] for kind, flats in ways.items()})
        return {f"{self.number}/due": torch.tensor(self.due), **self.outer_state(), **in_flight}

    def _named(self, kinds: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        return {f"{self.number}/{kind}/{i}": tensor for kind, some in kinds.items() for i, tensor in enumerate(some)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore a saved state; start from the current parameters if the state lacks this fragment."""
        due = state.get(f"{self.number}/due")
        self.due = None if due is None else int(due)
        for i, (outer, velocity) in enumerate(zip(self.outer, self.momentum, strict=True)):
            if f"{self.number}/outer/{i}" in state:
                outer.values.copy_(state[f"{self.number}/outer/{i}"])
                velocity.copy_(state[f"{self.number}/momentum/{i}"])
            else:
                outer.copy_in()
                velocity.zero_()
        for kind, flats in (("way", self.pseudo_gradients), ("left", self.snapshot)) if self.due is not None else ():
            for i, flat in enumerate(flats):
                flat.values.copy_(state[f"{self.number}/{kind}/{i}"])
