# SPDX-License-Identifier: Apache-2.0
"""What a GPU's hardware queues are taken to be, by the variable that the driver reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.runtime.device import has_one_queue
from adaptra_megatron.runtime.transports import has_serial_queue, preferred_path
from adaptra_megatron.transport.gpu.hardware_queues import CONNECTIONS, hardware_queues, queues_in_words
from adaptra_megatron.transport.paths import Path

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


def test_few_queues_are_told_with_what_to_do() -> None:
    told = {value: queues_in_words({CONNECTIONS: value}) for value in ("", "2", "16")}
    assert told["16"] is None
    assert "8 hardware queues" in str(told[""])
    assert str(told["2"]).endswith(f"Set {CONNECTIONS}=32")
    assert "links take the host path" in str(queues_in_words({CONNECTIONS: "1"}))
    assert "hold up nothing once they have started" in str(queues_in_words({CONNECTIONS: "1"}, "shared"))


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
