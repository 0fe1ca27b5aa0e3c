# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import replace

import pytest

from adaptra_megatron.telemetry.exported_figures import ExportedFigures, PrometheusEndpoint, PrometheusError
from adaptra_megatron.telemetry.scalars import (
    ArrivalFigures,
    CellFigures,
    FailureMetrics,
    JobFigures,
    LeaderFigures,
    LinkFigures,
    MemoryFigures,
    RankFigures,
    RouteFigures,
    scalars,
)

RANK = RankFigures(
    iteration_s=1.5, peak_in_flight=6.0, plan_number=2, messages_by_path={"device": 90, "host": 6}, failovers=1
)
LOST = FailureMetrics(dead_cells=[(0, 1), (2, 1)], ranks=4, seconds={1: 0.5, 3: 0.75})
JOB = JobFigures(
    bubble_fraction=0.25,
    links={(3, 4): LinkFigures(latency_s=0.08, bandwidth_bytes_s=2e9, state="slow")},
    memory={3: MemoryFigures(activation_nbytes=7.0, free_nbytes=50.0, cap=6.0)},
    routes=RouteFigures(
        cells={(0, 1): CellFigures(speed=0.4, given=3), (2, 1): CellFigures(speed=1.0, taken=3)}, predicted_gain_s=0.5
    ),
)


@pytest.fixture
def figures() -> ExportedFigures:
    hosts = [f"node{stage}" for stage in range(4)]  # of stage 4 it is not known
    labels = {"labels": {"rank": "5"}, "job_labels": {"replica": "1"}, "info": {"version": "1.2"}}
    return ExportedFigures(**labels, stage_hosts=hosts)


@pytest.fixture
def endpoint(figures: ExportedFigures) -> Iterator[PrometheusEndpoint]:
    pytest.importorskip("prometheus_client")
    endpoint = PrometheusEndpoint(figures, 0)
    yield endpoint
    endpoint.close()


def fetched(endpoint: PrometheusEndpoint) -> dict[str, float]:
    """Samples by name and labels, as a Prometheus server reads them."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        sample.name + "".join(f" {label}={value}" for label, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_what_is_shown_is_served(endpoint: PrometheusEndpoint, figures: ExportedFigures) -> None:
    assert fetched(endpoint) == {}
    leader = LeaderFigures(predicted_s=1.4, lower_bound_s=1.25, saved_s=60.0, stage_states=["healthy", "slow"])
    figures.show(10, RANK, JOB, leader)
    assert fetched(endpoint) == {
        "adaptra_info policy= rank=5 run= version=1.2": 1,
        "adaptra_predicted_seconds replica=1": 1.4,
        "adaptra_lower_bound_seconds replica=1": 1.25,
        "adaptra_saved_seconds_total replica=1": 60,
        "adaptra_stage_state host=node0 of_stage=0 replica=1 state=healthy": 1,
        "adaptra_stage_state host=node1 of_stage=1 replica=1 state=slow": 1,
        "adaptra_iterations_total rank=5": 10,
        "adaptra_iteration_seconds rank=5": 1.5,
        "adaptra_peak_in_flight rank=5": 6,
        "adaptra_plan_number rank=5": 2,
        "adaptra_failovers_total rank=5": 1,
        "adaptra_messages_total path=device rank=5": 90,
        "adaptra_messages_total path=host rank=5": 6,
        "adaptra_bubble_ratio replica=1": 0.25,
        "adaptra_link_latency_seconds from=3 from_host=node3 replica=1 to=4 to_host=": 0.08,
        "adaptra_link_bandwidth_bytes_per_second from=3 from_host=node3 replica=1 to=4 to_host=": 2e9,
        "adaptra_link_state from=3 from_host=node3 replica=1 state=slow to=4 to_host=": 1,
        "adaptra_activation_bytes of_stage=3 replica=1": 7,
        "adaptra_free_bytes of_stage=3 replica=1": 50,
        "adaptra_activation_cap of_stage=3 replica=1": 6,
        "adaptra_cell_speed_ratio of_replica=0 of_stage=1 replica=1": 0.4,
        "adaptra_cell_speed_ratio of_replica=2 of_stage=1 replica=1": 1,
        "adaptra_cell_micro_batches_given of_replica=0 of_stage=1 replica=1": 3,
        "adaptra_cell_micro_batches_given of_replica=2 of_stage=1 replica=1": 0,
        "adaptra_cell_micro_batches_taken of_replica=0 of_stage=1 replica=1": 0,
        "adaptra_cell_micro_batches_taken of_replica=2 of_stage=1 replica=1": 3,
        "adaptra_routes_predicted_gain_seconds replica=1": 0.5,
    }
    figures.show(11, RANK, None, leader)
    assert fetched(endpoint)["adaptra_iterations_total rank=5"] == 11
    assert fetched(endpoint)["adaptra_bubble_ratio replica=1"] == 0.25
    figures.show(12, RANK)
    assert not [name for name in fetched(endpoint) if "replica=1" in name], "the rank that leads says it"


def test_dead_cells_and_what_each_loss_took_are_served_of_jobs_that_survive_failures(
    endpoint: PrometheusEndpoint, figures: ExportedFigures
) -> None:
    figures.show(10, replace(RANK, lost=FailureMetrics()))
    assert {name: value for name, value in fetched(endpoint).items() if "dead" in name or "lo" in name} == {
        "adaptra_dead_cells rank=5": 0,
        "adaptra_ranks_lost rank=5": 0,
        "adaptra_failovers_total rank=5": 1,
    }
    figures.show(11, replace(RANK, lost=LOST))
    expected = {
        "adaptra_dead_cells rank=5": 2,
        "adaptra_ranks_lost rank=5": 4,
        "adaptra_cell_dead of_replica=0 of_stage=1 rank=5": 1,
        "adaptra_cell_dead of_replica=2 of_stage=1 rank=5": 1,
        "adaptra_loss_seconds epoch=1 rank=5": 0.5,
        "adaptra_loss_seconds epoch=3 rank=5": 0.75,
    }
    assert expected.items() <= fetched(endpoint).items()
    values = scalars(replace(RANK, lost=LOST))
    assert (values["adaptra/dead_cells"], values["adaptra/ranks_lost"], values["adaptra/seconds_lost"]) == (2, 4, 1.25)


def test_lags_of_cells_are_served_where_they_are_known(endpoint: PrometheusEndpoint, figures: ExportedFigures) -> None:
    figures.show(1, RANK, arrivals=ArrivalFigures(lags_s=[[0.0, 0.18]], late=[1]))
    served = {name: value for name, value in fetched(endpoint).items() if "arrival" in name or "late" in name}
    assert served == {
        "adaptra_arrival_lag_seconds of_replica=0 of_stage=0 rank=5": 0.0,
        "adaptra_arrival_lag_seconds of_replica=1 of_stage=0 rank=5": 0.18,
        "adaptra_replica_late of_replica=1 rank=5": 1.0,
    }
    figures.show(2, RANK)
    assert not [name for name in fetched(endpoint) if "arrival" in name or "late" in name]


def test_a_port_in_use_is_a_clear_error(endpoint: PrometheusEndpoint, figures: ExportedFigures) -> None:
    with pytest.raises(PrometheusError, match=f"127.0.0.1:{endpoint.port}: .*name a free port"):
        PrometheusEndpoint(figures, endpoint.port)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(PrometheusError, match=r"pip install 'adaptra-megatron\[metrics\]'"):
        PrometheusEndpoint(ExportedFigures(), 0)
