# SPDX-License-Identifier: Apache-2.0
"""What ranks do in test_dual_path.py: `dual_ranks.py {shm,tcp} SCENARIO...`. A scenario raises when something is
wrong."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from host_ranks import ANY, all_agree, exchange
from transport_checks import CPU, activation, content, expect, flush, host_transport, run_scenarios

from adaptra_megatron.transport._ring import die_with_parent
from adaptra_megatron.transport.delegate.supervisor import Supervisor
from adaptra_megatron.transport.device_session.pair_group import PairGroup, PairWork
from adaptra_megatron.transport.dual_path.host_transport import HostTransport
from adaptra_megatron.transport.dual_path.two_paths import PathSwitch
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.link_paths import Path, PathCounters, PathSettings, ProbeTimes
from adaptra_megatron.transport.message_keys import TensorSpecification, TransportError
from testing.replacing import Replaced, Replacement
from testing.waiting import stop, until

FAILOVER_S = 20.0
"""Before a message's own deadline. How long it takes, `make soak` measures."""
FIXED = TensorSpecification((64, 33), torch.float32, CPU)

Make = Callable[..., HostTransport]


def paths(transport: HostTransport) -> PathCounters:
    counters = transport.link_counters()[1 - dist.get_rank()].paths
    assert counters is not None
    return counters


def on(transport: HostTransport, path: Path) -> None:
    """Wait until this rank sends by `path`."""
    until(lambda: paths(transport).path is path, f"rank {dist.get_rank()} does not send by the {path.value} path")


def timed_exchange(transport: HostTransport, iteration: int) -> float:
    start_s = time.monotonic()
    exchange(transport, iteration)
    return time.monotonic() - start_s


class Swallowed:
    """Work that never ends."""

    def wait(self, timeout: timedelta) -> bool:
        time.sleep(timeout.total_seconds())
        raise RuntimeError("swallowed")


@contextmanager
def faulty_sends(instead: Callable[[], PairWork]) -> Iterator[list[int]]:
    """This rank's sends on the device path do something else; yields the tags that were struck."""
    real, struck = PairGroup.send, []

    def send(self: PairGroup, tensor: torch.Tensor, tag: int) -> PairWork:
        struck.append(tag)
        return instead()

    PairGroup.send = send  # type: ignore[method-assign]
    try:
        yield struck
    finally:
        PairGroup.send = real  # type: ignore[method-assign]


def _raise() -> PairWork:
    raise RuntimeError("emulated: connection reset by peer")


def device_first(make: Make) -> None:
    """Messages begin on the host path and move to the device path once that is proven; fixed and varying shapes."""
    for specification in (ANY, FIXED):
        transport = make(stall_s=10.0)
        transport.describe(specification)
        on(transport, Path.DEVICE)
        dist.barrier()
        transport.take_times()
        for iteration in range(3):
            if specification is ANY:
                exchange(transport, iteration)
            else:
                _exchange_fixed(transport, iteration)
        for times in transport.take_times():
            assert [entry.path for entry in times] == [Path.DEVICE] * 30
            assert all(entry.nbytes > 0 for entry in times)
        counters = paths(transport)
        assert counters.sent_by_device == 30, counters
        assert counters.sent_by_host == 0, counters
        assert transport.link_counters()[1 - dist.get_rank()].doubles == 0
        dist.barrier()
        transport.close()


def _exchange_fixed(transport: HostTransport, iteration: int) -> None:
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    for number in range(10):
        transport.post_receive(activation(number, iteration=iteration, chunk=peer), peer)
        tensor = content(FIXED.shape or (), torch.float32, 100 * iteration + 10 * number + rank)
        transport.post_send(activation(number, iteration=iteration, chunk=rank), peer, tensor)
    for number in range(10):
        key = activation(number, iteration=iteration, chunk=peer)
        expect(transport, key, content(FIXED.shape or (), torch.float32, 100 * iteration + 10 * number + peer))
    flush(transport)


