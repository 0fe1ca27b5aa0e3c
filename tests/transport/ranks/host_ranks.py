# SPDX-License-Identifier: Apache-2.0
"""What ranks do in test_host_transport.py: `host_ranks.py {shm,tcp} SCENARIO`. A scenario raises when it goes wrong."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_usage import sleeper, usage
from transport_checks import (
    CPU,
    MEBIBYTE,
    activation,
    content,
    expect,
    flush,
    gradient,
    host_transport,
    no_more,
    our_threads,
    run_scenarios,
    slow_to_end,
)

from adaptra_megatron.common.handshake import ANSWER_NBYTES, CHALLENGE_NBYTES
from adaptra_megatron.transport.delegate.supervisor import INTERVAL_S
from adaptra_megatron.transport.dual_path.host_transport import HostTransport
from adaptra_megatron.transport.gpu.cuda_device import Computed
from adaptra_megatron.transport.host_link.message_queues import RetransmitQueue
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.lines.lines import SILENT_S
from adaptra_megatron.transport.message_keys import MessageKey, TensorSpecification, TransportError
from testing.waiting import stop, until

ANY = TensorSpecification(None, torch.float32, CPU)
SIZES = (1, 1000, MEBIBYTE // 8, MEBIBYTE, 40_000)
"""Elements of float32: below, at and beyond what fits into a slot and a ring."""

FAILOVER_S = 20.0
"""Longest pause of traffic that a dead or silent delegate may cause: before a message's own deadline. `make soak`
measures it."""

MOST_WAKES_PER_S = 20.0
"""Limit of a delegate that has only pings to answer: five times as many as there are."""

Make = Callable[..., HostTransport]


def store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def alive(process: int) -> bool:
    """Return whether a process runs; one that waits for its parent to notice its death does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends between opening and reading
        return False


def exchange(transport: HostTransport, iteration: int, messages: int = 10, within_s: float = 20.0) -> None:
    """Both ranks send to each other; every message arrives once, with its content, each within `within_s`."""
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    keys: list[tuple[MessageKey, MessageKey]] = []
    for number in range(messages):
        both = (activation(number, iteration=iteration), gradient(number, iteration=iteration))
        keys.append((both[rank], both[peer]))
    for number, (ours, theirs) in enumerate(keys):
        transport.post_receive(theirs, peer)
        transport.post_send(ours, peer, _content(number, iteration, rank))
    for number, (_ours, theirs) in enumerate(keys):
        expect(transport, theirs, _content(number, iteration, peer), within_s)
    flush(transport, within_s)


def _content(number: int, iteration: int, sender: int) -> torch.Tensor:
    shape = (SIZES[number % len(SIZES)],)
    return content(shape, torch.float32, 1000 * iteration + 10 * number + sender)


def delegates_killed(make: Make) -> None:
    """Each rank kills its delegate again and again in the middle of traffic; nothing is lost or doubled."""
    kills, peer = 3, 1 - dist.get_rank()
    transport = make()
    exchange(transport, 0)
    done = threading.Event()

    def sessions() -> int:
        return transport._links[peer].sessions

    def kill() -> None:
        try:
            for number in range(kills):
                time.sleep(0.1 + 0.07 * number + 0.05 * dist.get_rank())
                broken, process = sessions(), transport.delegate_process_id
                assert process is not None
                os.kill(process, signal.SIGKILL)
                until(lambda broken=broken: sessions() > broken, "the link is not up again after a kill", 20.0)
        finally:
            done.set()

    killer = threading.Thread(target=kill)
    killer.start()
    iteration = 1
    while not (all_agree(done.is_set()) and iteration > 3):
        exchange(transport, iteration)
        iteration += 1
    killer.join()
    exchange(transport, iteration)
    counters = transport.counters()
    assert counters.delegate_starts == 1 + kills
    assert counters.links[peer].sessions >= 1 + kills
    assert counters.links[peer].unacknowledged == 0
    dist.barrier()
    transport.close()


def all_agree(mine: bool) -> bool:
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, mine)
    return all(answers)


