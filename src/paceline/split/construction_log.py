"""Recording of a model's construction without values, and its replay with little memory."""

from __future__ import annotations

import hashlib
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from paceline.device import is_device_type
from paceline.job.parameters import is_dense
from paceline.planning.model.recorder import written_tensors

Take = Callable[[str, Tensor], object]


@dataclass(frozen=True)
class View:
    """A tensor in the log, which is a view of storage number `storage`."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class StorageSpec(NamedTuple):
    """A storage in the log, with its size in bytes and its device."""

    nbytes: int
    device: torch.device


@dataclass(frozen=True)
class RestoreRNG:
    """A step in which the construction set the state of a random generator.

    `to` is the state, or the index of the draw after which the generator had this state.
    """

    generator: torch.Generator
    to: int | Tensor


@dataclass(frozen=True)
class LoggedOperation:
    """One logged operation, in which a `View` replaces every logged tensor.

    Attributes:
        reads: the storages that the result depends on.
        writes: the views that the operation changes, including views of the storages in `covers`.
        covers: the storages that the operation overwrites completely without reading them.
        made: the returned tensors that have new storages, each with its position among the results.
        draws: the generator from which the operation draws random numbers, or None.
        draw_index: 1-based number of this draw among all draws from the generator.
    """

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: frozenset[int]
    writes: tuple[View, ...]
    covers: frozenset[int]
    made: tuple[tuple[int, View], ...]
    draws: torch.Generator | None = None
    draw_index: int = 0

    @property
    def creates(self) -> frozenset[int]:
        """Storages that the operation creates."""
        return frozenset(view.storage for _, view in self.made)

    @property
    def changes(self) -> frozenset[int]:
        """Storages whose values differ after this step."""
        return self.creates | {view.storage for view in self.writes}

    @property
    def touches(self) -> frozenset[int]:
        """Storages that must be in memory for this step."""
        return self.reads | self.changes


Action = Literal["run", "draw", "skip"]


@dataclass
class OperationLog:
    """The steps of a construction in order, and the initial states of the generators."""

    steps: list[LoggedOperation | RestoreRNG] = field(default_factory=list)
    storages: list[StorageSpec] = field(default_factory=list)
    starts: list[tuple[torch.Generator, Tensor]] = field(default_factory=list)

    def replay(self, wanted: Mapping[str, View], take: Take) -> None:
        """Run the construction again, and call `take` for each finished tensor of `wanted`.

        Other tensors are not computed. However, if a wanted tensor is random, all random numbers are drawn, so that the
        generators end in the same state as after a plain construction. Only unfinished tensors are in memory; for most
        models, this is one tensor at a time.
        """
        memory = _Memory(self.storages)
        live = {view.storage for view in wanted.values()}
        actions = self._actions(set(live), draw=False)
        if any(
            a == "run" and isinstance(s, LoggedOperation) and s.draws for s, a in zip(self.steps, actions, strict=True)
        ):
            actions = self._actions(live)
        finished = self._finished(actions, wanted)
        draws = _Draws(self)
        for index, (step, action) in enumerate(zip(self.steps, actions, strict=True)):
            if isinstance(step, RestoreRNG):
                draws.restore(step)
                continue
            if action == "run":
                memory.run(step)
            elif action == "draw":
                memory.draw(step)
            draws.note(step)
            for storage, names in finished[index]:
                for name in names:
                    take(name, memory.tensor(wanted[name]))
                memory.free(storage)

    def value(self, view: View) -> Tensor | None:
        """Return the value of a tensor after all steps; None if the value is random."""
        memory = _Memory(self.storages)
        for step, action in zip(self.steps, self._actions({view.storage}, draw=False), strict=True):
            if action == "run":
                if not isinstance(step, LoggedOperation) or step.draws is not None:
                    return None
                memory.run(step)
        return memory.tensor(view)

    def _actions(self, live: set[int], *, draw: bool = True) -> list[Action]:
        """Choose an action for each step; the storages `live` are needed at the end.

        The steps are examined in reverse order. A step that is not needed is skipped. If it draws random numbers, only
        the numbers are drawn; if it also reads tensors, the step runs, because the number of draws may depend on them.
        """
        actions: list[Action] = []
        for step in reversed(self.steps):
            if isinstance(step, RestoreRNG):
                actions.append("run" if draw else "skip")
                continue
            drawn = draw and step.draws is not None
            if step.changes & live or (drawn and step.reads):
                actions.append("run")
                live = (live - step.covers - step.creates) | step.reads
                live |= {view.storage for view in step.writes} - step.covers
            else:
                actions.append("draw" if drawn else "skip")
        return actions[::-1]

    def _finished(self, actions: list[Action], wanted: Mapping[str, View]) -> dict[int, list[tuple[int, list[str]]]]:
        names: dict[int, list[str]] = defaultdict(list)
        for name, view in wanted.items():
            names[view.storage].append(name)
        last: dict[int, int] = {}
        for i, (step, action) in enumerate(zip(self.steps, actions, strict=True)):
            if action == "run" and isinstance(step, LoggedOperation):
                last |= dict.fromkeys(step.touches, i)
        finished: dict[int, list[tuple[int, list[str]]]] = defaultdict(list)
        for storage, index in last.items():
            finished[index].append((storage, names[storage]))
        return finished


class _Memory:
    """The storages that are in memory at one point of the replay."""

    def __init__(self, storages: list[StorageSpec]) -> None:
        self._storages = storages
        self._held: dict[int, torch.UntypedStorage] = {}

    def run(self, step: LoggedOperation) -> None:
        for storage in step.changes - step.creates - self._held.keys():
            # allocated only now, because this step overwrites the whole storage
            self._allocate(storage)
        given = tree_map(lambda x: self.tensor(x) if isinstance(x, View) else x, (step.args, step.kwargs))
        results = tree_leaves(step.call(*given[0], **given[1]))
        theirs = {x.untyped_storage()._cdata for x in tree_leaves(given) if isinstance(x, Tensor)}
        for place, view in step.made:
            self._held[view.storage] = self._as_recorded(results[place], view, theirs)

    def draw(self, step: LoggedOperation) -> None:
        def scratch(x: Any) -> Any:
            if not isinstance(x, View):
                return x
            return torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device=self._storages[x.storage].device)

        args, kwargs = tree_map(scratch, (step.args, step.kwargs))
        step.call(*args, **kwargs)

    def tensor(self, view: View) -> Tensor:
        storage = self._held[view.storage]
        return torch.empty(0, dtype=view.dtype, device=storage.device).set_(
            storage, view.offset, view.shape, view.stride
        )

    def free(self, storage: int) -> None:
        del self._held[storage]

    def _as_recorded(self, result: Tensor, view: View, theirs: Iterable[int]) -> torch.UntypedStorage:
        """Return the storage of a result, copied if it is shared or has another layout.

        The layout of a real result may differ from the layout that was recorded without values.
        """
        storage = result.untyped_storage()
        layout = tuple(result.shape), result.stride(), result.storage_offset(), result.dtype
        if layout == (view.shape, view.stride, view.offset, view.dtype) and storage._cdata not in theirs:
            return storage
        self._allocate(view.storage)
        self.tensor(view).copy_(result)
        return self._held[view.storage]

    def _allocate(self, storage: int) -> None:
        nbytes, device = self._storages[storage]
        self._held[storage] = torch.UntypedStorage(nbytes, device=device)


class _Draws:
    """Random generators during a replay, which begin in their initial states.

    `RestoreRNG` steps set later states.
    """

    def __init__(self, log: OperationLog) -> None:
        returned_to = [
            (step.generator, step.to) for step in log.steps if isinstance(step, RestoreRNG) and isinstance(step.to, int)
        ]
        self._saved: dict[tuple[torch.Generator, int], Tensor | None] = dict.fromkeys(returned_to)
        for generator, state in log.starts:
            generator.set_state(state)
            self._save(generator, 0)

    def note(self, step: LoggedOperation) -> None:
        if step.draws is not None:
            self._save(step.draws, step.draw_index)

    def restore(self, step: RestoreRNG) -> None:
        state = self._saved[step.generator, step.to] if isinstance(step.to, int) else step.to
        assert state is not None
        step.generator.set_state(state)

    def _save(self, generator: torch.Generator, number: int) -> None:
        if (generator, number) in self._saved and self._saved[generator, number] is None:
            self._saved[generator, number] = generator.get_state()


# Operations whose floating-point results get no memory during recording, with their fill values. Other factories
# (arange, linspace, tensor(...)) return real tensors, because constructions use them to compute layer counts, drop
# rates and rotary frequencies, and read the results.
_FILLED: dict[str, float | None] = {
    **dict.fromkeys(("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), 0),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), 1),
    # the fill value is among the arguments
    **dict.fromkeys(("full", "full_like", "new_full")),
}
# Operations that do not read the tensor that they write to.
_DRAWS_INTO = {"normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_"}
_OVERWRITE = _DRAWS_INTO | {"fill_", "zero_", "copy_"}
_CPU = torch.device("cpu")


class NotRecordable(Exception):
    """Raised when a construction cannot be recorded, with the reason as the message."""


class ConstructionRecorder:
    """Recorder of the operations of a construction.

    `log` is complete after the context `recording` ends.

    Attributes:
        problem: the reason why the log cannot be used; None if it can be used.
        constant_bytes: bytes of real tensors in the log, such as weights that the construction loaded.
    """

    def __init__(self) -> None:
        self.log = OperationLog()
        self.problem: str | None = None
        self.constant_bytes = 0
        self._numbers: dict[int, int] = {}  # index of each storage, by its address
        self._storages: list[torch.UntypedStorage] = []  # references that prevent the reuse of an address
        self._constants: dict[int, torch.UntypedStorage] = {}
        self._streams: dict[torch.Generator, _GeneratorStates] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record all construction in this context, and restore torch's random state afterwards."""
        try:
            self._stream(torch.default_generator)
            with _truncated_normal_recorded(self), _Attributes(self), _RecordingMode(self):
                yield
            for stream in self._streams.values():
                self._follow(stream)
        finally:
            for stream in self._streams.values():
                stream.generator.set_state(stream.start)

    def holds(self, tensor: Tensor) -> bool:
        """True if a tensor is in the log."""
        return tensor.is_meta and tensor.untyped_storage()._cdata in self._numbers

    def view(self, tensor: Tensor) -> View:
        """Return the view of a tensor in the log.

        Raises:
            NotRecordable: the tensor is not in the log.
        """
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        if number is None:
            raise NotRecordable(
                "it uses numbers that torch has put where no recording sees them, such as those of weight[[0, 1]]"
            )
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            raise NotRecordable("it makes a sparse or lazily conjugated tensor")
        return View(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def device(self, tensor: Tensor) -> torch.device:
        """Return the intended device of a tensor in the log."""
        return self.log.storages[self._numbers[tensor.untyped_storage()._cdata]].device

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one torch operation.

        If some values are unknown, the operation runs without values and is logged.

        Raises:
            NotRecordable: the operation cannot be logged.
        """
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        recorded = [x for x in tensors if x.is_meta]
        name = func._schema.name.removeprefix("aten::")
        random = torch.Tag.nondeterministic_seeded in func.tags
        fills = name in _FILLED and (bool(recorded) or not name.endswith("_like"))
        # for `weight[i] = 0`, torch creates the number 0 on the device of the weight
        beside = _is_meta(kwargs.get("device"))
        if not (recorded or random or fills or beside):
            return self._known(func, args, kwargs)
        if beside:
            kwargs = kwargs | {"device": _CPU}
        if name == "_local_scalar_dense":
            return self._read(func, recorded[0])
        # these operations change the memory that a tensor refers to, but no values
        if name == "set_" or torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        written = written_tensors(func, args, kwargs)
        if any(not x.is_meta and x.numel() for x in written):
            raise NotRecordable(
                "it makes values that it knows already, such as those of torch.tensor(...), depend on random ones"
            )
        result = self._shaped(func, args, kwargs, written, create=not recorded)
        real = fills and not recorded and not beside
        if real and not (result.numel() and (result.is_floating_point() or result.is_complex())):
            return self._known(func, args, kwargs)
        self._note(func, name, args, kwargs, written, result)
        return result

    def fill(self, func: Callable[..., Any], tensor: Tensor, *args: Any, generator: torch.Generator | None) -> None:
        """Log a function that fills `tensor` with random numbers."""
        view = self.view(tensor)
        covers = frozenset([view.storage]) if self._is_all(tensor) else frozenset()
        step = LoggedOperation(func, (view, *args), {"generator": generator}, frozenset(), (view,), covers, ())
        self._add(step, generator or torch.default_generator)

    def _known(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(x.untyped_storage()._cdata in self._constants for x in written_tensors(func, args, kwargs)):
            raise NotRecordable("it changes values in place that it has used for weights")
        return func(*args, **kwargs)

    def _read(self, func: Any, tensor: Tensor) -> Any:
        """Return the number in a tensor, which must not be random."""
        with torch.no_grad():
            value = self.log.value(self.view(tensor))
        if value is None:
            raise NotRecordable("it reads random numbers (.item(), .tolist(), or an `if` on a tensor)")
        return func(value)

    def _shaped(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor], *, create: bool
    ) -> Any:
        sizes = [x.untyped_storage().nbytes() for x in written]
        args, kwargs = tree_map(_shape_only, (args, kwargs))
        names = [argument.name for argument in func._schema.arguments]
        if "device" in names and (create or kwargs.get("device")):
            kwargs |= {"device": torch.device("meta")}
        result = func(*args, **{key: value for key, value in kwargs.items() if key != "pin_memory"})
        if sizes != [x.untyped_storage().nbytes() for x in written]:
            raise NotRecordable(f"{func} resizes a tensor")
        return result

    def _note(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor], result: Any
    ) -> None:
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        for tensor in inputs:
            if tensor.is_meta:
                self.view(tensor)
        device = self._device_of_result(inputs, kwargs)
        made = tuple(
            (place, self._new(tensor, device))
            for place, tensor in enumerate(tree_leaves(result))
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._numbers
        )
        if not made and not written:
            return
        if name in _FILLED and not written:
            value = _FILLED[name] if "full" not in name else kwargs.get("fill_value", args[-1])
            layout = tuple(result.shape), result.stride(), result.dtype
            self._add(LoggedOperation(_filled, (*layout, device, value), {}, frozenset(), (), frozenset(), made))
            return
        if not inputs:
            kwargs = kwargs | {"device": device, "dtype": result.dtype}
        only_writes = {id(x) for x in written} if name in _OVERWRITE or _is_out(func) else set()
        reads = frozenset(self.view(x).storage for x in inputs if x.is_meta and id(x) not in only_writes)
        covers = frozenset(self.view(x).storage for x in written if id(x) in only_writes and self._is_all(x)) - reads
        args, kwargs = tree_map(self._placed, (args, kwargs))
        step = LoggedOperation(func, args, kwargs, reads, tuple(self.view(x) for x in written), covers, made)
        random = torch.Tag.nondeterministic_seeded in func.tags
        self._add(step, (kwargs.get("generator") or torch.default_generator) if random else None)

    def _add(self, step: LoggedOperation, generator: torch.Generator | None = None) -> None:
        if generator is None:
            self.log.steps.append(step)
            return
        if any(self.log.storages[storage].device.type != "cpu" for storage in step.touches):
            raise NotRecordable("it draws random numbers on another device than the CPU")
        stream = self._stream(generator)
        self._follow(stream)
        self.log.steps.append(replace(step, draws=generator, draw_index=stream.advance()))

    def _stream(self, generator: torch.Generator) -> _GeneratorStates:
        if generator not in self._streams:
            self._streams[generator] = _GeneratorStates(generator)
            self.log.starts.append((generator, self._streams[generator].start))
        return self._streams[generator]

    def _follow(self, stream: _GeneratorStates) -> None:
        if (to := stream.moved()) is not None:
            self.log.steps.append(RestoreRNG(stream.generator, to))

    def _new(self, tensor: Tensor, device: torch.device) -> View:
        storage = tensor.untyped_storage()
        self._numbers[storage._cdata] = len(self._storages)
        self._storages.append(storage)
        self.log.storages.append(StorageSpec(storage.nbytes(), device))
        return self.view(tensor)

    def _placed(self, x: Any) -> Any:
        """Replace a meta tensor with its view in the log; return other arguments unchanged."""
        if not isinstance(x, Tensor):
            return x
        if x.is_meta:
            return self.view(x)
        storage = x.untyped_storage()
        if storage._cdata not in self._constants:
            self._constants[storage._cdata] = storage
            self.constant_bytes += storage.nbytes()
        return x.detach()

    def _device_of_result(self, inputs: list[Tensor], kwargs: dict[str, Any]) -> torch.device:
        if kwargs.get("device") is not None:
            return torch.device(kwargs["device"])
        return next((self.device(x) if x.is_meta else x.device for x in inputs), _CPU)

    def _is_all(self, tensor: Tensor) -> bool:
        """True if a tensor covers each element of its storage exactly once."""
        whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        return whole and is_dense(tensor)


class _RecordingMode(TorchDispatchMode):
    """Dispatch mode that passes operations to the recorder.

    The first failure is stored in the recorder's `problem`.
    """

    def __init__(self, recorder: ConstructionRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            # the recorder needs the real device of a tensor, not the device that `_Attributes` reports
            with torch._C.DisableTorchFunction():
                return self._recorder.operate(func, args, kwargs or {})
        except Exception as error:
            what = str(error) if isinstance(error, NotRecordable) else f"{func}: {error}"
            self._recorder.problem = self._recorder.problem or f"{what}, at {_place()}"
            raise


class _Attributes(TorchFunctionMode):
    """Function mode that reports the intended device of logged tensors.

    Many initialisers would skip tensors on the meta device.
    """

    def __init__(self, recorder: ConstructionRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ANSWERS and self._recorder.holds(args[0]):
            return _ANSWERS[func](self._recorder.device(args[0]))
        if _is_meta((kwargs or {}).get("device")):
            self._recorder.problem = f"it makes tensors on the meta device, which have no values, at {_place()}"
        if func is Tensor.__deepcopy__ and self._recorder.holds(args[0]):
            return _deep_copied(*args)
        if func == _SET_DATA and self._recorder.holds(args[0]) and not args[1].is_meta:
            # torch cannot assign a tensor with values to a meta tensor's `data`
            return func(args[0], torch.empty(args[1].shape, dtype=args[1].dtype).copy_(args[1]))
        return func(*args, **(kwargs or {}))


class _GeneratorStates:
    """A random generator during recording, which advances with every draw.

    Each state is therefore unique.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.start = generator.get_state()
        self._last = _digest(self.start)
        # number of draws before each state
        self._known = {self._last: 0}
        self._drawn = 0

    def moved(self) -> int | Tensor | None:
        """Return the state that the construction has set since the last draw.

        The result is the index of an earlier draw that led to this state, or a new state. It is None if no state was
        set.
        """
        state = self.generator.get_state()
        digest = _digest(state)
        if digest == self._last:
            return None
        self._last = digest
        return self._known.get(digest, state)

    def advance(self) -> int:
        torch.rand(1, generator=self.generator, device=_CPU)
        self._drawn += 1
        self._last = _digest(self.generator.get_state())
        self._known[self._last] = self._drawn
        return self._drawn


def _is_of(kind: str, device: torch.device) -> bool:
    return device.type == kind


_ANSWERS: dict[Any, Callable[[torch.device], Any]] = {
    Tensor.device.__get__: lambda device: device,
    # is_cpu, is_meta and so on
    **{
        getattr(Tensor, f"is_{kind}").__get__: partial(_is_of, kind)
        for kind in (name.removeprefix("is_") for name in dir(torch._C.TensorBase) if name.startswith("is_"))
        if is_device_type(kind)
    },
}
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


def _deep_copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Deep-copy a logged tensor, whose storage has no memory that PyTorch could copy."""
    if id(tensor) not in memo:
        memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    copied: Tensor = memo[id(tensor)]
    return copied


@contextmanager
def _truncated_normal_recorded(recorder: ConstructionRecorder) -> Iterator[None]:
    """Log torch's truncated normal as one operation, because its number of draws varies.

    torch's function draws again for each rejected value.
    """
    original: Any = torch.nn.init._no_grad_trunc_normal_

    def fill(
        tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
    ) -> Tensor:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            if recorder.holds(tensor):
                recorder.fill(original, tensor, mean, std, a, b, generator=generator)
                return tensor
        filled: Tensor = original(tensor, mean, std, a, b, generator=generator)
        return filled

    torch.nn.init._no_grad_trunc_normal_ = fill
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = original


def _filled(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device, value: float | None
) -> Tensor:
    made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return made if value is None else made.fill_(value)


def _is_out(func: Any) -> bool:
    return any(argument.is_out for argument in func._schema.arguments)


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _shape_only(x: Any) -> Any:
    if isinstance(x, torch.Generator):
        return None
    if isinstance(x, Tensor) and not x.is_meta:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return x


def _digest(state: Tensor) -> bytes:
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()


def _place() -> str:
    others = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(others)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown place"
