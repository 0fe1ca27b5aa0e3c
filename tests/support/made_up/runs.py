# SPDX-License-Identifier: Apache-2.0
"""Run directories as training leaves them, with times that are known."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.played_schedules import played

from adaptra_megatron.schedule.classic import forward_only, one_f_one_b, split_backward
from adaptra_megatron.schedule.costs import LinkCost, uniform_costs
from adaptra_megatron.telemetry.action_records import ActionRecord
from adaptra_megatron.telemetry.event_log import EventFile
from adaptra_megatron.telemetry.events import Event, RunEnded, RunStarted, Stamp, StampedEvent
from adaptra_megatron.telemetry.trace import TraceWriter

STAGES, MICRO_BATCHES = 3, 6
GAP_S = 0.5
"""Between two iterations."""


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """1F1B on 3 stages and 6 micro-batches; every F, I and W takes 1 s."""

    delay_s: float = 0.0
    """Delay of each message between stages 0 and 1, both ways."""
    split: bool = False
    """True if weight gradients have actions of their own, put off by one backward."""
    forward_only: bool = False

    def records(self, number: int, start_s: float) -> list[ActionRecord]:
        link = LinkCost(latency_s=self.delay_s)
        costs = uniform_costs(
            STAGES,
            MICRO_BATCHES,
            forward_s=1.0,
            backward_input_s=1.0,
            backward_weight_s=1.0,
            links={(0, 1): link, (1, 0): link},
        )
        schedule = one_f_one_b(STAGES, MICRO_BATCHES)
        if self.split:
            schedule = split_backward(schedule, 1)
        if self.forward_only:
            schedule = forward_only(STAGES, MICRO_BATCHES, 1, None)
        return played(schedule, costs, iteration=number, start_s=start_s)


def write_run(
    directory: Path,
    iterations: Sequence[Iteration],
    *,
    first_rank: int = 0,
    ranks_apart: int = 1,
    traced: Collection[int] | None = None,
) -> None:
    """The traces of one pipeline; its stages are the ranks `first_rank`, `first_rank + ranks_apart`, and so on.

    `traced`: iterations that were asked for; None: all.
    """
    writers = [TraceWriter(directory, first_rank + stage * ranks_apart, stage) for stage in range(STAGES)]
    start_s = 100.0
    for number, iteration in enumerate(iterations):
        records = iteration.records(number, start_s)
        for stage, writer in enumerate(writers if traced is None or number in traced else ()):
            writer.write(number, [record for record in records if record.stage == stage])
        start_s = max(record.end_s for record in records) + GAP_S
    for writer in writers:
        writer.close()


def write_events(directory: Path, events: Sequence[tuple[Event, int]], *, ended: bool = True) -> None:
    """The log of rank 0: events with their iterations, ten seconds apart."""

    start = RunStarted(layout={"stages": STAGES}, versions={"megatron-core": "0.16.1"}, config={"policy": "adapt"})
    last = [(RunEnded(reason="training finished"), events[-1][1])] if ended else []
    _write_log(directory, 0, start, [*events, *last])


def write_replicas(
    directory: Path, replicas: int, events: Sequence[tuple[Event, int]], *, reroute: str = "failures"
) -> None:
    """Logs of a job of some replicas: rank r of the first stage is of replica r, and rank 0 says all."""
    for rank in range(replicas):
        start = RunStarted(
            layout={"stages": STAGES, "world_size": replicas * STAGES, "replica": rank},
            versions={},
            config={"reroute": reroute},
        )
        _write_log(directory, rank, start, events if not rank else ())


def _write_log(directory: Path, rank: int, start: RunStarted, events: Sequence[tuple[Event, int]]) -> None:
    def stamped(event: Event, iteration: int, number: int) -> StampedEvent:
        at_s = 100.0 + 10.0 * number
        stamp = Stamp(run="run", rank=rank, sequence=number, iteration=iteration, wall_s=at_s, monotonic_s=at_s)
        return StampedEvent(stamp=stamp, event=event)

    file = EventFile(directory, stamped(start, -1, 0))
    for number, (event, iteration) in enumerate(events, start=1):
        file.append(stamped(event, iteration, number))
    file.close()
