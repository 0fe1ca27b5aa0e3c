# SPDX-License-Identifier: Apache-2.0
"""A rank of a training in which one rank raises: `raising_action.py RANK ACTION TRAINING_ARGUMENTS...`.

The ACTIONth that RANK performs, from 0, raises; the log says when, by time.monotonic. Its process ends as it ends;
before that it cleans up, for CLEANS_UP_S seconds of the environment.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from adaptra_megatron.emulation.megatron.megatron_on_cpu import install

install(with_fused_weight_gradient=True)

import torch.distributed as dist  # noqa: E402  (Megatron on the CPU must be installed first)

from adaptra_megatron.emulation.training.arguments import parse_arguments  # noqa: E402
from adaptra_megatron.emulation.training.training import train  # noqa: E402
from adaptra_megatron.runtime.execution.executor import PipelineExecutor  # noqa: E402


def main(rank: int, action: int, arguments: list[str]) -> None:
    perform, performed = PipelineExecutor._perform, 0

    def raise_in_time(self: PipelineExecutor, *arguments: Any) -> None:
        nonlocal performed
        performed += 1
        if dist.get_rank() == rank and performed == action + 1:
            sys.stdout.write(f"raised at {time.monotonic()}\n")
            raise ArithmeticError("as a model's own code would")
        perform(self, *arguments)

    PipelineExecutor._perform = raise_in_time  # type: ignore[method-assign]
    try:
        train(parse_arguments(["--emulate-cpu", "--distributed-backend", "gloo", *arguments]))
    finally:
        time.sleep(float(os.environ.get("CLEANS_UP_S", "0")))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
