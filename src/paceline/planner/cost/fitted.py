"""Values that `benchmarks/published_fit.py` found and wrote: change them there.

They rest on a tenth of the rows of each table of published runs, which are not scored, and on what data sheets and
documentation say beforehand.
"""

from __future__ import annotations

CONSTANTS: dict[str, float] = {
    "GEMM_START_K": 103.3,
    "UNALIGNED": 0.2837,
    "VECTOR_TOP": 0.8047,
    "VECTOR_BACKWARD": 1.949,
    "SCORES_BACKWARD": 1.319,
    "KERNEL_S": 2.747e-06,
    "LAUNCH_TP": 0.03649,
    "MEETING": 6.043,
    "WAVE": 0.5835,
    "STEP_S": 0.001546,
    "OPTIMIZER_PASSES": 1.344,
    "PIPELINE_S": 0.0002909,
    "LINK_TOP_BETWEEN": 0.79,
    "CONTENTION": 0.1323,
    "EXPERT_S": 5.142e-05,
    "SCAN": 0.3889,
    "CONVOLUTION": 0.8551,
    "CONVOLUTION_VECTOR": 0.8592,
    "MIXTURE_KERNELS": 104.8,
    "EXPERT_KERNELS": 4.94,
}

# of each framework: of its computing, of what its kernels move beside products, of how many kernels, of its loss
FRAMEWORKS: dict[str, dict[str, float]] = {
    "Megatron-DeepSpeed": {"derating": 0.9213, "vector": 0.8605, "kernels": 5.664, "loss": 2.379},
    "TensorFlow with Horovod": {"derating": 1.348, "vector": 1.693, "kernels": 1.168, "loss": 0.998},
    "MaxText (XLA)": {"derating": 1.061, "vector": 0.9094, "kernels": 0.7, "loss": 1.035},
    "Megatron-LM": {"derating": 0.9878, "vector": 1.136, "kernels": 1.994, "loss": 2.087},
    "LiBai (OneFlow)": {"derating": 1.014, "vector": 1.113, "kernels": 1.016, "loss": 0.9668},
    "FSDP": {"derating": 0.866, "vector": 0.9907, "kernels": 1.495, "loss": 1},
    "Composer FSDP": {"derating": 1.174, "vector": 0.9014, "kernels": 1.493, "loss": 0.9488},
    "Megatron Core": {"derating": 0.9598, "vector": 1.113, "kernels": 2.059, "loss": 1.588, "overlaps_ep": 0.3141},
    "DDP": {"derating": 0.9158, "vector": 0.9762, "kernels": 1.487, "loss": 0.9991},
    "PaddlePaddle Fleet": {"derating": 1.048, "vector": 1.092, "kernels": 1.208, "loss": 1},
    "DDP, images": {"derating": 0.9634, "vector": 0.8537, "kernels": 1.492, "loss": 0.997},
    "TensorFlow with Horovod, fused images": {"derating": 1.044, "vector": 1.34, "kernels": 1.004, "loss": 1},
    "TensorFlow with Horovod, images": {"derating": 1.004, "vector": 1.156, "kernels": 1.024, "loss": 1.001},
    "torchtitan, compiled": {"derating": 1.113, "vector": 0.9371, "kernels": 0.7006, "loss": 1.003},
}

# of the peak of each device, what long products keep within its power
SUSTAINED: dict[str, float] = {
    "A100-SXM-80": 0.7779,
    "V100-SXM-16": 0.8045,
    "V100-SXM-32": 0.7923,
    "TPU-v5p": 0.8206,
    "TPU-v7x": 0.7331,
    "H100-SXM": 0.6949,
    "A100-SXM-40": 0.7299,
    "TPU-v4": 0.7802,
    "TPU-v5e": 0.8528,
    "GB200": 0.6609,
    "GB300": 0.6966,
    "B200": 0.716,
    "H100-SXM-96": 0.6175,
}
