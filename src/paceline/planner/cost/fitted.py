"""Values that `benchmarks/published_fit.py` found and wrote: change them there.

They rest on a tenth of the rows of each table of published runs, which are not scored, and on what data sheets and
documentation say beforehand.
"""

from __future__ import annotations

CONSTANTS: dict[str, float] = {
    "GEMM_START_K": 91.49,
    "UNALIGNED": 0.2825,
    "VECTOR_TOP": 0.7778,
    "VECTOR_BACKWARD": 2.208,
    "SCORES_BACKWARD": 1.375,
    "KERNEL_S": 2.603e-06,
    "LAUNCH_TP": 0.03663,
    "MEETING": 6.054,
    "WAVE": 0.5347,
    "STEP_S": 0.001344,
    "OPTIMIZER_PASSES": 1.195,
    "PIPELINE_S": 0.0002939,
    "LINK_TOP_BETWEEN": 0.7735,
    "CONTENTION": 0.1347,
    "EXPERT_S": 5.078e-05,
    "SCAN": 0.3918,
    "CONVOLUTION": 0.8508,
    "CONVOLUTION_VECTOR": 0.8475,
    "MIXTURE_KERNELS": 113.9,
    "EXPERT_KERNELS": 6.484,
}

# of each framework: of its computing, of what its kernels move beside products, of how many kernels, of its loss
FRAMEWORKS: dict[str, dict[str, float]] = {
    "Megatron-DeepSpeed": {"derating": 0.9194, "vector": 0.8699, "kernels": 5.673, "loss": 2.344},
    "TensorFlow of 2019 with Horovod": {"derating": 1.09, "vector": 11.11, "kernels": 2.164, "loss": 1},
    "MaxText (XLA)": {"derating": 1.079, "vector": 0.8329, "kernels": 0.7, "loss": 1.018},
    "Megatron-LM": {"derating": 0.9873, "vector": 1.107, "kernels": 1.994, "loss": 2.094},
    "LiBai (OneFlow)": {"derating": 1.012, "vector": 1.105, "kernels": 1.016, "loss": 0.9614},
    "FSDP": {"derating": 1.022, "vector": 1.003, "kernels": 1.501, "loss": 1},
    "Composer FSDP": {"derating": 1.107, "vector": 0.8847, "kernels": 1.491, "loss": 0.8646},
    "Megatron Core of NeMo 26.06": {"derating": 0.9872, "vector": 0.8486, "kernels": 1.954, "loss": 1.523, "overlaps_ep": 0.4484},
    "Megatron Core": {"derating": 0.9856, "vector": 1.051, "kernels": 1.723, "loss": 1.513, "overlaps_ep": 0.344},
    "DDP": {"derating": 0.9541, "vector": 1.058, "kernels": 1.521, "loss": 1.002},
    "TensorFlow with Horovod": {"derating": 1.226, "vector": 1.749, "kernels": 1.079, "loss": 1.012},
    "PaddlePaddle Fleet": {"derating": 1.046, "vector": 1.102, "kernels": 1.208, "loss": 1},
    "DDP, images": {"derating": 0.9586, "vector": 0.8243, "kernels": 1.491, "loss": 0.9961},
    "TensorFlow with Horovod, fused images": {"derating": 1.036, "vector": 1.297, "kernels": 1.003, "loss": 1},
    "TensorFlow with Horovod, images": {"derating": 1.014, "vector": 1.213, "kernels": 1.025, "loss": 1.001},
    "torchtitan, compiled": {"derating": 1.164, "vector": 1.072, "kernels": 0.7023, "loss": 1.017},
}

# of the peak of each device, what long products keep within its power
SUSTAINED: dict[str, float] = {
    "A100-SXM-80": 0.7884,
    "V100-SXM-16": 0.8161,
    "V100-SXM-32": 0.8519,
    "TPU-v5p": 0.7954,
    "TPU-v7x": 0.762,
    "H100-SXM": 0.707,
    "A100-SXM-40": 0.7502,
    "TPU-v4": 0.7874,
    "TPU-v5e": 0.8485,
    "GB200": 0.6596,
    "GB300": 0.6857,
    "B200": 0.7135,
    "H100-SXM-96": 0.6169,
}
