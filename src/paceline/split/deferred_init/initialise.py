"""Building a model without its memory, and its weights afterwards one at a time, bit-equal to those of a plain construction.

A model's construction runs once on shapes; what it does to its tensors is recorded on a tape (`recorder`), which every rank then plays
(`tape`) to take its part of each parameter. All ranks draw all random numbers, so their weights come from one seed as in one process.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from paceline.errors import JobError, PlanError
from paceline.split.deferred_init.recorder import NotRecordable, Recorder
from paceline.split.deferred_init.tape import Take, Tape
from paceline.split.parameter_hooks import carry_hooks, refuse_kept_parameters

_MUCH = 1 / 8  # of the model, brought along by its construction, is worth a note


@dataclass
class Recorded:
    """A model whose parameters have no memory, and the way to their values.

    Attributes:
        model: parameters on the meta device; buffers there or real.
        note: why every rank held the whole model (or much of it) at first, or None.
    """

    model: nn.Module
    note: str | None
    _play: Callable[[Callable[[str], bool], Take], None]

    @torch.no_grad()
    def replay(self, take: Take, names: Collection[str] | None = None) -> None:
        """Call `take(name, full tensor)` for every parameter and every buffer on the meta device, by their names in the undivided model.

        A tied one comes once, under its first name. The tensor is gone when `take` returns, unless it keeps a reference; parameters come
        in the order in which they are finished. torch's random state is set to that at the start of the construction, and is afterwards
        what it is after a plain one. Bits are those of a plain construction with as many threads: random numbers do not depend on
        their number, but linear algebra (orthogonal initialisation) rounds by it.

        Args:
            take: what to do with a tensor.
            names: those that are wanted; None: all.
        """
        self._play((lambda name: True) if names is None else set(names).__contains__, take)


def record(build: Callable[[], nn.Module]) -> Recorded:
    """Run the construction of a model without memory for its floating-point tensors. torch's random state stays as it is.

    A construction that cannot be recorded, for it reads what it has drawn, or uses an operation that knows no shapes, is run again for
    real, and the note says so.

    Raises:
        JobError: the construction leaves parameters on the meta device, or of unknown shape.
        Exception: whatever the construction raises.
    """
    others = random.getstate(), np.random.get_state()
    recorder = Recorder()
    problem: str | None
    try:
        with recorder.recording():
            model = build()
        _check(model)
        problem = recorder.problem
        if problem is None:
            return _on_tape(model, recorder)
    except Exception as error:  # noqa: BLE001 - of any kind: what is wrong without recording, too, is raised below
        problem = recorder.problem or (str(error) if isinstance(error, NotRecordable) else f"{type(error).__name__}: {error}")
    random.setstate(others[0])
    np.random.set_state(others[1])
    return _built_whole(build, problem)


def recorded_from(model: nn.Module) -> Recorded:
    """Take the weights of a model that is real: its parameters become shapes, under the same names and as tied as they were.

    The full tensors are kept until `replay` has handed them out, which it can do once. Buffers stay.

    Raises:
        JobError: it has parameters on the meta device, or of unknown shape.
        PlanError: its modules keep parameters elsewhere, too; or it is compiled by torch.jit.
    """
    _check(model)
    refuse_kept_parameters(model)
    if on_meta := [name for name, p in model.named_parameters() if p.is_meta]:
        raise JobError(f"parameter {on_meta[0]} is on the meta device, so it has no values; build the model on the CPU")
    full = _without_memory(model)

    def play(wanted: Callable[[str], bool], take: Take) -> None:
        for name in list(full):
            tensor = full.pop(name)
            if wanted(name):
                take(name, tensor)

    return Recorded(model, None, play)


def _built_whole(build: Callable[[], nn.Module], why: str) -> Recorded:
    start = torch.get_rng_state()
    model = build()
    end = torch.get_rng_state()
    torch.set_rng_state(start)
    recorded = recorded_from(model)

    def play(wanted: Callable[[str], bool], take: Take) -> None:
        recorded._play(wanted, take)
        torch.set_rng_state(end)

    return Recorded(model, f"every rank held the whole model at first, for its construction cannot be recorded: {why}", play)


def _on_tape(model: nn.Module, recorder: Recorder) -> Recorded:
    _compute_attributes(model, recorder)
    tape: Tape = recorder.tape
    tensors = dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if b.is_meta}
    views = {name: recorder.view(tensor) for name, tensor in tensors.items() if tensor.is_meta}
    known = _without_memory(model)  # parameters that the construction made from numbers, such as torch.tensor(0.07)

    def play(wanted: Callable[[str], bool], take: Take) -> None:
        for name, tensor in known.items():
            if wanted(name):
                take(name, tensor)
        tape.play({name: view for name, view in views.items() if wanted(name)}, take)

    note = None
    total = sum(p.nbytes for p in model.parameters())
    if recorder.constant_bytes > _MUCH * total:
        note = (
            f"every rank holds {recorder.constant_bytes:,} bytes that the model's construction brings along (weights that it loads or "
            f"computes outside torch), of {total:,} bytes of parameters"
        )
    return Recorded(model, note, play)


def _without_memory(model: nn.Module) -> dict[str, Tensor]:
    """Replace every real parameter by its shape; returns the tensors under their first names."""
    full = {name: p.detach() for name, p in model.named_parameters() if not p.is_meta}
    shapes: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.is_meta:
                continue
            if parameter not in shapes:
                shapes[parameter] = _shape(parameter)
            module._parameters[name] = shapes[parameter]
    return full


def _shape(parameter: nn.Parameter) -> nn.Parameter:
    shape = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
    shape.__dict__.update(parameter.__dict__)  # marks that the user or a library left on it
    carry_hooks(parameter, shape)
    return shape


def _compute_attributes(model: nn.Module, recorder: Recorder) -> None:
    """Give values to the tensors without memory that modules keep as plain attributes, where they do not depend on random numbers.

    Raises:
        NotRecordable: one does.
    """
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for path, module in model.named_modules():
        for name, value in list(vars(module).items()):
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            for holder, key, tensor in _tensors(vars(module), name, value):
                if not tensor.is_meta or id(tensor) in own:
                    continue
                real = recorder.tape.value(recorder.view(tensor))
                if real is None:
                    raise NotRecordable(f"{path or 'the model'} keeps random numbers in {name}, which is neither parameter nor buffer")
                holder[key] = real


def _tensors(holder: Any, key: Any, value: Any) -> Iterator[tuple[Any, Any, Tensor]]:
    """The tensors in an attribute, in a list or in a dict, each with where it stands."""
    if isinstance(value, Tensor):
        yield holder, key, value
    elif isinstance(value, (list, dict)):
        for inner, entry in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield from _tensors(value, inner, entry)


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise JobError(f"the construction returns a {type(model).__name__}, not an nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise PlanError(
            "a model compiled by torch.jit cannot be divided: give the module that it was made from, or divide nothing (dp only)"
        )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise JobError(f"parameter {name} gets its shape from the first batch: run one through the model in its factory")
