# SPDX-License-Identifier: Apache-2.0
"""Record one rank's run: traces, events, scalars, Prometheus, OpenTelemetry.

The engine holds one object per pipeline and calls it a few times per iteration. No call waits for a disk or a network,
and none raises after construction: if something cannot be written, one warning says so and training continues.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from adaptra_megatron.common.child_process import OwningProcess
from adaptra_megatron.telemetry.action_records import ActionRecord, ArrivalRecord, Iterations
from adaptra_megatron.telemetry.changes import (
    IterationTimes,
    LeaderWatch,
    PathState,
    PathWatch,
    SwitchWatch,
)
from adaptra_megatron.telemetry.events import (
    Event,
    LinkDetection,
    PlanSwitched,
    RunEnded,
    RunStarted,
    StageDetection,
    StragglerDetection,
)
from adaptra_megatron.telemetry.log_lines import RunLog
from adaptra_megatron.telemetry.scalars import (
    ArrivalFigures,
    JobFigures,
    RankFigures,
    ScalarWriters,
    megatron_step,
    megatron_writers,
    scalars,
)

if TYPE_CHECKING:
    from adaptra_megatron.telemetry.event_log import EventLog
    from adaptra_megatron.telemetry.exported_figures import ExportedFigures, PrometheusEndpoint
    from adaptra_megatron.telemetry.open_telemetry import OpenTelemetryExport
    from adaptra_megatron.telemetry.trace import TraceWriter
    from adaptra_megatron.telemetry.trace_requests import RequestBox, RequestedTraces


@dataclass(frozen=True, kw_only=True)
class TelemetrySettings:
    """Settings that a user chooses."""

    trace_dir: Path | None = None
    """Directory of traces and events; None: write none."""
    every_iteration: bool = True
    """Whether all iterations are traced, or only requested ones."""
    prometheus_port: int | None = None
    """Port of a host's first rank; each further rank uses the next one. 0: any free ports; None: no endpoint."""
    prometheus_address: str = "127.0.0.1"
    otel: bool = False
    """Whether figures and events are exported to OpenTelemetry, which its own environment variables configure."""
    goes_on: bool = False
    """Whether this process continues the files of an earlier one that it replaces."""


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Place of a rank in its job."""

    run: str
    """Name of this start of the job, the same on all ranks."""
    rank: int
    local_rank: int
    """Number of the rank on its host; it determines the Prometheus port."""
    stage: int
    leads: bool
    """Whether this rank is a leader. Only the leader logs its replica's switches; that of replica 0 takes users'
    requests."""
    replica: int = 0
    decides_apart: bool = False
    """Whether each replica has a leader and plans of its own."""
    clock_offset_s: float = 0.0
    stage_hosts: tuple[str, ...] = ()
    """Host of each stage of the replica, for metrics."""

    @property
    def word(self) -> str:
        """Prefix of log lines that concern this replica alone."""
        return f"replica {self.replica}: " if self.decides_apart else ""


REMEMBERED = 256
"""Number of latest iterations whose Megatron numbers are kept, since findings name earlier ones."""


class FiguresOfJob(Protocol):
    """The leader's figures, encoded; only a rank that exports them decodes them."""

    def unpacked(self) -> JobFigures:
        """Decode the figures."""


