# SPDX-License-Identifier: Apache-2.0
"""Export one rank's telemetry by OpenTelemetry (OTLP): metrics, as for Prometheus, and events as log records.

Needs `pip install 'adaptra-megatron[otel]'`, imported when an export begins. Endpoint, interval and headers come from
OpenTelemetry's own variables, such as OTEL_EXPORTER_OTLP_ENDPOINT. What cannot be delivered is dropped, and the SDK's
logger (`opentelemetry`) says so.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

from adaptra_megatron import __version__
from adaptra_megatron.telemetry.event_wording import event_text
from adaptra_megatron.telemetry.events import (
    Event,
    Fault,
    IterationsTimed,
    LinkDetection,
    PathChanged,
    RanksLost,
    StageDetection,
    Stamp,
    StampedEvent,
    encode,
)
from adaptra_megatron.telemetry.exported_figures import METRICS, ExportedFigures

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Observation
    from opentelemetry.sdk._logs.export import LogRecordExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader

SERVICE = "adaptra-megatron"
CLOSES_WITHIN_S = 5.0
_PROTOCOLS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}


class OpenTelemetryError(RuntimeError):
    """The export cannot start. Names the variable or the package, and the remedy."""


def exporter_of(signal: str) -> Any:
    """Return the exporter of "metrics" or "logs" that the environment names; None for "none". Raises
    OpenTelemetryError.

    By default it is OTLP by HTTP. OTEL_{METRICS,LOGS}_EXPORTER and OTEL_EXPORTER_OTLP_{,METRICS_,LOGS_}PROTOCOL change
    it.
    """
    name = os.environ.get(f"OTEL_{signal.upper()}_EXPORTER") or "otlp"
    if name == "none":
        return None
    if name == "otlp":
        given = [f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"]
        protocol = next(filter(None, map(os.environ.get, given)), "http/protobuf")
        name = _PROTOCOLS.get(protocol, protocol)
    for entry in metadata.entry_points(group=f"opentelemetry_{signal}_exporter", name=name):
        return entry.load()()
    raise OpenTelemetryError(
        f"no OpenTelemetry exporter of {signal} is called {name}: pip install 'adaptra-megatron[otel]' brings "
        "otlp_proto_http; for gRPC also install opentelemetry-exporter-otlp-proto-grpc, or set "
        "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"
    )


class OpenTelemetryExport:
    """Export of one rank. The SDK's threads send; only `close` waits for the network, for a limited time."""

    def __init__(
        self,
        figures: ExportedFigures,
        *,
        run: str,
        rank: int,
        host: str = "",
        readers: Sequence[MetricReader] | None = None,
        log_exporter: LogRecordExporter | None = None,
    ) -> None:
        """Start the export. `readers`, `log_exporter`: by default, those that the environment names. Raises
        OpenTelemetryError."""
        try:
            from opentelemetry._logs import SeverityNumber
            from opentelemetry.sdk._logs import LoggerProvider
            from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
            from opentelemetry.sdk.metrics import MeterProvider
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        except ImportError as error:
            raise OpenTelemetryError(
                "OpenTelemetry needs its SDK: pip install 'adaptra-megatron[otel]', or drop --adaptra-otel"
            ) from error
        if readers is None:
            metrics = exporter_of("metrics")
            readers = [] if metrics is None else [PeriodicExportingMetricReader(metrics)]
        log_exporter = exporter_of("logs") if log_exporter is None else log_exporter
        about = {"service.name": SERVICE, "service.version": __version__, "service.instance.id": f"{run}/{rank}"}
        about |= {"host.name": host} if host else {}
        resource = Resource.create().merge(Resource(about)).merge(OTELResourceDetector().detect())
        self._figures, self._run, self._rank = figures, run, rank
        self._lock, self._sequence, self._severities = threading.Lock(), 0, SeverityNumber
        meters = MeterProvider(metric_readers=readers, resource=resource, shutdown_on_exit=False)
        self._meters: MeterProvider | None = meters
        self._loggers = LoggerProvider(resource=resource, shutdown_on_exit=False)
        if log_exporter is not None:
            self._loggers.add_log_record_processor(BatchLogRecordProcessor(log_exporter))
        meter = meters.get_meter(SERVICE, __version__)
        for name, described in METRICS.items():
            create = meter.create_observable_counter if described.counter else meter.create_observable_gauge
            create(name, [functools.partial(self._observed, name)], description=described.meaning)
        self._logger = self._loggers.get_logger(SERVICE, __version__)

    def log(self, event: Event, iteration: int, step: int) -> None:
        """Send an event that happened now, in `iteration`, Megatron's `step`. Thread-safe.

        The event's fields are attributes, with the keys of the event log. IterationsTimed is left out: it is a metric.
        Nothing is sent after `close`.
        """
        if self._meters is None or isinstance(event, IterationsTimed):
            return
        with self._lock:
            sequence, self._sequence = self._sequence, self._sequence + 1
        now_s = time.time()
        stamp = Stamp(
            run=self._run,
            rank=self._rank,
            sequence=sequence,
            iteration=iteration,
            wall_s=now_s,
            monotonic_s=time.monotonic(),
        )
        fields = {**json.loads(encode(StampedEvent(stamp=stamp, event=event))), "step": step}
        severity = self._severities.WARN if _is_bad(event) else self._severities.INFO
        self._logger.emit(
            timestamp=round(now_s * 1e9),
            severity_number=severity,
            severity_text=severity.name,
            event_name=f"adaptra.{event.name}",
            body=": ".join(filter(None, event_text(event))),
            attributes={f"adaptra.{name}": _attribute(value) for name, value in fields.items() if value is not None},
        )

    def close(self) -> None:
        """Send what is queued, for at most CLOSES_WITHIN_S. May be called twice."""
        meters, self._meters = self._meters, None
        if meters is None:
            return

        def shut_down() -> None:
            meters.shutdown()
            self._loggers.shutdown()

        # Exporters retry for as long as they are configured to, but this process ends.
        thread = threading.Thread(target=shut_down, name="adaptra-otel-close", daemon=True)
        thread.start()
        thread.join(CLOSES_WITHIN_S)

    def _observed(self, name: str, _options: CallbackOptions) -> Iterable[Observation]:
        from opentelemetry.metrics import Observation

        for samples in self._figures.samples():
            if samples.name == name:
                for labels, value in samples.values.items():
                    yield Observation(value, dict(zip(samples.labels, labels, strict=True)))


def _is_bad(event: Event) -> bool:
    """Return whether an operator should know."""
    if isinstance(event, (LinkDetection, StageDetection)):
        return event.after != "healthy"
    return isinstance(event, (Fault, RanksLost)) or (isinstance(event, PathChanged) and event.failover)


def _attribute(value: Any) -> str | bool | int | float:
    return value if isinstance(value, (str, bool, int, float)) else json.dumps(value, separators=(",", ":"))
