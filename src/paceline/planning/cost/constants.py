"""Physical constants of the cost model. The same values apply to all models, machines and frameworks.

The values in `CONSTANTS` are fitted by `benchmarks/published_fit.py` on a tenth of the rows of published tables.
`LINK_TOP_INSIDE` and `COLLECTIVE_S` are fitted to timings of NCCL (`tables/calib_collectives.csv`). The other constants
are properties of hardware or libraries with a cited source, or are marked as assumed.
"""

from __future__ import annotations

CONSTANTS: dict[str, float] = {
    "GEMM_START_K": 86.63,
    "UNALIGNED": 0.2735,
    "VECTOR_TOP": 0.7903,
    "VECTOR_BACKWARD": 2.038,
    "SCORES_BACKWARD": 1.379,
    "KERNEL_S": 2.452e-06,
    "LAUNCH_TP": 0.03674,
    "MEETING": 6.007,
    "WAVE": 0.5079,
    "STEP_S": 0.001331,
    "OPTIMIZER_PASSES": 1.142,
    "PIPELINE_S": 0.0003003,
    "LINK_TOP_BETWEEN": 0.7245,
    "CONTENTION": 0.1366,
    "EXPERT_S": 5.126e-05,
    "SCAN": 0.242,
    "CONVOLUTION": 0.8513,
    "CONVOLUTION_VECTOR": 0.7622,
    "CONVOLUTION_3D": 1.476,
    "CONVOLUTION_TF32": 1.515,
    "MIXTURE_KERNELS": 220.6,
    "EXPERT_KERNELS": 3.444,
}

# for each framework: factors on its compute, its memory-bound traffic, its kernels, and its loss
FRAMEWORKS: dict[str, dict[str, float]] = {
    "Megatron-DeepSpeed": {"derating": 0.9419, "vector": 1.005, "kernels": 5.686, "loss": 2.344},
    "Megatron-LM": {"derating": 0.9736, "vector": 1.236, "kernels": 2, "loss": 2.123},
    "Megatron Core": {"derating": 0.9547, "vector": 1.187, "kernels": 1.538, "loss": 1.535, "overlaps_ep": 0.3818},
    "FSDP": {"derating": 1.037, "vector": 0.9818, "kernels": 1.5, "loss": 1},
    "Composer FSDP": {"derating": 1.114, "vector": 0.9129, "kernels": 1.499, "loss": 0.8474},
    "torchtitan, compiled": {"derating": 1.152, "vector": 0.9484, "kernels": 0.7002, "loss": 1.015},
    "DDP": {"derating": 1.013, "vector": 1.012, "kernels": 1.502, "loss": 1.002},
    "TensorFlow with Horovod": {"derating": 1.162, "vector": 2.6, "kernels": 1.008, "loss": 1.004},
    "TensorFlow of 2019 with Horovod": {"derating": 1.104, "vector": 12.47, "kernels": 2.013, "loss": 1},
    "DDP of images": {"derating": 1.048, "vector": 0.9537, "kernels": 1.5, "loss": 0.9989},
    "TensorFlow with XLA of images": {"derating": 1.086, "vector": 1.49, "kernels": 1.002, "loss": 1.002},
    "PaddlePaddle Fleet": {"derating": 1.04, "vector": 1.063, "kernels": 1.201, "loss": 1},
    "LiBai (OneFlow)": {"derating": 1.031, "vector": 1.109, "kernels": 1.003, "loss": 0.9667},
    "MaxText (XLA)": {"derating": 1.074, "vector": 0.8243, "kernels": 0.7, "loss": 1.019},
    "HAI-LLM": {"derating": 0.9779, "vector": 1.137},
    "DeepSpeed": {"derating": 1.056, "vector": 0.9839},
    "torchtitan": {"derating": 1.056, "vector": 2.165},
    "TensorFlow with Horovod of images": {"derating": 1.08, "vector": 2.723},
}

# share of each device's peak that long products sustain within its power
SUSTAINED: dict[str, float] = {
    "A100-SXM-80": 0.7672,
    "V100-SXM-16": 0.7942,
    "V100-SXM-32": 0.8854,
    "TPU-v5p": 0.7897,
    "TPU-v7x": 0.7584,
    "H100-SXM": 0.7028,
    "A100-SXM-40": 0.764,
    "TPU-v4": 0.7834,
    "TPU-v5e": 0.8455,
    "GB200": 0.652,
    "GB300": 0.6878,
    "B200": 0.7138,
    "H100-SXM-96": 0.6172,
}


