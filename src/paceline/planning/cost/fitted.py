"""Values that `benchmarks/published_fit.py` found and wrote: change them there.

They rest on a tenth of the rows of each table of published runs, which are not scored, and on what data sheets and
documentation say in advance.
"""

from __future__ import annotations

CONSTANTS: dict[str, float] = {
    "GEMM_START_K": 86.63,
    "UNALIGNED": 0.2735,
    "VECTOR_TOP": 0.7903,
    "VECTOR_BACKWARD": 2.038,
    "SCORES_BACKWARD": 1.379,
    "KERNEL_S": 2.452e-06,
    "LAUNCH_TP": 0.03674,
    "MEETING": 6.007,
    "WAVE": 0.5079,
    "STEP_S": 0.001331,
    "OPTIMIZER_PASSES": 1.142,
    "PIPELINE_S": 0.0003003,
    "LINK_TOP_BETWEEN": 0.7245,
    "CONTENTION": 0.1366,
    "EXPERT_S": 5.126e-05,
    "SCAN": 0.242,
    "CONVOLUTION": 0.8513,
    "CONVOLUTION_VECTOR": 0.7622,
    "CONVOLUTION_3D": 1.476,
    "CONVOLUTION_TF32": 1.515,
    "MIXTURE_KERNELS": 220.6,
    "EXPERT_KERNELS": 3.444,
}

# of each framework: of its computing, of its traffic beside products, of its kernels, of its loss
FRAMEWORKS: dict[str, dict[str, float]] = {
    "Megatron-DeepSpeed": {"derating": 0.9419, "vector": 1.005, "kernels": 5.686, "loss": 2.344},
    "Megatron-LM": {"derating": 0.9736, "vector": 1.236, "kernels": 2, "loss": 2.123},
    "Megatron Core": {"derating": 0.9547, "vector": 1.187, "kernels": 1.538, "loss": 1.535, "overlaps_ep": 0.3818},
    "Megatron Core of NeMo 26.06": {
        "derating": 1.014,
        "vector": 1.241,
        "kernels": 1.569,
        "loss": 1.539,
        "overlaps_ep": 0.4166,
        "mixtures": 0.7861,
    },
    "FSDP": {"derating": 1.037, "vector": 0.9818, "kernels": 1.5, "loss": 1},
    "Composer FSDP": {"derating": 1.114, "vector": 0.9129, "kernels": 1.499, "loss": 0.8474},
    "torchtitan, compiled": {"derating": 1.152, "vector": 0.9484, "kernels": 0.7002, "loss": 1.015},
    "DDP": {"derating": 1.013, "vector": 1.012, "kernels": 1.502, "loss": 1.002},
    "TensorFlow with Horovod": {"derating": 1.162, "vector": 2.6, "kernels": 1.008, "loss": 1.004},
    "TensorFlow of 2019 with Horovod": {"derating": 1.104, "vector": 12.47, "kernels": 2.013, "loss": 1},
    "DDP of images": {"derating": 1.048, "vector": 0.9537, "kernels": 1.5, "loss": 0.9989},
    "TensorFlow with XLA of images": {"derating": 1.086, "vector": 1.49, "kernels": 1.002, "loss": 1.002},
    "PaddlePaddle Fleet": {"derating": 1.04, "vector": 1.063, "kernels": 1.201, "loss": 1},
    "LiBai (OneFlow)": {"derating": 1.031, "vector": 1.109, "kernels": 1.003, "loss": 0.9667},
    "MaxText (XLA)": {"derating": 1.074, "vector": 0.8243, "kernels": 0.7, "loss": 1.019},
    "HAI-LLM": {"derating": 0.9779, "vector": 1.137},
    "DeepSpeed": {"derating": 1.056, "vector": 0.9839},
    "torchtitan": {"derating": 1.056, "vector": 2.165},
    "TensorFlow with Horovod of images": {"derating": 1.08, "vector": 2.723},
}

# of the peak of each device, what long products keep within its power
SUSTAINED: dict[str, float] = {
    "A100-SXM-80": 0.7672,
    "V100-SXM-16": 0.7942,
    "V100-SXM-32": 0.8854,
    "TPU-v5p": 0.7897,
    "TPU-v7x": 0.7584,
    "H100-SXM": 0.7028,
    "A100-SXM-40": 0.764,
    "TPU-v4": 0.7834,
    "TPU-v5e": 0.8455,
    "GB200": 0.652,
    "GB300": 0.6878,
    "B200": 0.7138,
    "H100-SXM-96": 0.6172,
}
