# SPDX-License-Identifier: Apache-2.0
"""Two ends of a verbs link in one process, over the Soft-RoCE rails that scripts/softroce_vm.py sets up, and what can
happen to these rails."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import numpy

from adaptra_megatron.transport._ring import DATA_TYPES, Description, Event, Inbox, Ring
from adaptra_megatron.transport.wires.verbs.verbs_session import VerbsSession
from adaptra_megatron.transport.wires.verbs.verbs_wire import VerbsWire

SLOTS, SLOT_NBYTES = 16, 1 << 18
UP_S = 30.0
MESSAGE_S = 60.0


class CountingWire(VerbsWire):
    """Remembers every chunk that it hands to the receiving ring."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)
        self.arrived: list[int] = []

    def commit(self, chunk: int) -> int:
        self.arrived.append(chunk)
        return super().commit(chunk)


class End:
    """What a training process has of a link: two rings, and messages over them."""

    def __init__(self, devices: list[str], connects: bool) -> None:
        self.outbound, self.inbound = Ring.create(SLOTS, SLOT_NBYTES), Ring.create(SLOTS, SLOT_NBYTES)
        self.wire = CountingWire(self.outbound, self.inbound, connects=connects, devices=devices, timeout_s=UP_S)
        self.causes: list[str] = []
        self.sent_chunks = 0
        self._inbox = Inbox(max_message_nbytes=1 << 30, pooled_nbytes=1 << 26)
        self._sequence = 0

    @property
    def session(self) -> VerbsSession:
        assert self.wire.session is not None
        return self.wire.session

    def send(self, content: numpy.ndarray) -> None:
        write_message(self.outbound, self._sequence, content)
        self._sequence += 1
        self.sent_chunks += max(1, -(-content.nbytes // SLOT_NBYTES))

    def receive(self) -> Event:
        event = self._inbox.next(self.inbound, time.monotonic() + MESSAGE_S)
        assert event is not None, f"no message in {MESSAGE_S} s; {self.causes} {self.session.outage()}"
        return event


def write_message(ring: Ring, sequence: int, content: numpy.ndarray) -> None:
    description = Description(
        sequence=sequence,
        iteration=0,
        direction=0,
        chunk=0,
        micro_batch=sequence,
        dtype=DATA_TYPES["uint8"],
        shape=[content.nbytes],
    )
    ring.write(description, content.ctypes.data, content.nbytes, time.monotonic() + MESSAGE_S)


class Pair:
    """Two ends, both in an event loop of a thread."""

    def __init__(self, rails: str) -> None:
        self.left = End([f"rx{rail}0" for rail in rails], True)
        self.right = End([f"rx{rail}1" for rail in rails], False)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._run(self._begin())
        for rail in range(len(rails)):
            self.wait_for_state(rail, "up")

    def wait_for_state(self, rail: int, state: str, limit_s: float = UP_S) -> float:
        """How long it took until both ends had the rail in this state."""
        return wait_until(lambda: self.states(rail) == [state, state], limit_s, lambda: str(self.describe()))

    def states(self, rail: int) -> list[str]:
        return [end.session.rail_states[rail].value for end in (self.left, self.right)]

    def describe(self) -> list[object]:
        return [(end.session.rail_states, end.session.outage(), end.causes) for end in (self.left, self.right)]

    def close(self) -> None:
        for end in (self.left, self.right):
            self._run(end.wire.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _begin(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            theirs, _address = listener.accept()
        for connection in (ours, theirs):
            connection.setblocking(False)
        await asyncio.gather(
            self.left.wire.begin([ours], self.left.causes.append),
            self.right.wire.begin([theirs], self.right.causes.append),
        )

    def _run(self, work: object) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(60)


def random_bytes(nbytes: int, seed: int) -> numpy.ndarray:
    return numpy.random.default_rng(seed).integers(0, 256, nbytes, numpy.uint8)


def wait_until(done: Callable[[], bool], limit_s: float, describe: Callable[[], str] = lambda: "") -> float:
    """Seconds until `done`; fails after `limit_s`."""
    begun_s = time.monotonic()
    while not done():
        assert time.monotonic() - begun_s < limit_s, f"not within {limit_s} s: {describe()}"
        time.sleep(0.01)
    return time.monotonic() - begun_s


def shell(command: str) -> str:
    done = subprocess.run(command, shell=True, check=True, capture_output=True, text=True)
    return done.stdout


@contextlib.contextmanager
def packets_lost(rail: str) -> Iterator[None]:
    """Every packet of the left end of a rail is dropped. Proves that it happened."""
    interface = f"v{rail}0"
    shell(f"tc qdisc add dev {interface} root netem loss 100%")
    try:
        yield
    finally:
        seen = shell(f"tc -s qdisc show dev {interface}")
        shell(f"tc qdisc del dev {interface} root")
    dropped = int(seen.partition("(dropped ")[2].partition(",")[0])
    assert dropped > 0, f"nothing was dropped: {seen}"


@contextlib.contextmanager
def link_down(interface: str) -> Iterator[None]:
    shell(f"ip link set {interface} down")
    try:
        yield
    finally:
        shell(f"ip link set {interface} up")
