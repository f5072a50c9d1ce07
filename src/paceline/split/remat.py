"""Activation checkpointing (`remat`) and compilation of blocks, without renaming modules."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from paceline.device import has_graphs, is_accelerator
from paceline.errors import PlanError
from paceline.files import made_cache_folder, must_not_be_anothers, private_folder
from paceline.planning.limits import no_graphs
from paceline.split import ring  # noqa: F401, its operator is kept

Undo = Callable[[], None]
Forward = Callable[..., Any]

_aten = torch.ops.aten
_ATTENTION = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
_KEPT_NAMES = ("mm", "addmm", "convolution", "_grouped_mm", *(f"_scaled_dot_product_{kind}" for kind in _ATTENTION))
_KEPT = {getattr(_aten, name).default for name in _KEPT_NAMES if hasattr(_aten, name)} | {
    torch.ops.paceline.ring_attention.default
}


def rematerialise(blocks: Sequence[nn.Module], how: Literal["selective", "block"]) -> Undo:
    """Recompute activations of blocks in the backward pass; return a function that undoes this.

    `block` keeps only the inputs of a block and costs one more forward pass of the block (Chen et al., 2016,
    arXiv:1604.06174). `selective` also keeps the results of matrix multiplications with weights, convolutions and fused
    attention, and recomputes the cheap remainder. The remainder includes materialized attention scores, whose size
    grows with the square of the sequence length (Korthikanti et al., 2022, arXiv:2205.05198).

    The results do not change, because dropout draws the same masks again, and batch norm statistics are updated only
    once. While gradients are recorded, a block gets no key-value cache, because the second pass would append to the
    cache again. Only the method `forward` of each instance is replaced, so hooks (including those of FSDP2) run once,
    outside of the recomputation.
    """
    return replace_forwards(blocks, partial(_rematerialised, how=how))


def compile_blocks(blocks: Sequence[nn.Module], mode: str, device: torch.device) -> Undo:
    """Compile each block's forward pass; return a function that undoes this.

    Call this after `rematerialise`, so that torch.compile also traces the recomputation.

    Args:
        mode: a value of the plan key `compile`, which is `on` or one of torch's modes.
        device: the device on which the blocks compute.

    Raises:
        PlanError: the mode is `reduce-overhead` and the device does not support graphs. The first forward pass also
            raises a PlanError if torch cannot compile on this machine.
    """
    return replace_forwards(
        blocks,
        lambda block, forward: wraps(forward)(compiled(forward, mode, device, f"a {type(block).__name__}")),
    )


def compile_calls(modules: Sequence[nn.Module], mode: str, device: torch.device) -> Undo:
    """Compile direct calls of modules, `module(…)`; return a function that undoes this.

    As with `Module.compile`, copies of the modules, such as moving averages, are not compiled.

    Raises:
        PlanError: as for `compile_blocks`.
    """
    for module in modules:
        module._compiled_call_impl = compiled(module._call_impl, mode, device, f"a {type(module).__name__}")

    def undo() -> None:
        for module in modules:
            module._compiled_call_impl = None

    return undo


def _rematerialised(block: nn.Module, forward: Forward, how: str) -> Forward:
    selects = how == "selective"
    written = _WrittenState(block)

    @wraps(forward)
    def rematerialised(*args: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **keywords)
        args, keywords = _without_cache(args, keywords)
        # the compiler supports only its own selective checkpointing, and updates batch norm statistics outside of the
        # recomputation
        compiling = torch.compiler.is_compiling()
        contexts = partial(create_selective_checkpoint_contexts, _policy) if compiling else _keep_and_replay
        selection: dict[str, Any] = {"context_fn": contexts} if selects else {}
        again = forward if compiling else _Again(forward, written)
        return checkpoint(again, *args, use_reentrant=False, **selection, **keywords)

    return rematerialised


def _policy(context: Any, operator: Any, *args: Any, **keywords: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_kept(operator, args, keywords) else CheckpointPolicy.PREFER_RECOMPUTE


def _is_kept(operator: Any, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> bool:
    """Return True if an operator's result is kept for the backward pass.

    Attention with dropout is recomputed, because it draws a random mask, and the masks of later operations depend on
    this draw.
    """
    if operator not in _KEPT:
        return False
    names = [argument.name for argument in operator._schema.arguments]
    return not {**dict(zip(names, args, strict=False)), **keywords}.get("dropout_p")


def _keep_and_replay() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    results: list[Any] = []
    return _Kept(results, replays=False), _Kept(results, replays=True)


class _Kept(TorchDispatchMode):
    """Dispatch mode that records results in the forward pass, or returns the recorded results.

    In contrast to PyTorch's selective checkpointing, results are copied on write, so a block may change them in place
    (such as an in-place activation function or a sum over ranks). The results can also be returned more than once, as
    zero-bubble schedules require.
    """

    def __init__(self, results: list[Any], *, replays: bool) -> None:
        super().__init__()
        self.results, self.replays = results, replays

    def __enter__(self) -> _Kept:
        self.left = iter(self.results)
        super().__enter__()
        return self

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_kept = _is_kept(operator, args, kwargs or {})
        if is_kept and self.replays:
            return _copied_on_write(next(self.left))
        result = operator(*args, **(kwargs or {}))
        if is_kept:
            self.results.append(_copied_on_write(result))
        return result


def _copied_on_write(result: Any) -> Any:
    return tree_map_only(Tensor, torch._lazy_clone, result)


def _without_cache(args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Remove the key-value cache from the arguments of a Hugging Face block.

    Hugging Face's own gradient checkpointing does the same.
    """
    if "use_cache" in keywords:
        keywords = {**keywords, "use_cache": False}
    caches = sys.modules.get("transformers.cache_utils")
    if caches is None:
        return args, keywords
    kept = tuple(None if isinstance(value, caches.Cache) else value for value in args)
    return kept, {name: None if isinstance(value, caches.Cache) else value for name, value in keywords.items()}


