# SPDX-License-Identifier: Apache-2.0
"""Predict how each remedy would have changed a recorded step, from its own times.

A remedy changes the pipelines' part of the step, from the first action to the last. The parts before and after it
(collectives, the optimizer) stay. Changes of cells and stages are replayed on the recording itself. Other orders,
split backwards and routes are planned and simulated as in `adaptra plan`, with the seconds of each micro-batch and the
median transfer of each link. Launch delays are left out in both cases.

To add a remedy: a function from `_Step` to `Remedy | None`, and an entry of `_REMEDIES`. Collectives that hide a
straggler (`schedule.all_reduce`) would be one, with the time saved after the pipelines' part.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.schedule.costs import Costs, PerMicroBatch
from adaptra_megatron.schedule.ir import ScheduleError
from adaptra_megatron.schedule.jobs.job_costs import job_of
from adaptra_megatron.schedule.planner import plan
from adaptra_megatron.schedule.routing.balance import balanced_replicas
from adaptra_megatron.schedule.routing.routed_costs import RoutedCosts
from adaptra_megatron.schedule.routing.routed_planner import plan_routed
from adaptra_megatron.schedule.simulator import peak_in_flight, simulate
from adaptra_megatron.tools.replay.operations import OpType, RecordedStep
from adaptra_megatron.tools.replay.pipelines import RecordedPipelines, pipelines_of
from adaptra_megatron.tools.replay.replay_engine import ReplayBatch, Times, replay, step_seconds
from adaptra_megatron.tools.replay.replay_graph import ReplayEvent

SLOW_CELL = 1.1
"""A cell counts as slow if it takes this many times as long as its peers; then the node's exchange is considered."""
_EXTRA_ACTIVATIONS = (1, 2, 4, 8, 16)
_WORTH = 0.01
"""Share of a step that exchanging micro-batches must save; if all are alike, it saves nothing."""
_ENOUGH = 0.005
"""Share of a step that more memory must save."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One remedy, and the step with it."""

    key: str
    title: str
    seconds: float
    """Seconds of the whole step."""
    note: str
    """Requirements and assumptions."""
    extra_activations: float = 0.0
    """Largest number of additional activations (of one micro-batch) on a stage."""


@dataclass(frozen=True, kw_only=True)
class Remedies:
    """All remedies for one step, in the order of the table."""

    step: int
    now_s: float
    """Seconds of the step replayed without launch delays, which remedies are compared with."""
    pipelines_s: float
    """Seconds from the first to the last action of the pipelines within the step."""
    rows: tuple[Remedy, ...]
    why_not: str = ""
    """Why no remedy could be tried; empty otherwise."""

    def gain(self, remedy: Remedy) -> float:
        """Return the share of the step that a remedy saves; 0 if it takes longer."""
        return max(0.0, 1.0 - remedy.seconds / self.now_s)


def remedies_for(step: RecordedStep, batches: Sequence[ReplayBatch]) -> Remedies:
    """Return the remedies for `step`, which is one of those in `batches`."""
    of_step = _Step(step, batches)
    why_not, found = "", []
    try:
        found = [make(of_step) for make in _REMEDIES]
    except ScheduleError as error:
        why_not = str(error)
    return Remedies(
        step=step.number,
        now_s=of_step.now_s,
        pipelines_s=of_step.pipelines_s,
        rows=tuple(remedy for remedy in found if remedy is not None),
        why_not=why_not,
    )


