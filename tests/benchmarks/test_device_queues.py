# SPDX-License-Identifier: Apache-2.0
"""What plans gain and lose on the model of GPUs, by how their hardware queues work."""

from __future__ import annotations

import pytest
from device_queues import CASES, DEVICE, HOST, Case, ours_ms, stock_ms
from support.device_model import Device

ONE_SERIAL_QUEUE = Device(queues=1, trailing_waits=True)


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=["1F1B", "interleaved"])
def test_one_serial_queue_gains_by_the_host_path_alone(case: Case, slow: bool) -> None:
    """So without one stock's own schedule runs."""
    stock = stock_ms(case, ONE_SERIAL_QUEUE, slow=slow)
    assert ours_ms(case, ONE_SERIAL_QUEUE, HOST, slow=slow, queue="serial") < stock
    assert ours_ms(case, ONE_SERIAL_QUEUE, DEVICE, slow=slow, queue="serial") > stock
