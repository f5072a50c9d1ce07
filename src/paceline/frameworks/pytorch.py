"""Transports, codecs and local rules for training loops in plain PyTorch, with or without DDP.

Call `init_process_group` on ranks that torchrun or another launcher has started. With `DistributedDataParallel`:

    model.register_comm_hook(CodecState("int8"), codec_hook)

The codecs are the same as for `compress=` in a plan, with error feedback. Without DDP, replicas take local steps and
synchronize parameters periodically:

    steps = LocalSteps(model, "diloco:30")
    ...
    optimizer.step()
    steps.stepped()
"""

# No `from __future__ import annotations`: torch compares the annotations of `codec_hook` with its classes.

import hashlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from paceline.comm import process_group
from paceline.comm.backend import group_of
from paceline.comm.group import Group
from paceline.device import accelerator_type, default_backend, use
from paceline.errors import LaunchError, PlanError
from paceline.planning.plan import Plan
from paceline.planning.sync_info import BETWEEN_HOSTS, CODECS, WITHIN_HOST, CompressSpec, SyncSpec
from paceline.rank_environment import LOCAL_RANK, WORLD_SIZE
from paceline.sync import Replica, attach, build_rule
from paceline.sync.batchnorm import has_batch_norm
from paceline.sync.compress import Compressor
from paceline.sync.local import LocalRule
from paceline.sync.rule import Traffic


def cpu_backend(*, one_host: bool) -> str:
    """Register and return the backend for CPU ranks: `shm` on one host, else `tcp`."""
    backend = WITHIN_HOST if one_host else BETWEEN_HOSTS
    process_group.register(backend)
    return backend


def init_process_group(**options: Any) -> None:
    """Create the default process group, with paceline's transports if the ranks are on CPUs.

    The function calls `torch.distributed.init_process_group`. Frameworks use an existing process group, so call this
    function before them. On accelerators, the backend is torch's own. If no launcher started this process, the function
    does nothing.

    Args:
        options: options of `torch.distributed.init_process_group`, e.g. `timeout`.

    Raises:
        LaunchError: the default process group already exists.
        ClusterError: the ranks cannot share memory.
    """
    ranks = int(os.environ.get(WORLD_SIZE, "1"))
    if ranks == 1:
        return
    if dist.is_initialized():
        raise LaunchError(
            "frameworks.process_group_exists",
            "a process group over {backend} already exists. Call init_process_group before the framework creates "
            "its own, e.g. before Accelerator() or TrainingArguments().",
            backend=dist.get_backend(),
        )
    if accelerator_type() is not None:
        device = use(int(os.environ.get(LOCAL_RANK, "0")))
        dist.init_process_group(default_backend(device), **options)
        return
    on_this_host = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    dist.init_process_group(cpu_backend(one_host=on_this_host == ranks), **options)


class CodecState:
    """State of `codec_hook` on one rank: codec and error feedback.

    Each model needs its own state. The gradients of the first backward pass are sent uncompressed, because DDP rebuilds
    its buckets after this pass.

    Args:
        codec: codec as in a plan, such as `int8`, `bf16`, `topk:0.01+bf16` or `powersgd:4`.
        process_group: process group of the DDP model; None means the default process group.
        seed: seed of the random rounding.

    Attributes:
        traffic: counters of sent bytes and of the codec's error.

    Raises:
        PlanError: the codec is unknown.
    """

    def __init__(self, codec: str, process_group: dist.ProcessGroup | None = None, *, seed: int = 0) -> None:
        if codec in ("none", "auto"):
            raise PlanError(
                "frameworks.hook_without_codec",
                'the hook needs a codec, but "{codec}" is not a codec. Use one of {names}, or no hook.',
                codec=codec,
                names=list(CODECS.names),
            )
        CompressSpec.parse(codec)
        self.codec, self.seed, self.traffic = codec, seed, Traffic()
        self._process_group = process_group
        self._passes = 0
        self._names: dict[tuple[int, ...], str] = {}  # error feedback of buckets, by the identities of their parameters
        self._loaded: dict[str, Tensor] = {}
        self._compressor: Compressor | None = None
        self._group: Group | None = None

    def average(self, bucket: GradBucket) -> Tensor:
        """Return the bucket's buffer (1-D), which becomes the mean over the ranks."""
        flat: Tensor = bucket.buffer()
        if self._group is None:
            self._group = group_of(self._process_group, flat.device)
        flat.div_(self._group.size)  # divides before the sum, which could overflow in 16 bits
        coded = self._passes > 0
        if bucket.is_last():
            self._passes += 1
        if not coded:
            self._group.all_reduce(flat)
            return flat
        if self._compressor is None:
            self._compressor = Compressor(self.codec, self._group, self.traffic, seed=self.seed)
            self._compressor.load_state_dict(self._loaded)
        self._compressor.sum(self._name(bucket), flat, bucket.gradients())
        for message in self._compressor.messages:
            if self._group.rank == 0:
                warnings.warn(message, stacklevel=2)
        self._compressor.messages.clear()
        return flat

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's error feedback; every rank must save its own state."""
        return dict(self._loaded) if self._compressor is None else self._compressor.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the result of `state_dict` on this rank, before the first backward pass.

        The number of ranks must be the same as before.
        """
        self._loaded = dict(state)

    def _name(self, bucket: GradBucket) -> str:
        """Return the key of a bucket's error feedback.

        The key consists of the bucket's index and its shapes, which are the same after a restart.
        """
        parameters = bucket.parameters()
        layout = tuple(map(id, parameters))
        if layout not in self._names:
            shapes = ";".join(str(tuple(parameter.shape)) for parameter in parameters)
            name = f"bucket{bucket.index()}-{hashlib.sha256(shapes.encode()).hexdigest()[:8]}"
            before = sum(known.startswith(name) for known in self._names.values())
            self._names[layout] = f"{name}.{before}"
        return self._names[layout]


def codec_hook(state: CodecState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket's gradients over the ranks with the codec; for `register_comm_hook`.

    Every rank gets the same bits. The call returns only after the reduction. An asynchronous reduction would save
    little time: ranks on one host share their cores, and between hosts, compressed gradients are small.

    Raises:
        PlanError: the codec does not support the dtype of the gradients.
        SyncError: a rank failed or missed the deadline.
    """
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(state.average(bucket))
    return future