class _Step:
    """A step, its replay, and its pipelines."""

    def __init__(self, step: RecordedStep, batches: Sequence[ReplayBatch]) -> None:
        self._step = step
        self._batches = batches
        batch = next(each for each in batches if step.number in each.numbers)
        column = batch.numbers.index(step.number)
        self._batch = dataclasses.replace(
            batch,
            numbers=(step.number,),
            delays_s=batch.delays_s[:, column : column + 1],
            work_s=batch.work_s[:, column : column + 1],
        )
        ends_s = replay(self._batch, launch_delays=False)[:, 0, 0]
        computed = [index for index, event in enumerate(batch.graph.events) if event.optype.computes]
        self.now_s = float(ends_s.max())
        starts_s = ends_s - self._batch.work_s[:, 0]
        self.pipelines_s = float(ends_s[computed].max() - starts_s[computed].min())

    @cached_property
    def pipelines(self) -> RecordedPipelines:
        """Costs of the step's pipelines. Raises ReplayError as `pipelines_of`."""
        return pipelines_of(self._step, self._batches)

    @cached_property
    def peaks(self) -> tuple[float, ...]:
        """Largest number of activations that each stage held."""
        return peak_in_flight(self.pipelines.schedule, 0.0)

    @cached_property
    def as_ran_s(self) -> float:
        """Seconds of the slowest pipeline in the recorded order, with messages that overlap computation."""
        found = self.pipelines
        return max(simulate(found.schedule, costs).makespan_s for costs in found.replicas)

    def replayed(self, factor: Callable[[ReplayEvent], float]) -> float:
        """Return the seconds of the step with the duration of each action multiplied by `factor`."""

        def work_s(index: int, event: ReplayEvent) -> Times:
            scale = factor(event) if event.optype.computes else 1.0
            found: Times = scale * self._batch.work_s[index][None, :]
            return found

        return float(step_seconds(self._batch, work_s, launch_delays=False)[0, 0])

    def with_pipelines(self, seconds: float) -> float:
        """Return the seconds of the step if its pipelines' part takes `seconds`."""
        return self.now_s - self.pipelines_s + seconds

    def planned(self, replicas: Sequence[Costs], *, split: bool, extra: float = 0.0) -> float:
        """Return the seconds of the slowest of `replicas`, each with a plan of its own. Replicas that cannot be the
        slowest are skipped."""
        capped = [
            dataclasses.replace(costs, max_in_flight=tuple(peak + extra for peak in self.peaks)) for costs in replicas
        ]
        as_ran = [(simulate(self.pipelines.schedule, costs).makespan_s, index) for index, costs in enumerate(capped)]
        worst_s = 0.0
        for ran_s, index in sorted(as_ran, reverse=True):
            if ran_s <= worst_s:
                break
            worst_s = max(worst_s, min(ran_s, plan(capped[index], split=split).makespan_s))
        return worst_s


def _host_path(step: _Step) -> Remedy:
    return Remedy(
        key="host-path",
        title="Host path: the same order, messages during computation",
        seconds=step.with_pipelines(step.as_ran_s),
        note="sends and receives never hold a stage up; transfers take as long as they did",
    )


def _order(step: _Step) -> Remedy:
    return Remedy(
        key="order",
        title="Re-planned order",
        seconds=step.with_pipelines(step.planned(step.pipelines.replicas, split=False)),
        note="whole backwards, no more activations than were held; with the host path",
    )


def _halves(step: _Step) -> str:
    return "" if step.pipelines.splits_backward else "; halves of backwards were not recorded: taken for equal"


def _split_backward(step: _Step) -> Remedy:
    return Remedy(
        key="split-backward",
        title="Re-planned order with split backwards",
        seconds=step.with_pipelines(step.planned(step.pipelines.replicas, split=True)),
        note=f"no more activations than were held{_halves(step)}",
    )


def _memory(step: _Step) -> Remedy | None:
    """Return the remedy with the least memory that saves about as much as a lot does."""
    replicas = step.pipelines.replicas
    found = {extra: step.planned(replicas, split=True, extra=extra) for extra in (0, *_EXTRA_ACTIVATIONS)}
    enough_s = min(found.values()) + _ENOUGH * step.now_s
    extra = next(extra for extra, seconds in found.items() if seconds <= enough_s)
    if extra == 0:
        return None
    return Remedy(
        key="memory",
        title=f"Split backwards, and up to {extra} activation{'s' if extra > 1 else ''} more per stage",
        seconds=step.with_pipelines(found[extra]),
        note=f"room for activations of as many more micro-batches{_halves(step)}",
        extra_activations=extra,
    )


def _balanced(step: _Step) -> Remedy | None:
    """Return the remedy of exchanging micro-batches between replicas when they are loaded. The order stays."""
    found = step.pipelines
    if len(found.replicas) == 1:
        return None
    seconds = step.with_pipelines(max(simulate(found.schedule, costs).makespan_s for costs in exchanged(found)))
    if seconds > (1.0 - _WORTH) * step.with_pipelines(step.as_ran_s):
        return None
    return Remedy(
        key="balance",
        title="Long micro-batches shared out evenly between replicas",
        seconds=seconds,
        note="whole micro-batches exchanged by the data loader, which has to know their lengths; with the host path",
    )


