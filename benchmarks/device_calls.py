# SPDX-License-Identifier: Apache-2.0
"""What a message of the device path costs the training thread, CUDA and NCCL taken away.

    python benchmarks/device_calls.py

The plain device path, as on GPUs, over functions that do nothing (tests/support/gpu/device_calls.c). Microseconds for
which the thread ran, the median of 5 rounds of 2000 messages each; the device's memory and clock are stand-ins that do
nothing either.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.gpu.device_calls import COMPUTE, LINK, DeviceCalls  # noqa: E402
from torch.distributed import HashStore  # noqa: E402

from adaptra_megatron.transport.device_session.communicator_config import CommunicatorConfig  # noqa: E402
from adaptra_megatron.transport.device_session.link_watch import LinkWatch  # noqa: E402
from adaptra_megatron.transport.device_session.nccl_link import NcclLink, NcclSide  # noqa: E402
from adaptra_megatron.transport.device_session.pair_group import PairEnds  # noqa: E402
from adaptra_megatron.transport.message_keys import Direction, MessageKey, TensorSpecification  # noqa: E402
from adaptra_megatron.transport.single_path.nccl_transport import StreamTransport  # noqa: E402

MESSAGES, ROUNDS, NBYTES = 2000, 5, 64


class NoDevice:
    """Memory that is there already."""

    def __init__(self) -> None:
        self._memory = torch.empty(NBYTES, dtype=torch.uint8)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: SimpleNamespace(__enter__=None)

    device = torch.device("cpu")

    def idle(self, stream: int) -> bool:
        return True

    def use(self, stream: int) -> Any:
        return memoryview(b"")  # any context manager

    def handle(self, stream: int) -> int:
        return stream

    def current_handle(self) -> int:
        return COMPUTE

    def empty(self, *_: object) -> torch.Tensor:
        return self._memory


def transport_of(calls: DeviceCalls) -> StreamTransport:
    """Stage 0 of two, with a link either way."""
    device: Any = NoDevice()
    side = NcclSide(calls.nccl, device, "gpu 0", CommunicatorConfig(), LinkWatch(), 60.0, LINK)
    links = {}
    for ends, sends in ((PairEnds(0, 1), True), (PairEnds(1, 0), False)):
        store: Any = HashStore()
        store.set(f"gpu/{int(sends)}", "gpu 1")
        store.set("id", bytes(128))
        links[ends.source, ends.target] = NcclLink(store, ends, side, LINK, sends=sends, timeout_s=60.0)
    clock: Any = SimpleNamespace(mark=lambda: None)
    return StreamTransport(0, links, device, clock, side.watch, 600.0)


def microseconds(call: Callable[[int], Any]) -> float:
    """Of one call."""
    begun_s = time.thread_time()
    for number in range(MESSAGES):
        call(number)
    return 1e6 * (time.thread_time() - begun_s) / MESSAGES


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        transport = transport_of(DeviceCalls(Path(directory)))
        transport.describe(TensorSpecification((NBYTES,), torch.uint8, torch.device("cpu")))
        tensor, deadline_s = torch.empty(NBYTES, dtype=torch.uint8), time.monotonic() + 600.0
        rounds: dict[str, list[float]] = {"post_receive": [], "wait": [], "post_send": []}
        for number in range(ROUNDS):
            keys = [MessageKey(number, Direction.GRADIENT, 0, each) for each in range(MESSAGES)]
            rounds["post_receive"].append(microseconds(lambda each, keys=keys: transport.post_receive(keys[each], 1)))
            rounds["wait"].append(microseconds(lambda each, keys=keys: transport.wait(keys[each], deadline_s)))
            rounds["post_send"].append(microseconds(lambda each, keys=keys: transport.post_send(keys[each], 1, tensor)))
            transport._sent.clear()
            transport._received.clear()
        transport.close(drained=False)
    for name, found in rounds.items():
        print(f"{name}: {median(found):.1f} us ({min(found):.1f} to {max(found):.1f})")


if __name__ == "__main__":
    main()
