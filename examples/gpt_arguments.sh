# SPDX-License-Identifier: Apache-2.0
# Arguments of Megatron-LM's pretrain_gpt.py that the other examples share: 2 hosts of 8 GPUs, 8 stages (PP) of 2 GPUs
# (TP), so that stages 0 to 3 are on the first host and the link between stages 3 and 4 leaves it. Source it.

RUN_DIRECTORY=${RUN_DIRECTORY:-runs/gpt}
MODEL=(
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096
    --micro-batch-size 1 --global-batch-size 128 --train-iters 1000 --lr 3e-4 --bf16 --mock-data
    --tokenizer-type NullTokenizer --vocab-size 32000
)
PARALLEL=(--tensor-model-parallel-size 2 --pipeline-model-parallel-size 8 --sequence-parallel)
OUTPUT=(--log-interval 10 --tensorboard-dir "$RUN_DIRECTORY/tensorboard" --distributed-timeout-minutes 10)

# --adaptra alone is enough. The range of ports is for hosts with a firewall between them; the directory is for
# `adaptra status` and `adaptra report`, and may be on a disk of each host.
ADAPTRA=(
    --adaptra --adaptra-port-range 20000-20127
    --adaptra-trace-dir "$RUN_DIRECTORY/adaptra" --adaptra-trace asked
)
GPT_ARGUMENTS=("${MODEL[@]}" "${PARALLEL[@]}" "${OUTPUT[@]}" "${ADAPTRA[@]}")

# Megatron asks for one hardware queue with tensor or sequence parallelism on GPUs before Blackwell.
export CUDA_DEVICE_MAX_CONNECTIONS=1
