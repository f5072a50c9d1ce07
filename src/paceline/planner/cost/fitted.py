"""Values that `benchmarks/published_fit.py` found and wrote: change them there.

They rest on a tenth of the rows of each table of published runs, which are not scored, and on what data sheets and
documentation say beforehand.
"""

from __future__ import annotations

CONSTANTS: dict[str, float] = {
    "GEMM_START_K": 21.58,
    "UNALIGNED": 0.2658,
    "VECTOR_TOP": 0.8094,
    "VECTOR_BACKWARD": 1.965,
    "SCORES_BACKWARD": 1.328,
    "KERNEL_S": 2.405e-06,
    "LAUNCH_TP": 0.03487,
    "MEETING": 4.367,
    "STEP_S": 0.001099,
    "OPTIMIZER_PASSES": 1.148,
    "PIPELINE_S": 0.0005058,
    "LINK_TOP_BETWEEN": 0.8823,
    "CONTENTION": 0.1338,
    "EXPERT_S": 5.208e-05,
    "SCAN": 0.3824,
}

# of each framework: of its computing, of what its kernels move beside products, of how many kernels, of its loss
FRAMEWORKS: dict[str, dict[str, float]] = {
    "Megatron-DeepSpeed": {"derating": 0.961, "vector": 0.8771, "kernels": 5.623, "loss": 2.437},
    "TensorFlow with Horovod": {"derating": 1.361, "vector": 1.677, "kernels": 1.112, "loss": 1},
    "MaxText (XLA)": {"derating": 1.053, "vector": 0.9171, "kernels": 0.7, "loss": 1.036},
    "Megatron-LM": {"derating": 1.016, "vector": 1.144, "kernels": 2, "loss": 2.082},
    "LiBai (OneFlow)": {"derating": 1.015, "vector": 1.122, "kernels": 1.014, "loss": 0.9672},
    "FSDP": {"derating": 0.8447, "vector": 0.9524, "kernels": 1.494, "loss": 1},
    "Composer FSDP": {"derating": 1.204, "vector": 0.9367, "kernels": 1.498, "loss": 0.9485},
    "Megatron Core": {"derating": 0.9892, "vector": 1.372, "kernels": 1.677, "loss": 1.615},
    "DDP": {"derating": 0.9245, "vector": 0.9934, "kernels": 1.496, "loss": 0.9997},
    "PaddlePaddle Fleet": {"derating": 1.05, "vector": 1.1, "kernels": 1.208, "loss": 1},
    "torchtitan, compiled": {"derating": 1.123, "vector": 0.9463, "kernels": 0.7007, "loss": 1.004},
}

# of the peak of each device, what long products keep within its power
SUSTAINED: dict[str, float] = {
    "A100-SXM-80": 0.7781,
    "V100-SXM-32": 0.7305,
    "TPU-v5p": 0.81,
    "TPU-v7x": 0.7752,
    "H100-SXM": 0.7063,
    "A100-SXM-40": 0.7736,
    "TPU-v4": 0.7841,
    "TPU-v5e": 0.8261,
    "GB200": 0.6664,
    "GB300": 0.6816,
    "B200": 0.713,
    "V100-SXM-16": 0.7319,
    "H100-SXM-96": 0.6194,
}