class _Again:
    def __init__(self, forward: Forward, written: _WrittenState) -> None:
        self.forward, self.written = forward, written
        self.before: list[_ModuleState] | None = None

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if self.before is None:
            with self.written.noted() as self.before:
                return self.forward(*args, **keywords)
        now = [_ModuleState(state.module) for state in self.before]
        for state in self.before:
            state.put(copies=True)
        try:
            return self.forward(*args, **keywords)
        finally:
            for state in now:
                state.put()


class _WrittenState:
    """The modules of a block whose buffers or plain attributes change in the forward pass.

    The first pass in each mode (training or evaluation) finds these modules with copies of all buffers.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self._found: dict[bool, list[nn.Module]] = {}

    @contextmanager
    def noted(self) -> Iterator[list[_ModuleState]]:
        """Record the changes that a forward pass makes within this context.

        Afterwards, the yielded list has the earlier state of each module that changed.

        Raises:
            PlanError: a module changes a buffer that it did not change in the first pass.
        """
        mode, modules = self.block.training, list(self.block.modules())
        looks = mode not in self._found
        before = [_ModuleState(module, copies=True) for module in (modules if looks else self._found[mode])]
        versions = [_versions(module) for module in modules]
        yield before
        if looks:
            before[:] = [state for state in before if state.differs()]
            self._found[mode] = [state.module for state in before]
        known = set(self._found[mode])
        for module, version in zip(modules, versions, strict=True):
            if module not in known and _versions(module) != version:
                raise PlanError(
                    "plan.remat_buffer",
                    "remat: a {class_name} changes a buffer only in some steps, and the second forward pass of a "
                    "block would change the buffer again. Use remat=none.",
                    class_name=type(module).__name__,
                )


class _ModuleState:
    """The buffers and plain attributes of one module.

    With `copies`, the state has copies of the buffers, so later in-place changes do not affect the state.
    """

    def __init__(self, module: nn.Module, *, copies: bool = False) -> None:
        self.module, self._versions = module, _versions(module)
        self._buffers = _buffers(module._buffers, copies)
        self._attributes = {key: value for key, value in vars(module).items() if isinstance(value, _PLAIN)}

    def put(self, *, copies: bool = False) -> None:
        """Set the module to this state.

        With `copies`, the module gets copies of the buffers, because autograd must not see changes to the originals.
        """
        self.module._buffers.update(_buffers(self._buffers, copies))
        vars(self.module).update(self._attributes)

    def differs(self) -> bool:
        now = vars(self.module)
        return _versions(self.module) != self._versions or any(
            now.get(key) is not value for key, value in self._attributes.items()
        )


_PLAIN = (bool, int, float, complex, str, tuple, Tensor, type(None))


def _buffers(buffers: Mapping[str, Tensor | None], copies: bool) -> dict[str, Tensor | None]:
    return {key: b.clone() if copies and b is not None else b for key, b in buffers.items()}


def _versions(module: nn.Module) -> list[tuple[int, int]]:
    return [(id(b), b._version) for b in module._buffers.values() if b is not None]


def compiled(forward: Forward, mode: str, device: torch.device, name: str) -> Forward:
    """Compile a forward pass.

    Args:
        mode: a value of the plan key `compile`; see `compile_blocks`.
        name: name of the compiled module, for errors.

    Raises:
        PlanError: the device does not support graphs, or torch cannot compile on this machine; see `compile_blocks`.
    """
    if mode == "reduce-overhead" and not has_graphs(device):
        raise PlanError.of_problems([no_graphs("this rank")])
    keep_compiled_code_private()
    made: Forward = torch.compile(forward, mode=None if mode == "on" else mode)

    def run(*args: Any, **keywords: Any) -> Any:
        from torch._inductor.exc import InductorError  # heavy

        try:
            return made(*args, **keywords)
        except InductorError as error:
            what = str(error).strip().partition("\n")[0]
            code = f"code for devices of type {device.type}, " if is_accelerator(device) else ""
            raise PlanError(
                "plan.compile_failed",
                "compile={mode}: torch cannot compile {name} here: {reason}. It needs {needs}a C++ compiler and "
                "Python's headers (on Debian and Ubuntu: apt install g++ python3-dev). You can also leave compile "
                "out.",
                mode=mode,
                name=name,
                reason=what,
                needs=code,
            ) from error

    return run


def replace_forwards(blocks: Sequence[nn.Module], replacement: Callable[[nn.Module, Forward], Forward]) -> Undo:
    """Set `forward` on each instance; return a function that restores the previous `forward`."""
    before = [block.__dict__.get("forward") for block in blocks]
    for block in blocks:
        block.__dict__["forward"] = replacement(block, block.forward)

    def undo() -> None:
        for block, own in zip(blocks, before, strict=True):
            block.__dict__.pop("forward", None)
            if own is not None:
                block.__dict__["forward"] = own

    return undo


_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def keep_compiled_code_private() -> None:
    """Make torch.compile use a private cache folder (mode 0700) or TORCHINDUCTOR_CACHE_DIR.

    By default, torch uses a folder with a predictable name among the temporary files. Another user who creates this
    folder first could choose the code that runs.

    Raises:
        PlanError: the folder belongs to another user.
    """
    named = os.environ.get(_VARIABLE)
    try:
        folder = Path(named) if named else made_cache_folder("torchinductor")
        if named:
            must_not_be_anothers(folder)
    except OSError as error:
        if named or error.errno == errno.EPERM:
            raise PlanError(
                "plan.compile_folder_open",
                "compile= would run code from {folder}: {reason}. Set {variable} to your own folder, or leave "
                "compile out.",
                folder=named or error.filename,
                reason=error.strerror,
                variable=_VARIABLE,
            ) from error
        return _guard_the_default(error)  # the user has no home directory
    os.environ[_VARIABLE] = str(folder)
    return None


def _guard_the_default(error: OSError) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # heavy

    try:
        private_folder(Path(default_cache_dir()))
    except OSError as second:
        raise PlanError(
            "plan.compile_no_folder",
            "compile= has no folder for the compiled code: {reason} ({filename}), and {second_reason} ({second}). "
            "Set {variable} to your own folder, or leave compile out.",
            reason=error.strerror,
            filename=error.filename,
            second_reason=second.strerror,
            second=second.filename,
            variable=_VARIABLE,
        ) from second
