# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from adaptra_megatron.telemetry.scalars import (
    LINKS_SHOWN,
    MEGATRON_VARIABLES,
    ArrivalFigures,
    JobFigures,
    LinkFigures,
    RankFigures,
    ScalarWriters,
    megatron_step,
    megatron_writers,
    scalars,
)

RANK = RankFigures(
    iteration_s=1.5, peak_in_flight=6.0, plan_number=2, messages_by_path={"device": 90, "host": 6}, failovers=1
)


class Recorder:
    """Has the methods of both writers."""

    def __init__(self, failing: bool = False) -> None:
        self.written: list[Any] = []
        self.failing = failing

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.log({tag: scalar_value}, global_step)

    def log(self, data: dict[str, float], step: int) -> None:
        self.written.append((data, step))
        if self.failing:
            raise RuntimeError("the network is down")


def test_a_rank_alone_and_with_the_jobs_figures() -> None:
    alone = {
        "adaptra/iteration_time_s": 1.5,
        "adaptra/peak_in_flight": 6.0,
        "adaptra/plan_number": 2,
        "adaptra/failovers": 1,
        "adaptra/messages_by_device_path": 90,
        "adaptra/messages_by_host_path": 6,
    }
    assert scalars(RANK) == alone
    links = {
        (3, 4): LinkFigures(latency_s=0.08, state="slow"),
        (4, 3): LinkFigures(latency_s=0.001, bandwidth_bytes_s=1e9),
    }
    assert scalars(RANK, JobFigures(bubble_fraction=0.25, links=links)) == {
        **alone,
        "adaptra/bubble_fraction": 0.25,
        "adaptra/slowest_link_latency_s": 0.08,
        "adaptra/links_not_healthy": 1,
        "adaptra/link_3_to_4/latency_s": 0.08,
        "adaptra/link_4_to_3/latency_s": 0.001,
        "adaptra/link_4_to_3/bandwidth_bytes_s": 1e9,
    }


def test_a_long_pipeline_has_no_curve_per_link() -> None:
    links = {(stage, stage + 1): LinkFigures(latency_s=0.001 * stage) for stage in range(LINKS_SHOWN + 1)}
    values = scalars(RANK, JobFigures(links=links))
    assert values["adaptra/slowest_link_latency_s"] == pytest.approx(0.001 * LINKS_SHOWN)
    assert not any("link_0_to_1" in tag for tag in values)


def test_lags_of_cells_at_gradient_synchronisation() -> None:
    few = scalars(RANK, arrivals=ArrivalFigures(lags_s=[[0.0, 0.0], [-0.1, 0.18]], late=[1]))
    assert few["adaptra/longest_arrival_lag_s"] == 0.18
    assert few["adaptra/late_replicas"] == 1
    assert few["adaptra/replica_0_stage_1/arrival_lag_s"] == -0.1
    many = scalars(RANK, arrivals=ArrivalFigures(lags_s=[[-0.1] * (LINKS_SHOWN + 1)]))
    assert many["adaptra/longest_arrival_lag_s"] == 0.0
    assert not [tag for tag in many if tag.endswith("/arrival_lag_s")]


def test_writers_get_values_at_their_interval() -> None:
    tensorboard, wandb = Recorder(), Recorder()
    writers = ScalarWriters(tensorboard=tensorboard, wandb=wandb, interval=5)
    assert writers
    for step in range(1, 12):
        writers.write(step, {"a": 1.0 * step, "b": 2.0})
    assert wandb.written == [({"a": 5.0, "b": 2.0}, 5), ({"a": 10.0, "b": 2.0}, 10)]
    assert tensorboard.written == [({"a": 5.0}, 5), ({"b": 2.0}, 5), ({"a": 10.0}, 10), ({"b": 2.0}, 10)]


def test_a_failing_writer_is_left_out_and_the_other_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    tensorboard, wandb = Recorder(failing=True), Recorder()
    writers = ScalarWriters(tensorboard=tensorboard, wandb=wandb)
    with caplog.at_level(logging.WARNING, logger="adaptra_megatron"):
        writers.write(1, {"a": 1.0})
        writers.write(2, {"a": 2.0})
    assert len(tensorboard.written) == 1
    assert len(wandb.written) == 2
    assert len(caplog.records) == 1
    assert "no more scalars to TensorBoard (the network is down)" in caplog.text


def test_megatrons_own_writers_and_its_numbers_are_used() -> None:
    wandb = Recorder()
    variables = SimpleNamespace(
        get_tensorboard_writer=lambda: None,
        get_wandb_writer=lambda: wandb,
        _GLOBAL_ARGS=SimpleNamespace(tensorboard_log_interval=2, curr_iteration=41),
    )
    modules = {MEGATRON_VARIABLES: variables}
    writers = megatron_writers(modules)
    assert writers
    assert not writers.due(41)
    writers.write(megatron_step(7, modules), {"a": 1.0})
    assert wandb.written == [({"a": 1.0}, 42)]


def test_without_megatrons_training_there_is_nothing_to_write_to() -> None:
    assert not megatron_writers({})
    assert megatron_step(7, {}) == 7
