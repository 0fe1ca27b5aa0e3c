# SPDX-License-Identifier: Apache-2.0
"""What the scenarios of transport_ranks.py and transport_failures.py share."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from adaptra_megatron.transport.messages import Direction, MessageKey, Transport

CPU = torch.device("cpu")
MEBIBYTE = 1 << 20


def activation(micro_batch: int, *, chunk: int = 0, iteration: int = 0) -> MessageKey:
    return MessageKey(iteration, Direction.ACTIVATION, chunk, micro_batch)


def gradient(micro_batch: int, *, chunk: int = 0, iteration: int = 0) -> MessageKey:
    return MessageKey(iteration, Direction.GRADIENT, chunk, micro_batch)


def content(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The same on every rank for the same arguments, different for any other seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.int32, generator=generator).to(dtype)


def expect(transport: Transport, key: MessageKey, expected: torch.Tensor) -> None:
    received = transport.wait(key, time.monotonic() + 20.0)
    assert received.dtype == expected.dtype, f"{key}: {received.dtype} instead of {expected.dtype}"
    assert received.shape == expected.shape, f"{key}: {received.shape} instead of {expected.shape}"
    assert torch.equal(received, expected), f"{key}: other content"
    assert received.grad_fn is None


def flush(transport: Transport) -> None:
    transport.flush(time.monotonic() + 20.0)


def until(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + 5.0
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.005)
