"""Values that `benchmarks/published_fit.py` found and wrote: change them there.

They rest on a tenth of the rows of each table of published runs, which are not scored, and on what data sheets and
documentation say beforehand.
"""

from __future__ import annotations

CONSTANTS: dict[str, float] = {
    "GEMM_START_K": 21.49,
    "UNALIGNED": 0.2657,
    "VECTOR_TOP": 0.8115,
    "VECTOR_BACKWARD": 1.917,
    "SCORES_BACKWARD": 1.334,
    "KERNEL_S": 2.587e-06,
    "LAUNCH_TP": 0.03486,
    "MEETING": 4.258,
    "STEP_S": 0.001099,
    "OPTIMIZER_PASSES": 1.188,
    "PIPELINE_S": 0.000298,
    "LINK_TOP_BETWEEN": 0.8022,
    "CONTENTION": 0.1328,
    "EXPERT_S": 5.113e-05,
    "SCAN": 0.3896,
    "CONVOLUTION": 0.9,
    "CONVOLUTION_VECTOR": 0.7,
    "MIXTURE_KERNELS": 102,
    "EXPERT_KERNELS": 5.362,
}

# of each framework: of its computing, of what its kernels move beside products, of how many kernels, of its loss
FRAMEWORKS: dict[str, dict[str, float]] = {
    "Megatron-DeepSpeed": {"derating": 0.9484, "vector": 0.868, "kernels": 5.601, "loss": 2.481},
    "Megatron-LM": {"derating": 1.017, "vector": 1.147, "kernels": 2.002, "loss": 2.081},
    "Megatron Core": {"derating": 0.966, "vector": 1.13, "kernels": 1.996, "loss": 1.59, "overlaps_ep": 0.3264},
    "FSDP": {"derating": 0.8448, "vector": 0.9531, "kernels": 1.493, "loss": 1},
    "Composer FSDP": {"derating": 1.205, "vector": 0.9403, "kernels": 1.498, "loss": 0.9546},
    "torchtitan, compiled": {"derating": 1.124, "vector": 0.9463, "kernels": 0.7007, "loss": 1.004},
    "DDP": {"derating": 0.9248, "vector": 0.9941, "kernels": 1.496, "loss": 0.9997},
    "TensorFlow with Horovod": {"derating": 1.365, "vector": 1.683, "kernels": 1.12, "loss": 1},
    "PaddlePaddle Fleet": {"derating": 1.05, "vector": 1.099, "kernels": 1.209, "loss": 1},
    "LiBai (OneFlow)": {"derating": 1.017, "vector": 1.125, "kernels": 1.015, "loss": 0.9684},
    "MaxText (XLA)": {"derating": 1.053, "vector": 0.9156, "kernels": 0.7, "loss": 1.035},
}

# of the peak of each device, what long products keep within its power
SUSTAINED: dict[str, float] = {
    "A100-SXM-80": 0.7809,
    "V100-SXM-32": 0.7304,
    "TPU-v5p": 0.81,
    "TPU-v7x": 0.775,
    "H100-SXM": 0.7061,
    "A100-SXM-40": 0.7736,
    "TPU-v4": 0.7842,
    "TPU-v5e": 0.8261,
    "GB200": 0.6687,
    "GB300": 0.6802,
    "B200": 0.7134,
    "V100-SXM-16": 0.7319,
    "H100-SXM-96": 0.6194,
}
