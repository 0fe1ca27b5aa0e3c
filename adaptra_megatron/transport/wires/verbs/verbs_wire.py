# SPDX-License-Identifier: Apache-2.0
"""Wire between hosts over RDMA: RNICs write from the outbound ring here into the inbound ring of the peer's delegate.

The authenticated connection carries the messages of the two ends. Everything runs in the event loop, except for two
threads that wait for idle rings; nothing spins.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from adaptra_megatron.common.handshake import tune_connection
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.transport._ring import FrameError, Ring, RingError
from adaptra_megatron.transport.wires.verbs.queue_pair import VerbsQueuePair
from adaptra_megatron.transport.wires.verbs.rail import RailState, RailTiming
from adaptra_megatron.transport.wires.verbs.verbs_device import VerbsUnavailableError, find_ports, load_verbs
from adaptra_megatron.transport.wires.verbs.verbs_messages import Hello, Unable, VerbsDecoder, VerbsMessage, encode
from adaptra_megatron.transport.wires.verbs.verbs_session import VerbsSession
from adaptra_megatron.transport.wires.wire import Traffic

Item = TypeVar("Item")
_LOOK_S = 60.0
"""Longest sleep of the thread without a signal."""
_JOIN_S = 1.0
"""Longest block of the event loop for a thread that has finished its work."""


class RingWatch(Generic[Item]):
    """One side of a ring, for the event loop that created it: a thread waits only when no slot is ready.

    Waking a thread for each slot would cost more than processing the slot.
    """

    def __init__(self, ring: Ring, get: Callable[[float], Item | None], came: Callable[[], None]) -> None:
        """`get` waits in the ring until a deadline; `came` is called when `pull` is due after a `watch`."""
        self.over = False
        """True once the ring is closed and all of it has been pulled."""
        self._ring, self._get, self._came = ring, get, came
        self._loop = asyncio.get_running_loop()
        self._found: list[Item] = []
        self._error: RingError | FrameError | None = None
        self._waiting = False
        self._orders: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name=f"verbs-{get.__name__}", daemon=True)
        self._thread.start()

    def pull(self) -> list[Item]:
        """Return all slots that are ready. Raises RingError, FrameError: the ring is corrupted."""
        if self._error is not None:
            raise self._error
        if self._waiting:
            return []  # a ring gives to one at a time
        items, self._found = self._found, []
        closed = self._ring.closed
        while (item := self._get(0.0)) is not None:
            items.append(item)
        self.over = closed
        return items

    def watch(self) -> None:
        """Call `came` as soon as a slot is ready or the ring is closed."""
        if not self._waiting and not self.over:
            self._waiting = True
            self._orders.put(True)

    async def stop(self) -> None:
        """Wait for the end of the thread. The ring must be closed."""
        self._orders.put(False)
        await asyncio.wait([self._ended])  # which, unlike a bare await, leaves the future alone when it is cancelled
        self._thread.join(_JOIN_S)  # it has reported its end, and has only to return

    def _arrived(self, item: Item | None, error: RingError | FrameError | None) -> None:
        self._waiting, self._error = False, error
        if item is not None:
            self._found.append(item)
        self._came()

    def _run(self) -> None:
        while self._orders.get():
            item, error = None, None
            try:
                while item is None and not self._ring.closed:
                    item = self._get(time.monotonic() + _LOOK_S)
            except (RingError, FrameError) as cause:
                error = cause
            self._loop.call_soon_threadsafe(self._arrived, item, error)
        self._loop.call_soon_threadsafe(self._ended.set_result, None)


logger = logger_of(__name__)

OUTAGE_S = 2.0
_RECEIVED_AT_ONCE = 1 << 16


class VerbsWire:
    """Wire over RNICs: the n-th port of this host is connected to the n-th port of the other."""

    def __init__(
        self,
        outbound: Ring,
        inbound: Ring,
        *,
        connects: bool,
        devices: list[str],
        timeout_s: float,
        outage_s: float = OUTAGE_S,
        timing: RailTiming | None = None,
    ) -> None:
        """`connects`: whether this side raises rails. `devices`: RDMA devices to use; empty: all with a link.
        `timeout_s`: longest time until the first rail is up. `outage_s`: longest time without any rail later."""
        self.inbound: Ring | None = None
        self._outbound, self._received = outbound, inbound
        self._connects, self._devices = connects, devices
        self._timeout_s, self._outage_s, self._timing = timeout_s, outage_s, timing
        self._connection: socket.socket | None = None
        self._queue_pairs: list[VerbsQueuePair] = []
        self._session: VerbsSession | None = None
        self._ended: Callable[[str], None] = lambda cause: None
        self._begun, self._over, self._cause = False, False, ""
        self._decoder, self._unsent = VerbsDecoder(), bytearray()
        self._frames: RingWatch[tuple[int, int]] | None = None
        self._slots: RingWatch[int] | None = None
        self._step_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    @property
    def session(self) -> VerbsSession | None:
        """Return the session once it has begun."""
        return self._session

    async def begin(self, connections: Sequence[socket.socket], ended: Callable[[str], None]) -> None:
        (self._connection,), self._ended = connections, ended
        tune_connection(self._connection)
        try:
            ports = find_ports(self._devices)
            # Not here: importing takes a while, and the other links are served by this thread.
            verbs = await asyncio.to_thread(load_verbs)
        except VerbsUnavailableError as cause:
            self.send(Unable(cause=str(cause)))
            raise OSError(str(cause)) from cause
        theirs, early = await self._exchange(Hello(rails=len(ports), **_geometry(self._outbound)))
        for port in ports[: theirs.rails]:
            self._queue_pairs.append(VerbsQueuePair(verbs, port, self._outbound, self._received))
        self._session = VerbsSession(
            self._queue_pairs,
            initiates=self._connects,
            slots=self._received.slots,
            outside=self,
            now_s=time.monotonic(),
            timing=self._timing,
        )
        self._frames = RingWatch(self._outbound, self._outbound.take_frame, self._step)
        self._slots = RingWatch(self._received, self._received.claim_slot, self._step)
        self._on_messages(early)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._connection, self._on_readable)
        for pair in self._queue_pairs:
            # Both descriptors stay readable until `_step` has read them (queue_pair.completions, queue_pair.event).
            loop.add_reader(pair.completion_fd, self._step)
            loop.add_reader(pair.event_fd, self._step)
        self._step_soon()
        await self._until(lambda: self._over or RailState.UP in self._states() or self._hopeless(), self._timeout_s)
        if self._over:
            raise OSError(self._cause)
        if RailState.UP not in self._states():
            raise OSError(f"no RNIC reaches the peer: {self._session.outage()[1]}")
        self._begun = True

    async def stop(self) -> None:
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        self._outbound.close()
        self._received.close()
        for watch in (self._frames, self._slots):
            if watch is not None:
                await watch.stop()
        loop = asyncio.get_running_loop()
        for pair in self._queue_pairs:
            loop.remove_reader(pair.completion_fd)
            loop.remove_reader(pair.event_fd)
            pair.close()
        if self._connection is not None:
            loop.remove_reader(self._connection)
            loop.remove_writer(self._connection)
            self._connection.close()

    async def drain(self, timeout_s: float) -> None:
        session, frames = self._session, self._frames
        if session is not None and frames is not None:
            self._step_soon()
            await self._until(lambda: self._over or (frames.over and not session.pending), timeout_s)

    def traffic(self) -> Traffic:
        session = self._session
        return Traffic(0, 0) if session is None else Traffic(session.sent_nbytes, session.received_nbytes)

    # What the session does, see verbs_session.Outside.

    def send(self, message: VerbsMessage) -> None:
        self._unsent += encode(message)
        self._flush()

    def release(self, chunk: int) -> None:
        self._outbound.release_frame(chunk)

    def commit(self, chunk: int) -> int:
        return self._received.commit_slot(chunk)

    async def _exchange(self, ours: Hello) -> tuple[Hello, list[VerbsMessage]]:
        """Exchange Hello; return the peer's and the messages after it. Raises OSError if the rings do not match."""
        assert self._connection is not None
        self.send(ours)
        arrived: list[VerbsMessage] = []
        loop = asyncio.get_running_loop()
        deadline_s = time.monotonic() + self._timeout_s
        try:
            while not arrived:
                receiving = loop.sock_recv(self._connection, _RECEIVED_AT_ONCE)
                data = await asyncio.wait_for(receiving, deadline_s - time.monotonic())
                if not data:
                    raise OSError("the peer's delegate ended the connection; the cause is in its log")
                arrived = self._decoder.feed(data)
        except asyncio.TimeoutError:
            raise OSError(f"the peer's delegate said nothing for {self._timeout_s:g} s") from None
        except ValueError as cause:
            raise OSError(f"invalid message from the peer's delegate: {cause}") from cause
        # The connecting end raises rails as soon as it has our Hello, so its first Raise may come with its own.
        theirs, *early = arrived
        if isinstance(theirs, Unable):
            raise OSError(f"the peer cannot: {theirs.cause}")
        if not isinstance(theirs, Hello) or (theirs.slots, theirs.slot_nbytes) != (ours.slots, ours.slot_nbytes):
            raise OSError(f"the peer began with {theirs}, which does not fit {ours}: all stages need the same settings")
        return theirs, early

    def _on_readable(self) -> None:
        assert self._connection is not None
        try:
            data = self._connection.recv(_RECEIVED_AT_ONCE)
        except BlockingIOError:
            return
        except OSError as cause:
            self._end(f"the connection to the peer's delegate broke: {cause}")
            return
        if not data:
            self._guarded(lambda session: session.advance(time.monotonic()))  # what arrived before it went
            self._end("the peer's delegate went away")
            return
        try:
            self._on_messages(self._decoder.feed(data))
        except ValueError as cause:
            self._end(f"invalid message from the peer's delegate: {cause}")

    def _on_messages(self, messages: list[VerbsMessage]) -> None:
        for message in messages:
            self._guarded(lambda session: session.on_message(message, time.monotonic()))  # noqa: B023 (called at once)
        self._step_soon()

    def _flush(self) -> None:
        assert self._connection is not None
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # not now; or never, which is seen where the connection is read
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]
        if self._unsent and not self._over:
            loop.add_writer(self._connection, self._flush)
        else:
            loop.remove_writer(self._connection)

    def _step_soon(self) -> None:
        if not self._step_due and not self._over:
            self._step_due = True
            asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        self._step_due = False
        if self._over or self._session is None:
            return
        self._guarded(self._advance)
        self._changed.set()
        if self._begun and self._session.outage_s > self._outage_s:  # the training process then begins another session
            outage_s, causes = self._session.outage()
            self._end(f"no RNIC has reached the peer for {outage_s:.1f} s: {causes}")
        due_s = self._session.next_s()
        if self._session.outage_s:
            # Rails that wait for the peer have no time of their own, and the outage has to end.
            due_s = min(due_s or math.inf, time.monotonic() + self._outage_s / 2)
        if due_s is not None and not self._over:
            self._wake_at(due_s)

    def _advance(self, session: VerbsSession) -> None:
        assert self._frames is not None
        assert self._slots is not None
        for frame in self._frames.pull():
            session.taken(*frame)
        for chunk in self._slots.pull():
            session.claimed(chunk)
        session.advance(time.monotonic())
        if session.wants_frames:
            self._frames.watch()
        if session.wants_slots:
            self._slots.watch()

    def _wake_at(self, due_s: float) -> None:
        """Set a timer for `due_s`, or keep an earlier one: a needless wake-up costs less than resetting the timer each
        time.
        """
        if self._timer is not None and due_s < self._timer.when():
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(due_s, self._timer_went_off)

    def _timer_went_off(self) -> None:
        self._timer = None
        self._step()

    def _guarded(self, act: Callable[[VerbsSession], None]) -> None:
        if self._session is None or self._over:
            return
        try:
            act(self._session)
        except (ValueError, RingError) as cause:  # FrameError is a ValueError
            self._end(f"the session cannot go on: {cause}")

    def _end(self, cause: str) -> None:
        if not self._over:
            self._over, self._cause = True, cause
            self._changed.set()
            if self._connection is not None:
                asyncio.get_running_loop().remove_reader(self._connection)  # its end stays readable
            self._ended(cause)

    def _hopeless(self) -> bool:
        return self._connects and self._session is not None and self._session.hopeless

    def _states(self) -> list[RailState]:
        return [] if self._session is None else self._session.rail_states

    async def _until(self, done: Callable[[], bool], timeout_s: float) -> None:
        """Wait for `done`, at most `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while not done() and (left_s := deadline_s - time.monotonic()) > 0:
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left_s)


def _geometry(ring: Ring) -> dict[str, int]:
    return {"slots": ring.slots, "slot_nbytes": ring.slot_nbytes}
