"""Physical constants of the cost model: one set for all models, machines and software.

Those marked *fitted* come from `benchmarks/published_fit.py`: links from timings of NCCL, the others from a tenth of
one table of runs. The others are properties of the hardware, with the source.
"""

from __future__ import annotations

# Matrix products
# of the peak, what a large product reaches on an A100 within its power: 250 TFLOP/s
GEMM_TOP = 0.80
# fitted: starting and ending a tile takes as long as so many steps of its inner loop
GEMM_START_K = 16
# of the result, and how well each uses a multiprocessor
TILES = ((256, 128, 1.0), (128, 128, 0.97), (128, 64, 0.82), (64, 64, 0.66))
# among how many multiprocessors a tile's inner loop may be split
SPLITS = (1, 2, 4, 8)
# Rows that do not begin on a line of memory are read in more pieces (NVIDIA, "Matrix Multiplication Background User's
# Guide") bytes that divide the rows' length, and the speed that remains
ALIGNED = ((128, 1.0), (64, 0.97), (32, 0.93), (16, 0.86))
UNALIGNED = 0.254  # fitted: below 16 bytes
# below 16 bytes, many small products do not use tensor cores: this of the fp32 peak
UNALIGNED_BATCH = 0.9

# Attention in one kernel: of the peak, forward and backward together, long sequences (Dao, 2023, arXiv:2307.08691,
# figures 4 to 6)
FUSED_ATTENTION = {1: 0.30, 2: 0.56}
# the length of a sequence at which half of that is reached
FUSED_ATTENTION_HALF = 400.0
FUSED_BACKWARD = 2.5  # five products instead of two

# Kernels that only read and write
# fitted: of the memory's bandwidth
VECTOR_TOP = 0.85
# what they move in the backward pass for each number of the forward pass
VECTOR_BACKWARD = 1.7
# the same of softmax and dropout over the attention's squares
SCORES_BACKWARD = 1.2
# scale, mask, softmax, casts one by one: how much more they move, in so many more kernels
UNFUSED_SOFTMAX = 2.2
UNFUSED_KERNELS = 5
# fitted: times that an update reads and writes its numbers
OPTIMIZER_PASSES = 0.875

# Kernels, and what Python takes
# fitted: of a device, to start and to end a kernel, whatever it does
KERNEL_S = 2.43e-06
# from Python to a kernel on the device's queue, where the stack does not say otherwise
LAUNCH_S = 7e-6
# fitted: how much longer for each further rank of tp, which wait for the slowest of them
LAUNCH_TP = 0.0359
# fitted: the power in which Python's and the device's time add up where ranks of tp meet in every layer
MEETING = 3.52
# fitted: once a step: data, logging, the loss to all
STEP_S = 0.001

# Links
# fitted: of the link's bandwidth inside a host, what large collectives reach
LINK_TOP_INSIDE = 0.713
LINK_TOP_BETWEEN = 0.80  # the same between hosts
COLLECTIVE_S = 3.21e-05  # fitted: to start one
# of the time of bytes that travel while a device computes, how much longer that takes (Galvatron's overlap_coe)
CONTENTION = 0.126
# fitted: to hand a microbatch from one stage to the next, beside the link
PIPELINE_S = 0.000537

# Failures and checkpoints: assumed, as nothing measures a cluster's storage
# bytes per second of a host, to and from the storage of checkpoints
STORAGE = 1e9
# bytes per second that a rank writes beside the training, at the lowest priority and a tenth of its time
CHECKPOINT_WRITE = 1e8
# bytes per second at which a rank copies its part of the state, while the next step computes
CHECKPOINT_COPY = 5e9
# of a checkpoint, however small: its files, and what training does for it
CHECKPOINT_WRITE_S = 0.5
CHECKPOINT_STALL_S = 0.005
# of the time in which a checkpoint is written, how much longer the steps take
CHECKPOINT_SLOWS = 0.005
# from a failure to ranks that are ready to read a checkpoint; a host in the place of a lost one is at hand
RESTART_S = 15.0
# beyond the step that is repeated, where replicas go on in place
RECOVERY_S = 1.0
# of a rank's state, in memory, where a plan has one replica: two versions of its own and of another rank's
STATE_COPIES = 4
# of the time between two such copies, or two states that a run may go back to: the most that taking one may cost
STATE_SHARE = 0.01
# cost of a copy, as a multiple of the time that a rank waits for it: it also travels, and another comes
COPY_TRAFFIC = 3
