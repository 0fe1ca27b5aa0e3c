# SPDX-License-Identifier: Apache-2.0
"""What a GPU's hardware queues are taken to be, by the variable that the driver reads."""

from __future__ import annotations

import json
from pathlib import Path as FilePath
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel import layers

from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.engine.rank_transports import has_serial_queue, keeps_stock, preferred_path
from adaptra_megatron.engine.runtime import AdaptraRuntime
from adaptra_megatron.megatron.gradients.linear_wgrad import WeightGradientQueue
from adaptra_megatron.megatron.prospects import prospects_of
from adaptra_megatron.schedule.costs import costs_to_json, uniform_costs
from adaptra_megatron.transport.gpu.hardware_queues import CONNECTIONS, NO_PLAN_FASTER, hardware_queues, queues_in_words
from adaptra_megatron.transport.gpu.training_device import has_one_queue, shares_queues
from adaptra_megatron.transport.link_paths import Path

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("value", "queues"),
    [
        ("1", 1),
        ("01", 1),
        (" 1", 1),
        ("1x", 1),
        ("2", 2),
        ("32", 32),
        ("64", 32),
        ("", 8),
        ("0", 8),
        ("-1", 8),
        ("x", 8),
    ],
)
def test_queues_are_a_number_as_c_reads_it(monkeypatch: pytest.MonkeyPatch, value: str, queues: int) -> None:
    monkeypatch.setenv(CONNECTIONS, value)
    assert hardware_queues() == hardware_queues({CONNECTIONS: value}) == queues
    assert has_one_queue(GPU) is (queues == 1)
    assert not has_one_queue(torch.device("cpu"))
    assert shares_queues(GPU) is (queues < 16)
    assert not shares_queues(torch.device("cpu"))
    assert prospects_of(SimpleNamespace()).device.startswith("one " if queues == 1 else "several ")


def test_few_queues_are_reported_with_what_to_do() -> None:
    reported = {value: queues_in_words({CONNECTIONS: value}) for value in ("", "2", "16")}
    assert reported["16"] is None
    assert "8 hardware queues" in str(reported[""])
    assert str(reported["2"]).endswith(f"Set {CONNECTIONS}=32")
    assert "links take the host path" in str(queues_in_words({CONNECTIONS: "1"}))
    assert "delay nothing once they have started" in str(queues_in_words({CONNECTIONS: "1"}, "shared"))


@pytest.mark.parametrize(
    ("value", "settings", "serial", "path"),
    [
        ("1", {}, True, Path.HOST),
        ("1", {"queue_model": "shared"}, False, Path.DEVICE),
        ("1", {"path": "device"}, True, Path.DEVICE),
        ("32", {}, False, Path.DEVICE),
        ("32", {"path": "host"}, False, Path.HOST),
    ],
)
def test_messages_keep_out_of_a_queue_that_is_taken_for_a_serial_one(
    monkeypatch: pytest.MonkeyPatch, value: str, settings: dict[str, Any], serial: bool, path: Path
) -> None:
    monkeypatch.setenv(CONNECTIONS, value)
    config = AdaptraConfig(**settings)
    assert has_serial_queue(config, GPU) is serial
    assert preferred_path(config, GPU) is path
    assert preferred_path(AdaptraConfig(), torch.device("cpu")) is Path.DEVICE


@pytest.mark.parametrize(
    ("value", "settings", "stock"),
    [
        ("1", {"path": "device"}, True),
        ("1", {"host_transport": "off"}, True),
        ("1", {"policy": "observe", "host_transport": "off"}, True),
        ("1", {}, False),
        ("1", {"path": "device", "queue_model": "shared"}, False),
        ("32", {"path": "device"}, False),
    ],
)
def test_where_no_plan_is_faster_stock_runs(
    monkeypatch: pytest.MonkeyPatch, value: str, settings: dict[str, Any], stock: bool
) -> None:
    monkeypatch.setenv(CONNECTIONS, value)
    config = AdaptraConfig(**settings)
    assert keeps_stock(config, lambda: GPU) is stock
    assert not keeps_stock(config, lambda: torch.device("cpu"))


def test_the_training_thread_calls_stock_and_the_log_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONNECTIONS, "1")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: GPU)
    runtime = AdaptraRuntime(AdaptraConfig(path="device"), WeightGradientQueue(layers))
    ran: list[Any] = []
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(runtime, "run_stock", lambda *given: ran.append(given))
    model = torch.nn.Identity()
    model.config = ModelParallelConfig()  # type: ignore[assignment]
    call: dict[str, Any] = {"model": [model]}
    stock = object()
    runtime.forward_backward(call, interleaved=False, stock=stock)  # type: ignore[arg-type]
    assert ran[0][:2] == (stock, call)
    assert NO_PLAN_FASTER in ran[0][2]
    assert NO_PLAN_FASTER in str(queues_in_words())


def test_given_costs_are_planned_for_in_any_queue(monkeypatch: pytest.MonkeyPatch, tmp_path: FilePath) -> None:
    monkeypatch.setenv(CONNECTIONS, "1")
    costs = uniform_costs(2, 4, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    (tmp_path / "costs.json").write_text(json.dumps(costs_to_json(costs)))
    config = AdaptraConfig(path="device", costs_json=tmp_path / "costs.json")
    assert not keeps_stock(config, lambda: GPU)