def _balanced_and_split(step: _Step) -> Remedy | None:
    if _balanced(step) is None:
        return None
    return Remedy(
        key="balance-split",
        title="Long micro-batches shared out, and split backwards",
        seconds=step.with_pipelines(step.planned(exchanged(step.pipelines), split=True)),
        note=f"no more activations than were held{_halves(step)}",
    )


def _routing(step: _Step) -> Remedy | None:
    replicas = step.pipelines.replicas
    if len(replicas) == 1 or replicas[0].chunks > 1:
        return None
    capped = [dataclasses.replace(costs, max_in_flight=step.peaks) for costs in replicas]
    found = plan_routed(RoutedCosts(job=job_of(capped)))
    if not found.routing.moves():
        return None
    moved = sum(len(move.micro_batches) for move in found.routing.moves())
    runs = sum(map(len, found.routing.hosts))
    return Remedy(
        key="routing",
        title="Micro-batches routed between replicas, with split backwards",
        seconds=step.with_pipelines(found.simulation.makespan_s),
        note=f"{moved} of {runs} pass a stage at another replica; no more activations than were held{_halves(step)}",
    )


def _exchange(step: _Step) -> Remedy | None:
    slow = {cell: factor for cell, factor in step.pipelines.slowness.items() if factor >= SLOW_CELL}
    if not slow:
        return None
    worst = max(slow, key=lambda cell: slow[cell])
    return Remedy(
        key="exchange",
        title=f"Node of cell {worst} exchanged",
        seconds=step.replayed(lambda event: 1.0 / slow[worst] if event.takers[0].cell == worst else 1.0),
        note=f"it takes {slow[worst]:.2f} times what cells of its stage usually take",
    )


def _even_stages(step: _Step) -> Remedy | None:
    """Return the remedy of equal stages: each action takes the mean over the stages. The order stays."""
    if step.pipelines.schedule.stages == 1:
        return None
    found = step.pipelines
    stages = range(found.schedule.stages)
    both = ("backward_input_s", "backward_weight_s")
    usual_s = {
        forward: [
            statistics.fmean(
                sum(sum(costs.tables()[name][stage]) for name in names) / found.slowness[Cell(replica, stage)]
                for replica, costs in zip(found.numbers, found.replicas, strict=True)
            )
            for stage in stages
        ]
        for forward, names in ((True, ("forward_s",)), (False, both))
    }

    def factor(event: ReplayEvent) -> float:
        row = usual_s[event.optype is OpType.FORWARD]
        own_s = row[event.takers[0].cell.stage]
        return statistics.fmean(row) / own_s if own_s > 0.0 else 1.0

    return Remedy(
        key="even-stages",
        title="Layers moved so that all stages take equally long",
        seconds=step.replayed(factor),
        note="another partition of the model, needs a restart; the order stays",
    )


_REMEDIES: tuple[Callable[[_Step], Remedy | None], ...] = (
    _host_path,
    _order,
    _split_backward,
    _memory,
    _routing,
    _balanced,
    _balanced_and_split,
    _exchange,
    _even_stages,
)


def exchanged(found: RecordedPipelines) -> tuple[Costs, ...]:
    """Return the replicas after exchanging whole micro-batches, by their time in all stages together on cells that are
    not slow."""
    replicas = found.replicas
    count, stages = replicas[0].micro_batches, range(replicas[0].stages)
    names = tuple(replicas[0].tables())
    chunks = range(replicas[0].chunks)
    taken = [
        [
            sum(
                costs.micro_batch_s(name, stage, chunk)[number] / found.slowness[Cell(replica, stage)]
                for name in names
                for stage in stages
                for chunk in chunks
            )
            for number in range(count)
        ]
        for replica, costs in zip(found.numbers, replicas, strict=True)
    ]

    def factors(name: str, jobs: Sequence[int]) -> PerMicroBatch:
        return tuple(
            tuple(
                tuple(replicas[job // count].factors_of(name, stage, chunk)[job % count] for job in jobs)
                for chunk in chunks
            )
            for stage in stages
        )

    rows: list[Mapping[str, PerMicroBatch]] = [
        {name: factors(name, jobs) for name in names} for jobs in balanced_replicas(taken)
    ]
    return tuple(dataclasses.replace(costs, micro_batch_factors=row) for costs, row in zip(replicas, rows, strict=True))
