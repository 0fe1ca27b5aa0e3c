# SPDX-License-Identifier: Apache-2.0
"""Ranks of a job of cells without Megatron: calls with collectives inside, collectives outside, and deaths.

    group_ranks.py REPLICAS STAGES DEATH [DEATH...]

DEATH is "<rank>:<moment>": a rank kills itself as it comes to that moment, counted over all of its operations, commits
and meetings; with ":error" behind it, it raises an error of its own instead. Each rank prints what it has come to.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.layout import Cell, JobLayout, Worker
from adaptra_megatron.common.membership import MembershipRecords
from adaptra_megatron.elastic.generation import Generation
from adaptra_megatron.elastic.process_group_manager import FaultTolerantGroups
from adaptra_megatron.elastic.recovery import RecoveryManager

CALLS, TIMEOUT_S = 4, 20.0


class Mortal:
    """Counts moments, and dies at its own."""

    def __init__(self, moments: set[int], *, errs: bool) -> None:
        self._moments, self._count, self._errs = moments, 0, errs

    def before(self, owner: Any, name: str) -> None:
        """Have each call of a method be a moment."""
        original = getattr(owner, name)

        def counted(*given: Any, **keywords: Any) -> Any:
            if self._count in self._moments and self._errs:
                raise ValueError("a matrix is singular")
            if self._count in self._moments:
                os.kill(os.getpid(), signal.SIGKILL)
            self._count += 1
            return original(*given, **keywords)

        setattr(owner, name, counted)


def main(replicas: int, stages: int, deaths: list[str]) -> None:
    """Carry out some calls, each followed by operations outside."""
    groups = FaultTolerantGroups()
    groups.install()
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    rank = dist.get_rank()
    of_stage = {stage: [stage * replicas + replica for replica in range(replicas)] for stage in range(stages)}
    replica, stage = rank % replicas, rank // replicas
    made = [dist.new_group(ranks, group_desc="data") for ranks in of_stage.values()]
    data: Any = made[stage]
    lines = [[of_stage[each][number] for each in range(stages)] for number in range(replicas)]
    pipelines: list[Any] = [dist.new_group(ranks, group_desc="pipeline") for ranks in lines]
    pipeline = pipelines[replica]
    workers = {
        each * replicas + number: Worker(Cell(number, each), 0, "host", "boot/net")
        for each in range(stages)
        for number in range(replicas)
    }
    layout = JobLayout(rank, workers, "job", together=True)
    manager = RecoveryManager(
        layout, ControlStore.of_job("job"), groups, MembershipRecords.of_rank(TIMEOUT_S), TIMEOUT_S, 10.0
    )
    ours = [death.split(":") for death in deaths if int(death.split(":")[0]) == rank]
    mortal = Mortal({int(death[1]) for death in ours}, errs=any(len(death) == 3 for death in ours))
    for name in ("native", "enter", "leave"):
        mortal.before(groups, name)
    for name in ("known", "keep"):
        mortal.before(groups.kept, name)
    for name in ("_answer", "_after"):
        mortal.before(manager, name)
    weight, seen = torch.tensor([1.0 + stage], dtype=torch.float64), []

    def attempt(generation: Generation, number: int) -> torch.Tensor:
        """The gradient of a stage: 1 for each replica's work, wherever that is done."""
        live = [each for each in of_stage[stage] if each in generation.live]
        shares = [sum(1 for each in range(replicas) if live[each % len(live)] == mine) for mine in live]
        gradient = torch.tensor([float(shares[live.index(rank)])], dtype=torch.float64)
        dist.all_reduce(gradient, group=data)
        dist.all_reduce(torch.zeros(1), group=pipeline)
        return gradient

    for call in range(CALLS):
        gradient = manager.carry_out(attempt)
        norm = (gradient * weight) ** 2
        dist.all_reduce(norm, group=pipeline)
        flag = torch.tensor([float(call == 2 and stage == 0)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        reported = torch.tensor([float(call)] if stage == stages - 1 else [-1.0])
        dist.broadcast(reported, src=dist.get_process_group_ranks(pipeline)[-1], group=pipeline)
        parts = [torch.full((1,), -1.0, dtype=torch.float64) for _ in range(replicas)]
        with groups.ignoring_failed_members():
            dist.all_gather(parts, weight, group=data)
        weight = weight + gradient / norm.sqrt()
        seen.append([float(norm), float(flag), float(reported), max(float(part) for part in parts)])
    dist.barrier()
    known = {"stage": stage, "whole": groups.is_whole, "last": groups.last_live}
    result = json.dumps({"weight": float(weight), "seen": seen, "epochs": manager.epochs, **known})
    sys.stdout.write(f"RESULT {result}\n")
    manager.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
