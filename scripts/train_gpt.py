#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train a GPT with Megatron-core; start one process per rank, with torchrun for example.

    torchrun --nproc-per-node 4 scripts/train_gpt.py --emulate-cpu --mock-data \
        --pipeline-model-parallel-size 4 --global-batch-size 16 --train-iters 20 --adaptra
"""

from __future__ import annotations

import logging
import sys
import warnings

from testing.training.training_arguments import parse_arguments


def main() -> None:
    args = parse_arguments()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("adaptra_megatron").setLevel(logging.INFO)
    if args.emulate_cpu:
        from testing.megatron.megatron_on_cpu import install

        # Of apex and Transformer Engine, which there are not for CPUs.
        warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
        warnings.filterwarnings("ignore", category=FutureWarning)  # Megatron calls what newer torch renamed
        args.distributed_backend = "gloo"
        install(with_fused_weight_gradient=args.emulate_fused_weight_gradient)
    from testing.training.process_groups import leave_job
    from testing.training.train import train

    train(args)
    leave_job()


# The writer of checkpoints may start processes that import this file again.
if __name__ == "__main__":
    main()
