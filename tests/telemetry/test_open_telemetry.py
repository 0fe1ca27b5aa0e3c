# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry, by the SDK's own exporters in memory, and by OTLP to a server that stands for a collector."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from telemetry.figures.test_prometheus import JOB, RANK
from telemetry.test_run_telemetry import place

from adaptra_megatron.telemetry.events import (
    Event,
    IterationsTimed,
    LinkDetection,
    PlanMade,
    PlanSwitched,
    RunStarted,
)
from adaptra_megatron.telemetry.exported_figures import METRICS, ExportedFigures
from adaptra_megatron.telemetry.open_telemetry import (
    CLOSES_WITHIN_S,
    OpenTelemetryError,
    OpenTelemetryExport,
    exporter_of,
)
from adaptra_megatron.telemetry.run_telemetry import RunTelemetry, TelemetrySettings
from adaptra_megatron.telemetry.scalars import LeaderFigures

pytest.importorskip("opentelemetry.sdk", reason="comes with adaptra-megatron[otel]")

SLOW = LinkDetection(source=0, target=1, before="healthy", after="slow", reason="60 ms, before 1 ms", latency_s=0.06)
START = RunStarted(layout={"stages": 2}, versions={"torch": "2.13"}, config={"policy": "adapt"}, host="node-7")


class Attributes(dict[str, Any]):
    """Key of a metric's sample, to look it up by."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))


def exported(figures: ExportedFigures, *events: Event) -> tuple[dict[str, Any], list[Any]]:
    """What the SDK's readers have: metrics by name, and log records."""
    from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader, logs = InMemoryMetricReader(), InMemoryLogRecordExporter()
    export = OpenTelemetryExport(figures, run="run", rank=5, host="node-7", readers=[reader], log_exporter=logs)
    for event in events:
        export.log(event, 12, 13)
    data = reader.get_metrics_data()
    export.close()
    export.log(SLOW, 13, 14)
    export.close()
    found = [] if data is None else data.resource_metrics[0].scope_metrics[0].metrics
    return {metric.name: metric for metric in found}, list(logs.get_finished_logs())


def test_metrics_are_those_that_prometheus_gets() -> None:
    figures = ExportedFigures(labels={"rank": "5"}, job_labels={"replica": "1"}, info={"version": "1.2"})
    assert exported(figures)[0] == {}
    figures.show(10, RANK, JOB, LeaderFigures(predicted_s=1.4, saved_s=60.0, stage_states=["healthy"]))
    metrics, _ = exported(figures)
    reported = {
        (name, Attributes(point.attributes)): point.value
        for name, metric in metrics.items()
        for point in metric.data.data_points
    }
    expected = {
        (name, Attributes(zip(labels, each, strict=True))): value
        for name, labels, values in figures.samples()
        for each, value in values.items()
    }
    assert reported == expected
    assert (
        reported[
            "adaptra_link_latency_seconds",
            Attributes({"replica": "1", "from": "3", "to": "4", "from_host": "", "to_host": ""}),
        ]
        == 0.08
    )
    for name, metric in metrics.items():
        assert (type(metric.data).__name__ == "Sum") == METRICS[name].counter
        assert metric.description == METRICS[name].meaning
    assert metrics["adaptra_iterations"].data.is_monotonic


def test_events_are_log_records_with_the_keys_of_the_event_log() -> None:
    plan = PlanMade(
        number=2, adopted=True, reason="the link", predicted_s=1.0, current_predicted_s=None, costs={"a": [1]}
    )
    before_s = time.time()
    _, records = exported(ExportedFigures(), SLOW, IterationsTimed(first=0, seconds=[1.0]), plan)
    slow, made = (record.log_record for record in records)
    assert (slow.event_name, slow.severity_text, slow.severity_number.value) == ("adaptra.link", "WARN", 13)
    assert slow.body == "Link 0→1 is slow (was healthy): 60 ms, before 1 ms"
    assert before_s <= slow.timestamp / 1e9 <= time.time()
    assert {
        "adaptra.event": "link", "adaptra.run": "run", "adaptra.rank": 5, "adaptra.iteration": 12, "adaptra.step": 13,
        "adaptra.source": 0, "adaptra.after": "slow", "adaptra.latency_s": 0.06,
    }.items() <= dict(slow.attributes).items()  # fmt: skip
    assert (made.event_name, made.severity_text) == ("adaptra.plan", "INFO")
    assert made.attributes["adaptra.costs"] == '{"a":[1]}'
    about = records[0].resource.attributes
    assert (about["service.name"], about["service.instance.id"], about["host.name"]) == (
        "adaptra-megatron", "run/5", "node-7",
    )  # fmt: skip


class Collector(ThreadingHTTPServer):
    """Takes OTLP by HTTP, and keeps it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.received: dict[str, list[bytes]] = {}


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.setdefault(self.path, []).append(body)
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "llm")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=training")
    yield server
    server.shutdown()
    server.server_close()
    thread.join(timeout=10)


def test_a_run_reaches_a_collector_that_the_environment_names(collector: Collector) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    telemetry = RunTelemetry(TelemetrySettings(otel=True), place(), START)
    telemetry.begin(0)
    telemetry.log(SLOW)
    telemetry.switch(1)
    telemetry.trained(RANK)
    telemetry.close()
    telemetry.close()
    logs = [ExportLogsServiceRequest.FromString(body) for body in collector.received["/v1/logs"]]
    records = [record for each in logs for scope in each.resource_logs[0].scope_logs for record in scope.log_records]
    assert [record.event_name for record in records] == [
        f"adaptra.{name}" for name in ("run_started", "link", "switch", "run_ended")
    ]
    about = {each.key: each.value.string_value for each in logs[0].resource_logs[0].resource.attributes}
    assert (about["service.name"], about["team"], about["service.instance.id"]) == ("llm", "training", "run/0")
    (body,) = collector.received["/v1/metrics"]
    (scope,) = ExportMetricsServiceRequest.FromString(body).resource_metrics[0].scope_metrics
    (seconds,) = (each for each in scope.metrics if each.name == "adaptra_iteration_seconds")
    (point,) = seconds.gauge.data_points
    assert point.as_double == 1.5
    assert {each.key: each.value.string_value for each in point.attributes} == {"rank": "0", "stage": "0"}
    assert PlanSwitched.name in {record.event_name.removeprefix("adaptra.") for record in records}


def test_a_collector_that_is_not_there_keeps_no_run_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("adaptra_megatron.telemetry.open_telemetry.CLOSES_WITHIN_S", 0.5)
    telemetry = RunTelemetry(TelemetrySettings(otel=True), place(), START)
    telemetry.begin(0)
    telemetry.trained(RANK)
    begun_s = time.monotonic()
    telemetry.close()
    assert time.monotonic() - begun_s < CLOSES_WITHIN_S


def test_exporters_are_those_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_LOGS_EXPORTER", "none")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "console")
    assert exporter_of("logs") is None
    assert type(exporter_of("metrics")).__name__ == "ConsoleMetricExporter"
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "carrier-pigeon")
    with pytest.raises(OpenTelemetryError, match="exporter of metrics is called carrier-pigeon: .*PROTOCOL=http/prot"):
        exporter_of("metrics")


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.metrics", None)
    with pytest.raises(OpenTelemetryError, match=r"pip install 'adaptra-megatron\[otel\]', or drop --adaptra-otel"):
        RunTelemetry(TelemetrySettings(otel=True), place(), START)
