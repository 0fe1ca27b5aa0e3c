# SPDX-License-Identifier: Apache-2.0
"""Create device-path links between any two ranks; at a pipeline's start, in an order without circular waits.

NCCL connects the two ends of a communicator at its first transfer, which both must reach. So every link is greeted when
it is created: its source sends a tensor, and its target compares the tensor bit by bit. At the start this happens in
rounds, in each of which a stage has at most one link: links between neighbours in two colours (three around a ring of
an odd number), first all in one direction, then all in the other. There are four rounds, or six, for any number of
stages. Each later session is created by a thread of its own, which waits for no other link.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from adaptra_megatron.common.gathering import epoch_group
from adaptra_megatron.transport.device_session.pair_group import LinkGroup, PairEnds, PairGroup
from adaptra_megatron.transport.gpu.cuda_device import Stream
from adaptra_megatron.transport.message_keys import TransportError
from adaptra_megatron.transport.setup.rendezvous import Rendezvous

if TYPE_CHECKING:
    from adaptra_megatron.transport.device_session.nccl_link import NcclSide

ROUND_S = 60.0
"""Longest time of a round. NCCL needs seconds for a communicator; a stage that failed in a round may be as late."""
FIRST_SESSION = 1
"""Number of an opening's first session; that of the first opening is made at the start."""
FREED_S = 2.0
"""Longest wait of closing for NCCL to free the sessions' memory."""
_GREETING_NBYTES = 1 << 20
_GREETING_TAG = (1 << 31) - 3
_CAUSE_LENGTH = 300

Link = tuple[int, int]
"""Source and target: global ranks."""


