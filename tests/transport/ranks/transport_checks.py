# SPDX-License-Identifier: Apache-2.0
"""What the scenarios of transport_ranks.py and transport_failures.py share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.gathering import gather_layout
from adaptra_megatron.common.handshake import SECRET_NBYTES
from adaptra_megatron.transport.dual_path.host_transport import HostTransport
from adaptra_megatron.transport.gpu.host_copies import HostPayload
from adaptra_megatron.transport.host_link.message_queues import RetransmitQueue
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.link_paths import PathSettings
from adaptra_megatron.transport.message_keys import Direction, MessageKey, Transport
from adaptra_megatron.transport.setup.link_setup import LinkMaker
from adaptra_megatron.transport.setup.rendezvous import Rendezvous

CPU = torch.device("cpu")
MEBIBYTE = 1 << 20
SECRET = b"s" * SECRET_NBYTES


def retransmit_queue(
    window_messages: int = 64,
    window_nbytes: int = 1 << 30,
    send_note: Callable[[int, bytes], None] = lambda number, packet: None,
) -> RetransmitQueue:
    """Make the queue of a link between CPUs. By default it has no control connection for notes."""
    return RetransmitQueue(window_messages, window_nbytes, lambda message: HostPayload(message.tensor), send_note)


def host_transport(
    settings: HostSettings, paths: PathSettings | None = None, *, chunks: int = 1, store: Any = None
) -> HostTransport:
    """Between all ranks of the job; called by all of them. `paths`: None for links without a device path. `store`: to
    meet in; None: the job's."""
    if store is None:
        rendezvous = Rendezvous.of(dist.group.WORLD, settings.timeout_s)
    else:
        layout = gather_layout(range(dist.get_world_size()))
        rendezvous = Rendezvous(ControlStore(store, SECRET, layout.token), layout, settings.timeout_s)
    return HostTransport(rendezvous, chunks, settings, paths, None if paths is None else connected(rendezvous, chunks))


def connected(rendezvous: Rendezvous, chunks: int) -> LinkMaker:
    """Device paths over gloo."""
    maker = LinkMaker(rendezvous, None)
    maker.connect(wrap=chunks > 1)
    return maker


def activation(micro_batch: int, *, chunk: int = 0, iteration: int = 0) -> MessageKey:
    return MessageKey(iteration, Direction.ACTIVATION, chunk, micro_batch)


def gradient(micro_batch: int, *, chunk: int = 0, iteration: int = 0) -> MessageKey:
    return MessageKey(iteration, Direction.GRADIENT, chunk, micro_batch)


def content(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The same on every rank for the same arguments, different for any other seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.int32, generator=generator).to(dtype)


def expect(transport: Transport, key: MessageKey, expected: torch.Tensor, within_s: float = 20.0) -> None:
    received = transport.wait(key, time.monotonic() + within_s)
    assert received.dtype == expected.dtype, f"{key}: {received.dtype} instead of {expected.dtype}"
    assert received.shape == expected.shape, f"{key}: {received.shape} instead of {expected.shape}"
    assert torch.equal(received, expected), f"{key}: other content"
    assert received.grad_fn is None


def flush(transport: Transport, within_s: float = 20.0) -> None:
    transport.flush(time.monotonic() + within_s)


def run_scenarios(scenarios: Iterable[Callable[[Any], None]], names: Iterable[str], make: Any) -> None:
    """Give `make` to the scenarios of these names, one after another, and leave the job."""
    by_name = {scenario.__name__: scenario for scenario in scenarios}
    for name in names:
        by_name[name](make)
        dist.barrier()
    dist.destroy_process_group()


@contextmanager
def slow_to_end() -> Iterator[set[str]]:
    """After its last work a thread of ours ends only once it is joined, or after a while; yields the names of those
    that have done their last work."""
    every_thread: Any = threading.Thread
    join, delete = every_thread.join, every_thread._delete  # the latter is the last that a thread calls
    slow, joined = set[str](), set[threading.Thread]()

    def slow_delete(self: threading.Thread) -> None:
        until_s = time.monotonic() + 5.0
        if self.name.startswith("adaptra-"):
            slow.add(self.name)
            while self not in joined and time.monotonic() < until_s:
                time.sleep(0.002)
        delete(self)

    def noted_join(self: threading.Thread, timeout: float | None = None) -> None:
        joined.add(self)
        join(self, timeout)

    every_thread.join, every_thread._delete = noted_join, slow_delete
    try:
        yield slow
    finally:
        every_thread.join, every_thread._delete = join, delete


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("adaptra-")]


def no_more(held: Mapping[str, int], before: Mapping[str, int]) -> bool:
    """Return whether nothing has grown. Connections go late, once their other ends have gone."""
    return all(held[what] <= before[what] for what in before)