def delegate_stopped(make: Make) -> None:
    """A delegate is stopped in the middle of traffic: it is replaced, soon enough, and every message arrives once."""
    transport, peer = make(), 1 - dist.get_rank()
    exchange(transport, 0)
    dist.barrier()
    victim, longest_s, iteration = transport.delegate_process_id, 0.0, 1
    assert victim is not None
    links = transport.link_counters()
    while not all_agree(iteration > 20 and links[peer].sessions > 1):
        start_s = time.monotonic()
        if iteration == 10 and dist.get_rank() == 0:
            threading.Timer(0.01, os.kill, (victim, signal.SIGSTOP)).start()
        exchange(transport, iteration)
        longest_s = max(longest_s, time.monotonic() - start_s)
        # Not those of the delegate, which would wait for the next one in place of an exchange.
        links, iteration = transport.link_counters(), iteration + 1
    counters = transport.counters()
    assert counters.delegate_starts >= 2 - dist.get_rank()
    assert counters.links[peer].unacknowledged == 0
    assert not alive(victim) or dist.get_rank() == 1, "the stopped delegate is still there"
    # At one end perhaps: the other may have had all that it waits for, and waits for the first one to agree.
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, longest_s)
    assert 0.5 < max(of_ranks) < FAILOVER_S, f"the longest exchange of each rank took {of_ranks} s"
    sys.stdout.write(f"stopped delegate: traffic stood for {longest_s:.2f} s\n")
    dist.barrier()
    transport.close()


def rank_stopped(make: Make) -> None:
    """A whole training process is stopped for longer than a delegate may be: nothing changes, no delegate is killed."""
    transport, stop_s, over = make(), 3.0, threading.Event()
    ranks: list[Any] = [None, None]
    dist.all_gather_object(ranks, os.getpid())
    exchange(transport, 0)
    delegate, iteration, ends_s = transport.delegate_process_id, 1, [time.monotonic()]

    def stop_for_a_while() -> None:
        time.sleep(0.2)
        stop(ranks[0])
        time.sleep(stop_s)
        os.kill(ranks[0], signal.SIGCONT)
        over.set()

    stopper = threading.Thread(target=stop_for_a_while)
    if dist.get_rank() == 1:
        stopper.start()
    else:
        over.set()
    while not all_agree(over.is_set()):
        exchange(transport, iteration)
        ends_s.append(time.monotonic())
        iteration += 1
    time.sleep(1.5)  # a supervisor that took the silence for a failure would act now
    exchange(transport, iteration)
    counters = transport.counters()
    longest_s: list[Any] = [None, None]
    dist.all_gather_object(longest_s, max(after - before for before, after in zip(ends_s, ends_s[1:], strict=False)))
    assert max(longest_s) > stop_s - 0.2, f"the longest exchange of each rank took {longest_s} s: nothing was stopped"
    assert transport.delegate_process_id == delegate
    assert counters.delegate_starts == 1
    assert counters.links[1 - dist.get_rank()].sessions == 1
    dist.barrier()
    transport.close()


def stopped_while_the_link_is_down(make: Make) -> None:
    """A training process does not run for longer than a link may be down, and cannot connect: training goes on then."""
    # A rank that was paused itself counts its peer as running for another SILENT_S.
    grace_s = SILENT_S + 1.0
    transport, stop_s = make(grace_s=grace_s), grace_s + 2.0
    ranks: list[Any] = [None, None]
    dist.all_gather_object(ranks, os.getpid())
    exchange(transport, 0)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(ranks[0], signal.SIGSTOP)
        state: Any = transport._links[0]._state
        until(lambda: state._stopped_s is not None, "rank 1 does not see that rank 0 is stopped")
        delegate = transport.delegate_process_id
        assert delegate is not None
        os.kill(delegate, signal.SIGKILL)
        start_s = time.monotonic()
        threading.Timer(stop_s, os.kill, (ranks[0], signal.SIGCONT)).start()
    for iteration in range(1, 4):
        exchange(transport, iteration)
    if dist.get_rank() == 1:
        assert time.monotonic() - start_s >= stop_s, "nothing was stopped"
    counters = transport.counters()
    assert counters.links[1 - dist.get_rank()].sessions > 1
    dist.barrier()
    transport.close()


