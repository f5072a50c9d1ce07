"""Optimizers in the processes where the parameters of remote modules are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from paceline.errors import PacelineError
from paceline_server.modules.module import RemoteModule, current_context
from paceline_server.modules.reference import Reference, path_of


def optimizer(
    modules: RemoteModule | Sequence[RemoteModule],
    make: str | Callable[..., Any],
    *,
    together: int = 1,
    name: str | None = None,
    **settings: Any,
) -> RemoteOptimizer:
    """An optimizer over the parameters of remote modules, one at each of their hosts.

    Args:
        make: "sgd", "adam", "adamw", "adagrad", "rmsprop", "sparse_adam", or an import path that the hosts serve.
        together: number of clients that share these modules and step together, by the sum of their gradients, as ranks
            of data parallelism do. All give the same `name`.
        settings: of the optimizer, such as `lr`.

    Raises:
        RemoteError: it is not served there, or raised.
        PacelineError: there are no modules, or several clients without a name.
    """
    chosen = [modules] if isinstance(modules, RemoteModule) else list(modules)
    if not chosen:
        raise PacelineError("an optimizer needs at least one remote module")
    if together < 1 or (together > 1 and name is None):
        raise PacelineError(
            f"together={together}: it is the number of clients that step together, and with more than one all need "
            'one name for the optimizer, e.g. name="tables"'
        )
    path = make if isinstance(make, str) else path_of(make)
    parts = []
    for host in dict.fromkeys(module.host for module in chosen):
        numbers = [module.reference.number for module in chosen if module.host is host]
        made = host.call("optimizer", "make", numbers, path, settings, together, name, what=path)
        parts.append(Reference(host, made, f"optimizer {path}"))
    return RemoteOptimizer(parts)


class RemoteOptimizer:
    """Steps parameters where they are.

    Gradients stay there until `step` applies them: those of this process and of the context that it is called in. Each
    is applied once, even where a connection is lost on the way; afterwards they are gone, as after `zero_grad`.
    """

    def __init__(self, parts: list[Reference]) -> None:
        self._parts = parts

    def step(self, *, scale: float = 1.0, deadline_s: float | None = None) -> None:
        """One step on every host at the same time.

        Args:
            scale: factor for the gradients, e.g. to clip their norm.
            deadline_s: for it; with `together`, the other clients have to call `step` within.

        Raises:
            RemoteError: the optimizer raised; or the clients that step together did not all come, and the gradients are
                still there.
            DeadlineError: a host did not answer in time.
        """
        if not math.isfinite(scale):
            raise PacelineError(f"step(scale={scale}): gradients are scaled by a finite number")
        answers = []
        for part in self._parts:
            patience_s = deadline_s or part.host.deadline_s
            given = (part.number, current_context(), float(scale), patience_s)
            answers.append(
                part.host.begin(
                    "step", part.number, *given, what=f"step of {part.what}", deadline_s=patience_s + _SLACK_S
                )
            )
        for answer in answers:
            answer.result()

    def zero_grad(self) -> None:
        """Drop the gradients of this context without a step."""
        self._ask("zero_grad", current_context())

    def gradient_norm(self) -> float:
        """L2 norm of the gradients of this context, over all hosts. Apart from `together`: of this process alone."""
        return math.sqrt(sum(self._ask("squared_norm", current_context())))

    def set(self, **settings: Any) -> None:
        """Change settings, such as the learning rate."""
        self._ask("set", settings)

    def state_dict(self) -> list[dict[str, Any]]:
        """The optimizer's own state, by host."""
        return self._ask("state", None)

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Take what `state_dict` gave.

        Raises:
            PacelineError: it is the state over another number of hosts.
        """
        if len(states) != len(self._parts):
            raise PacelineError(
                f"this is the state over {len(states)} hosts, and the modules are on {len(self._parts)}"
            )
        for part, state in zip(self._parts, states, strict=True):
            part.host.call("of_optimizer", part.number, part.number, "load", state)

    def _ask(self, what: str, value: Any) -> list[Any]:
        answers = [
            part.host.begin("of_optimizer", part.number, part.number, what, value, what=f"{what} of {part.what}")
            for part in self._parts
        ]
        return [answer.result() for answer in answers]


_SLACK_S = 5.0  # for the answer, after the deadline there