def _fails_over(make: Make, instead: Callable[[], PairWork]) -> None:
    transport = make()
    on(transport, Path.DEVICE)
    exchange(transport, 0)
    dist.barrier()
    if dist.get_rank() == 0:
        with faulty_sends(instead) as struck:
            took_s = timed_exchange(transport, 1)
            assert struck, "the fault did not fire"
            assert paths(transport).path is Path.HOST
            exchange(transport, 2)
            before = len(struck)
            until(lambda: len(struck) > before, "no other session was tried")  # what it sends is lost as well
            exchange(transport, 3)
            assert paths(transport).path is Path.HOST
    else:
        took_s = timed_exchange(transport, 1)
        exchange(transport, 2)
        exchange(transport, 3)
    assert took_s < FAILOVER_S, f"failing over took {took_s:.2f} s"
    sys.stdout.write(f"failing over took {took_s:.2f} s\n")
    on(transport, Path.DEVICE)
    exchange(transport, 4)
    counters = paths(transport)
    assert counters.sent_by_device > 0
    assert counters.sessions_lost >= 1
    dist.barrier()
    transport.close()


def device_silent(make: Make) -> None:
    """Rank 0's device path swallows messages: the other path brings them in time, and the device path comes back."""
    _fails_over(make, Swallowed)


def device_raises(make: Make) -> None:
    """Rank 0's device path raises: as above, at once."""
    _fails_over(make, _raise)


def device_ends(make: Make) -> None:
    """Device sessions are closed under both ends, again and again in the middle of traffic."""
    transport = make(first_rest_s=0.02, longest_rest_s=0.1, probe_pause_s=0.002)
    on(transport, Path.DEVICE)
    peer, randomness = 1 - dist.get_rank(), random.Random(dist.get_rank())
    link: Any = transport._links[peer]
    done = threading.Event()
    ended = 0

    def end_sessions() -> None:
        nonlocal ended
        while not done.is_set():
            time.sleep(randomness.uniform(0.01, 0.1))
            link._paths.abort_all()
            ended += 1

    thread = threading.Thread(target=end_sessions)
    thread.start()
    start_s, iteration = time.monotonic(), 0
    while not all_agree(time.monotonic() > start_s + 4.0 and ended > 20 and paths(transport).sessions_lost > 5):
        exchange(transport, iteration)
        iteration += 1
    done.set()
    thread.join()
    on(transport, Path.DEVICE)
    exchange(transport, iteration)
    dist.barrier()
    transport.close()


def switching(make: Make) -> None:
    """Both ranks change the preferred path at random all the time: every message arrives once."""
    transport = make(stall_s=10.0)
    peer, randomness = 1 - dist.get_rank(), random.Random(dist.get_rank())
    done = threading.Event()

    def switch() -> None:
        while not done.is_set():
            transport.prefer(peer, randomness.choice(list(Path)))
            time.sleep(randomness.uniform(0.0, 0.01))

    thread = threading.Thread(target=switch)
    thread.start()
    counters, iteration = paths(transport), 0
    # As long as it takes on this machine until both paths have carried many messages.
    while not all_agree(min(counters.sent_by_device, counters.sent_by_host) > 100 and counters.switches > 20):
        exchange(transport, iteration)
        counters, iteration = paths(transport), iteration + 1
    done.set()
    thread.join()
    sys.stdout.write(f"{counters}\n")
    assert counters.sessions_lost == 0, counters
    assert transport.link_counters()[peer].doubles == 0
    dist.barrier()
    transport.close()


