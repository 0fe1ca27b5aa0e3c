# SPDX-License-Identifier: Apache-2.0
"""A pretraining script: parses its command line by megatron.training, trains by megatron.core, on the CPU."""

from __future__ import annotations

import sys

from megatron.training.initialize import initialize_megatron

from testing.megatron.megatron_on_cpu import install
from testing.training.training_arguments import parse_arguments


def main() -> None:
    install()
    arguments = initialize_megatron()
    from testing.training.process_groups import leave_job
    from testing.training.train import train

    size = ("--pipeline-model-parallel-size", str(arguments.pipeline_model_parallel_size), "--global-batch-size", "6")
    iterations = ("--train-iters", str(arguments.train_iters), "--dump-state", arguments.dump_state)
    train(parse_arguments(["--emulate-cpu", "--mock-data", "--distributed-backend", "gloo", *size, *iterations]))
    patches = sys.modules.get("adaptra_megatron.patches")
    applied = None if patches is None else patches.in_force()
    iterations_run = 0 if applied is None else applied.runtime.summary()["training_iterations"]
    sys.stdout.write(f"iterations run by adaptra: {iterations_run}\n")
    leave_job()


if __name__ == "__main__":
    main()
