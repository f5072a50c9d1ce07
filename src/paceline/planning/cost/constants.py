"""Physical constants of the cost model. The same values apply to all models, machines and frameworks.

`ASSUMED` lists the numbers that `benchmarks/published_fit.py` fits to published runs, each with the value that data
sheets and literature suggest and the spread of its logarithm; `fitted.FITTED` has the result. A user's own runs move
them again (`planning/machines.py`). The other constants are properties of hardware or libraries with a cited source, or
are marked as assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar

from paceline.planning.cost.fitted import FITTED as FITTED


class Assumed(NamedTuple):
    """Value assumed before any run is measured, and the spread of its logarithm."""

    value: float
    spread: float


ASSUMED: dict[str, Assumed] = {
    # fraction of the peak that long matrix products sustain within a device's power, by family of devices; relative to
    # `Accelerator.sustained`
    "SUSTAINED_VOLTA": Assumed(0.80, 0.10),
    "SUSTAINED_AMPERE": Assumed(0.80, 0.10),
    "SUSTAINED_HOPPER": Assumed(0.76, 0.10),
    "SUSTAINED_BLACKWELL": Assumed(0.76, 0.10),
    "SUSTAINED_CDNA": Assumed(0.70, 0.10),
    "SUSTAINED_TPU": Assumed(0.80, 0.10),
    "SUSTAINED_OTHER": Assumed(0.75, 0.15),
    # overhead of a tile, in steps of its inner loop
    "GEMM_START_K": Assumed(90.0, 0.15),
    # cost of an incomplete last wave of tiles, as a share of the missing tiles; smaller tiles fill it up
    "WAVE": Assumed(0.5, 0.2),
    # remaining speed of products whose rows are aligned to less than 16 bytes
    "UNALIGNED": Assumed(0.254, 0.2),
    # products below 16 bits: their share of the peak relative to operations measured alone (`LOW_TOP`)
    "LOW_PRECISION": Assumed(0.9, 0.15),
    # fused attention: its speed in a training step relative to the kernel measured alone
    "ATTENTION": Assumed(1.0, 0.15),
    # traffic beside products relative to the trace, by software stack
    "VECTOR_EAGER": Assumed(1.5, 0.25),
    "VECTOR_PARTLY_FUSED": Assumed(1.3, 0.25),
    "VECTOR_FUSED": Assumed(1.1, 0.25),
    "VECTOR_COMPILED": Assumed(0.9, 0.25),
    # traffic of the backward pass per number of the forward pass; the same for scores of attention
    "VECTOR_BACKWARD": Assumed(1.7, 0.15),
    "SCORES_BACKWARD": Assumed(1.2, 0.2),
    # number of times that an update reads and writes its numbers
    "OPTIMIZER_PASSES": Assumed(1.0, 0.2),
    # kernels for each kernel of the trace, by software stack
    "KERNELS_EAGER": Assumed(4.0, 0.3),
    "KERNELS_PARTLY_FUSED": Assumed(3.0, 0.3),
    "KERNELS_FUSED": Assumed(1.5, 0.3),
    # time to start and end a kernel on a device
    "KERNEL_S": Assumed(2.43e-6, 0.2),
    # increase of launch times for each further tp rank, since ranks wait for the slowest
    "LAUNCH_TP": Assumed(0.036, 0.4),
    # once per step: data, logging, reduction of the loss
    "STEP_S": Assumed(1e-3, 0.7),
    # share of the bandwidth between hosts that large collectives reach
    "LINK_TOP_BETWEEN": Assumed(0.80, 0.15),
    # exponent by which that share falls with the number of hosts of a group, since all wait for the slowest link
    "HOSTS": Assumed(0.10, 0.5),
    # slowdown of compute, relative to the duration of overlapped traffic (Galvatron's overlap_coe, arXiv:2211.13878)
    "CONTENTION": Assumed(0.126, 0.3),
    # time to pass a microbatch to the next stage, beside the time on the link
    "PIPELINE_S": Assumed(3e-4, 0.7),
    # mixtures: time to count each expert's tokens and wait for the counts; kernels for routing and sorting beyond those
    # that the trace counts, and for each expert of a rank
    "EXPERT_S": Assumed(5e-5, 0.5),
    "MIXTURE_KERNELS": Assumed(60.0, 0.7),
    "EXPERT_KERNELS": Assumed(3.0, 0.5),
    # speed of a state space's small products relative to a fused attention kernel
    "SCAN": Assumed(0.25, 0.3),
    # convolutions: time relative to plain products, and remaining traffic of norms and activations if they are fused
    "CONVOLUTION": Assumed(0.9, 0.2),
    "CONVOLUTION_VECTOR": Assumed(0.7, 0.3),
    # traffic between convolutions in tf32, relative to 16 bits. Tensor cores need channels-last images, but tf32 is
    # usually left on for channels-first images, which are transposed on the way (NVIDIA, Convolutional Layers Guide)
    "CONVOLUTION_TF32": Assumed(1.4, 0.2),
    # slowdown of convolutions over three dimensions on tensor cores
    "CONVOLUTION_3D": Assumed(1.5, 0.2),
}

_assumed = {name: assumed.value for name, assumed in ASSUMED.items()}
_base: Mapping[str, float] = FITTED
_clear: list[Callable[[], None]] = []
Function = TypeVar("Function", bound=Callable[..., Any])


def use(values: Mapping[str, float] | None = None) -> None:
    """Set fitted constants for the predictions that follow.

    Constants that `values` does not name are `FITTED`. Each is an attribute of this module. Cached results that depend
    on them are dropped if a value changes.
    """
    wanted = {**_assumed, **_base, **(values or {})}
    if any(globals().get(name) != value for name, value in wanted.items()):
        globals().update(wanted)
        forget()


def forget() -> None:
    """Drop cached results that depend on constants."""
    for clear in _clear:
        clear()


def fix(values: Mapping[str, float] | None = None) -> None:
    """Replace `FITTED` by other values, such as those of a fit without some runs.

    None restores it.
    """
    global _base
    _base = FITTED if values is None else dict(values)
    use()


def fitted(name: str | float) -> float:
    """Return the value in use of a fitted constant.

    A number is returned as it is.
    """
    return float(globals()[name]) if isinstance(name, str) else name


def __getattr__(name: str) -> float:
    """Tell type checkers that fitted constants are numbers; `use` sets them."""
    raise AttributeError(name)


use()


def cached(maxsize: int) -> Callable[[Function], Function]:
    """Cache results of a function as `functools.lru_cache` does, until fitted constants change."""

    def wrap(function: Function) -> Function:
        wrapped: Any = lru_cache(maxsize=maxsize)(function)
        _clear.append(wrapped.cache_clear)
        return wrapped  # type: ignore[no-any-return]

    return wrap


StackName = Literal["traced", "traced, compiled", "eager", "graph", "partly fused", "fused", "compiled"]


class Stack(NamedTuple):
    """How far the software fuses kernels.

    Attributes:
        vector: traffic of kernels beside matrix products relative to the trace, or the name of the fitted constant.
        kernels: the same for the number of kernels.
        loss: traffic of the loss over a vocabulary, relative to torch's.
        mixtures: traffic, casts and kernels of layers with experts relative to other layers.
    """

    vector: str | float
    kernels: str | float
    loss: float
    mixtures: float = 1.0


# paceline runs the model's own code, and its traces list each kernel: a GPT of 124M on an H100 takes 53.7 ms per step,
# and 42.6 if compiled (benchmarks/gpu.py). The other stacks run models whose traces are built from dimensions: `eager`
# launches each operation, `graph` does so without Python, `partly fused` has fused norms, softmax and optimizers,
# `fused` is a library of fused layers (Transformer Engine), and `compiled` is generated code (torch.compile, XLA).
STACKS: dict[StackName, Stack] = {
    "traced": Stack(0.9, 1.0, 1.0),
    "traced, compiled": Stack(0.45, 0.5, 0.6),
    "eager": Stack("VECTOR_EAGER", "KERNELS_EAGER", 1.0),
    "graph": Stack("VECTOR_EAGER", 1.0, 1.0),
    "partly fused": Stack("VECTOR_PARTLY_FUSED", "KERNELS_PARTLY_FUSED", 1.0),
    "fused": Stack("VECTOR_FUSED", "KERNELS_FUSED", 1.5),
    "compiled": Stack("VECTOR_COMPILED", 0.7, 1.0),
}


# Matrix products
# share of the peak that a large product reaches while power does not limit the clock
GEMM_TOP = 0.93
# sizes of the result's tiles, and how well each uses a multiprocessor
Tiles = tuple[tuple[int, int, float], ...]
TILES: Tiles = ((256, 128, 1.0), (128, 128, 0.97), (128, 64, 0.82), (64, 64, 0.66))
# for results that are no wider, such as convolutions with few channels without tensor cores
NARROW_N = 32
NARROW_TILES: Tiles = ((256, 32, 0.66), (128, 32, 0.55), (64, 32, 0.45))
# numbers of multiprocessors among which a tile's inner loop may be split
SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)
# Misaligned rows are read in more pieces (NVIDIA, "Matrix Multiplication Background User's Guide"): bytes that divide
# the rows' length, and the remaining speed
ALIGNED = ((128, 1.0), (64, 0.97), (32, 0.93), (16, 0.86))
# below 16 bytes, batches of small products do not use tensor cores: share of the fp32 peak
UNALIGNED_BATCH = 0.9

# Products in less than 16 bits: share of the peak, relative to 16-bit products, by scaling. fp8 with a scale per tensor
# or per row is measured (tables/operations_h100.csv: 1,320 and 1,150 TFLOP/s of 1,979, bf16 706 of 989). Kernels of
# 2024 with a scale per row were slower.
LOW_TOP = {"int8": 0.94, "fp8": 0.94, "fp8-row": 0.76, "fp8-block": 0.80, "mxfp8": 0.90, "fp4": 0.75}
# bytes of a number with its scales
LOW_BYTES = {"int8": 1.0, "fp8": 1.0, "fp8-row": 1.0, "fp8-block": 1.03, "mxfp8": 1.03, "fp4": 0.56}
# bytes moved for each number that is cast: read for its scale and to cast it, and written in two layouts. Rows need
# separate scales in each layout. Formats with scales for few numbers are read once
CAST_BYTES = {"int8": 5.0, "fp8": 6.0, "fp8-row": 10.0, "fp8-block": 6.0, "mxfp8": 4.0, "fp4": 3.5}

# Without a compiler, torchao's scale and cast are a dozen kernels: bytes moved for a number, relative to fused casts,
# and kernels for the two tensors that a layer casts in its forward pass
UNFUSED_CASTS = 5.5
UNFUSED_CAST_KERNELS = 24

# Convolutions: reduction of the work by Winograd's algorithm for 3 × 3 in tiles of 2 × 2
WINOGRAD = 2.25
# width up to which tensor cores compute groups of a convolution together: the width of a tile
GROUPS_N = 16

# Tokens of an expert are padded to a multiple of this, so that rows of its gradients are aligned (torchtitan pads to 8
# in bf16, to 16 in fp8)
EXPERT_ROWS = 16

# Memory-bound kernels
# share of the memory's bandwidth
VECTOR_TOP = 0.85
# separate kernels for scale, mask, softmax and casts: factor on traffic and on the number of kernels
UNFUSED_SOFTMAX = 2.2
UNFUSED_KERNELS = 5

# Kernels, and Python's overhead
# time from Python to a kernel on the device's queue, unless the device has another value
LAUNCH_S = 7e-6
# exponent of the p-norm that adds Python's and the device's time if tp ranks synchronize in every layer; assumed
MEETING = 6.0
# The same for ranks on cores. Several ranks add time to each step, independent of traffic: they coordinate which
# gradients are ready, run the hooks, copy buffers, and wait for the slowest. A step of examples/own_model.yaml took
# 0.25 ms on one rank and 0.68 ms on two (2 cores of an AMD EPYC, torch 2.13). With other processes running, it took
# 0.94 ms and 2.1 ms.
CORES_STEP_S, CORES_MEET_S = 1e-4, 4e-4

# Links
# share of the link's bandwidth inside a host that large collectives reach
LINK_TOP_INSIDE = 0.713
COLLECTIVE_S = 3.21e-05  # time to start one
# fraction of a core's peak that long products sustain; assumed
CORES_SUSTAINED = 0.80
# ranks along one dimension of a torus
TORUS_SIDE = 16

# bytes per second of a host's memory for each of 8 devices: 8 to 12 channels of DDR5 on two sockets, at two thirds
HOST_MEMORY_EACH = 50e9

# Failures and checkpoints: assumed, since no measurement of a cluster's storage is available
# bytes per second of a host to and from the checkpoint storage
STORAGE = 1e9
# bytes per second that a rank writes in the background, at the lowest priority and a tenth of its time
CHECKPOINT_WRITE = 1e8
# bytes per second at which a rank copies its part of the state, during the next step
CHECKPOINT_COPY = 5e9
# fixed time of a checkpoint: its files, and the work of the training process
CHECKPOINT_WRITE_S = 0.5
CHECKPOINT_STALL_S = 0.005
# slowdown of steps, relative to the duration of writing a checkpoint
CHECKPOINT_SLOWS = 0.005
# from a failure to ranks that are ready to read a checkpoint, with a spare host available
RESTART_S = 15.0
# in addition to the repeated step, if replicas continue in place
RECOVERY_S = 1.0
# copies of a rank's state in memory if a plan has one replica: two versions each of its own state and of another rank's
STATE_COPIES = 4
# maximum cost of taking a copy or a restorable state, as a share of the time between two of them
STATE_SHARE = 0.01
# cost of a copy, as a multiple of a rank's wait for it: the copy is also sent, and another one arrives
COPY_TRAFFIC = 3
