"""Values that `benchmarks/published_fit.py` found and wrote: change them there.

They rest on a tenth of the rows of each table of published runs, which are not scored, and on what data sheets and
documentation say beforehand.
"""

from __future__ import annotations

CONSTANTS: dict[str, float] = {
    "GEMM_START_K": 91.51,
    "UNALIGNED": 0.2827,
    "VECTOR_TOP": 0.7774,
    "VECTOR_BACKWARD": 2.193,
    "SCORES_BACKWARD": 1.378,
    "KERNEL_S": 2.582e-06,
    "LAUNCH_TP": 0.03663,
    "MEETING": 6.045,
    "WAVE": 0.5343,
    "STEP_S": 0.001344,
    "OPTIMIZER_PASSES": 1.196,
    "PIPELINE_S": 0.0002942,
    "LINK_TOP_BETWEEN": 0.7715,
    "CONTENTION": 0.1348,
    "EXPERT_S": 5.082e-05,
    "SCAN": 0.3917,
    "CONVOLUTION": 0.8558,
    "CONVOLUTION_VECTOR": 0.8452,
    "MIXTURE_KERNELS": 111.6,
    "EXPERT_KERNELS": 6.609,
}

# of each framework: of its computing, of what its kernels move beside products, of how many kernels, of its loss
FRAMEWORKS: dict[str, dict[str, float]] = {
    "Megatron-DeepSpeed": {"derating": 0.9242, "vector": 0.8718, "kernels": 5.673, "loss": 2.347},
    "TensorFlow of 2019 with Horovod": {"derating": 1.091, "vector": 11.13, "kernels": 2.164, "loss": 1},
    "MaxText (XLA)": {"derating": 1.079, "vector": 0.8326, "kernels": 0.7, "loss": 1.018},
    "Megatron-LM": {"derating": 0.9921, "vector": 1.103, "kernels": 1.995, "loss": 2.091},
    "LiBai (OneFlow)": {"derating": 1.012, "vector": 1.102, "kernels": 1.016, "loss": 0.9616},
    "FSDP": {"derating": 1.022, "vector": 1.003, "kernels": 1.501, "loss": 1},
    "Composer FSDP": {"derating": 1.11, "vector": 0.8956, "kernels": 1.491, "loss": 0.8646},
    "Megatron Core of NeMo 26.06": {"derating": 0.9884, "vector": 0.8511, "kernels": 1.96, "loss": 1.523, "overlaps_ep": 0.4463},
    "Megatron Core": {"derating": 0.9865, "vector": 1.052, "kernels": 1.723, "loss": 1.484, "overlaps_ep": 0.343},
    "DDP": {"derating": 0.9236, "vector": 0.9679, "kernels": 1.483, "loss": 0.9988},
    "TensorFlow with Horovod": {"derating": 1.23, "vector": 1.735, "kernels": 1.079, "loss": 1.012},
    "PaddlePaddle Fleet": {"derating": 1.046, "vector": 1.101, "kernels": 1.208, "loss": 1},
    "DDP, images": {"derating": 0.9594, "vector": 0.8293, "kernels": 1.491, "loss": 0.9962},
    "TensorFlow with Horovod, fused images": {"derating": 1.037, "vector": 1.298, "kernels": 1.004, "loss": 1},
    "TensorFlow with Horovod, images": {"derating": 1.013, "vector": 1.201, "kernels": 1.025, "loss": 1.001},
    "torchtitan, compiled": {"derating": 1.179, "vector": 1.135, "kernels": 0.7029, "loss": 1.023},
}

# of the peak of each device, what long products keep within its power
SUSTAINED: dict[str, float] = {
    "A100-SXM-80": 0.7968,
    "V100-SXM-16": 0.8169,
    "V100-SXM-32": 0.8464,
    "TPU-v5p": 0.7952,
    "TPU-v7x": 0.7622,
    "H100-SXM": 0.7026,
    "A100-SXM-40": 0.7509,
    "TPU-v4": 0.7874,
    "TPU-v5e": 0.8485,
    "GB200": 0.6577,
    "GB300": 0.6858,
    "B200": 0.7135,
    "H100-SXM-96": 0.6145,
}
