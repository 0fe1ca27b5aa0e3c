# SPDX-License-Identifier: Apache-2.0
"""What a GPU's hardware queues are taken to be, by the variable that the driver reads."""

from __future__ import annotations

import pytest
import torch

from adaptra_megatron.runtime.device import CONNECTIONS, hardware_queues, has_one_queue, shares_queues

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


def test_few_queues_are_told_with_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONNECTIONS, raising=False)
    assert shares_queues(torch.device("cpu")) is None
    told = shares_queues(GPU)
    assert told is not None
    assert "8 hardware queues" in told
    assert told.endswith(f"Set {CONNECTIONS}=32")
    for value, said in (("1", False), ("2", True), ("16", False)):
        monkeypatch.setenv(CONNECTIONS, value)
        assert (shares_queues(GPU) is not None) is said
