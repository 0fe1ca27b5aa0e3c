# SPDX-License-Identifier: Apache-2.0
"""What four ranks do, two pipelines of two stages, when tests of links between pipelines start them with SCENARIOs."""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transport_checks import (
    CPU,
    content,
    expect,
    flush,
    no_more,
    our_threads,
    run_scenarios,
    slow_to_end,
)

from adaptra_megatron.common.control_store import MOST_SPARE, ControlStore
from adaptra_megatron.common.gathering import gather_layout
from adaptra_megatron.transport.dual_path.host_transport import HostTransport
from adaptra_megatron.transport.host_link.host_link_reader import HostLinkReader
from adaptra_megatron.transport.host_settings import MEBIBYTE, HostSettings
from adaptra_megatron.transport.link_paths import Path, PathSettings
from adaptra_megatron.transport.message_keys import (
    AbortedError,
    Direction,
    MessageKey,
    TensorSpecification,
    TransportError,
)
from adaptra_megatron.transport.setup.link_setup import LinkMaker
from adaptra_megatron.transport.setup.rendezvous import Rendezvous
from testing.waiting import until

PIPELINES = ((0, 1), (2, 3))
MICRO_BATCHES = 8
"""Number of micro-batches of each replica."""
ANY = TensorSpecification(None, torch.float32, CPU, MICRO_BATCHES)
SIZES = (1, 1000, MEBIBYTE // 8, 40_000)
SOON_S = 20.0
MEETS_S = 15.0
"""For device sessions: the store looks up a name for each client that connects, one after the other."""
AT_ONCE_S = 10.0
"""Longest time for an abort to wake those who wait, at either end."""

Try = tuple[int, int]
"""Iteration and attempt."""


def key(source: int, number: int, turn: Try) -> MessageKey:
    """Both directions of a link have the same micro-batch numbers: of the sender's replica."""
    iteration, attempt = turn
    direction = Direction.ACTIVATION if source % 2 == 0 else Direction.GRADIENT
    return MessageKey(iteration, direction, source, source // 2 * MICRO_BATCHES + number, attempt)


def sent_by(source: int, target: int, number: int, turn: Try, size: int | None = None) -> torch.Tensor:
    seed = (((turn[0] * 8 + turn[1]) * 4 + source) * 4 + target) * MICRO_BATCHES + number
    return content((size or SIZES[number % len(SIZES)],), torch.float32, seed)


def exchange(transport: HostTransport, peers: Sequence[int], turn: Try, numbers: Sequence[int] = range(4)) -> None:
    """With each of the peers, each way, over all links at once; all arrives once, bit by bit."""
    rank = dist.get_rank()
    for number in numbers:
        for peer in peers:
            transport.post_receive(towards(peer, rank, number, turn), peer)
            transport.post_send(towards(rank, peer, number, turn), peer, sent_by(rank, peer, number, turn))
    for number in numbers:
        for peer in peers:
            expect(transport, towards(peer, rank, number, turn), sent_by(peer, rank, number, turn), SOON_S)
    flush(transport)


def towards(source: int, target: int, number: int, turn: Try) -> MessageKey:
    """A transport tells what its rank receives from several peers apart by key alone."""
    return key(source, number, turn)._replace(chunk=4 * source + target)


def partner(rank: int) -> int:
    return rank ^ 1


def crossing(rank: int) -> list[int]:
    """The ranks of the other pipeline."""
    return list(PIPELINES[1 - rank // 2])


def up(transport: HostTransport, peers: Sequence[int]) -> None:
    for peer in peers:
        transport.wait_for_link(peer, time.monotonic() + SOON_S)


def held() -> dict[str, int]:
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(our_threads()),
        "rings": FilePath("/proc/self/maps").read_text().count("memfd:adaptra-ring"),
    }


SERVING = ["adaptra-connections", "adaptra-links-receive", "adaptra-links-send"]
"""The transport's threads in a training process for any number of peers, besides those in which gloo waits."""


def serving() -> list[str]:
    return sorted(name for name in our_threads() if not name.startswith("adaptra-device-receive-"))


def device_up(transport: HostTransport, peer: int) -> None:
    """Wait until messages to `peer` take the device path."""

    def by_device() -> bool:
        paths = transport.link_counters()[peer].paths
        return paths is not None and paths.path is Path.DEVICE

    until(by_device, f"no device path to rank {peer}", SOON_S)


Make = Callable[..., HostTransport]


def opened_and_closed(make: Make) -> None:
    """Links between two pipelines come and go while those within carry traffic; nothing of them stays."""
    rank, transport = dist.get_rank(), make()
    own, others = partner(rank), crossing(rank)
    with ExitStack() as spare:  # as many clients as are ever kept: how many links meet at once differs by cycle
        for _ in range(MOST_SPARE):
            spare.enter_context(transport._opener.control.lent("spare", SOON_S))
    before: dict[str, int] = {}
    for cycle in range(4):
        for peer in others[:: 1 if rank % 2 else -1]:
            transport.open_link(peer)
            transport.open_link(peer)  # says nothing new
        exchange(transport, [own], (4 * cycle, 0))  # they come up meanwhile
        exchange(transport, [own, *others], (4 * cycle + 1, 0))
        for peer in others:
            device_up(transport, peer)
        exchange(transport, [own, *others], (4 * cycle + 2, 0))
        until(lambda: serving() == SERVING, lambda: f"threads serve {len(transport.peers)} links: {serving()}")
        assert sorted(transport.peers) == sorted([own, *others])
        counters = transport.link_counters()
        assert all(link.doubles == link.stale == link.unacknowledged == 0 for link in counters.values()), counters
        dist.barrier()
        transport.close_link(others[0])
        exchange(transport, [own], (4 * cycle + 3, 0))
        transport.close_link(others[1])
        assert transport.peers == [own]
        with pytest.raises(TransportError, match="has no link to rank"):
            transport.post_send(key(rank, 0, (99, 0)), others[0], torch.ones(1))
        if not before:
            before.update(settled())
        until(no_more_than(before), lambda: f"{held()} is held, {before} before")
        dist.barrier()
    assert transport.link_counters()[own].sessions == 1
    with slow_to_end() as slow:
        transport.close_link(own)
        transport.close()
        assert not our_threads()
    assert slow >= {"adaptra-blocking", f"adaptra-device-receive-{own}", f"adaptra-link-{own}", *SERVING}


def no_more_than(before: dict[str, int]) -> Callable[[], bool]:
    return lambda: no_more(held(), before)


def settled() -> dict[str, int]:
    """What is held once that has not changed for a while."""
    now, since_s = held(), time.monotonic()
    while time.monotonic() < since_s + 1.0:
        time.sleep(0.1)
        if (again := held()) != now:
            now, since_s = again, time.monotonic()
    return now


@contextmanager
def no_reading(rank: int, link: Any) -> Iterator[list[int]]:
    """On one rank, what comes over a link stays in its ring; yields how often it was not read."""
    real, aside, struck = HostLinkReader._read, HostLinkReader._next_step, []

    def read(self: HostLinkReader, *arguments: Any, **more: Any) -> Callable[[], bool]:
        if self is not link._reader:
            return real(self, *arguments, **more)
        struck.append(1)
        time.sleep(0.02)
        return lambda: not link._state.closing

    def next_step(self: HostLinkReader) -> Any:
        step = aside(self)
        if self is not link._reader or step is None or link._state.closing:
            return step
        struck.append(1)
        return 0.02

    if dist.get_rank() == rank:
        HostLinkReader._read = read  # type: ignore[method-assign]
        HostLinkReader._next_step = next_step  # type: ignore[method-assign]
        link._reader.task.next_step = functools.partial(next_step, link._reader)
        with link._lock:
            link._reader.task.wake()  # or it would read on in the ring that it waits for
    try:
        yield struck
    finally:
        HostLinkReader._read = real  # type: ignore[method-assign]
        HostLinkReader._next_step = aside  # type: ignore[method-assign]
        link._reader.task.next_step = link._reader._next_step


def aborted_in_mid_message(make: Make) -> None:
    """A message that fills a ring several times is cut off by an abort at both ends; the micro-batches go again."""
    rank, transport = dist.get_rank(), make(preferred=Path.HOST)
    own, others = partner(rank), crossing(rank)
    for peer in others:
        transport.open_link(peer)
    everyone = [own, *others]
    exchange(transport, everyone, (0, 0))
    dist.barrier()
    opposite = (rank + 2) % 4
    link: Any = transport._links[opposite]
    large = 64 * MEBIBYTE // 4
    with no_reading(2, link) as struck:
        aborted = functools.partial(transport.abort, "stage 0 of replica 1 is being replaced")
        timer = threading.Timer(0.3, aborted)
        cut_off = towards(0, 2, 0, (1, 0))
        if rank == 2:
            transport.post_receive(cut_off, 0)
            link._state.session.inbound.poke()  # or its thread would go on with what it has begun
            until(lambda: bool(struck), "the fault does not fire")
        dist.barrier()
        if rank == 0:
            transport.post_send(cut_off, 2, sent_by(0, 2, 0, (1, 0), large))
        elif rank == 2:
            until(lambda: link._state.session.inbound.backlog == link._settings.slots, "the ring is not full")
        dist.barrier()
        timer.start()
        if rank == 0:
            _woken(lambda: flush(transport), "rank 0 .*, link 0->2: could not send the activation of .*replaced")
        elif rank == 2:
            said = "waited for the activation of micro-batch 0 of replica 0 .*replaced"
            _woken(lambda: transport.wait(cut_off, time.monotonic() + SOON_S), said)
        timer.join()
    with pytest.raises(AbortedError, match="is being replaced"):
        transport.post_send(towards(rank, opposite, 0, (1, 0)), opposite, torch.ones(1))
    for turn in ((1, 1), (2, 0)):
        for peer in everyone:
            transport.open_link(peer)
        exchange(transport, everyone, turn, range(MICRO_BATCHES))
        counters = transport.link_counters()
        assert all(each.doubles == each.stale == each.unacknowledged == 0 for each in counters.values()), counters
        dist.barrier()
    transport.close()


def _woken(wait: Callable[[], object], said: str) -> None:
    """By what its own rank or the peer has aborted, whichever was first."""
    with pytest.raises(AbortedError, match=said):
        wait()


def aborted_by_the_peer(make: Make) -> None:
    """Who waits at the other end of an aborted link learns why at once; both open it again, in another epoch."""
    rank, transport = dist.get_rank(), make()
    own, opposite = partner(rank), (rank + 2) % 4
    transport.open_link(opposite)
    up(transport, [opposite])
    for peer in (own, opposite):
        device_up(transport, peer)
    for attempt in range(3):
        transport.enter(transport._opener.control.in_generation(attempt + 1))
        exchange(transport, [own], (attempt, 0))
        if rank >= 2:
            cut_off = towards(rank, opposite, 0, (attempt, 0))
            transport.post_send(cut_off, opposite, sent_by(rank, opposite, 0, (attempt, 0)))
            transport.post_receive(towards(opposite, rank, 0, (attempt, 0)), opposite)
        dist.barrier()
        if rank < 2:
            transport.abort(f"try {attempt} has failed", [opposite])
        else:
            began_s = time.monotonic()
            with pytest.raises(AbortedError, match=f"rank {opposite} .* has ended it: try {attempt} has failed"):
                transport.wait(towards(opposite, rank, 0, (attempt, 0)), time.monotonic() + SOON_S)
            assert time.monotonic() - began_s < AT_ONCE_S
        transport.open_link(opposite)
        exchange(transport, [own, opposite], (attempt, attempt + 1), range(MICRO_BATCHES))
        device_up(transport, opposite)
        exchange(transport, [own, opposite], (attempt, attempt + 2), range(MICRO_BATCHES))
        assert transport.link_counters()[own].sessions == 1
    dist.barrier()
    transport.close()


def stale_messages(make: Make) -> None:
    """A try that is given up without an abort: what was sent in it is dropped, counted, and never delivered."""
    rank, transport = dist.get_rank(), make(device=False)
    own = partner(rank)
    if rank % 2 == 0:
        for number in range(5):
            transport.post_send(towards(rank, own, number, (0, 0)), own, sent_by(rank, own, number, (0, 0)))
    else:
        for number in (0, 1):
            transport.post_receive(towards(own, rank, number, (0, 0)), own)
        expect(transport, towards(own, rank, 0, (0, 0)), sent_by(own, rank, 0, (0, 0)))
        until(lambda: len(transport._links[own]._receive_queue) == 4, "not all has come")
    dist.barrier()
    exchange(transport, [own], (0, 1), range(MICRO_BATCHES))
    counters = transport.link_counters()[own]
    assert (counters.stale, counters.doubles, counters.unacknowledged) == (4 * (rank % 2), 0, 0), counters
    dist.barrier()
    transport.close()


def a_rank_dies(make: Make) -> None:
    """The others learn who it was; among them links are opened again, in the next epoch, and work."""
    rank, transport = dist.get_rank(), make()
    own, others = partner(rank), crossing(rank)
    for peer in others:
        transport.open_link(peer)
    exchange(transport, [own, *others], (0, 0))
    dist.barrier()
    if rank == 3:
        os._exit(0)
    waiting = next(peer for peer in transport.peers if peer != 3)
    transport.post_receive(towards(waiting, rank, 0, (1, 0)), waiting)
    with pytest.raises(TransportError, match=r"rank 3 \(stage 1 on .*\) is gone: its process has ended"):
        transport.wait(towards(waiting, rank, 0, (1, 0)), time.monotonic() + SOON_S)
    transport.abort("rank 3 is gone")
    transport.close_link(3)
    transport.enter(transport._opener.control.in_generation(1))
    living = [peer for peer in range(3) if peer != rank]
    for peer in living:
        transport.open_link(peer)
    for attempt in (1, 2, 3):
        exchange(transport, living, (1, attempt), range(MICRO_BATCHES))
    for peer in living:
        device_up(transport, peer)
    exchange(transport, living, (2, 0))
    transport.close()
    sys.stdout.flush()
    os._exit(0)  # torch.distributed waits for all ranks


def no_peer_there(make: Make) -> None:
    """A link that one end alone opens: an error in time, and another try is not harmed."""
    rank, transport = dist.get_rank(), make()
    opposite = (rank + 2) % 4
    limit_s = transport._limit_s
    transport._limit_s = 1.0
    if rank < 2:
        transport.open_link(opposite)
        with pytest.raises(TransportError, match=rf"could not be opened: rank {opposite} .* did not open its end"):
            up(transport, [opposite])
        with pytest.raises(TransportError, match="did not open its end"):
            transport.post_send(key(rank, 0, (0, 0)), opposite, torch.ones(1))
    dist.barrier()
    transport._limit_s = limit_s
    transport.open_link(opposite)
    transport.abort("given up before it is up", [opposite])
    with pytest.raises(AbortedError, match="given up before it is up"):
        transport.post_receive(key(opposite, 0, (0, 0)), opposite)
    for peer in (rank, 4):
        with pytest.raises(TransportError, match="it is no other rank"):
            transport.open_link(peer)
    transport.open_link(opposite)
    exchange(transport, [partner(rank), opposite], (0, 0))
    dist.barrier()
    transport.close()


SCENARIOS = (
    opened_and_closed,
    aborted_in_mid_message,
    aborted_by_the_peer,
    stale_messages,
    no_peer_there,
    a_rank_dies,
)


def main(transport_name: str, names: list[str]) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))

    def make(*, device: bool = True, **changes: Any) -> HostTransport:
        layout = gather_layout(PIPELINES[dist.get_rank() // 2])
        rendezvous = Rendezvous(ControlStore.of_job(layout.token), layout, 30.0)
        settings = HostSettings(transport=transport_name, timeout_s=30.0)
        if not device:
            transport = HostTransport(rendezvous, 1, settings)
        else:
            maker = LinkMaker(rendezvous, None)
            maker.connect(wrap=False)
            transport = HostTransport(rendezvous, 1, settings, PathSettings(probe_limit_s=MEETS_S, **changes), maker)
        transport.describe(ANY)
        return transport

    run_scenarios(SCENARIOS, names, make)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
