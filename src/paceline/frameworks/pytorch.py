"""Transports, codecs and local rules in loops of plain PyTorch, with DDP or without.

`init_process_group` is for ranks that torchrun or another launcher has started. With `DistributedDataParallel`:

    model.register_comm_hook(CodecState("int8"), codec_hook)

The codecs are those of a plan's `compress=`, with their error feedback. Without DDP, replicas step alone, and
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
    """Backend for ranks on CPUs, known to torch now: `shm` on one host, else `tcp`."""
    backend = WITHIN_HOST if one_host else BETWEEN_HOSTS
    process_group.register(backend)
    return backend


def init_process_group(**options: Any) -> None:
    """`torch.distributed.init_process_group` over paceline's transports, if the ranks are on CPUs.

    Frameworks use a process group that is there already, so call it before them. On accelerators the backend is
    torch's own. Alone, without a launcher, it does nothing.

    Args:
        options: passed on, e.g. `timeout`.

    Raises:
        LaunchError: there is a process group already.
        ClusterError: the ranks cannot share memory.
    """
    ranks = int(os.environ.get(WORLD_SIZE, "1"))
    if ranks == 1:
        return
    if dist.is_initialized():
        raise LaunchError(
            "frameworks.process_group_exists",
            "a process group over {backend} already exists. Call init_process_group before the framework makes its "
            "own, e.g. before Accelerator() or TrainingArguments().",
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

    One for each model. The gradients of the first backward pass are sent as they are: DDP lays its buckets out anew
    after it.

    Args:
        codec: as in a plan: `int8`, `bf16`, `topk:0.01+bf16`, `powersgd:4`.
        process_group: that of the DDP model; None: the default one.
        seed: of the random rounding.

    Attributes:
        traffic: bytes sent, and the codec's error.

    Raises:
        PlanError: an unknown codec.
    """

    def __init__(self, codec: str, process_group: dist.ProcessGroup | None = None, *, seed: int = 0) -> None:
        if codec in ("none", "auto"):
            raise PlanError(
                "frameworks.hook_without_codec",
                'the hook needs a codec, not "{codec}". Use one of {names}, or no hook.',
                codec=codec,
                names=list(CODECS.names),
            )
        CompressSpec.parse(codec)
        self.codec, self.seed, self.traffic = codec, seed, Traffic()
        self._process_group = process_group
        self._passes = 0
        self._names: dict[tuple[int, ...], str] = {}  # of buckets, by the identities of their parameters
        self._loaded: dict[str, Tensor] = {}
        self._compressor: Compressor | None = None
        self._group: Group | None = None

    def average(self, bucket: GradBucket) -> Tensor:
        """The bucket's buffer (1-D), which becomes the mean over the ranks."""
        flat: Tensor = bucket.buffer()
        if self._group is None:
            self._group = group_of(self._process_group, flat.device)
        flat.div_(self._group.size)  # before the sum, which 16-bit numbers may not hold
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
        """Error feedback of this rank; every rank saves its own."""
        return dict(self._loaded) if self._compressor is None else self._compressor.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over what `state_dict` gave on this rank, before the first backward pass.

        There must be as many ranks as then.
        """
        self._loaded = dict(state)

    def _name(self, bucket: GradBucket) -> str:
        """Key of a bucket's error feedback.

        It is made of the bucket's place and the shapes in it, which outlive the process.
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
    """Mean of a bucket's gradients over the ranks, sent in the state's code; for `register_comm_hook`.

    Every rank gets the same bits. The sum is made before the call returns: ranks of one host share their cores, and
    between hosts the code leaves little to send.

    Raises:
        PlanError: the codec does not take the dtype of the gradients.
        SyncError: a rank did not come.
    """
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(state.average(bucket))
    return future


def register_codec(model: DistributedDataParallel, codec: str) -> CodecState:
    """Have a DDP model send its gradients coded. Raises as `CodecState`."""
    state = CodecState(codec, model.process_group)
    model.register_comm_hook(state, codec_hook)
    return state


_RULES = ("local", "diloco")  # they need nothing of a loop but its steps


class LocalSteps:
    """Local steps of a model's replicas, which are the ranks of the default process group.

    Every rank makes one, before its optimizer has stepped; all begin with rank 0's parameters.

    Args:
        model: the plain model, not wrapped by DDP.
        sync: the rule as in a plan: `local:8`, `diloco:30`.
        codec: of what DiLoCo sends; None sends it as it is.
        device: where the model is.

    Raises:
        PlanError: no such rule or codec, or the model has batch-norm statistics, which these rules do not share.
    """

    def __init__(
        self, model: nn.Module, sync: str, codec: str | None = None, device: torch.device | None = None
    ) -> None:
        check_sync(sync, codec)
        if sync == "allreduce":
            raise PlanError(
                "frameworks.rule_of_gradients",
                "sync={sync} reduces gradients. Wrap the model in DistributedDataParallel instead.",
                sync=sync,
            )
        if has_batch_norm(model):
            raise PlanError(
                "frameworks.batch_norm_local",
                "sync={sync}: the model has batch norm, and each rank would keep its own statistics. Use group norm, "
                "or paceline.setup, which averages the statistics when a model is evaluated.",
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
        """Let the rule act after an optimizer step; every rank calls it after each."""
        self.step += 1
        self.rule.after_backward(self.step, self._none)
        self.rule.after_step(self.step)

    @contextmanager
    def in_agreement(self) -> Iterator[None]:
        """Context in which all ranks have the parameters that they agree on; all enter it."""
        with self.rule.in_agreement():
            yield

    def end(self) -> None:
        """Leave every rank with the agreed parameters, and let go of the model.

        Every rank calls it.
        """
        with self.rule.in_agreement():
            agreed = [parameter.detach().clone() for parameter in self.rule.parameters]
        with torch.no_grad():
            for parameter, value in zip(self.rule.parameters, agreed, strict=True):
                parameter.copy_(value)
        self.rule.detach()

    def state_dict(self) -> dict[str, Any]:
        """Steps so far and the outer optimizer's state, the same on all ranks."""
        self.rule.wait()
        return {"step": self.step, "outer": {key: value.clone() for key, value in self.rule.outer_state().items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`; the model has the parameters that were agreed on then."""
        self.step = state["step"]
        self.rule.go_on(state["outer"])


def check_sync(sync: str, codec: str | None) -> None:
    """Check a rule and a codec before anything is started.

    Raises:
        PlanError: one of them is unknown, or they do not work here or together.
    """
    spec = SyncSpec.parse(sync)
    if codec in ("none", "auto"):
        raise PlanError(
            "frameworks.codec_unknown", 'codec="{codec}" is not a codec. Name one, or leave it out.', codec=codec
        )
    if codec is not None:
        CompressSpec.parse(codec)
    if sync == "allreduce":
        return
    if spec.name not in _RULES:
        raise PlanError(
            "frameworks.rule_unsupported",
            "sync={sync} needs paceline's own engine. Use paceline.setup or paceline.train; or use allreduce, local:8 "
            "or diloco:30 here.",
            sync=sync,
        )
    if codec is not None and not spec.info.compresses:
        raise PlanError(
            "frameworks.codec_of_parameters",
            "sync={sync} sends parameters, which codecs do not compress. Leave codec={codec} out, or use diloco:30.",
            sync=sync,
            codec=codec,
        )
