# SPDX-License-Identifier: Apache-2.0
"""What ranks do in test_telemetry_of_a_run.py: train, with stand-ins for the writers that Megatron's training makes.

`telemetry_ranks.py OUTPUT ARGUMENTS...`: the last rank, which has the writers, leaves in OUTPUT what they were given.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from testing.megatron.megatron_on_cpu import install


class SummaryWriter:
    """As torch.utils.tensorboard's, which Megatron makes on the last rank."""

    def __init__(self) -> None:
        self.written: list[tuple[str, float, int]] = []

    def add_scalar(
        self,
        tag: str,
        scalar_value: float,
        global_step: int | None = None,
        walltime: float | None = None,
        new_style: bool = False,
        double_precision: bool = False,
    ) -> None:
        assert global_step is not None
        self.written.append((tag, float(scalar_value), global_step))


class Wandb(ModuleType):
    """As the wandb module, which is what Megatron calls its writer: steps must not go back."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.written: list[tuple[dict[str, Any], int]] = []

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        assert step is not None
        assert not self.written or step >= self.written[-1][1]
        self.written.append((data, step))


def main(output: Path, argv: list[str]) -> None:
    install(with_fused_weight_gradient=True)
    import torch
    import torch.distributed as dist

    from testing.training import train as training
    from testing.training.process_groups import join_job, leave_job
    from testing.training.training_arguments import parse_arguments

    args = parse_arguments(["--emulate-cpu", "--distributed-backend", "gloo", *argv])
    last = join_job(args) - 1
    tensorboard, wandb = SummaryWriter(), Wandb()
    variables: Any = ModuleType("megatron.training.global_vars")
    variables._GLOBAL_ARGS = SimpleNamespace(tensorboard_log_interval=2, curr_iteration=0)
    variables.get_tensorboard_writer = lambda: tensorboard if dist.get_rank() == last else None
    variables.get_wandb_writer = lambda: wandb if dist.get_rank() == last else None
    sys.modules[variables.__name__] = variables
    step, ranges = training.Trainer._train_step, list[str]()

    def counted(trainer: training.Trainer, iterators: Any) -> float:
        variables._GLOBAL_ARGS.curr_iteration = trainer.iteration  # as Megatron's train() does
        if dist.get_rank() != last or trainer.iteration != args.train_iters - 1:
            return step(trainer, iterators)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            loss = step(trainer, iterators)
        ranges.extend(event.name for event in profile.events() if event.name.startswith("adaptra "))
        return loss

    training.Trainer._train_step = counted  # type: ignore[method-assign]
    training.train(args)
    if dist.get_rank() == last:
        output.write_text(json.dumps({"tensorboard": tensorboard.written, "wandb": wandb.written, "ranges": ranges}))
    leave_job()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
