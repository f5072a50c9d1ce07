"""Values that `benchmarks/published_fit.py` found and wrote: change them there.

They rest on a tenth of the rows of each table of published runs, which are not scored, and on what data sheets and
documentation say in advance.
"""

from __future__ import annotations

CONSTANTS: dict[str, float] = {
    "GEMM_START_K": 93.45,
    "UNALIGNED": 0.279,
    "VECTOR_TOP": 0.7781,
    "VECTOR_BACKWARD": 2.253,
    "SCORES_BACKWARD": 1.382,
    "KERNEL_S": 2.437e-06,
    "LAUNCH_TP": 0.03733,
    "MEETING": 6.026,
    "WAVE": 0.5241,
    "STEP_S": 0.001337,
    "OPTIMIZER_PASSES": 1.162,
    "PIPELINE_S": 0.0002962,
    "LINK_TOP_BETWEEN": 0.7221,
    "CONTENTION": 0.1358,
    "EXPERT_S": 5.093e-05,
    "SCAN": 0.2441,
    "CONVOLUTION": 0.866,
    "CONVOLUTION_VECTOR": 0.9867,
    "MIXTURE_KERNELS": 231.1,
    "EXPERT_KERNELS": 3.388,
}

# of each framework: of its computing, of its traffic beside products, of its kernels, of its loss
FRAMEWORKS: dict[str, dict[str, float]] = {
    "Megatron-DeepSpeed": {"derating": 0.9422, "vector": 0.8222, "kernels": 5.668, "loss": 2.278},
    "Megatron-LM": {"derating": 0.9756, "vector": 1.13, "kernels": 2, "loss": 2.125},
    "Megatron Core": {"derating": 0.9522, "vector": 1.06, "kernels": 1.534, "loss": 1.536, "overlaps_ep": 0.4016},
    "Megatron Core of NeMo 26.06": {
        "derating": 1.043,
        "vector": 1.076,
        "kernels": 1.565,
        "loss": 1.529,
        "overlaps_ep": 0.4291,
        "mixtures": 0.4338,
    },
    "FSDP": {"derating": 1.019, "vector": 1.003, "kernels": 1.5, "loss": 1},
    "Composer FSDP": {"derating": 1.103, "vector": 0.8602, "kernels": 1.499, "loss": 0.837},
    "torchtitan, compiled": {"derating": 1.139, "vector": 1.012, "kernels": 0.7002, "loss": 1.011},
    "DDP": {"derating": 0.9467, "vector": 1.077, "kernels": 1.503, "loss": 1.002},
    "TensorFlow with Horovod": {"derating": 1.24, "vector": 1.742, "kernels": 1.009, "loss": 1.012},
    "TensorFlow of 2019 with Horovod": {"derating": 1.085, "vector": 11.25, "kernels": 2.017, "loss": 1},
    "DDP of images": {"derating": 0.9513, "vector": 0.7755, "kernels": 1.499, "loss": 0.9956},
    "TensorFlow with XLA of images": {"derating": 1.081, "vector": 1.245, "kernels": 1.004, "loss": 1.002},
    "PaddlePaddle Fleet": {"derating": 1.055, "vector": 1.121, "kernels": 1.201, "loss": 1},
    "LiBai (OneFlow)": {"derating": 1.014, "vector": 1.126, "kernels": 1.002, "loss": 0.9521},
    "MaxText (XLA)": {"derating": 1.08, "vector": 0.8337, "kernels": 0.7, "loss": 1.019},
}

# of the peak of each device, what long products keep within its power
SUSTAINED: dict[str, float] = {
    "A100-SXM-80": 0.7675,
    "V100-SXM-16": 0.7878,
    "V100-SXM-32": 0.8685,
    "TPU-v5p": 0.7963,
    "TPU-v7x": 0.7597,
    "H100-SXM": 0.7006,
    "A100-SXM-40": 0.752,
    "TPU-v4": 0.788,
    "TPU-v5e": 0.8515,
    "GB200": 0.6548,
    "GB300": 0.6875,
    "B200": 0.7138,
    "H100-SXM-96": 0.6188,
}
