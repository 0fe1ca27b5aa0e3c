# SPDX-License-Identifier: Apache-2.0
"""What plans gain and lose on the model of GPUs, by how their hardware queues work."""

from __future__ import annotations

import pytest
from device_queues import CASES, DEVICE, HOST, Case, chosen_ms, ours_ms, stock_ms
from support.device_model import Device

ONE_SERIAL_QUEUE = Device(queues=1, trailing_waits=True)


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=["1F1B", "interleaved"])
def test_one_serial_queue_gains_by_the_host_path_alone(case: Case, slow: bool) -> None:
    """So without one stock's own schedule runs."""
    stock = stock_ms(case, ONE_SERIAL_QUEUE, slow=slow)
    assert ours_ms(case, ONE_SERIAL_QUEUE, HOST, slow=slow, queue="serial") < stock
    assert ours_ms(case, ONE_SERIAL_QUEUE, DEVICE, slow=slow, queue="serial") > stock


@pytest.mark.parametrize("trailing_waits", [False, True])
def test_a_slow_link_of_a_device_with_few_queues_leaves_the_device_path(trailing_waits: bool) -> None:
    """What stands there for it would hold up computation in some of them, for longer than in stock."""
    device = Device(queues=8, trailing_waits=trailing_waits)
    ours, path = chosen_ms(CASES[2], device, slow=True)
    assert "by the host path" in path
    assert ours < 0.75 * stock_ms(CASES[2], device, slow=True)


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=["1F1B", "interleaved"])
def test_a_link_whose_messages_wait_for_each_other_leaves_the_device_path(case: Case) -> None:
    """Though nothing of it holds up computation: NCCL carries one message at a time, the host path several."""
    device = Device(queues=32)
    ours, path = chosen_ms(case, device, slow=True)
    assert "by the host path" in path
    assert ours < 0.95 * ours_ms(case, device, DEVICE, slow=True, queue="separate")
