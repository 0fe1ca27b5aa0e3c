# SPDX-License-Identifier: Apache-2.0
"""Emulate conditions of a training: compute times, and faults at given points."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules

from testing.faults.deaths import Arrivals, Deaths, parse_death
from testing.faults.emulated_compute import EmulatedCompute, EmulationError, parse_compute
from testing.faults.holds import Holds, parse_hold
from testing.faults.late_operations import LateRank, late_messages, parse_lateness
from testing.faults.network.link_faults import LinkFault, parse_link_fault
from testing.faults.network.link_story import LinkFaultScenario, read_story
from testing.faults.network.links import SlowLinks
from testing.faults.network.path_flaps import PathFlaps
from testing.faults.pauses import Pauses
from testing.faults.planners import cpu_times, exact_times, prompt_planner
from testing.faults.slow_cells import CellSpeed, parse_slow_cell
from testing.results import TrainingResult
from testing.training.process_groups import stage_of_rank
from testing.training.training_arguments import TrainingArgumentsError

if TYPE_CHECKING:
    from adaptra_megatron.megatron.computation import StageComputation
    from testing.soak.soak_rank import SoakRank


class Conditions:
    """Emulated conditions of one rank, which hold within this context."""

    def __init__(
        self, args: argparse.Namespace, world_size: int, stack: contextlib.ExitStack, late: LateRank | None = None
    ) -> None:
        """Set up the conditions. `late`: delays of this rank.

        Raises TrainingArgumentsError for arguments that do not fit, and the errors of each fault's parser.
        """
        self._stages = args.pipeline_model_parallel_size
        self._stage = parallel_state.get_pipeline_model_parallel_rank()
        story = (
            read_story(Path(args.emulate_link_story)) if args.emulate_link_story else LinkFaultScenario(iterations=0)
        )
        slow_cells = [parse_slow_cell(text) for text in args.emulate_slow_cell]
        if slow_cells and args.emulate_compute_ms is None:
            raise TrainingArgumentsError("--emulate-slow-cell multiplies compute times: give --emulate-compute-ms too")
        self._speed = CellSpeed(slow_cells, parallel_state.get_data_parallel_rank(), self._stage)
        if args.emulate_exact_times and args.emulate_compute_ms is not None and args.sequences_vary:
            raise TrainingArgumentsError(
                "--emulate-exact-times reports emulated times of sequences of one length: with --emulate-compute-ms, "
                "do not give --variable-seq-lengths with --mock-data-padded"
            )
        self._compute = self._emulate_compute(args, stack)
        faults = [fault for text in args.emulate_slow_link for fault in parse_link_fault(text)]
        faults += late_messages([parse_lateness(text) for text in args.emulate_late], self._stages)
        self._links = self._emulate_links([*faults, *story.faults], world_size, stack)
        self._pauses = Pauses(story.pauses, self._stage)
        waits = args.emulate_wait_for_arrivals
        self._deaths = Deaths([parse_death(text) for text in args.emulate_death], dist.get_rank(), waits, late)
        self._late = late
        stack.enter_context(self._deaths.at_admissions())
        arrivals = Arrivals(waits, None if late is None else late.board)
        holds = Holds([parse_hold(text) for text in args.emulate_hold])
        soak = self._soak(args.emulate_fault_plan, stack)
        seed = args.emulate_path_flaps
        if args.emulate_prompt_planner:
            stack.enter_context(prompt_planner())
        self._flaps = None if seed is None else stack.enter_context(PathFlaps(f"{seed}:{dist.get_rank()}"))
        self.watchers: list[Callable[[int], None]] = [
            watcher.set_iteration
            for watcher in (self._links, soak, self._pauses, self._speed, late, self._deaths, arrivals, holds)
            if watcher is not None
        ]
        """Called with the number of each training iteration (from 0) when it begins."""
        self._lateness_s: list[float] = []
        if self._compute is not None:
            self.watchers.append(self._note_lateness)

    def decorate(self, computation: StageComputation, stage: int) -> StageComputation:
        """Return the computation of `stage` (this rank's) under these conditions."""
        if self._compute is not None:
            computation = self._compute.decorate(computation)
        if self._late is not None:
            computation = self._late.decorate(computation)
        return self._deaths.decorate(self._pauses.decorate(computation))

    def report(self, result: TrainingResult) -> None:
        """Record the active conditions in `result`, as proof."""
        if self._links is not None:
            result.links_struck = {f"{a}>{b}": count for (a, b), count in self._links.struck_on_either.items()}
            if self._late is not None:
                self._late.board.add("messages", self._links.late)
        if self._compute is not None:
            result.compute = asdict(self._compute.counts)
            result.lateness_s = [*self._lateness_s[1:], self._compute.take_lateness_s()]
        if self._flaps is not None:
            result.path_flaps = self._flaps.flaps
        result.pauses, result.iterations_slowed = self._pauses.made, self._speed.slowed

    def _note_lateness(self, iteration: int) -> None:
        """Record the lateness of the previous iteration's operations."""
        assert self._compute is not None
        self._lateness_s.append(self._compute.take_lateness_s())

    def _emulate_compute(self, args: argparse.Namespace, stack: contextlib.ExitStack) -> EmulatedCompute | None:
        if args.emulate_compute_ms is None:
            if args.emulate_exact_times:
                stack.enter_context(cpu_times())
            return None
        compute = parse_compute(
            args.emulate_compute_ms,
            stage=self._stage,
            stages=self._stages,
            slow_down=lambda: self._speed.factor,
            full_length=args.seq_length if args.sequences_vary else None,
        )
        # Also under --adaptra: where that leaves an iteration to stock, times are the same.
        stack.enter_context(compute.install_on_stock(schedules))
        if args.emulate_exact_times:
            stack.enter_context(exact_times(compute))
        return compute

    def _emulate_links(self, faults: list[LinkFault], world_size: int, stack: contextlib.ExitStack) -> SlowLinks | None:
        stages = self._stages
        pipeline = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())[0]
        ours = faults_of_pipeline(faults, pipeline, stages=stages, pipelines=world_size // stages)
        if not ours:
            return None
        return stack.enter_context(
            SlowLinks(ours, lambda rank: stage_of_rank(rank, world_size=world_size, stages=stages))
        )

    def _soak(self, directory: str | None, stack: contextlib.ExitStack) -> SoakRank | None:
        if directory is None:
            return None
        from testing.soak.soak_rank import SoakRank

        return stack.enter_context(SoakRank(Path(directory), self._stage, self._stages))


def faults_of_pipeline(faults: Sequence[LinkFault], pipeline: int, *, stages: int, pipelines: int) -> list[LinkFault]:
    """Return the faults of `pipeline`, named by its first global rank.

    Raises TrainingArgumentsError if any of `faults` names an unknown stage or pipeline.
    """
    for fault in faults:
        link = f"link {fault.source}>{fault.target}"
        if max(fault.source, fault.target) >= stages:
            raise TrainingArgumentsError(f"{link} is to be slow, but there are stages 0 to {stages - 1}")
        if fault.pipeline is not None and not 0 <= fault.pipeline < pipelines:
            raise TrainingArgumentsError(
                f"{link} is to be slow in pipeline {fault.pipeline}; pipelines are named by their first global ranks, "
                f"here 0 to {pipelines - 1}"
            )
    return [fault for fault in faults if fault.pipeline in (None, pipeline)]


@contextlib.contextmanager
def emulate_conditions(args: argparse.Namespace, world_size: int, late: LateRank | None = None) -> Iterator[Conditions]:
    """Make the conditions that `args` ask for. Process groups must be set up. `late`: of `late_rank`."""
    with contextlib.ExitStack() as stack:
        yield Conditions(args, world_size, stack, late)


def late_rank(args: argparse.Namespace) -> LateRank | None:
    """Return the delays of this rank, to be entered before process groups are made; None if `args` ask for none.

    Raises EmulationError for invalid settings.
    """
    from adaptra_megatron.config import config_from_arguments

    late = [parse_lateness(text) for text in args.emulate_late]
    if not (args.adaptra and config_from_arguments(args).is_fault_tolerant and args.dump_state):
        if late:
            raise EmulationError("--emulate-late needs --adaptra-reroute failures and --dump-state")
        return None
    if not (late or args.emulate_death):
        return None
    return LateRank(late, Path(args.dump_state), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
