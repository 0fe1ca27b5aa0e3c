# SPDX-License-Identifier: Apache-2.0
"""Run one of the two processes of the self-test.

python -m adaptra_megatron.tools.local_ranks.self_test_rank RESULTS TRANSPORT...

Rank 1 appends one JSON line per transport to the file RESULTS. Any error ends the process with its traceback.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist

from adaptra_megatron.transport.dual_path.host_transport import HostTransport
from adaptra_megatron.transport.host_settings import MEBIBYTE, HostSettings
from adaptra_megatron.transport.message_keys import Direction, MessageKey, TransportError
from adaptra_megatron.transport.setup.rendezvous import Rendezvous

MESSAGE_NBYTES = 4 * MEBIBYTE
MESSAGES, WARM_UP = 48, 8
ROUND_TRIPS = 50
SMALL_NBYTES = 4096
WAIT_S = 25.0


def main(results: Path, transports: list[str]) -> None:
    """Exchange messages over each transport in turn. Raises TransportError if a message does not arrive, or is
    corrupted."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=2 * WAIT_S))
    group = dist.group.WORLD
    assert group is not None
    for name in transports:
        settings = HostSettings(transport=name, timeout_s=WAIT_S, bind="127.0.0.1")
        transport = HostTransport(Rendezvous.of(group, WAIT_S), 1, settings)
        try:
            outcome = _exchange(transport, name)
        finally:
            transport.close()
        if dist.get_rank() == 1:
            with results.open("a") as file:
                file.write(json.dumps(outcome) + "\n")
        dist.barrier()
    dist.destroy_process_group()


def _exchange(transport: HostTransport, name: str) -> dict[str, object]:
    peer = 1 - dist.get_rank()
    used = transport.counters().links[peer].transport
    if used != name:
        raise TransportError(f"the link came up over {used} instead of {name}")
    numbers = count()
    round_trips_s = [_round_trip(transport, peer, numbers) for _ in range(ROUND_TRIPS)]
    seconds = _stream(transport, peer, numbers)
    transport.flush(time.monotonic() + WAIT_S)
    return {
        "transport": name,
        "message_mib": MESSAGE_NBYTES // MEBIBYTE,
        "gib_per_s": MESSAGES * MESSAGE_NBYTES / seconds / (1 << 30),
        "round_trip_us": statistics.median(round_trips_s) * 1e6,
    }


def _round_trip(transport: HostTransport, peer: int, numbers: Iterator[int]) -> float:
    """Send a message and its answer; return the seconds, on rank 1. Rank 0 answers with what it received."""
    number = next(numbers)
    question, answer = MessageKey(0, Direction.GRADIENT, 0, number), MessageKey(0, Direction.ACTIVATION, 0, number)
    if dist.get_rank() == 0:
        transport.post_receive(question, peer)
        transport.post_send(answer, peer, transport.wait(question, time.monotonic() + WAIT_S))
        return 0.0
    content = _content(SMALL_NBYTES, number)
    transport.post_receive(answer, peer)
    start_s = time.monotonic()
    transport.post_send(question, peer, content)
    came = transport.wait(answer, time.monotonic() + WAIT_S)
    seconds = time.monotonic() - start_s
    _check(came, content, answer)
    return seconds


def _stream(transport: HostTransport, peer: int, numbers: Iterator[int]) -> float:
    """Stream messages from rank 0 to rank 1: some to warm up, then MESSAGES; return the seconds of these, on rank 1."""
    keys = [MessageKey(0, Direction.ACTIVATION, 0, next(numbers)) for _ in range(WARM_UP + MESSAGES)]
    go = MessageKey(0, Direction.GRADIENT, 0, next(numbers))
    content = _content(MESSAGE_NBYTES, 0)
    if dist.get_rank() == 0:
        transport.post_receive(go, peer)
        for key in keys[:WARM_UP]:
            transport.post_send(key, peer, content)
        transport.wait(go, time.monotonic() + WAIT_S)
        for key in keys[WARM_UP:]:
            transport.post_send(key, peer, content)
        return math.inf
    for key in keys:
        transport.post_receive(key, peer)
    for key in keys[:WARM_UP]:
        _check(transport.wait(key, time.monotonic() + WAIT_S), content, key)
    start_s = time.monotonic()
    transport.post_send(go, peer, _content(SMALL_NBYTES, 0))
    for key in keys[WARM_UP:]:
        last = transport.wait(key, time.monotonic() + WAIT_S)  # the memory of the one before is used again
    seconds = time.monotonic() - start_s
    _check(last, content, keys[-1])
    return seconds


def _content(nbytes: int, salt: int) -> torch.Tensor:
    return torch.arange(nbytes // 4, dtype=torch.int32) * 2654435761 + salt


def _check(came: torch.Tensor, expected: torch.Tensor, key: MessageKey) -> None:
    if not torch.equal(came, expected):
        raise TransportError(f"the {key} came with other content than was sent")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