# Matrix products
# share of the peak that a large product reaches while power does not limit the clock
GEMM_TOP = 0.93
# share of the peak that products sustain for minutes within an A100's power, 250 TFLOP/s; `sustained` is relative to it
PRODUCTS_TOP = 0.80
# the overhead of a tile, in steps of its inner loop
GEMM_START_K = CONSTANTS["GEMM_START_K"]
# cost of an incomplete last wave of tiles, as a share of the missing tiles; smaller tiles fill it up
WAVE = CONSTANTS["WAVE"]
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
UNALIGNED = CONSTANTS["UNALIGNED"]  # below 16 bytes
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

# Convolutions: their time relative to plain products, the reduction by Winograd's algorithm for 3 × 3 in tiles of
# 2 × 2, and the remaining traffic of norms and activations if they are fused
CONVOLUTION = CONSTANTS["CONVOLUTION"]
# slowdown of convolutions over three dimensions on tensor cores
CONVOLUTION_3D = CONSTANTS["CONVOLUTION_3D"]
# traffic between them in tf32, relative to 16 bits. Tensor cores need channels-last images, but tf32 is usually left on
# for channels-first images, which are transposed on the way (NVIDIA, Convolutional Layers Guide)
CONVOLUTION_TF32 = CONSTANTS["CONVOLUTION_TF32"]
WINOGRAD = 2.25
# width up to which tensor cores compute groups of a convolution together: the width of a tile
GROUPS_N = 16
CONVOLUTION_VECTOR = CONSTANTS["CONVOLUTION_VECTOR"]

# State spaces: speed of the scan's small products relative to a fused attention kernel
SCAN = CONSTANTS["SCAN"]

# Tokens of an expert are padded to a multiple of this, so that rows of its gradients are aligned (torchtitan pads to 8
# in bf16, to 16 in fp8)
EXPERT_ROWS = 16

# Memory-bound kernels
# share of the memory's bandwidth
VECTOR_TOP = CONSTANTS["VECTOR_TOP"]
# traffic in the backward pass per number of the forward pass
VECTOR_BACKWARD = CONSTANTS["VECTOR_BACKWARD"]
# the same for softmax and dropout over the attention's squares
SCORES_BACKWARD = CONSTANTS["SCORES_BACKWARD"]
# separate kernels for scale, mask, softmax and casts: factor on traffic and on the number of kernels
UNFUSED_SOFTMAX = 2.2
UNFUSED_KERNELS = 5
# number of times that an update reads and writes its numbers
OPTIMIZER_PASSES = CONSTANTS["OPTIMIZER_PASSES"]

# Kernels, and Python's overhead
# time to start and end a kernel on a device, independent of its work
KERNEL_S = CONSTANTS["KERNEL_S"]
# time from Python to a kernel on the device's queue, unless the framework's profile has another value
LAUNCH_S = 7e-6
# increase for each further tp rank, since ranks wait for the slowest
LAUNCH_TP = CONSTANTS["LAUNCH_TP"]
# exponent of the p-norm that adds Python's and the device's time if tp ranks synchronize in every layer
MEETING = CONSTANTS["MEETING"]
# once per step: data, logging, reduction of the loss
STEP_S = CONSTANTS["STEP_S"]
# The same for ranks on cores. Several ranks add time to each step, independent of traffic: they coordinate which
# gradients are ready, run the hooks, copy buffers, and wait for the slowest. A step of examples/own_model.yaml took
# 0.25 ms on one rank and 0.68 ms on two (2 cores of an AMD EPYC, torch 2.13). With other processes running, it took
# 0.94 ms and 2.1 ms.
CORES_STEP_S, CORES_MEET_S = 1e-4, 4e-4

# kernels for routing and sorting beyond those that the trace counts, and for each expert of a rank (its products
# and casts are separate kernels)
MIXTURE_KERNELS = CONSTANTS["MIXTURE_KERNELS"]
EXPERT_KERNELS = CONSTANTS["EXPERT_KERNELS"]
# time to count the tokens of each expert and wait for the counts, in each pass of a mixture
EXPERT_S = CONSTANTS["EXPERT_S"]

# Links
# share of the link's bandwidth inside a host that large collectives reach
LINK_TOP_INSIDE = 0.713
LINK_TOP_BETWEEN = CONSTANTS["LINK_TOP_BETWEEN"]  # the same between hosts
COLLECTIVE_S = 3.21e-05  # time to start one
# ranks along one dimension of a torus
TORUS_SIDE = 16
# slowdown of compute, relative to the duration of overlapped traffic (Galvatron's overlap_coe)
CONTENTION = CONSTANTS["CONTENTION"]
# time to pass a microbatch to the next stage, beside the time on the link
PIPELINE_S = CONSTANTS["PIPELINE_S"]

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
