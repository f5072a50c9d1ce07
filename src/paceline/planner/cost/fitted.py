"""Values that `benchmarks/published_fit.py` found and wrote: change them there.

They rest on a tenth of the rows of each table of published runs, which are not scored, and on what data sheets and
documentation say in advance.
"""

from __future__ import annotations

CONSTANTS: dict[str, float] = {
    "GEMM_START_K": 91.35,
    "UNALIGNED": 0.2847,
    "VECTOR_TOP": 0.7821,
    "VECTOR_BACKWARD": 2.217,
    "SCORES_BACKWARD": 1.35,
    "KERNEL_S": 2.375e-06,
    "LAUNCH_TP": 0.0371,
    "MEETING": 6.119,
    "WAVE": 0.5252,
    "STEP_S": 0.00127,
    "OPTIMIZER_PASSES": 1.175,
    "PIPELINE_S": 0.0002843,
    "LINK_TOP_BETWEEN": 0.7103,
    "CONTENTION": 0.1335,
    "EXPERT_S": 5.099e-05,
    "SCAN": 0.2454,
    "CONVOLUTION": 0.8547,
    "CONVOLUTION_VECTOR": 0.9215,
    "MIXTURE_KERNELS": 155.7,
    "EXPERT_KERNELS": 3.485,
}

# of each framework: of its computing, of its traffic beside products, of its kernels, of its loss
FRAMEWORKS: dict[str, dict[str, float]] = {
    "Megatron-DeepSpeed": {"derating": 0.9814, "vector": 0.8558, "kernels": 5.664, "loss": 2.183},
    "Megatron-LM": {"derating": 0.9686, "vector": 1.12, "kernels": 1.993, "loss": 2.103},
    "Megatron Core": {"derating": 0.9599, "vector": 1.067, "kernels": 1.823, "loss": 1.539, "overlaps_ep": 0.3583},
    "Megatron Core of NeMo 26.06": {
        "derating": 1.036,
        "vector": 1.06,
        "kernels": 2.02,
        "loss": 1.525,
        "overlaps_ep": 0.437,
        "mixtures": 0.4271,
    },
    "FSDP": {"derating": 1.021, "vector": 1.003, "kernels": 1.501, "loss": 1},
    "Composer FSDP": {"derating": 1.104, "vector": 0.8918, "kernels": 1.492, "loss": 0.8675},
    "torchtitan, compiled": {"derating": 1.131, "vector": 1.027, "kernels": 0.7017, "loss": 1.013},
    "DDP": {"derating": 0.9533, "vector": 1.054, "kernels": 1.518, "loss": 1.002},
    "TensorFlow with Horovod": {"derating": 1.225, "vector": 1.742, "kernels": 1.073, "loss": 1.012},
    "TensorFlow of 2019 with Horovod": {"derating": 1.091, "vector": 11.23, "kernels": 2.149, "loss": 1},
    "DDP of images": {"derating": 0.9493, "vector": 0.7875, "kernels": 1.49, "loss": 0.9957},
    "TensorFlow with Horovod of images": {"derating": 1.008, "vector": 1.472, "kernels": 3.21, "loss": 1.001},
    "TensorFlow with XLA of images": {"derating": 1.063, "vector": 0.9026, "kernels": 1.007, "loss": 1},
    "PaddlePaddle Fleet": {"derating": 1.045, "vector": 1.094, "kernels": 1.207, "loss": 1},
    "LiBai (OneFlow)": {"derating": 1.014, "vector": 1.109, "kernels": 1.015, "loss": 0.9622},
    "MaxText (XLA)": {"derating": 1.079, "vector": 0.8334, "kernels": 0.7, "loss": 1.018},
}

# of the peak of each device, what long products keep within its power
SUSTAINED: dict[str, float] = {
    "A100-SXM-80": 0.7542,
    "V100-SXM-16": 0.8057,
    "V100-SXM-32": 0.8477,
    "TPU-v5p": 0.7954,
    "TPU-v7x": 0.7616,
    "H100-SXM": 0.7062,
    "A100-SXM-40": 0.7529,
    "TPU-v4": 0.7875,
    "TPU-v5e": 0.8486,
    "GB200": 0.6573,
    "GB300": 0.6838,
    "B200": 0.7134,
    "H100-SXM-96": 0.618,
}
