"""Values that `benchmarks/published_fit.py` found and wrote: change them there.

They rest on a tenth of the rows of each table of published runs, which are not scored, and on what data sheets and
documentation say in advance.
"""

from __future__ import annotations

CONSTANTS: dict[str, float] = {
    "GEMM_START_K": 86.77,
    "UNALIGNED": 0.2901,
    "VECTOR_TOP": 0.7806,
    "VECTOR_BACKWARD": 2.25,
    "SCORES_BACKWARD": 1.372,
    "KERNEL_S": 2.368e-06,
    "LAUNCH_TP": 0.0371,
    "MEETING": 6.161,
    "WAVE": 0.524,
    "STEP_S": 0.001293,
    "OPTIMIZER_PASSES": 1.144,
    "PIPELINE_S": 0.0002897,
    "LINK_TOP_BETWEEN": 0.6853,
    "CONTENTION": 0.1349,
    "EXPERT_S": 5.107e-05,
    "SCAN": 0.2443,
    "CONVOLUTION": 0.8373,
    "CONVOLUTION_VECTOR": 0.9874,
    "MIXTURE_KERNELS": 161.8,
    "EXPERT_KERNELS": 3.454,
}

# of each framework: of its computing, of its traffic beside products, of its kernels, of its loss
FRAMEWORKS: dict[str, dict[str, float]] = {
    "Megatron-DeepSpeed": {"derating": 0.9709, "vector": 0.8144, "kernels": 5.685, "loss": 2.163},
    "Megatron-LM": {"derating": 0.9696, "vector": 1.138, "kernels": 1.997, "loss": 2.128},
    "Megatron Core": {"derating": 0.9557, "vector": 1.083, "kernels": 1.84, "loss": 1.547, "overlaps_ep": 0.4031},
    "Megatron Core of NeMo 26.06": {
        "derating": 1.043,
        "vector": 1.072,
        "kernels": 2.004,
        "loss": 1.527,
        "overlaps_ep": 0.4284,
        "mixtures": 0.434,
    },
    "FSDP": {"derating": 1.019, "vector": 1.003, "kernels": 1.501, "loss": 1},
    "Composer FSDP": {"derating": 1.101, "vector": 0.8643, "kernels": 1.49, "loss": 0.8396},
    "torchtitan, compiled": {"derating": 1.133, "vector": 1.027, "kernels": 0.7017, "loss": 1.013},
    "DDP": {"derating": 0.9472, "vector": 1.075, "kernels": 1.523, "loss": 1.002},
    "TensorFlow with Horovod": {"derating": 1.24, "vector": 1.751, "kernels": 1.089, "loss": 1.012},
    "TensorFlow of 2019 with Horovod": {"derating": 1.087, "vector": 11.36, "kernels": 2.155, "loss": 1},
    "DDP of images": {"derating": 0.9426, "vector": 0.754, "kernels": 1.488, "loss": 0.995},
    "TensorFlow with Horovod of images": {"derating": 1.009, "vector": 1.563, "kernels": 3.248, "loss": 1.001},
    "TensorFlow with XLA of images": {"derating": 1.072, "vector": 0.9751, "kernels": 1.007, "loss": 1},
    "PaddlePaddle Fleet": {"derating": 1.054, "vector": 1.118, "kernels": 1.208, "loss": 1},
    "LiBai (OneFlow)": {"derating": 1.016, "vector": 1.128, "kernels": 1.019, "loss": 0.953},
    "MaxText (XLA)": {"derating": 1.081, "vector": 0.8339, "kernels": 0.7, "loss": 1.019},
}

# of the peak of each device, what long products keep within its power
SUSTAINED: dict[str, float] = {
    "A100-SXM-80": 0.7552,
    "V100-SXM-16": 0.8021,
    "V100-SXM-32": 0.865,
    "TPU-v5p": 0.7963,
    "TPU-v7x": 0.7594,
    "H100-SXM": 0.7016,
    "A100-SXM-40": 0.7464,
    "TPU-v4": 0.7881,
    "TPU-v5e": 0.8515,
    "GB200": 0.6535,
    "GB300": 0.6874,
    "B200": 0.7138,
    "H100-SXM-96": 0.6181,
}