def measured(make: Make) -> None:
    """Whichever path messages take, the other one is measured, also while they change it at random; all of them arrive
    once."""
    transport = make(stall_s=10.0)
    peer, randomness = 1 - dist.get_rank(), random.Random(dist.get_rank())
    transport.measure(peer)  # nothing has been sent: the size of a usual message is not known
    assert not transport.take_probes()
    on(transport, Path.DEVICE)
    exchange(transport, 0)
    for path in (Path.HOST, Path.DEVICE):
        _measure_in_peace(transport, path)
        exchange(transport, 1 + (path is Path.DEVICE))
        dist.barrier()
        transport.prefer(peer, path)
        on(transport, path)
        dist.barrier()
    for iteration in range(3, 63):
        transport.measure(peer)
        if iteration % 3 == 0:
            transport.prefer(peer, randomness.choice(list(Path)))
        exchange(transport, iteration)
    probes = transport.take_probes()
    assert {probe.path for probe in probes} == set(Path)
    assert all(0.0 < probe.arrived_s - probe.sent_s < 5.0 for probe in probes), probes
    counters = paths(transport)
    assert counters.switches > 5, counters
    assert counters.sessions_lost == 0, counters
    assert (counters.device_down, counters.host_down) == (None, None)
    assert transport.link_counters()[peer].doubles == 0
    dist.barrier()
    transport.close()


def _measure_in_peace(transport: HostTransport, path: Path) -> None:
    peer, found, measure = 1 - dist.get_rank(), list[ProbeTimes](), PathSwitch.measure

    def twice(switch: PathSwitch, device: torch.device) -> None:
        measure(switch, device)
        measure(switch, device)  # does nothing: the probes go one after the other, and none can be over meanwhile

    began_s = time.monotonic()
    with Replaced([Replacement(PathSwitch, "measure", twice, "both within the link's lock")]):
        transport.measure(peer)
    until(lambda: bool(found.extend(transport.take_probes()) or found), f"no probe measured the {path.value} path")
    assert [(probe.peer, probe.path) for probe in found] == [(peer, path)] * PathSettings.measuring_probes
    ended_s, sent_s = time.monotonic(), [probe.sent_s for probe in found]
    assert sent_s == sorted(sent_s)
    # Both ranks are on one machine, and share its clock.
    assert all(began_s <= probe.sent_s < probe.arrived_s <= ended_s for probe in found), found
    assert all(later > probe.arrived_s for later, probe in zip(sent_s[1:], found, strict=False))


@contextmanager
def no_delegate(transport: HostTransport) -> Iterator[None]:
    """The delegate of this rank is killed, and no other is started."""
    begin = Supervisor._begin

    def later(self: Supervisor) -> None:
        self._restart_s = time.monotonic() + 0.05

    Supervisor._begin = later  # type: ignore[method-assign]
    try:
        assert transport.delegate_process_id is not None
        os.kill(transport.delegate_process_id, signal.SIGKILL)
        yield
    finally:
        Supervisor._begin = begin  # type: ignore[method-assign]


def host_dies(make: Make) -> None:
    """The host path is preferred, and dies for good in the middle: the device path takes over, with what was lost."""
    _host_dies(make(preferred=Path.HOST, stall_s=10.0), lambda: None)


def _host_dies(transport: HostTransport, first: Callable[[], None]) -> None:
    """As `host_dies` says, after what rank 0 does `first`; and back once the host path is whole again."""
    exchange(transport, 0)
    assert paths(transport).sent_by_device == 0
    until(lambda: transport._links[1 - dist.get_rank()]._paths.sender.device_healthy, "no device path")  # type: ignore[attr-defined]
    dist.barrier()
    if dist.get_rank() == 0:
        first()
    with no_delegate(transport) if dist.get_rank() == 0 else nullcontext():
        took_s = timed_exchange(transport, 1)
        # Over shm both ends have the rings themselves: messages still arrive until the delegate's death is noticed.
        on(transport, Path.DEVICE)
        for iteration in (2, 3):
            exchange(transport, iteration)
        counters = paths(transport)
        assert counters.path is Path.DEVICE, counters
        dist.barrier()
    sys.stdout.write(f"failing over to the device path took {took_s:.2f} s\n")
    assert took_s < FAILOVER_S, f"failing over took {took_s:.2f} s"
    on(transport, Path.HOST)
    # A peer that has posted receives already expects these on the device path, and the change waits for them.
    dist.barrier()
    exchange(transport, 4)
    dist.barrier()
    transport.close()


