# SPDX-License-Identifier: Apache-2.0
"""What one rank's iterations measured: handed in for later plans, and written to traces, once it has happened."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from adaptra_megatron.control.control_loop import PlanExchange
from adaptra_megatron.control.measurements import stage_measurement
from adaptra_megatron.control.memory import StageMemory
from adaptra_megatron.control.paths.steering import LinkSteering
from adaptra_megatron.runtime.device import current_device
from adaptra_megatron.runtime.dispatch.dispatch import Dispatcher
from adaptra_megatron.runtime.execution.executor import IterationReport
from adaptra_megatron.runtime.job import Job
from adaptra_megatron.runtime.measurement.megatron_timers import add_times
from adaptra_megatron.runtime.measurement.reporting import arrival_records
from adaptra_megatron.runtime.measurement.stragglers import Arrivals
from adaptra_megatron.runtime.measurement.sync_waits import IterationWaits
from adaptra_megatron.runtime.megatron.megatron_call import PipelineCall
from adaptra_megatron.telemetry.run_telemetry import RunTelemetry
from adaptra_megatron.transport.messages import MessageTimes, Transport

SentAndReceived = tuple[Sequence[MessageTimes], Sequence[MessageTimes]]


class EndedIteration(NamedTuple):
    """An iteration of which everything has been launched, and on the CPU has happened."""

    call: PipelineCall
    report: IterationReport
    iteration: int
    training_iteration: int
    begun_s: float
    disturbance: str | None
    memory: StageMemory | None
    seconds: float = 0.0
    waits: IterationWaits | None = None
    """In gradient synchronisation; None where that is not measured."""


class Measuring:
    """Hands in what an iteration measured: at once on the CPU, on a GPU when the next one begins."""

    def __init__(
        self,
        job: Job,
        transport: Transport,
        dispatcher: Dispatcher,
        telemetry: RunTelemetry,
        arrivals: Arrivals | None = None,
        work: tuple[str, ...] = (),
    ) -> None:
        """All of them are this rank's. `arrivals`: None where no stragglers are looked for. `work`: see
        StageMeasurement."""
        self._work = work
        self._job, self._transport, self._dispatcher, self._telemetry = job, transport, dispatcher, telemetry
        self._arrivals = arrivals
        self.unsettled: EndedIteration | None = None
        """The latest iteration, until what it measured is handed in."""

    def settle(self, exchange: PlanExchange, steering: LinkSteering | None) -> None:
        """Hand in and trace what the latest iteration measured; waits for the device where that is still at it.

        `steering`: the one of this rank's links, None where their paths are not decided on.
        """
        ended, self.unsettled = self.unsettled, None
        if ended is None:
            return
        call, records = ended.call, ended.report.records  # which relates the clocks that the transport tells by
        addresses, (sent, received) = ended.report.addresses, self._transport.take_times()
        nbytes = addresses.nbytes((*sent, *received))
        times = addresses.in_pipeline(sent), addresses.in_pipeline(received)
        arrivals = arrival_records(call.stage, times[1])
        if not call.forward_only:
            self.hand_in(exchange, steering, ended, times, nbytes)
            self._dispatcher.ran(ended.report.steps, records, arrivals)
            if self._arrivals is not None:
                computed_s = sum(record.compute_s for record in records)
                self._arrivals.add(ended.iteration, ended.seconds, ended.waits, computed_s)
        offset_s = self._job.clock.drifted(time.monotonic())
        self._telemetry.traced(ended.iteration, records, arrivals, offset_s)
        if call.config.timers is not None:
            add_times(call.config.timers, ended.report)

    def hand_in(
        self,
        exchange: PlanExchange,
        steering: LinkSteering | None,
        ended: EndedIteration,
        times: SentAndReceived,
        nbytes: Mapping[int, int],
    ) -> None:
        """Send off what an iteration measured, for the plans of later ones. `nbytes`: of each micro-batch's messages,
        also where another replica's cell is at their other end."""
        report = ended.report
        measurement = stage_measurement(
            self._job.layout.pipeline[0],
            ended.call.stage,
            ended.call.micro_batches,
            report.records,
            times,
            self._job.clock.offset_at(time.monotonic()),
            report.computed_s() if current_device().type == "cuda" else None,
            ended.memory,
            probes=() if steering is None else steering.take_probes(),
            broken=() if steering is None else steering.broken(),
            disturbance=ended.disturbance,
            nbytes=nbytes,
            idle=(ended.iteration, ended.begun_s),
            work=self._work,
        )
        exchange.post(ended.training_iteration, measurement)
