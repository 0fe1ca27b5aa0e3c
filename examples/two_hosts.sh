#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Train on two hosts without a scheduler. Run the same line on both, with their own NODE_RANK:
#
#   NODE_RANK=0 MASTER_ADDR=host0 examples/two_hosts.sh        # on host0
#   NODE_RANK=1 MASTER_ADDR=host0 examples/two_hosts.sh        # on the other
#
# LAUNCHER: torchrun (default); "adaptra launch", for jobs that survive rank failures; ft_launcher, for restarts within the job.
# MEGATRON_LM: its sources. INTERFACE: the network between the hosts, where it is not the one that leads to MASTER_ADDR.
set -euo pipefail
: "${NODE_RANK:?the number of this host: 0 or 1}" "${MASTER_ADDR:?the first host, as both of them reach it}"
source "$(dirname "$0")/gpt_arguments.sh"

if [ -n "${INTERFACE:-}" ]; then
    export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE # the first is the host path's, too
fi
read -ra launcher <<<"${LAUNCHER:-torchrun}"
exec "${launcher[@]}" --nnodes 2 --nproc-per-node 8 --node-rank "$NODE_RANK" \
    --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29400}" \
    "${MEGATRON_LM:-.}/pretrain_gpt.py" "${GPT_ARGUMENTS[@]}"