def rank_lost(make: Make) -> None:
    """One of four dies while all others wait: each has an error that names it, within a second."""
    rank, victim = dist.get_rank(), 2
    transport = make(timeout_s=60.0)
    names = transport._layout.name(victim)
    for peer in transport.peers:
        transport.post_receive(activation(0, chunk=peer), peer)
    dist.barrier()
    if rank == victim:
        time.sleep(0.3)
        sys.stdout.write(f"killed at {time.monotonic()}\n")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    awaited = [activation(0, chunk=peer) for peer in transport.peers]
    waits = {0: lambda: transport.wait_any(awaited, time.monotonic() + 30.0)}
    with pytest.raises(TransportError) as failed:
        waits.get(rank, lambda: transport.wait(awaited[0], time.monotonic() + 30.0))()
    failed_s = time.monotonic()
    transport.report_failure(str(failed.value))
    transport.close(drained=False)
    sys.stdout.write(f"failed at {failed_s}, ended at {time.monotonic()}: {failed.value}\n")
    sys.stdout.flush()
    assert f"{names} is gone: its process has ended. Look at {names} first" in str(failed.value)
    os._exit(0)


def parent_killed(make: Make) -> None:
    """Rank 0 dies by SIGKILL; its delegate and its addresses end with it."""
    transport = make()
    exchange(transport, 0)
    if dist.get_rank() == 1:
        store().set("survivor", "ready")
        victim, delegate = (int(number) for number in store().get("victim").decode().split())
        store().set("kill", "now")
        until(lambda: not alive(victim), "the victim did not die")
        until(lambda: not alive(delegate), "a delegate still runs without its parent")
        transport.close()
        sys.stdout.write("survived\n")
        sys.stdout.flush()
        os._exit(0)
    store().set("victim", f"{os.getpid()} {transport.delegate_process_id}")
    store().get("kill")
    os.kill(os.getpid(), signal.SIGKILL)


def another_delegate(transport: HostTransport, process: int) -> int:
    """Process id of the delegate that has replaced `process`; an assertion after 20 s without one."""
    until(lambda: transport.delegate_process_id not in (None, process), "no other delegate", 20.0)
    replacement = transport.delegate_process_id
    assert replacement is not None
    return replacement


def nothing_leaks(make: Make) -> None:
    """Transports come and go, with a killed delegate each; descriptors, threads, children, memory stay."""
    before, addresses = None, set()
    for number in range(4):
        transport = make()
        addresses |= _abstract_addresses(transport)
        exchange(transport, 0)
        process = transport.delegate_process_id
        assert process is not None
        os.kill(process, signal.SIGKILL)
        exchange(transport, 1)  # may still pass through a delegate that is about to die
        replacement = another_delegate(transport, process)
        dist.barrier()
        transport.close()
        transport.close()
        assert not alive(process)
        assert not alive(replacement)
        del transport
        gc.collect()
        dist.barrier()
        held = _held(addresses)
        if number == 0:
            before = held  # the first one also pays for what torch.distributed and the standard library keep
    assert no_more(held, before), f"{held} after 4 transports, {before} after the first"


def _abstract_addresses(transport: HostTransport) -> set[str]:
    """Abstract addresses of this rank's own sockets in /proc/net/unix: other jobs on this machine come and go."""
    listeners = transport._opener.supervisor._listeners
    names = {listener.getsockname() for listener in listeners if listener.family == socket.AF_UNIX}
    return {"@" + os.fsdecode(name[1:]) for name in names}


def _held(addresses: set[str]) -> dict[str, int]:
    maps = Path("/proc/self/maps").read_text()
    present = Path("/proc/net/unix").read_text().split()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(our_threads()),
        "rings": maps.count("memfd:adaptra-ring"),
        "addresses": sum(address in addresses for address in present),
    }


def intruders(make: Make) -> None:
    """Junk, oversized, replayed, half-open and too many connections change nothing, and are counted."""
    transport = make(handshake_s=1.0)
    exchange(transport, 0)
    if dist.get_rank() == 1:
        (listener,) = transport._opener.supervisor._listeners
        half_open = [_connect(listener) for _ in range(70)]  # more than an acceptor lets wait
        request = b"GET / HTTP/1.1\r\n\r\n" + bytes(100)
        for junk in (request, os.urandom(1 << 16), bytes(ANSWER_NBYTES), b"\xff" * ANSWER_NBYTES):
            with _connect(listener) as peer:
                _say(peer, junk)
                assert _answer(peer) == b"", "a peer was let in"
        _connect(listener).close()
        dist.barrier()
        exchange(transport, 1)
        until(lambda: sum(transport.counters().refused.values()) >= 75, f"only {transport.counters()} were counted")
        refused = transport.counters().refused
        assert refused["half_open"] >= 71
        assert refused.get("junk", 0) + refused.get("wrong_secret", 0) == 4
        for connection in half_open:
            connection.close()
    else:
        dist.barrier()
        exchange(transport, 1)
    dist.barrier()
    assert transport.delegate_process_id is not None
    if dist.get_rank() == 1:
        os.kill(transport.delegate_process_id, signal.SIGKILL)  # after all that, a peer still gets in
    exchange(transport, 2)  # rings without a delegate may be usable for as long as this takes
    until(lambda: transport.link_counters()[1 - dist.get_rank()].sessions > 1, "the link did not come up again")
    dist.barrier()
    transport.close()


