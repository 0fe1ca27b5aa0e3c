# SPDX-License-Identifier: Apache-2.0
"""Scenarios of transport_ranks.py in which rank 0 fails and rank 1 gets an error."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from transport_checks import CPU, MEBIBYTE, activation, gradient

from adaptra_megatron.transport.message_keys import TensorSpecification, Transport, TransportError
from testing.waiting import until


def silent(transport: Transport) -> None:
    """Rank 0 lives but never sends, and never receives."""
    transport.describe(TensorSpecification((MEBIBYTE,), torch.float32, CPU))
    dist.barrier()
    if dist.get_rank() == 1:
        transport.post_receive(activation(3, chunk=1, iteration=9), 0)
        text = _failure(lambda: transport.wait(activation(3, chunk=1, iteration=9), time.monotonic() + 0.4), 0.4, 10.0)
        for part in ("rank 1", "link 0->1", str(activation(3, chunk=1, iteration=9)), "deadline", "Look at rank 0"):
            assert part in text, f"{part!r} is missing in: {text}"
        transport.post_send(gradient(3), 0, torch.zeros(MEBIBYTE))
        text = _failure(lambda: transport.flush(time.monotonic() + 0.4), 0.4, 10.0)
        for part in ("rank 1", "link 1->0", str(gradient(3)), "restart"):
            assert part in text, f"{part!r} is missing in: {text}"
        start_s = time.monotonic()
        transport.close()
        assert time.monotonic() - start_s < 15.0, "close() waits for a silent peer"
    _leave_together()


def killed(transport: Transport) -> None:
    """Rank 0 dies by SIGKILL while rank 1 waits for it; later calls fail as well, with the same error."""
    transport.describe(TensorSpecification((MEBIBYTE,), torch.float32, CPU))
    transport.post_receive(activation(0), 1 - dist.get_rank())
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    text = _failure(lambda: transport.wait(activation(0), time.monotonic() + 10.0), 0.0, 20.0)
    assert "link 0->1" in text
    assert "Look at rank 0" in text

    def send_and_flush() -> None:
        transport.post_send(gradient(0), 0, torch.zeros(MEBIBYTE))
        transport.flush(time.monotonic() + 5.0)

    def receive() -> None:
        transport.post_receive(activation(1), 0)
        transport.wait(activation(1), time.monotonic() + 5.0)

    assert "link 1->0" in _failure(send_and_flush, 0.0, 15.0)
    assert str(activation(1)) in _failure(receive, 0.0, 15.0)
    transport.close()
    sys.stdout.write("survived\n")
    sys.stdout.flush()
    os._exit(0)


def _failure(call: Callable[[], object], least_s: float, most_s: float) -> str:
    start_s = time.monotonic()
    with pytest.raises(TransportError) as failed:
        call()
    took_s = time.monotonic() - start_s
    assert least_s <= took_s <= most_s, f"took {took_s:.2f} s, not {least_s}..{most_s}: {failed.value}"
    return str(failed.value)


def _leave_together() -> None:
    """Broken pairs make an orderly tear-down impossible: wait for all ranks through the store, and go."""
    store = dist.distributed_c10d._get_default_store()
    store.add("left", 1)
    until(lambda: store.add("left", 0) == dist.get_world_size(), "the other rank did not finish")
    os._exit(0)