@contextmanager
def other_store() -> Iterator[tuple[dist.Store, int]]:
    """A client of a store that a process of its own serves, and that process."""
    place: list[Any] = [None]
    if dist.get_rank() == 0:
        read, write = os.pipe()
        if (server := os.fork()) == 0:
            die_with_parent(os.getppid())
            served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(write, str(served.port).encode())
            signal.pause()
        place = [(server, int(os.read(read, 16)))]
    dist.broadcast_object_list(place, 0)
    server, port = place[0]
    try:
        yield dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30)), server
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            os.kill(server, signal.SIGKILL)
            os.waitpid(server, 0)


def store_stops(make: Make) -> None:
    """As `host_dies`, with a store whose process is stopped."""
    _host_dies_without_store(make, signal.SIGSTOP)


def store_dies(make: Make) -> None:
    """As `host_dies`, with a store whose process is gone."""
    _host_dies_without_store(make, signal.SIGKILL)


def _host_dies_without_store(make: Make, fault: signal.Signals) -> None:
    with other_store() as (store, server):
        _host_dies(make(preferred=Path.HOST, stall_s=10.0, store=store), lambda: stop(server, fault))


def both_die(make: Make) -> None:
    """No path is left: an error with both causes, not later than the grace period of the host path."""
    _both_die(make(grace_s=1.5), _raise, "torch.distributed reported: emulated: connection")


def both_die_silently(make: Make) -> None:
    """As above; sessions that nothing comes through are made again and again, and are no path that is up."""
    _both_die(make(grace_s=3.0, first_rest_s=0.1, longest_rest_s=0.1), Swallowed, "what was sent did not arrive for")


def _both_die(transport: HostTransport, instead: Callable[[], PairWork], cause: str) -> None:
    on(transport, Path.DEVICE)
    exchange(transport, 0)
    dist.barrier()
    key = activation(0, iteration=1)
    if dist.get_rank() == 0:
        with no_delegate(transport), faulty_sends(instead):
            _host_is_down(transport)
            dist.barrier()
            transport.post_send(key, 1, torch.ones(5))
            with pytest.raises(TransportError) as failed:
                transport.flush(time.monotonic() + 30.0)
            dist.barrier()
    else:
        _host_is_down(transport)
        dist.barrier()

        def receive() -> None:
            transport.post_receive(key, 0)  # which raises, too, once the link has failed
            transport.wait(key, start_s + 30.0)

        start_s = time.monotonic()
        with pytest.raises(TransportError) as failed:
            receive()
        assert time.monotonic() - start_s < 20.0
        dist.barrier()
    for part in (
        f"rank {dist.get_rank()} (stage {dist.get_rank()} on ",
        "link 0->1",
        str(key),
        "host path has been down",
        f"the device path is down: {cause}",
    ):
        assert part in str(failed.value), f"{part!r} is missing in: {failed.value}"
    transport.close()


def _host_is_down(transport: HostTransport) -> None:
    link: Any = transport._links[1 - dist.get_rank()]
    until(lambda: link._state.down_since_s is not None, "the host path is still up")


SCENARIOS = (
    device_first,
    device_silent,
    device_raises,
    device_ends,
    switching,
    measured,
    host_dies,
    store_stops,
    store_dies,
    both_die,
    both_die_silently,
)


def main(transport_name: str, names: list[str]) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))

    def make(grace_s: float = 10.0, store: Any = None, **changes: Any) -> HostTransport:
        settings = HostSettings(transport=transport_name, timeout_s=30.0, grace_s=grace_s)
        transport = host_transport(settings, PathSettings(**changes), store=store)
        transport.describe(ANY)
        return transport

    run_scenarios(SCENARIOS, names, make)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
