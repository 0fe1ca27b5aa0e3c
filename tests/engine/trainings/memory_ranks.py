# SPDX-License-Identifier: Apache-2.0
"""A rank of a training whose device memory is made up: `made_up_memory.py STORY TRAINING_ARGUMENTS...`.

STORY is JSON: `room`, activations that each stage has memory for; `shrinks`, the iteration from which something else
takes the room of `taken` of them on stage 1; `directory`, where each rank writes what its stage held per iteration.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

from testing.megatron.megatron_on_cpu import install

logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
sys.path.insert(0, str(Path(__file__).parents[2]))
install(with_fused_weight_gradient=True)

import torch.distributed as dist  # noqa: E402  (Megatron on the CPU must be installed first)
from support.made_up.memory import MadeUpMemory, MadeUpStage  # noqa: E402

from adaptra_megatron.config import AdaptraConfig  # noqa: E402
from adaptra_megatron.engine import (  # noqa: E402
    pipeline,
    runtime,
)
from adaptra_megatron.schedule.ir import Kind  # noqa: E402
from testing.replacing import Replaced, Replacement  # noqa: E402
from testing.training.process_groups import leave_job  # noqa: E402
from testing.training.train import train  # noqa: E402
from testing.training.training_arguments import parse_arguments  # noqa: E402

MB = 1_000_000
ACTIVATION, STATIC, MESSAGE = 100 * MB, 500 * MB, 2 * MB
TAKES = ACTIVATION + 2 * MESSAGE
"""With its input, and its output on the way."""


class CountedComputation(runtime.MegatronComputation):
    """Allocates made-up memory as it computes."""

    def __init__(self, stage: MadeUpStage, *args: Any) -> None:
        super().__init__(*args)
        self._stage = stage

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return self._allocating(Kind.FORWARD, super().forward, *args, **keywords)

    def backward(self, *args: Any, split: bool, **keywords: Any) -> Any:
        kind = Kind.BACKWARD_INPUT if split else Kind.BACKWARD
        return self._allocating(kind, super().backward, *args, split=split, **keywords)

    def weight_gradient(self, *args: Any, **keywords: Any) -> Any:
        return self._allocating(Kind.BACKWARD_WEIGHT, super().weight_gradient, *args, **keywords)

    def _allocating(self, kind: Kind, function: Any, *args: Any, **keywords: Any) -> Any:
        self._stage.receive(kind)
        result = function(*args, **keywords)
        self._stage.compute(kind)
        self._stage.end(kind)
        return result


class Rank:
    """One rank's made-up device."""

    def __init__(self, story: dict[str, Any]) -> None:
        self._story = story
        self.memory = MadeUpMemory(total=0, static=STATIC)
        self._stage = MadeUpStage(self.memory, ACTIVATION, message=MESSAGE)
        self._peaks: list[int] = []

    def begin_iteration(self, *made_of: Any) -> CountedComputation:
        """Stands in for MegatronComputation, which every iteration makes one of."""
        self._note_peak()
        stage, story = dist.get_rank(), self._story
        self.memory.total = round((STATIC + story["room"][stage] * TAKES) / AdaptraConfig.memory_fraction)
        if stage == 1 and len(self._peaks) >= story["shrinks"]:
            self.memory.of_others = story["taken"] * TAKES
        self._peaks.append(0)
        self.memory.peak_ever = self.memory.allocated
        return CountedComputation(self._stage, *made_of)

    def held(self) -> list[float]:
        """Most activations at once, per iteration."""
        self._note_peak()
        return [(peak - STATIC) / ACTIVATION for peak in self._peaks]

    def _note_peak(self) -> None:
        if self._peaks:
            self._peaks[-1] = self.memory.peak_ever


def main(story: dict[str, Any], arguments: list[str]) -> None:
    rank = Rank(story)
    stand_ins = [
        Replacement(pipeline, "memory_of", lambda device: rank.memory, "made-up memory"),
        Replacement(runtime, "MegatronComputation", rank.begin_iteration, "made-up memory"),
    ]
    with Replaced(stand_ins):
        result = train(parse_arguments(["--emulate-cpu", "--distributed-backend", "gloo", *arguments]))
    reported = {"held": rank.held(), "plans": result.plans, "adaptra": result.adaptra}
    (Path(story["directory"]) / f"rank_{dist.get_rank()}.json").write_text(json.dumps(reported))
    leave_job()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