class LinkMaker:
    """Creates one rank's ends of device-path links. For any thread."""

    def __init__(self, rendezvous: Rendezvous, gpu: NcclSide | None) -> None:
        """`gpu`: of this rank; None: its tensors are on the CPU, and links use gloo."""
        self.control = rendezvous.control
        """Store in which the two ends of a session meet, of the present generation."""
        self._rendezvous, self._gpu = rendezvous, gpu
        self._streams: dict[Link, Stream] = {}
        self._connected: dict[Link, LinkGroup] = {}
        """Links made at the start and not handed out yet."""
        self._failures: dict[Link, str] = {}
        """Why the other links of the start were not made."""
        self._lock = threading.Lock()
        self._made: list[LinkGroup] = []
        """Links that may still hold device memory."""

    def connect(self, *, wrap: bool) -> None:
        """Create the first session of this rank's links within its pipeline. All of its stages call this at the same
        point.

        `wrap`: also between the last stage and the first. Errors are raised by `links` and `make`.
        """
        rank, ranks = self._rendezvous.layout.rank, self._rendezvous.ranks
        # All stages start together, so that the time limits of rounds mean the same everywhere.
        self._rendezvous.gather("connecting", None)
        begun_s = time.monotonic()
        for number, links in enumerate(rounds(self._rendezvous.stages, wrap=wrap), 1):
            # Limits count from the common beginning: a peer that waited in vain in an earlier round may still come to
            # this one.
            until_s = begun_s + number * ROUND_S
            of_ranks = [(ranks[source], ranks[target]) for source, target in links]
            for link in (link for link in of_ranks if rank in link):
                try:
                    self._connected[link] = self._make(link, 1, FIRST_SESSION, until_s - time.monotonic())
                # Kept, not raised: the other rounds must go on, as other stages wait in them.
                except RuntimeError as cause:
                    self._failures[link] = str(cause)

    def links(self) -> dict[Link, Any]:
        """Return this rank's links within its pipeline, which the caller then owns: NcclLinks on a GPU, else
        PairGroups.

        All stages of the pipeline call this at the same point. Raises TransportError on all alike if any link failed.
        """
        name, failures = self._rendezvous.layout.name, []
        for (source, target), cause in self._failures.items():
            failures.append(f"the link from {name(source)} to {name(target)} was not connected: {cause}")
        failure = TransportError("; ".join(failures)) if failures else None
        if (causes := self._rendezvous.agree("connected", failure)) is not None:
            self.close()
            raise TransportError(
                f"the device path does not come up: {causes}. Look at the logs of these ranks; on GPUs, "
                "NCCL_DEBUG=WARN has NCCL say what it met with"
            )
        links, self._connected = self._connected, {}
        return links

    def make(self, link: Link, session: int, timeout_s: float, opening: int = 1) -> LinkGroup:
        """Return this end of a session of a link, after the greeting. `connect` has made the link's first session.

        Raises RuntimeError with a one-line message if the peer does not come within `timeout_s` or the greeting does
        not arrive.
        """
        if (opening, session) == (1, FIRST_SESSION) and link in self._failures:
            raise RuntimeError(self._failures[link])
        if (opening, session) == (1, FIRST_SESSION) and link in self._connected:
            return self._connected.pop(link)
        return self._make(link, opening, session, timeout_s)

    def close(self) -> bool:
        """End the links that were not handed out. Returns whether all sessions have freed their memory after
        FREED_S.
        """
        for group in self._connected.values():
            group.abort()
        until_s = time.monotonic() + FREED_S
        with self._lock:
            left = [group for group in self._made if not group.wait_until_freed(until_s)]
        if self._gpu is not None:
            self._gpu.watch.close()
        return not left

    def _make(self, link: Link, opening: int, session: int, timeout_s: float) -> LinkGroup:
        control, gpu = self.control, self._gpu
        deadline_s = time.monotonic() + timeout_s
        ends = PairEnds(*link)
        sends = ends.source == self._rendezvous.layout.rank
        place = f"link/{ends.source}-{ends.target}/{opening}/{session}"
        try:
            made: LinkGroup
            if gpu is None:
                group = epoch_group(control, place, ends, ends[not sends], timeout_s)
                made = PairGroup(group, ends, sends=sends)
            else:
                if link not in self._streams:
                    self._streams[link] = gpu.device.new_stream()  # of all its sessions, for none is ever destroyed
                with control.lent(place, timeout_s) as store:
                    made = gpu.link(store, ends, self._streams[link], sends=sends, timeout_s=timeout_s)
            greet(made, sends, deadline_s)
        except RuntimeError as cause:
            # NCCL's and gloo's errors have many lines; this one becomes part of a log line.
            raise RuntimeError(" ".join(str(cause).split())[:_CAUSE_LENGTH]) from cause
        with self._lock:
            # Sessions are made again and again on a flapping path: those that are free are forgotten here.
            self._made = [each for each in (*self._made, made) if not each.wait_until_freed(0.0)]
        return made


def rounds(stages: int, *, wrap: bool) -> Iterator[list[Link]]:
    """Divide the links of a pipeline into rounds, in each of which a stage has at most one link."""
    ring = stages if wrap and stages > 2 else stages - 1
    colours: list[list[int]] = [[], [], []]
    for first in range(ring):
        # The last link of an odd ring meets both colours.
        colours[2 if first == stages - 1 and stages % 2 else first % 2].append(first)
    for colour in filter(None, colours):
        yield [(first, (first + 1) % stages) for first in colour]
        yield [((first + 1) % stages, first) for first in colour]


def greeting() -> torch.Tensor:
    """Return the CPU tensor that is sent over each path of each link at the start, and compared."""
    return torch.arange(_GREETING_NBYTES, dtype=torch.int32).remainder_(251).to(torch.uint8)


def greet(group: LinkGroup, sends: bool, deadline_s: float) -> None:
    """Send the greeting, or receive and compare it. Ends the session on failure."""
    expected = greeting()
    try:
        if sends:
            work = group.send(group.bring(expected), _GREETING_TAG)
            group.wait(work, max(0.0, deadline_s - time.monotonic()))
            return
        buffer = group.empty(expected.shape, expected.dtype)
        group.wait(group.receive(buffer, _GREETING_TAG), max(0.0, deadline_s - time.monotonic()))
        if not torch.equal(group.read(buffer), expected):
            raise RuntimeError("the greeting arrived corrupted")
    except RuntimeError as cause:
        group.abort(str(cause))
        raise
