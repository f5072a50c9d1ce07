"""Values that `benchmarks/published_fit.py` found and wrote: change them there.

They rest on a tenth of the rows of each table of published runs, which are not scored, and on what data sheets and
documentation say in advance.
"""

from __future__ import annotations

CONSTANTS: dict[str, float] = {
    "GEMM_START_K": 92.98,
    "UNALIGNED": 0.2793,
    "VECTOR_TOP": 0.7784,
    "VECTOR_BACKWARD": 2.244,
    "SCORES_BACKWARD": 1.384,
    "KERNEL_S": 2.459e-06,
    "LAUNCH_TP": 0.03694,
    "MEETING": 6.089,
    "WAVE": 0.5242,
    "STEP_S": 0.001328,
    "OPTIMIZER_PASSES": 1.155,
    "PIPELINE_S": 0.0002949,
    "LINK_TOP_BETWEEN": 0.7191,
    "CONTENTION": 0.136,
    "EXPERT_S": 5.093e-05,
    "SCAN": 0.2444,
    "CONVOLUTION": 0.8691,
    "CONVOLUTION_VECTOR": 0.9866,
    "MIXTURE_KERNELS": 168,
    "EXPERT_KERNELS": 3.318,
}

# of each framework: of its computing, of its traffic beside products, of its kernels, of its loss
FRAMEWORKS: dict[str, dict[str, float]] = {
    "Megatron-DeepSpeed": {"derating": 0.9414, "vector": 0.8212, "kernels": 5.684, "loss": 2.261},
    "Megatron-LM": {"derating": 0.976, "vector": 1.13, "kernels": 1.997, "loss": 2.124},
    "Megatron Core": {"derating": 0.9504, "vector": 1.064, "kernels": 1.871, "loss": 1.545, "overlaps_ep": 0.3833},
    "Megatron Core of NeMo 26.06": {
        "derating": 1.04,
        "vector": 1.067,
        "kernels": 1.975,
        "loss": 1.525,
        "overlaps_ep": 0.4317,
        "mixtures": 0.4316,
    },
    "FSDP": {"derating": 1.019, "vector": 1.003, "kernels": 1.501, "loss": 1},
    "Composer FSDP": {"derating": 1.103, "vector": 0.8612, "kernels": 1.49, "loss": 0.8376},
    "torchtitan, compiled": {"derating": 1.139, "vector": 1.012, "kernels": 0.7015, "loss": 1.011},
    "DDP": {"derating": 0.9471, "vector": 1.078, "kernels": 1.525, "loss": 1.002},
    "TensorFlow with Horovod": {"derating": 1.242, "vector": 1.733, "kernels": 1.091, "loss": 1.012},
    "TensorFlow of 2019 with Horovod": {"derating": 1.086, "vector": 11.25, "kernels": 2.163, "loss": 1},
    "DDP of images": {"derating": 0.9508, "vector": 0.7768, "kernels": 1.489, "loss": 0.9956},
    "TensorFlow with XLA of images": {"derating": 1.083, "vector": 1.243, "kernels": 1.032, "loss": 1.002},
    "PaddlePaddle Fleet": {"derating": 1.055, "vector": 1.121, "kernels": 1.209, "loss": 1},
    "LiBai (OneFlow)": {"derating": 1.015, "vector": 1.125, "kernels": 1.019, "loss": 0.9525},
    "MaxText (XLA)": {"derating": 1.08, "vector": 0.8336, "kernels": 0.7, "loss": 1.019},
}

# of the peak of each device, what long products keep within its power
SUSTAINED: dict[str, float] = {
    "A100-SXM-80": 0.7679,
    "V100-SXM-16": 0.7889,
    "V100-SXM-32": 0.8678,
    "TPU-v5p": 0.7963,
    "TPU-v7x": 0.7597,
    "H100-SXM": 0.7009,
    "A100-SXM-40": 0.751,
    "TPU-v4": 0.788,
    "TPU-v5e": 0.8514,
    "GB200": 0.6538,
    "GB300": 0.6873,
    "B200": 0.7138,
    "H100-SXM-96": 0.6188,
}
