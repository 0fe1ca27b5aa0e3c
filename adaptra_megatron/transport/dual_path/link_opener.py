# SPDX-License-Identifier: Apache-2.0
"""Open and close links while the job runs, in a thread for each link.

The two ends of a link meet in the job's store. Each publishes the number of its opening of the link (`openings`) and
its listening addresses, until both are at the same opening.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from adaptra_megatron.common.backoff import Backoff
from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.layout import JobLayout
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.common.sealed_store import SealedStore
from adaptra_megatron.transport.delegate.delegate_control import StartDelegate
from adaptra_megatron.transport.delegate.supervisor import DRAIN_S, SupervisedLink, Supervisor
from adaptra_megatron.transport.dual_path.dual_link import DualLink
from adaptra_megatron.transport.gpu.cuda_device import DeviceThread
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.lines.connection_loop import ConnectionLoop
from adaptra_megatron.transport.lines.lines import ControlConnections
from adaptra_megatron.transport.message_keys import TransportError
from adaptra_megatron.transport.setup.host_setup import HostSetup, Offer
from adaptra_megatron.transport.wires.wire_registry import WIRES


class Opening(NamedTuple):
    """State of one end of a link, published in the store."""

    number: int = 0
    """Number of openings of the link: the maximum of both ends', as far as this end knows."""
    open: bool = False


class LinkOpenings:
    """Openings of one link, at one end. No I/O; not thread-safe.

    Each end publishes its number; if both are open, the greater one counts. Numbers are never reused, so connections
    and device sessions of one opening cannot join another.
    """

    def __init__(self, number: int = 0) -> None:
        """`number`: openings so far; 1, open, for a link made at the start."""
        self.mine = Opening(number, open=number > 0)

    def begin(self) -> None:
        """Record that this end opens the link."""
        self.mine = Opening(self.mine.number + 1, open=True)

    def end(self) -> None:
        """Record that this end has closed it."""
        self.mine = self.mine._replace(open=False)

    def agreed(self, theirs: Opening) -> bool:
        """Return whether both ends are at the same opening (`theirs`: the peer's); adopt the number of a peer that is
        ahead.
        """
        if not (self.mine.open and theirs.open):
            return False
        if theirs.number > self.mine.number:
            self.mine = theirs
        return theirs.number == self.mine.number


