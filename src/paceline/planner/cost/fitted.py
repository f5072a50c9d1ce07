"""Values that `benchmarks/published_fit.py` found and wrote: change them there.

They rest on a tenth of the rows of each table of published runs, which are not scored, and on what data sheets and
documentation say beforehand.
"""

from __future__ import annotations

CONSTANTS: dict[str, float] = {
    "GEMM_START_K": 90.77,
    "UNALIGNED": 0.2846,
    "VECTOR_TOP": 0.7809,
    "VECTOR_BACKWARD": 2.234,
    "SCORES_BACKWARD": 1.346,
    "KERNEL_S": 2.359e-06,
    "LAUNCH_TP": 0.03714,
    "MEETING": 6.092,
    "WAVE": 0.5263,
    "STEP_S": 0.001268,
    "OPTIMIZER_PASSES": 1.176,
    "PIPELINE_S": 0.0002844,
    "LINK_TOP_BETWEEN": 0.7042,
    "CONTENTION": 0.1339,
    "EXPERT_S": 5.093e-05,
    "SCAN": 0.2453,
    "CONVOLUTION": 0.8513,
    "CONVOLUTION_VECTOR": 0.9336,
    "MIXTURE_KERNELS": 162.5,
    "EXPERT_KERNELS": 3.399,
}

# of each framework: of its computing, of its traffic beside products, of its kernels, of its loss
FRAMEWORKS: dict[str, dict[str, float]] = {
    "Megatron-DeepSpeed": {"derating": 0.984, "vector": 0.8557, "kernels": 5.662, "loss": 2.179},
    "Megatron-LM": {"derating": 0.9711, "vector": 1.117, "kernels": 1.994, "loss": 2.102},
    "Megatron Core": {"derating": 0.9648, "vector": 1.063, "kernels": 1.851, "loss": 1.529, "overlaps_ep": 0.3555},
    "Megatron Core of NeMo 26.06": {
        "derating": 1.036,
        "vector": 1.059,
        "kernels": 1.991,
        "loss": 1.524,
        "overlaps_ep": 0.4374,
        "mixtures": 0.4271,
    },
    "FSDP": {"derating": 1.02, "vector": 1.003, "kernels": 1.501, "loss": 1},
    "Composer FSDP": {"derating": 1.105, "vector": 0.8897, "kernels": 1.492, "loss": 0.8663},
    "torchtitan, compiled": {"derating": 1.145, "vector": 1.096, "kernels": 0.7024, "loss": 1.021},
    "DDP": {"derating": 0.9532, "vector": 1.055, "kernels": 1.518, "loss": 1.002},
    "TensorFlow with Horovod": {"derating": 1.224, "vector": 1.746, "kernels": 1.072, "loss": 1.012},
    "TensorFlow of 2019 with Horovod": {"derating": 1.09, "vector": 11.17, "kernels": 2.146, "loss": 1},
    "DDP of images": {"derating": 0.9493, "vector": 0.7828, "kernels": 1.49, "loss": 0.9956},
    "TensorFlow with Horovod of images": {"derating": 1.008, "vector": 1.483, "kernels": 3.208, "loss": 1.001},
    "TensorFlow with XLA of images": {"derating": 1.064, "vector": 0.9174, "kernels": 1.007, "loss": 1},
    "PaddlePaddle Fleet": {"derating": 1.045, "vector": 1.096, "kernels": 1.207, "loss": 1},
    "LiBai (OneFlow)": {"derating": 1.013, "vector": 1.108, "kernels": 1.015, "loss": 0.9617},
    "MaxText (XLA)": {"derating": 1.079, "vector": 0.8334, "kernels": 0.7, "loss": 1.018},
}

# of the peak of each device, what long products keep within its power
SUSTAINED: dict[str, float] = {
    "A100-SXM-80": 0.7596,
    "V100-SXM-16": 0.8051,
    "V100-SXM-32": 0.8488,
    "TPU-v5p": 0.7955,
    "TPU-v7x": 0.7617,
    "H100-SXM": 0.7062,
    "A100-SXM-40": 0.7545,
    "TPU-v4": 0.7875,
    "TPU-v5e": 0.8486,
    "GB200": 0.6569,
    "GB300": 0.6844,
    "B200": 0.7134,
    "H100-SXM-96": 0.6158,
}
