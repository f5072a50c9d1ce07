"""Communication hook of `DistributedDataParallel`: gradients are sent in coded form.

    model = DistributedDataParallel(model)
    model.register_comm_hook(CodecState("int8"), codec_hook)

The codecs are those of a plan's `compress=`, with their error feedback.
"""
# No `from __future__ import annotations`: torch compares the hook's annotations with its classes.

import hashlib
import warnings

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from paceline.comm.backend import group_of
from paceline.comm.group import Group
from paceline.errors import PlanError
from paceline.planning.sync_info import CODECS, CompressSpec
from paceline.sync.compress import Compressor
from paceline.sync.rule import Traffic


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
                f'the hook needs a codec, not "{codec}": one of {", ".join(CODECS.names)}, or no hook at all'
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


def register(model: DistributedDataParallel, codec: str) -> CodecState:
    """Have a DDP model send its gradients coded. Raises as `CodecState`."""
    state = CodecState(codec, model.process_group)
    model.register_comm_hook(state, codec_hook)
    return state
