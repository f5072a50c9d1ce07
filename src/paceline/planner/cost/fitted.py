"""Values that `benchmarks/published_fit.py` found and wrote: change them there.

They rest on a tenth of the rows of each table of published runs, which are not scored, and on what data sheets and
documentation say beforehand.
"""

from __future__ import annotations

CONSTANTS: dict[str, float] = {
    "WAVE": 0.5,
    "GEMM_START_K": 19.21,
    "UNALIGNED": 0.2638,
    "VECTOR_TOP": 0.7994,
    "VECTOR_BACKWARD": 1.931,
    "SCORES_BACKWARD": 1.358,
    "KERNEL_S": 2.6e-06,
    "LAUNCH_TP": 0.03508,
    "MEETING": 4.239,
    "STEP_S": 0.001496,
    "OPTIMIZER_PASSES": 1.381,
    "PIPELINE_S": 0.0002972,
    "LINK_TOP_BETWEEN": 0.7948,
    "CONTENTION": 0.1326,
    "EXPERT_S": 5.093e-05,
    "SCAN": 0.3901,
    "CONVOLUTION": 0.8284,
    "CONVOLUTION_VECTOR": 0.6835,
    "MIXTURE_KERNELS": 99.8,
    "EXPERT_KERNELS": 5.157,
}

# of each framework: of its computing, of what its kernels move beside products, of how many kernels, of its loss
FRAMEWORKS: dict[str, dict[str, float]] = {
    "Megatron-DeepSpeed": {"derating": 0.9352, "vector": 0.8588, "kernels": 5.565, "loss": 2.459},
    "Megatron-LM": {"derating": 1.007, "vector": 1.15, "kernels": 2.001, "loss": 2.087},
    "Megatron Core": {"derating": 0.9612, "vector": 1.099, "kernels": 2.112, "loss": 1.547, "overlaps_ep": 0.3251},
    "FSDP": {"derating": 0.8664, "vector": 0.9906, "kernels": 1.495, "loss": 1},
    "Composer FSDP": {"derating": 1.183, "vector": 0.9178, "kernels": 1.495, "loss": 0.9568},
    "torchtitan, compiled": {"derating": 1.115, "vector": 0.944, "kernels": 0.7007, "loss": 1.004},
    "DDP": {"derating": 0.9371, "vector": 1.22, "kernels": 1.478, "loss": 1.002},
    "TensorFlow with Horovod": {"derating": 1.373, "vector": 1.515, "kernels": 1.222, "loss": 1.003},
    "PaddlePaddle Fleet": {"derating": 1.049, "vector": 1.098, "kernels": 1.209, "loss": 1},
    "LiBai (OneFlow)": {"derating": 1.018, "vector": 1.132, "kernels": 1.016, "loss": 0.9678},
    "MaxText (XLA)": {"derating": 1.061, "vector": 0.9104, "kernels": 0.7, "loss": 1.035},
}

# of the peak of each device, what long products keep within its power
SUSTAINED: dict[str, float] = {
    "A100-SXM-80": 0.769,
    "V100-SXM-16": 0.8079,
    "V100-SXM-32": 0.7669,
    "TPU-v5p": 0.8207,
    "TPU-v7x": 0.7333,
    "H100-SXM": 0.6941,
    "A100-SXM-40": 0.7309,
    "TPU-v4": 0.7802,
    "TPU-v5e": 0.8529,
    "GB200": 0.6598,
    "GB300": 0.6949,
    "B200": 0.7159,
    "H100-SXM-96": 0.6146,
}
