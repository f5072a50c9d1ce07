"""Values that `benchmarks/published_fit.py` found and wrote: change them there.

They rest on a tenth of the rows of each table of published runs, which are not scored, and on what data sheets and
documentation say in advance.
"""

from __future__ import annotations

CONSTANTS: dict[str, float] = {
    "GEMM_START_K": 90,
    "UNALIGNED": 0.2862,
    "VECTOR_TOP": 0.7771,
    "VECTOR_BACKWARD": 2.235,
    "SCORES_BACKWARD": 1.362,
    "KERNEL_S": 2.747e-06,
    "LAUNCH_TP": 0.03654,
    "MEETING": 6.207,
    "WAVE": 0.5342,
    "STEP_S": 0.00128,
    "OPTIMIZER_PASSES": 1.186,
    "PIPELINE_S": 0.0002918,
    "LINK_TOP_BETWEEN": 0.7676,
    "CONTENTION": 0.1359,
    "EXPERT_S": 5.217e-05,
    "SCAN": 0.242,
    "CONVOLUTION": 0.855,
    "CONVOLUTION_VECTOR": 0.8726,
    "MIXTURE_KERNELS": 105.6,
    "EXPERT_KERNELS": 3.287,
}

# of each framework: of its computing, of what its kernels move beside products, of how many kernels, of its loss
FRAMEWORKS: dict[str, dict[str, float]] = {
    "Megatron-DeepSpeed": {"derating": 0.9122, "vector": 0.8574, "kernels": 5.663, "loss": 2.307},
    "Megatron-LM": {"derating": 0.9864, "vector": 1.103, "kernels": 1.994, "loss": 2.094},
    "Megatron Core": {"derating": 0.9845, "vector": 1.088, "kernels": 1.888, "loss": 1.493, "overlaps_ep": 0.3325},
    "Megatron Core of NeMo 26.06": {
        "derating": 1.024,
        "vector": 0.4997,
        "kernels": 0.9321,
        "loss": 1.547,
        "overlaps_ep": 0.3941,
    },
    "FSDP": {"derating": 1.022, "vector": 1.003, "kernels": 1.501, "loss": 1},
    "Composer FSDP": {"derating": 1.106, "vector": 0.8827, "kernels": 1.49, "loss": 0.8632},
    "torchtitan, compiled": {"derating": 1.163, "vector": 1.07, "kernels": 0.7024, "loss": 1.017},
    "DDP": {"derating": 0.9544, "vector": 1.058, "kernels": 1.522, "loss": 1.002},
    "TensorFlow with Horovod": {"derating": 1.224, "vector": 1.743, "kernels": 1.084, "loss": 1.012},
    "TensorFlow of 2019 with Horovod": {"derating": 1.09, "vector": 11.01, "kernels": 2.173, "loss": 1},
    "DDP of images": {"derating": 0.9547, "vector": 0.8085, "kernels": 1.489, "loss": 0.9957},
    "TensorFlow with Horovod of images": {"derating": 0.9967, "vector": 1.407, "kernels": 3.224, "loss": 1},
    "TensorFlow with XLA of images": {"derating": 1.062, "vector": 0.8546, "kernels": 1.007, "loss": 1},
    "PaddlePaddle Fleet": {"derating": 1.046, "vector": 1.102, "kernels": 1.208, "loss": 1},
    "LiBai (OneFlow)": {"derating": 1.012, "vector": 1.102, "kernels": 1.017, "loss": 0.961},
    "MaxText (XLA)": {"derating": 1.079, "vector": 0.8328, "kernels": 0.7, "loss": 1.018},
}

# of the peak of each device, what long products keep within its power
SUSTAINED: dict[str, float] = {
    "A100-SXM-80": 0.7881,
    "V100-SXM-16": 0.8167,
    "V100-SXM-32": 0.8519,
    "TPU-v5p": 0.7954,
    "TPU-v7x": 0.7621,
    "H100-SXM": 0.7071,
    "A100-SXM-40": 0.7503,
    "TPU-v4": 0.7874,
    "TPU-v5e": 0.8486,
    "GB200": 0.6576,
    "GB300": 0.6857,
    "B200": 0.7135,
    "H100-SXM-96": 0.617,
}
