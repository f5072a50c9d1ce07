"""Values that `benchmarks/published_fit.py` found and wrote: change them there.

They rest on a tenth of the rows of each table of published runs, which are not scored, and on what data sheets and
documentation say in advance.
"""

from __future__ import annotations

CONSTANTS: dict[str, float] = {
    "GEMM_START_K": 86.96,
    "UNALIGNED": 0.2898,
    "VECTOR_TOP": 0.7788,
    "VECTOR_BACKWARD": 2.248,
    "SCORES_BACKWARD": 1.383,
    "KERNEL_S": 2.502e-06,
    "LAUNCH_TP": 0.03697,
    "MEETING": 6.102,
    "WAVE": 0.5267,
    "STEP_S": 0.001309,
    "OPTIMIZER_PASSES": 1.153,
    "PIPELINE_S": 0.0002945,
    "LINK_TOP_BETWEEN": 0.7182,
    "CONTENTION": 0.1357,
    "EXPERT_S": 5.089e-05,
    "SCAN": 0.2445,
    "CONVOLUTION": 0.8341,
    "CONVOLUTION_VECTOR": 0.9942,
    "MIXTURE_KERNELS": 169.4,
    "EXPERT_KERNELS": 3.28,
}

# of each framework: of its computing, of its traffic beside products, of its kernels, of its loss
FRAMEWORKS: dict[str, dict[str, float]] = {
    "Megatron-DeepSpeed": {"derating": 0.9408, "vector": 0.8182, "kernels": 5.68, "loss": 2.253},
    "Megatron-LM": {"derating": 0.9766, "vector": 1.129, "kernels": 1.997, "loss": 2.124},
    "Megatron Core": {"derating": 0.9502, "vector": 1.055, "kernels": 1.869, "loss": 1.534, "overlaps_ep": 0.3933},
    "Megatron Core of NeMo 26.06": {
        "derating": 1.04,
        "vector": 1.068,
        "kernels": 1.965,
        "loss": 1.525,
        "overlaps_ep": 0.432,
        "mixtures": 0.4318,
    },
    "FSDP": {"derating": 1.02, "vector": 1.003, "kernels": 1.501, "loss": 1},
    "Composer FSDP": {"derating": 1.103, "vector": 0.8606, "kernels": 1.489, "loss": 0.8377},
    "torchtitan, compiled": {"derating": 1.139, "vector": 1.013, "kernels": 0.7016, "loss": 1.011},
    "DDP": {"derating": 0.9472, "vector": 1.076, "kernels": 1.525, "loss": 1.002},
    "TensorFlow with Horovod": {"derating": 1.24, "vector": 1.752, "kernels": 1.094, "loss": 1.012},
    "TensorFlow of 2019 with Horovod": {"derating": 1.087, "vector": 11.29, "kernels": 2.165, "loss": 1},
    "DDP of images": {"derating": 0.9443, "vector": 0.7554, "kernels": 1.488, "loss": 0.995},
    "TensorFlow with Horovod of images": {"derating": 1.008, "vector": 1.567, "kernels": 3.261, "loss": 1.001},
    "TensorFlow with XLA of images": {"derating": 1.071, "vector": 0.9802, "kernels": 1.007, "loss": 1},
    "PaddlePaddle Fleet": {"derating": 1.055, "vector": 1.123, "kernels": 1.209, "loss": 1},
    "LiBai (OneFlow)": {"derating": 1.015, "vector": 1.126, "kernels": 1.02, "loss": 0.9526},
    "MaxText (XLA)": {"derating": 1.08, "vector": 0.8337, "kernels": 0.7, "loss": 1.019},
}

# of the peak of each device, what long products keep within its power
SUSTAINED: dict[str, float] = {
    "A100-SXM-80": 0.7674,
    "V100-SXM-16": 0.802,
    "V100-SXM-32": 0.8669,
    "TPU-v5p": 0.7963,
    "TPU-v7x": 0.7596,
    "H100-SXM": 0.7005,
    "A100-SXM-40": 0.7483,
    "TPU-v4": 0.788,
    "TPU-v5e": 0.8514,
    "GB200": 0.6541,
    "GB300": 0.6874,
    "B200": 0.7138,
    "H100-SXM-96": 0.6188,
}