class RunTelemetry:
    """Telemetry of one rank. For the training thread, but for `log`, `arrivals` and `requests`, which are
    thread-safe."""

    def __init__(self, settings: TelemetrySettings, place: RankPlace, start: RunStarted) -> None:
        """Open the files and endpoints. Raises PrometheusError if the endpoint cannot be opened, OpenTelemetryError if
        that export cannot start."""
        self._place = place
        self._switches, self._paths = SwitchWatch(), PathWatch(place.stage)
        self._times = IterationTimes()
        self._iterations = 0
        self._running = -1
        self._steps: dict[int, int] = {}
        """Megatron's numbers of the latest iterations."""
        self._seconds: dict[int, float] = {}
        """Seconds of the latest iterations."""
        self._leader = LeaderWatch(int(start.layout.get("stages", 1)))
        self._found = False
        """Whether something was found since the last iteration."""
        self._said = RunLog(word=place.word, first=place.replica == 0) if place.leads else None
        self._directory = settings.trace_dir
        self._job: FiguresOfJob | None = None
        self._arrivals: ArrivalFigures | None = None
        self._scalars: ScalarWriters | None = None
        self._endpoint: PrometheusEndpoint | None = None
        self._otel: OpenTelemetryExport | None = None
        self._figures: ExportedFigures | None = None
        if settings.prometheus_port is not None or settings.otel:
            self._export(settings, start)
        self._events: EventLog | None = None
        self._traces: TraceWriter | None = None
        self._requested: RequestedTraces | None = None
        self._box: RequestBox | None = None
        if settings.trace_dir is not None:
            self._open_files(settings.trace_dir, settings, start)
        # After the writers are created, because exit handlers run in reverse order: `close` still writes the last
        # event.
        self.share: Callable[[Event], None] | None = None
        """Called with each finding and switch, on a leader that does not log for the whole job; None on others."""
        self._owner = OwningProcess()
        atexit.register(self.close)

    def _export(self, settings: TelemetrySettings, start: RunStarted) -> None:
        """Set up the exporters. Their modules are imported here, so that other jobs do not import them."""
        from adaptra_megatron.telemetry.exported_figures import PrometheusEndpoint

        place, self._figures = self._place, _figures(self._place, start)
        if settings.prometheus_port is not None:
            port = settings.prometheus_port and settings.prometheus_port + place.local_rank
            self._endpoint = PrometheusEndpoint(self._figures, port, settings.prometheus_address)
        if settings.otel:
            from adaptra_megatron.telemetry.open_telemetry import OpenTelemetryExport

            self._otel = OpenTelemetryExport(self._figures, run=place.run, rank=place.rank, host=start.host)
            self._otel.log(start, -1, 0)

    def _open_files(self, directory: Path, settings: TelemetrySettings, start: RunStarted) -> None:
        """Open the files of traces and events. Their modules are imported here, so that other jobs do not import
        them."""
        from adaptra_megatron.telemetry.event_log import EventLog
        from adaptra_megatron.telemetry.trace import TraceWriter

        place, offset_s = self._place, self._place.clock_offset_s
        self._events = EventLog(directory, start, run=place.run, rank=place.rank, clock_offset_s=offset_s)
        self._traces = TraceWriter(
            directory, place.rank, place.stage, clock_offset_s=offset_s, goes_on=settings.goes_on
        )
        if not settings.every_iteration:
            from adaptra_megatron.telemetry.trace_requests import RequestBox, RequestedTraces

            self._requested = RequestedTraces(self._traces)
            self._box = RequestBox(directory) if place.leads and not place.replica else None

    def log(self, event: Event) -> None:
        """Record an event of the current iteration."""
        if self._events is not None:
            self._events.log(event)
        if self._otel is not None:
            self._otel.log(event, self._running, self._numbered(self._running))
        if self._said is not None:
            self._said.take(event)
        if self.share is not None and isinstance(event, (LinkDetection, StageDetection, PlanSwitched)):
            self.share(event)
        self._found = self._found or isinstance(event, (LinkDetection, StageDetection, StragglerDetection))
        self._leader.take(event)

    def take_of(self, replica: int, event: Event) -> None:
        """Record an event of another replica, which this rank logs for the whole job. Thread-safe."""
        if self._said is not None:
            self._said.take(event, replica)

    def arrivals(self, figures: ArrivalFigures) -> None:
        """Set how replicas arrive at gradient synchronisation, to be exported. Thread-safe."""
        self._arrivals = figures

    def requests(self) -> tuple[Iterations, ...]:
        """Return the iterations that users asked to trace since the last call, on the rank that takes requests; empty
        on others."""
        return () if self._box is None else self._box.take(self._steps.get(self._running, 1))

    def policy_asked(self) -> str:
        """Return the policy that a user asked for since the last call, on the rank that takes requests; "" if none."""
        if self._directory is None or not self._place.leads or (self._place.replica and self._place.decides_apart):
            return ""
        from adaptra_megatron.telemetry.trace_requests import take_policy

        return take_policy(self._directory)

    def begin(self, iteration: int, requests: Sequence[Iterations] = (), job: FiguresOfJob | None = None) -> None:
        """Begin iteration `iteration`, where evaluations count, too. `requests`, `job`: sent by the leader for this
        iteration."""
        self._steps[iteration] = megatron_step(self._iterations + 1)
        self._running = iteration
        self._steps.pop(iteration - REMEMBERED, None)
        if self._events is not None:
            self._events.iteration = iteration
        if self._requested is not None:
            self._requested.request(requests)
        self._job = job if job is not None else self._job

    def lead(self, *, leads: bool) -> None:
        """Set whether this rank logs on behalf of others: the leader has failed, or has rejoined."""
        if self._place.leads and not leads:
            self._log_times()
        self._place = replace(self._place, leads=leads)
        self._said = self._said or RunLog(word=self._place.word) if leads else None

    def switch(self, number: int, *, predicted_s: float | None = None, before_predicted_s: float | None = None) -> None:
        """Note that plan `number` runs from this iteration on. Repeated calls change nothing."""
        event = self._switches.switched(number, predicted_s=predicted_s, before_predicted_s=before_predicted_s)
        if event is not None and self._place.leads:
            self.log(event)
        if self._said is not None:
            self._said.say(self._running, self._numbered, self._seconds)

    def traced(
        self,
        iteration: int,
        records: Sequence[ActionRecord],
        arrivals: Sequence[ArrivalRecord] = (),
        clock_offset_s: float | None = None,
    ) -> None:
        """Write this rank's records of a training or evaluation iteration. `clock_offset_s`: see TraceWriter.write."""
        if self._requested is not None:
            self._requested.add(iteration, self._numbered(iteration), records, arrivals, clock_offset_s)
        elif self._traces is not None:
            self._traces.write(iteration, records, arrivals, clock_offset_s)

    def trained(
        self,
        figures: RankFigures,
        links: Mapping[int, PathState] | None = None,
        delegate_starts: int | None = None,
    ) -> None:
        """Record the end of a training iteration. `links`: paths by peer, if links have two; failovers are counted
        from them."""
        self._iterations += 1
        self._seconds[self._running] = figures.iteration_s
        if len(self._seconds) > REMEMBERED:
            del self._seconds[next(iter(self._seconds))]
        if self._found:
            self._found = False
            self._switches.found()
        gain = self._switches.iteration(figures.iteration_s)
        step = megatron_step(self._iterations)
        for event in (gain, self._times.add(self._running, figures.iteration_s, step)):
            if event is not None and self._place.leads:
                self.log(event)
        for change in self._paths.look(links or {}, delegate_starts):
            self.log(change)
        figures = replace(figures, failovers=self._paths.failovers)
        if self._figures is not None:
            leader = self._leader.figures(self._switches.saved_s) if self._place.leads else None
            arrivals = self._arrivals if leader is not None and not self._place.replica else None
            self._figures.show(self._iterations, figures, self._figures_of_job(), leader, arrivals)
        if self._scalars is None:
            self._scalars = megatron_writers()  # not before: they are made while Megatron initializes
        if self._scalars.due(step):
            self._scalars.write(step, scalars(figures, self._figures_of_job(), self._arrivals))

    def _numbered(self, iteration: int) -> int:
        """Return Megatron's number of a recent iteration; for an older one, as if there had been no evaluation in
        between."""
        first = next(iter(self._steps), 0)
        known = max(iteration, first)
        return self._steps.get(known, known + 1) - (known - iteration)

    def _log_times(self) -> None:
        if (times := self._times.rest()) is not None:
            self.log(times)

    def _figures_of_job(self) -> JobFigures | None:
        return None if self._job is None else self._job.unpacked()

    def close(self) -> None:
        """Log why the run ended, and write what is queued, for a few seconds at most. May be called twice."""
        atexit.unregister(self.close)
        if not self._owner.is_this:
            return
        error = getattr(sys, "last_value", None)  # what the interpreter has reported as the end of the program
        reason = "the program ended" if error is None else f"{type(error).__name__}: {error}"
        if self._events is not None or self._otel is not None:
            if self._place.leads:
                self._log_times()
            self.log(RunEnded(reason=reason))
        if self._events is not None:
            self._events.close()
        if self._otel is not None:
            self._otel.close()
        if self._said is not None:
            report = "" if self._directory is None else f"adaptra report {self._directory}"
            self._said.say(self._running, self._numbered, self._seconds)
            self._said.end(self._iterations, self._switches.saved_s, "" if error is None else reason, report)
            self._said = None
        if self._traces is not None:
            self._traces.close()
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None


def _figures(place: RankPlace, start: RunStarted) -> ExportedFigures:
    from adaptra_megatron.telemetry.exported_figures import ExportedFigures

    return ExportedFigures(
        labels={"rank": str(place.rank), "stage": str(place.stage)},
        job_labels={"replica": str(place.replica)},
        stage_hosts=place.stage_hosts,
        info={
            "version": start.versions.get("adaptra-megatron", ""),
            "run": place.run,
            "policy": str(start.config.get("policy", "")),
        },
    )
