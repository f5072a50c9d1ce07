"""A served optimizer: steps by the gradients of one context, or of several clients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import RemoteError
from paceline_server.modules.served_module import Context, ServedModule

Gradients = list[dict[str, Tensor]]  # by module, then by parameter


class ServedOptimizer:
    """Optimizer over the parameters of served modules.

    Args:
        make: torch's class, or anything that makes an optimizer of parameters.
        together: number of clients whose gradients one step sums; each calls `step` once for it.
    """

    def __init__(
        self,
        modules: list[ServedModule],
        make: Callable[..., torch.optim.Optimizer],
        settings: Mapping[str, Any],
        together: int,
    ) -> None:
        self.modules, self.together = modules, together
        parameters = [each for module in modules for each in module.module.parameters() if each.requires_grad]
        if not parameters:
            raise RemoteError("these modules have no parameters to train: none has requires_grad")
        self.optimizer = make(parameters, **settings)
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise RemoteError(f"it makes a {type(self.optimizer).__name__}, and no torch.optim.Optimizer")
        for module in modules:
            module.optimizers.add(self)
        self._lock = threading.RLock()
        self._rounds = threading.Condition()
        self._arrived: dict[str, tuple[str, Gradients, float]] = {}  # by client: its name, gradients, scale
        self._round, self._problem = 0, ""

    def step(self, client: str, name: str, context: str, scale: float, deadline_s: float) -> None:
        """Apply the gradients of a context, times `scale`, once. They are gone afterwards.

        With `together`, the sum over that many clients, when all have come.

        Raises:
            RemoteError: not all came in time. The gradients are those of the context again.
        """
        key = (client, context)
        gradients = [module.take_gradients(key) for module in self.modules]
        if self.together == 1:
            self._apply([(gradients, scale)])
            return
        with self._rounds:
            if client in self._arrived:
                self._give_back(key, gradients)
                raise RemoteError("this client has asked for this step already, in another thread or context")
            self._arrived[client] = (name, gradients, scale)
            mine = self._round
            if len(self._arrived) == self.together:
                self._end_round()
            elif not self._rounds.wait_for(lambda: self._round != mine, deadline_s):
                here = ", ".join(sorted(name or "unnamed" for name, _, _ in self._arrived.values()))
                del self._arrived[client]
                self._give_back(key, gradients)
                raise RemoteError(
                    f"{self.together} clients step together, and within {deadline_s:g} s only these came: {here}"
                )
            if self._problem:
                raise RemoteError(self._problem)

    def set(self, settings: Mapping[str, Any]) -> None:
        """Change settings of all groups, e.g. the learning rate."""
        with self._lock:
            for group in self.optimizer.param_groups:
                if unknown := [name for name in settings if name not in group or name == "params"]:
                    known = ", ".join(name for name in group if name != "params")
                    raise RemoteError(f"the optimizer has no setting {unknown[0]!r}. Known: {known}")
                group.update(settings)

    def squared_norm(self, context: Context) -> float:
        """Sum of squares of a context's gradients of the parameters that this optimizer steps."""
        return sum(module.squared_norm(context) for module in self.modules)

    def zero_grad(self, context: Context) -> None:
        """Drop the gradients of a context."""
        for module in self.modules:
            module.drop(context)

    def state(self) -> dict[str, Any]:
        """State, as the optimizer's own `state_dict` gives it, on the CPU."""
        with self._lock:
            return dict(self.optimizer.state_dict())

    def load(self, state: dict[str, Any]) -> None:
        """Take a state that `state` gave."""
        with self._lock:
            self.optimizer.load_state_dict(state)

    def follow(self, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Go on with new parameters in the places of old ones, and their state."""
        for group in self.optimizer.param_groups:
            group["params"] = [new.get(parameter, parameter) for parameter in group["params"]]
        state = self.optimizer.state
        for old, parameter in new.items():
            if old in state:
                state[parameter] = state.pop(old)

    def _end_round(self) -> None:
        """Apply what all have given, in the order of their names."""
        arrived = sorted(self._arrived.items(), key=lambda item: (item[1][0], item[0]))
        self._arrived, self._problem = {}, ""
        try:
            self._apply([(gradients, scale) for _, (_, gradients, scale) in arrived])
        except Exception as error:  # noqa: BLE001 - every client of the round gets it
            self._problem = f"the step failed: {type(error).__name__}: {error}"
        self._round += 1
        self._rounds.notify_all()

    def _apply(self, given: list[tuple[Gradients, float]]) -> None:
        with self._lock, ExitStack() as stack:
            for module in sorted(self.modules, key=id):  # other optimizers lock in the same order
                stack.enter_context(module.lock)
                module.make_writable()
            for position, module in enumerate(self.modules):
                for name, parameter in module.module.named_parameters():
                    parts = [
                        gradients[position][name] * scale if scale != 1.0 else gradients[position][name]
                        for gradients, scale in given
                        if name in gradients[position]
                    ]
                    parameter.grad = _sum(parts) if parts else None
            try:
                self.optimizer.step()
            finally:
                for module in self.modules:
                    module.version += 1
                    module.module.zero_grad()

    def _give_back(self, context: Context, gradients: Gradients) -> None:
        for module, given in zip(self.modules, gradients, strict=True):
            module.give_back(context, given)


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
