# SPDX-License-Identifier: Apache-2.0
"""Ranks of `testing.jobs.variants` that save in the background, as Megatron-LM does with --async-save:
`async_save_ranks.py VARIANTS.json REPORT.json DIRECTORY`.

Each save forks a writer in each rank, while links, delegate and planner are there. The first is held until the device
path of both links has failed and an iteration has gone by on the other; of the second, rank 1's writer is killed.
DIRECTORY gets what came of it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from testing.jobs import variants
from testing.megatron.megatron_on_cpu import install

HELD_S, FAILED_S = 60.0, 0.3


def held(write: Callable[..., Any], release: Path, *given: Any, **keywords: Any) -> Any:
    """In the writer: write once `release` is there, or HELD_S have passed."""
    until_s = time.monotonic() + HELD_S
    while not release.exists() and time.monotonic() < until_s:
        time.sleep(0.01)
    return write(*given, **keywords)


class BackgroundSaves:
    """Stands in for what saves, and looks after each step whether a checkpoint is complete."""

    def __init__(self, directory: Path) -> None:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        from testing.faults.network.path_faults import PathFaults

        self._directory, self._queue, self._faults = directory, AsyncCallsQueue(), PathFaults().install()
        self._rank, self._iteration, self._saves, self._steps_since = int(os.environ["RANK"]), 0, 0, 0

    def save(self, args: Any, model: Any, optimizer: Any, scheduler: Any, iteration: int, _queue: None) -> None:
        import torch.distributed as dist
        from megatron.core import dist_checkpointing

        from testing.faults.network.path_faults import Mode
        from testing.training.checkpointing import LATEST, _sharded_state

        if self._saves == 2:
            return  # at the end
        self._saves, self._iteration, self._steps_since = self._saves + 1, iteration, 0
        place = Path(args.save) / f"iter_{iteration:07d}"
        place.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        state = {**_sharded_state(model, optimizer, scheduler, is_loading=False), "iteration": iteration}
        request = dist_checkpointing.save(state, str(place), async_sharded_save=True)
        request = request._replace(async_fn=partial(held, request.async_fn, self._release))
        latest = Path(args.save) / LATEST
        request.add_finalize_fn(lambda: latest.write_text(f"{iteration}\n") if self._rank == 0 else None)
        self._queue.schedule_async_request(request)
        writer = self._queue.async_calls[-1].async_caller.process
        self._note(f"writer of {iteration} is a fork: {writer.is_alive()}")
        if self._saves == 1:
            self._faults.arm((self._rank, 1 - self._rank), Mode.ERROR, FAILED_S)
            return
        if self._rank == 1:
            os.kill(writer.pid, signal.SIGKILL)
        self._release.touch()

    def after_step(self) -> None:
        from megatron.core.dist_checkpointing.core import CheckpointingException
        from torch.distributed.checkpoint.api import CheckpointException

        if not self._queue.get_num_unfinalized_calls():
            return
        self._steps_since += 1
        if self._saves == 1 and self._steps_since == 2:
            self._note(f"path failed: {len(self._faults.begun)}")
            self._release.touch()
        try:
            # By then each rank's writer may go on: waiting for it ends.
            done = self._queue.maybe_finalize_async_calls(blocking=self._steps_since >= 2)
        except (CheckpointException, CheckpointingException) as error:
            self._note(f"{self._iteration} failed: {type(error).__name__}")
            return
        if done:
            self._note(f"{self._iteration} complete after {self._steps_since} iterations")

    @property
    def _release(self) -> Path:
        return self._directory / f"release{self._saves}.{self._rank}"

    def _note(self, what: str) -> None:
        with (self._directory / f"noted{self._rank}").open("a") as notes:
            notes.write(f"{what}\n")


def main(directory: Path) -> None:
    install(with_fused_weight_gradient=True)
    from testing.training import train as training

    saves, step = BackgroundSaves(directory), training.Trainer._train_step

    def step_and_look(trainer: Any, iterators: Any) -> Any:
        norm = step(trainer, iterators)
        saves.after_step()
        return norm

    training.save_checkpoint = saves.save
    training.Trainer._train_step = step_and_look  # type: ignore[method-assign]
    variants._main(sys.argv[1:3])


if __name__ == "__main__":
    main(Path(sys.argv[3]))
