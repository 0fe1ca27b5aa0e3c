# SPDX-License-Identifier: Apache-2.0
"""The figures of one rank for a Prometheus server to fetch. Off unless a port is given.

Needs prometheus_client (`pip install 'adaptra-megatron[metrics]'`), imported when an endpoint is opened. What is served
names no secret and takes no input, but all that reaches the port can read it: it is bound to this host alone
unless another address is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from adaptra_megatron.telemetry.figures.exported import METRICS, ExportedFigures

if TYPE_CHECKING:
    from prometheus_client.core import Metric

LOOPBACK = "127.0.0.1"


class PrometheusError(RuntimeError):
    """The endpoint cannot be opened; names the flag or the package and the remedy."""


class PrometheusEndpoint:
    """Serves figures at http://ADDRESS:PORT/metrics, from a thread of its own."""

    def __init__(self, figures: ExportedFigures, port: int, address: str = LOOPBACK) -> None:
        """`port` 0 takes any free one. Raises PrometheusError."""
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as error:
            raise PrometheusError(
                "a Prometheus port needs the package prometheus-client: pip install 'adaptra-megatron[metrics]'"
            ) from error
        self._figures = figures
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, address, registry)
        except (OSError, OverflowError) as error:
            raise PrometheusError(
                f"cannot serve Prometheus metrics at {address}:{port}: {error}; name a free port, and an address of "
                "this host"
            ) from error

    @property
    def port(self) -> int:
        """Port that the server listens on."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop serving. May be called twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)

    def collect(self) -> Iterator[Metric]:
        """What prometheus_client asks for at each request."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, labels, values in self._figures.samples():
            family_type = CounterMetricFamily if METRICS[name].counter else GaugeMetricFamily
            family = family_type(name, METRICS[name].meaning, labels=labels)
            for each, value in values.items():
                family.add_metric(each, value)
            yield family