def register_codec(model: DistributedDataParallel, codec: str) -> CodecState:
    """Make a DDP model send compressed gradients; raises the same errors as `CodecState`."""
    state = CodecState(codec, model.process_group)
    model.register_comm_hook(state, codec_hook)
    return state


_RULES = ("local", "diloco")  # these rules need only calls after the steps of a loop


class LocalSteps:
    """Local steps of a model's replicas, one replica per rank of the default process group.

    Every rank creates a `LocalSteps` object before its first optimizer step. All ranks begin with rank 0's parameters.

    Args:
        model: the plain model, not wrapped by DDP.
        sync: sync rule as in a plan, such as `local:8` or `diloco:30`.
        codec: codec for DiLoCo's pseudo-gradients; None disables compression.
        device: device of the model.

    Raises:
        PlanError: the rule or codec does not exist, or the model has batch norm, whose statistics these rules do not
            synchronize.
    """

    def __init__(
        self, model: nn.Module, sync: str, codec: str | None = None, device: torch.device | None = None
    ) -> None:
        check_sync(sync, codec)
        if sync == "allreduce":
            raise PlanError(
                "frameworks.rule_of_gradients",
                "sync={sync} works on gradients. Wrap the model in DistributedDataParallel instead.",
                sync=sync,
            )
        if has_batch_norm(model):
            raise PlanError(
                "frameworks.batch_norm_local",
                "sync={sync}: the model has batch norm, and each rank would keep its own statistics. Use group "
                "norm, or use paceline.setup, which averages the statistics for evaluations.",
                sync=sync,
            )
        group = group_of(None, device or torch.device("cpu"))
        plan = Plan(dp=group.size, sync=sync, compress=codec or "none")
        rule = build_rule(plan)
        assert isinstance(rule, LocalRule)
        self.rule, self.step = rule, 0
        self._none = torch.zeros(0, device=group.device)
        attach(self.rule, Replica(model, group, inner=type(group)(device=group.device), world=group), plan)

    def stepped(self) -> None:
        """Apply the rule after an optimizer step; every rank must call this after each step."""
        self.step += 1
        self.rule.after_backward(self.step, self._none)
        self.rule.after_step(self.step)

    @contextmanager
    def shared_parameters(self) -> Iterator[None]:
        """Return a context with synchronized parameters; all ranks must enter it."""
        with self.rule.shared_parameters():
            yield

    def end(self) -> None:
        """Leave every rank with the synchronized parameters, and release the model.

        Every rank must call this method.
        """
        with self.rule.shared_parameters():
            shared = [parameter.detach().clone() for parameter in self.rule.parameters]
        with torch.no_grad():
            for parameter, value in zip(self.rule.parameters, shared, strict=True):
                parameter.copy_(value)
        self.rule.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and the outer optimizer's state, the same on all ranks."""
        self.rule.wait()
        return {"step": self.step, "outer": {key: value.clone() for key, value in self.rule.outer_state().items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`; the model must have the parameters saved with it."""
        self.step = state["step"]
        self.rule.go_on(state["outer"])


def check_sync(sync: str, codec: str | None) -> None:
    """Check a rule and a codec before training starts.

    Raises:
        PlanError: the rule or codec is unknown or not supported here, or the rule does not support the codec.
    """
    spec = SyncSpec.parse(sync)
    if codec in ("none", "auto"):
        raise PlanError(
            "frameworks.codec_unknown",
            '"{codec}" is not a codec. Name a codec, or leave the argument out.',
            codec=codec,
        )
    if codec is not None:
        CompressSpec.parse(codec)
    if sync == "allreduce":
        return
    if spec.name not in _RULES:
        raise PlanError(
            "frameworks.rule_unsupported",
            "sync={sync} needs paceline's own engine. Use paceline.setup or paceline.train; or use allreduce, "
            "local:8 or diloco:30 here.",
            sync=sync,
        )
    if codec is not None and not spec.info.compresses:
        raise PlanError(
            "frameworks.codec_of_parameters",
            "sync={sync} sends parameters, but codecs compress only gradients. Leave codec={codec} out, or use "
            "diloco:30.",
            sync=sync,
            codec=codec,
        )