logger = logger_of(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5e-3, 0.2
"""Shortest and longest pause between two polls of the peer's entry in the store."""


@dataclass
class _Task:
    """Latest task for the link to a peer."""

    thread: threading.Thread
    link: weakref.ref[DualLink]
    cancelled: threading.Event = field(default_factory=threading.Event)


class LinkOpener:
    """Opens and closes the links of one rank, with the delegate's supervisor and the control connections."""

    def __init__(self, control: ControlStore, layout: JobLayout, setup: HostSetup, settings: HostSettings) -> None:
        """`setup`: owned by the opener from now on. No link is started before `start`."""
        self.control = control
        """Store in which the two ends of a link meet, of the present generation."""
        self._client: tuple[ControlStore, SealedStore] | None = None
        self._layout, self._setup, self._settings = layout, setup, settings
        self._openings: dict[int, LinkOpenings] = {}
        self._tasks: dict[int, _Task] = {}
        self._lock = threading.Lock()
        """Guards `setup` and the tasks."""
        self._reaching = threading.Lock()
        """Guards the store's client. Held during requests, which may not return; so closing never takes it."""
        listeners = list(setup.line_listeners.values())
        spread = not settings.is_fault_tolerant
        self.loop = ConnectionLoop()
        job = layout.rank, layout.name, setup.job, control.secret
        self.lines = ControlConnections(*job, listeners, propagate_failures=spread, loop=self.loop)
        self._supervisor: Supervisor | None = None

    @property
    def supervisor(self) -> Supervisor:
        """Supervisor of the delegate."""
        assert self._supervisor is not None, "there is one once the links have been started"
        return self._supervisor

    def start(self, links: Iterable[DualLink]) -> None:
        """Bring up the initial links, whose peers have been met, in their first opening."""
        made = []
        for link in links:
            self._openings[link.ends.peer] = LinkOpenings(link.opening)
            made.append(self._prepared(link))
        self._supervisor = Supervisor(self._start(), list(self._setup.listeners.values()), made, loop=self.loop)
        self.lines.begin()

    def transport(self, peer: int) -> str:
        """Return the wire of the link to `peer`; "" until it has been chosen."""
        return self.supervisor.transport(peer) or self._setup.transports.get(peer, "")

    def open(self, link: DualLink, limit_s: float) -> None:
        """Begin to bring up a link; it fails after `limit_s`. Returns at once."""
        self._begin(link, lambda task: self._open(link, task, time.monotonic() + limit_s))

    def take_down(self, link: DualLink, cause: str | None) -> None:
        """Begin to close a link at both ends and to release its resources. `cause`: see `lines.Fin`.

        Does nothing for a link that a later opening has replaced, and closed.
        """
        self._begin(link, lambda task: self._take_down(link, cause), unless_replaced=True)

    def close(self, links: Iterable[DualLink], limit_s: float) -> None:
        """End all links, threads and the delegate. May be called twice."""
        until_s = time.monotonic() + limit_s
        with self._lock:
            tasks = list(self._tasks.values())
        for task in tasks:
            task.cancelled.set()
        for link in links:
            link.close()
        for task in tasks:
            task.thread.join(max(0.0, until_s - time.monotonic()))
        if self._supervisor is not None:
            self._supervisor.close()
        self.lines.close()
        self._setup.close()

    def _begin(self, link: DualLink, work: Callable[[_Task], None], *, unless_replaced: bool = False) -> None:
        """Run `work` for a link in a thread, after the previous task for the same peer."""

        def run() -> None:
            if earlier is not None:
                earlier.cancelled.set()
                earlier.thread.join()
            work(task)

        name = f"adaptra-link-{link.ends.peer}"
        task = _Task(DeviceThread(run, name), weakref.ref(link))
        with self._lock:
            earlier = self._tasks.get(link.ends.peer)
            if unless_replaced and earlier is not None and earlier.link() is not link:
                return
            self._tasks[link.ends.peer] = task
            task.thread.start()  # under the lock: another thread's task for this peer joins it

    def _open(self, link: DualLink, task: _Task, deadline_s: float) -> None:
        try:
            if self._agree(link, task, deadline_s):
                with self._lock:
                    prepared = self._prepared(link)
                self.supervisor.add(prepared)
                link.begin()
        except (OSError, RuntimeError) as cause:  # the store, listeners, or what the two ends ask for
            link.fail(f"it could not be opened: {cause}")

    def _agree(self, link: DualLink, task: _Task, deadline_s: float) -> bool:
        """Agree with the peer on an opening. Returns False if cancelled; raises TransportError if the peer does not
        come.
        """
        rank, peer, backoff = self._layout.rank, link.ends.peer, Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        with self._lock:
            for kind in self._setup.listen_for(self._setup.listeners_for(peer), [rank, peer]):
                self.supervisor.listen(self._setup.listeners[kind])
                self.lines.listen(self._setup.line_listeners[kind])
        opening = self._openings.setdefault(peer, LinkOpenings())
        opening.begin()
        store, published = self._store(), None
        while not task.cancelled.is_set():
            if published != opening.mine:
                published = opening.mine
                self._publish(store, peer, published)
            if (theirs := store.peek(f"{peer}/{rank}")) is not None:
                opening_there, offer = json.loads(theirs)
                if opening.agreed(Opening(*opening_there)) and published == opening.mine:
                    with self._lock:
                        self._setup.on_offer(peer, Offer(**offer))
                        self._setup.choose(peer)
                    link.opening = published.number
                    return True
            if time.monotonic() >= deadline_s:
                raise TransportError(f"{link.ends.there} did not open its end")
            task.cancelled.wait(backoff.next_s())
        return False

    def _take_down(self, link: DualLink, cause: str | None) -> None:
        if cause is not None:
            self.lines.remove(link, cause)  # first, for the peer to learn why
        link.close()
        self.supervisor.remove(link, DRAIN_S if cause is None else 0.0)
        self.lines.remove(link)
        opening = self._openings.setdefault(link.ends.peer, LinkOpenings())
        opening.end()
        try:
            self._publish(self._store(), link.ends.peer, opening.mine)
        except RuntimeError as problem:  # then a peer may wait for this end in vain, and has its own deadline
            logger.debug("link %s: its end cannot be published: %s", link.ends, problem)

    def _store(self) -> SealedStore:
        """Return the shared client of the present generation's store. Its requests do not wait for peers. Raises
        RuntimeError.
        """
        with self._reaching:
            control = self.control
            if self._client is None or self._client[0] is not control:
                self._client = control, control.client("openings", self._settings.handshake_s)
            return self._client[1]

    def _publish(self, store: SealedStore, peer: int, opening: Opening) -> None:
        store.set(f"{self._layout.rank}/{peer}", json.dumps([opening, asdict(self._setup.mine)]).encode())

    def _prepared(self, link: DualLink) -> SupervisedLink:
        """Bring up a link's control connection, and return the link for the supervisor."""
        peer, transport = link.ends.peer, self._setup.transports[link.ends.peer]
        link.takes(transport)
        self.lines.add(peer, self._setup.place(peer), link, link.opening)
        # An RNIC's work per slot is much the same whatever its size: over verbs, slots are larger.
        slot_nbytes = max(self._settings.slot_nbytes, WIRES[transport].slot_nbytes)
        return SupervisedLink(link, self._setup.request(peer, link.opening), self._settings.slots, slot_nbytes)

    def _start(self) -> StartDelegate:
        settings = self._settings
        return StartDelegate(
            rank=self._layout.rank,
            job=self._setup.job.hex(),
            secret=self.control.secret.hex(),
            listeners=list(self._setup.listeners),
            handshake_s=settings.handshake_s,
            stall_s=settings.stall_s,
            max_message_nbytes=settings.max_message_nbytes,
            rnics=list(settings.rnics),
        )
