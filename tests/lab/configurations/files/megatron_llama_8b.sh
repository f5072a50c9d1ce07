#!/bin/bash
# An 8B Llama on one host of eight GPUs, as such scripts are usually laid out.
GPUS_PER_NODE=8
NNODES=${NNODES:-1}
TP=2
MICRO=1
CHECKPOINTS=${1:-"checkpoints/8b"}

LAUNCH=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
    --master_addr localhost  # one host
)
MODEL=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length 8192
    --max-position-embeddings 8192
    --position-embedding-type rope
    --swiglu
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --vocab-size 128256
)
TRAINING="--micro-batch-size ${MICRO} --global-batch-size $((16 * GPUS_PER_NODE)) --lr 3.0e-4 \
    --train-iters 100000 --bf16 --clip-grad 1.0"
PARALLEL=(
    --tensor-model-parallel-size ${TP}
    # --pipeline-model-parallel-size 2
    --sequence-parallel
)
PARALLEL+=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)

torchrun ${LAUNCH[@]} pretrain_gpt.py \
    ${MODEL[@]} \
    $TRAINING \
    ${PARALLEL[@]} \
    --recompute-activations \
    --use-invented-kernels 3 \
    --save "$CHECKPOINTS" --log-interval 10
