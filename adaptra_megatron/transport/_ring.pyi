# SPDX-License-Identifier: Apache-2.0
"""Rings in shared memory, whole messages in and out of them, and TCP pumps. Native code: csrc/ring."""

import enum
from collections.abc import Sequence

DATA_TYPES: dict[str, int]
"""Code of each data type that can travel, by torch's name."""

PEER_ENDED: str
"""What `receive_frames` returns when the peer has ended the connection between two frames."""

FRAME_HEADER_NBYTES: int

class RingError(RuntimeError):
    """Memory that is no ring of this version, or one that the other process has spoilt."""

class RingClosedError(RingError): ...

class FrameError(ValueError):
    """A frame that no sender writes, or a message that fits into none."""

class Description:
    """What goes before a message: `direction` 0 activation, 1 gradient; `dtype` as in DATA_TYPES."""

    def __init__(
        self,
        *,
        sequence: int,
        iteration: int,
        direction: int,
        chunk: int,
        micro_batch: int,
        dtype: int,
        shape: Sequence[int],
    ) -> None: ...

class Ring:
    """Slots in an anonymous memfd, from one producing to one consuming process. Deadlines: time.monotonic().

    A buffer, too: uint8 [slots_nbytes], the memory that hardware copies into and out of. Holding it holds the mapping.
    """

    def __buffer__(self, flags: int, /) -> memoryview: ...
    @staticmethod
    def create(slots: int, slot_nbytes: int) -> Ring: ...
    @staticmethod
    def attach(fd: int) -> Ring: ...
    @property
    def fd(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def slot_nbytes(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    @property
    def backlog(self) -> int:
        """For the consumer: frames that it has not taken yet."""
    @property
    def pokes(self) -> int:
        """How often this object was poked."""
    def poke(self) -> None:
        """Let this process's threads that wait in `Inbox.next` on this object return."""
    def close(self) -> None: ...
    def disown(self) -> None:
        """In a forked child: leave memory and `fd` to the parent. What stays is a closed, empty ring of its own."""
    def write(self, description: Description, address: int, nbytes: int, deadline_s: float) -> None:
        """Copy a message in. Raises RingClosedError, TimeoutError, or FrameError before anything is written."""
    def write_some(
        self, description: Description, address: int, nbytes: int, offset: int, most_nbytes: int, patience_s: float
    ) -> int:
        """Copy a part of a message in, from `offset` on, of about `most_nbytes`; return where to go on, `nbytes + 1`
        once all is in.

        Each slot is waited for `patience_s`. Raises RingClosedError.
        """
    def write_ack(self, sequence: int, deadline_s: float) -> None: ...
    def write_bye(self, deadline_s: float) -> None: ...
    @property
    def slots_address(self) -> int:
        """Address of the memory of all headers and payloads, for hardware that reads and writes it."""
    @property
    def slots_nbytes(self) -> int: ...
    def slot_offsets(self, index: int) -> tuple[int, int]:
        """Where header and payload of this slot (counted from 0 for ever) are in that memory."""
    def take_frame(self, deadline_s: float) -> tuple[int, int] | None:
        """Index and payload size of the next frame to send. None at the deadline, or when closed and empty.

        Raises FrameError for a frame that no sender writes.
        """
    def release_frame(self, index: int) -> None:
        """The frame has left, and its slot may be used again."""
    def claim_slot(self, deadline_s: float) -> int | None:
        """Index of the next slot to fill. None at the deadline, or when closed."""
    def commit_slot(self, index: int) -> int:
        """The slot holds a frame now. Returns the payload size that it claims to have."""
    def claim_slots(self, most: int, deadline_s: float) -> tuple[int, int]:
        """Index of the first and number of the next slots to fill, `most` at most: as many as are free and follow one
        another in memory. (0, 0) at the deadline. Raises RingClosedError.
        """
    def commit_frames(self, index: int, count: int, description: Description, offset: int, total_nbytes: int) -> None:
        """The payloads of these slots hold a message of so many bytes from `offset` on, up to its end at most."""
    def commit_void(self, index: int, count: int) -> None:
        """These slots hold nothing, and are skipped."""
    def release_frames(self, index: int, count: int) -> None:
        """These slots, of a part of a message, may be used again."""

class Event:
    class Kind(enum.Enum):
        """Compare with ==: values are not singletons."""

        MESSAGE = ...
        PART = ...
        """Part of a message that was asked for: where its bytes are in the ring, until those slots are released."""
        REPEATED = ...
        ACK = ...
        BYE = ...

    @property
    def kind(self) -> Event.Kind: ...
    @property
    def arrived_s(self) -> float: ...
    @property
    def sequence(self) -> int: ...
    @property
    def iteration(self) -> int: ...
    @property
    def direction(self) -> int: ...
    @property
    def chunk(self) -> int: ...
    @property
    def micro_batch(self) -> int: ...
    @property
    def dtype(self) -> int: ...
    @property
    def shape(self) -> list[int]: ...
    @property
    def total_nbytes(self) -> int:
        """Size of the message."""
    @property
    def payload(self) -> memoryview:
        """Content of a whole message."""
    @property
    def block_nbytes(self) -> int:
        """Size of the memory that the payload begins, and that stays with the inbox; 0 where there is no payload."""
    @property
    def offset(self) -> int:
        """Offset of a part in its message."""
    @property
    def nbytes(self) -> int:
        """Size of a part."""
    @property
    def first_slot(self) -> int: ...
    @property
    def slots(self) -> int: ...

class Inbox:
    """Puts one sender's messages together, over any number of rings; each message comes out once."""

    def __init__(
        self,
        *,
        max_message_nbytes: int,
        pooled_nbytes: int,
        window_nbytes: int = 256 << 20,
        for_device: bool = False,
    ) -> None:
        """`window_nbytes`: the sender's; what is begun and not finished, less the largest, stays below it.

        Notes and probes have as much for themselves. `for_device`: messages are on their way to a device. Forked
        children do not have their memory, and what was asked for comes out in parts, without a copy: each part once, in
        no particular order.
        """
    def ask(self, *, iteration: int, direction: int, chunk: int, micro_batch: int) -> None:
        """Have this message come out in parts, unless it has begun to come. Iterations only go up."""
    def next(self, ring: Ring, deadline_s: float, seen_pokes: int | None = None, stays: bool = False) -> Event | None:
        """None at the deadline, when the ring's pokes are not `seen_pokes` (None: what they are at the call), or once
        the ring is empty of frames that came again, and were dropped.

        Meanwhile a RingWatch leaves the inbox to this thread; `stays`: also afterwards, until it comes for another ring
        or calls `leave`. Raises RingClosedError once a closed ring is empty, FrameError for a bad frame.
        """
    def leave(self) -> None:
        """Leave the inbox to a RingWatch again."""
    @property
    def doubles(self) -> int: ...

class Delivery:
    """Result of a wait for several rings."""

    @property
    def index(self) -> int:
        """Index of the ring that brought it."""
    def event(self) -> Event | None:
        """The event, once; None if frames that came again were dropped. Raises as Inbox.next."""

class RingWatch:
    """Wait of one thread for several rings."""

    def __init__(self, *, futex_waitv: bool = True) -> None:
        """`futex_waitv`: use it if the kernel has it (5.16); otherwise a native thread sleeps for each ring."""
    def wake(self) -> None:
        """Let the waiting thread return, now or from its next wait. For any thread."""
    def next(self, inboxes: Sequence[tuple[Inbox, Ring]], deadline_s: float) -> Delivery | None:
        """Return what one of the rings delivers; None after `wake`, and at the deadline.

        Inboxes that another thread attends (`Inbox.next`) are left to that thread.
        """
    def await_room(self, rings: Sequence[Ring], deadline_s: float) -> int | None:
        """Return the index of a ring with room, or that is closed or spoilt; None as above."""

class PumpCounters:
    def __init__(self) -> None: ...
    @property
    def frames(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

def send_frames(ring: Ring, socket: int, counters: PumpCounters) -> str: ...
def receive_frames(ring: Ring, socket: int, max_message_nbytes: int, stall_s: float, counters: PumpCounters) -> str: ...
def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent (process id `parent`) ends, however it ends."""