def _connect(listener: socket.socket) -> socket.socket:
    connection = socket.socket(listener.family, socket.SOCK_STREAM)
    connection.settimeout(5.0)
    connection.connect(listener.getsockname())
    return connection


def _say(connection: socket.socket, what: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # hung up on before everything was said
        connection.sendall(what)


def _answer(connection: socket.socket) -> bytes:
    """What comes after the challenge."""
    answer = b""
    with contextlib.suppress(ConnectionError):  # hung up on with something unread
        while part := connection.recv(1 << 16):
            answer += part
    return answer[CHALLENGE_NBYTES:]


def held_until_acknowledged(make: Make) -> None:
    """The storage under a sent tensor is swapped at once; the bytes are held until they were asked for, then freed."""
    transport, refs = make(), []
    post = RetransmitQueue.post

    def watched(self: RetransmitQueue, key: MessageKey, number: int, computed: Computed, *options: Any) -> Any:
        refs.append(weakref.ref(computed.tensor))
        return post(self, key, number, computed, *options)

    shape = (MEBIBYTE,)
    if dist.get_rank() == 0:
        RetransmitQueue.post = watched  # type: ignore[method-assign]
        tensor = content(shape, torch.float32, 5)
        transport.post_send(activation(0), 1, tensor)
        tensor.data = torch.empty(1)  # Megatron's deallocate_output_tensor
        time.sleep(0.2)
        assert [ref() is not None for ref in refs] == [True]
        dist.barrier()
        until(lambda: refs[0]() is None, "the sent tensor is still held after it was acknowledged")
        flush(transport)
    else:
        dist.barrier()
        transport.post_receive(activation(0), 0)
        received = transport.wait(activation(0), time.monotonic() + 10.0)
        assert torch.equal(received, content(shape, torch.float32, 5))
        kept = weakref.ref(received)
        del received
        assert kept() is None, "a received tensor is held by the transport"
    dist.barrier()
    transport.close()


def back_pressure(make: Make) -> None:
    """Posting never waits, however little the receiver asks for; what it keeps unasked is bounded by the window."""
    transport = make(window_messages=8, slots=4)
    count, shape = 60, (MEBIBYTE // 4,)
    if dist.get_rank() == 0:
        slowest_s = 0.0
        for number in range(count):
            tensor = content(shape, torch.float32, number)
            start_s = time.monotonic()
            transport.post_send(activation(number), 1, tensor)
            slowest_s = max(slowest_s, time.monotonic() - start_s)
        assert slowest_s < 10.0, f"posting took {slowest_s:.3f} s"
        assert transport.counters().links[1].unacknowledged == count
        dist.barrier()
        flush(transport)
    else:
        dist.barrier()
        until(lambda: len(transport._links[0]._receive_queue) == 8, "not as many as the window allows")
        time.sleep(0.3)
        assert len(transport._links[0]._receive_queue) == 8, "more than the window allows"
        for number in range(count):
            assert len(transport._links[0]._receive_queue) <= 8  # once one is asked for, another may come for it
            transport.post_receive(activation(number), 0)
            expect(transport, activation(number), content(shape, torch.float32, number))
    dist.barrier()
    transport.close()


def closed(make: Make) -> None:
    """close() ends threads and delegate, twice does no harm, and the peer gets a farewell."""
    transport = make(grace_s=30.0)
    exchange(transport, 0)
    dist.barrier()
    if dist.get_rank() == 0:
        with slow_to_end() as slow:
            transport.close()
            assert not our_threads()
        assert slow >= {"adaptra-blocking", "adaptra-connections", "adaptra-links-receive", "adaptra-links-send"}
        transport.close()
        assert transport.delegate_process_id is None
        dist.barrier()
        return
    dist.barrier()
    start_s = time.monotonic()
    with pytest.raises(
        TransportError, match=r"rank 1 \(stage 1 on .*, link 1->0.*rank 0 \(stage 0 on .* has closed its end"
    ):
        until(lambda: transport.post_send(gradient(0, iteration=1), 0, torch.zeros(1)), "the farewell did not arrive")
    assert time.monotonic() - start_s < 20.0, "the grace period was waited for though the peer said good-bye"
    transport.close()


def idle(make: Make) -> None:
    """An idle delegate wakes now and then, uses less than 0.5% of a core, and little memory.

    A virtual machine that its host gives no core at once is charged for waiting: milliseconds per wake. So a process
    next to it that only wakes as often shows what the machine makes of that (a delegate, which is asked something,
    works some times as much), and the quietest of some seconds counts.
    """
    transport = make()
    exchange(transport, 0)
    dist.barrier()
    process = Path(f"/proc/{transport.delegate_process_id}")
    with sleeper(INTERVAL_S) as other:
        time.sleep(1.0)  # what the exchange left to do, and the other's beginning
        said = []
        for _ in range(6):
            used, wakes_per_s, other_used = usage(1.0, process, other)
            said.append(f"{used:.3%} of a core, {wakes_per_s:.1f} wakes per second; a sleeper: {other_used:.3%}")
            assert wakes_per_s < MOST_WAKES_PER_S, said
            if used < max(0.005, 8 * other_used):
                break
        else:
            pytest.fail(f"an idle delegate uses too much: {said}")
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    resident_mib = (int(status["RssAnon"].split()[0]) + int(status["RssFile"].split()[0])) / 1024
    assert resident_mib < 64, f"a delegate takes {resident_mib:.0f} MiB"
    assert "libtorch" not in (process / "maps").read_text()
    sys.stdout.write(f"idle delegate: {said[-1]}; {resident_mib:.1f} MiB\n")
    dist.barrier()
    transport.close()


def gigabyte(make: Make) -> None:
    """The largest message that is promised."""
    transport = make()
    elements = 1 << 27
    if dist.get_rank() == 0:
        tensor = torch.arange(elements, dtype=torch.int64)
        transport.post_send(activation(0), 1, tensor)
        transport.flush(time.monotonic() + 40.0)
    else:
        transport.post_receive(activation(0), 0)
        received = transport.wait(activation(0), time.monotonic() + 40.0)
        assert received.shape == (elements,)
        assert torch.equal(received, torch.arange(elements, dtype=torch.int64))
    dist.barrier()
    transport.close()


def bound(make: Make) -> None:
    """The delegate and the threads that copy run on the CPUs that they are given, a later delegate too; the
    training does not."""
    training = os.sched_getaffinity(0)
    cpus = frozenset({min(training)})
    before = {thread.native_id for thread in threading.enumerate()}
    transport = make(cpus=cpus)
    exchange(transport, 0)
    delegate = transport.delegate_process_id
    assert delegate is not None
    ours = {thread.native_id for thread in threading.enumerate()} - before
    assert len(ours) >= 3
    for each in (*ours, delegate):
        assert each is not None
        assert os.sched_getaffinity(each) == cpus
    assert os.sched_getaffinity(0) == training
    dist.barrier()
    os.kill(delegate, signal.SIGKILL)
    replacement = another_delegate(transport, delegate)
    assert os.sched_getaffinity(replacement) == cpus
    exchange(transport, 1)
    dist.barrier()
    transport.close()


SCENARIOS = (
    bound,
    delegates_killed,
    delegate_stopped,
    rank_stopped,
    stopped_while_the_link_is_down,
    rank_lost,
    parent_killed,
    nothing_leaks,
    intruders,
    held_until_acknowledged,
    back_pressure,
    closed,
    idle,
    gigabyte,
)


def main(path: str, names: list[str]) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    settings = HostSettings(transport=path, timeout_s=30.0)

    def make(**changes: Any) -> HostTransport:
        transport = host_transport(replace(settings, **changes))
        transport.describe(ANY)
        return transport

    run_scenarios(SCENARIOS, names, make)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
