# SPDX-License-Identifier: Apache-2.0
"""Single queue pairs: what ends in an error state, what is left of it, and use again after repair.

Runs in the guest of scripts/softroce_vm.py.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from rails import SLOT_NBYTES, SLOTS, link_down, packets_lost, random_bytes, wait_until, write_message

from adaptra_megatron.transport._ring import Ring
from adaptra_megatron.transport.wires.verbs.queue_pair import VerbsQueuePair
from adaptra_megatron.transport.wires.verbs.rail import Completion, Did
from adaptra_megatron.transport.wires.verbs.verbs_device import Port, load_verbs
from adaptra_megatron.transport.wires.verbs.verbs_messages import VerbsEndpoint

NBYTES = 10000
FAILS_S = 10.0


class Ends(NamedTuple):
    sender: VerbsQueuePair
    receiver: VerbsQueuePair
    source: Ring
    target: Ring

    def connect(self, **wrong: int) -> None:
        """`wrong`: what the sender is given in place of the receiver's own figures."""
        here, there = self.sender.prepare(), self.receiver.prepare()
        self.receiver.connect(here)
        self.sender.connect(there._replace(**wrong))

    def write(self, chunk: int) -> None:
        """A frame into the ring, and over the wire."""
        write_message(self.source, chunk, random_bytes(NBYTES, chunk))
        assert self.source.take_frame(0.0) == (chunk, NBYTES)
        self.sender.write(chunk, NBYTES)

    def arrived(self, chunk: int) -> bool:
        return slot_content(self.source, chunk) == slot_content(self.target, chunk) != bytes(NBYTES)


def slot_content(ring: Ring, chunk: int) -> bytes:
    offset = ring.slot_offsets(chunk)[1]
    with mmap.mmap(ring.fd, 0) as memory:
        first = len(memory) - ring.slots_nbytes + offset
        return bytes(memory[first : first + NBYTES])


@pytest.fixture
def ends() -> Iterator[Ends]:
    verbs = load_verbs()
    rings = [Ring.create(SLOTS, SLOT_NBYTES) for _ in range(4)]
    sender = VerbsQueuePair(verbs, Port("rxa0", 1), rings[0], rings[1])
    receiver = VerbsQueuePair(verbs, Port("rxa1", 1), rings[2], rings[3])
    yield Ends(sender, receiver, rings[0], rings[3])
    sender.close()
    receiver.close()


def completions(pair: VerbsQueuePair, did: Did, count: int) -> list[Completion]:
    found: list[Completion] = []

    def enough() -> bool:
        found.extend(completion for completion in pair.completions() if completion.did is did)
        return len(found) >= count

    wait_until(enough, FAILS_S, lambda: str(found))
    return found


def state(pair: VerbsQueuePair) -> int:
    return pair._pair.query(pair.verbs.IBV_QP_STATE)[0].qp_state


def assert_works(ends: Ends, chunk: int) -> None:
    ends.write(chunk)
    assert completions(ends.sender, Did.WRITE, 1) == [Completion(Did.WRITE, chunk, None)]
    assert completions(ends.receiver, Did.RECEIVE, 1) == [Completion(Did.RECEIVE, chunk, None)]
    assert ends.arrived(chunk)


def repair(ends: Ends) -> None:
    """As a rail does it: error state, reset, and up again, on the same queue pairs."""
    numbers = ends.sender._pair.qp_num, ends.receiver._pair.qp_num
    for pair in (ends.sender, ends.receiver):
        pair.stop()
        assert state(pair) == pair.verbs.IBV_QPS_ERR
        pair.completions()
        pair.reset()
        assert state(pair) == pair.verbs.IBV_QPS_RESET
        pair.completions()
    ends.connect()
    assert (ends.sender._pair.qp_num, ends.receiver._pair.qp_num) == numbers


def test_a_probe_and_a_chunk(ends: Ends) -> None:
    ends.connect()
    ends.sender.probe()
    assert completions(ends.sender, Did.PROBE, 1) == [Completion(Did.PROBE, 0, None)]
    for chunk in range(5 * SLOTS):  # more than there are receives: each is posted again
        ends.target.claim_slot(0.0)
        assert_works(ends, chunk)
        ends.source.release_frame(chunk)
        ends.target.commit_slot(chunk)
        assert ends.target.take_frame(0.0) == (chunk, NBYTES)
        ends.target.release_frame(chunk)


def test_grants(ends: Ends) -> None:
    ends.connect()
    for number in range(5 * SLOTS):  # more than there are requests: each ends
        ends.receiver.grant(number + (1 << 32))
        assert completions(ends.receiver, Did.GRANT, 1) == [Completion(Did.GRANT, 0, None)]
        assert completions(ends.sender, Did.ON_GRANT, 1) == [Completion(Did.ON_GRANT, number, None)]


def test_a_wrong_key_and_repair(ends: Ends) -> None:
    there = ends.receiver.prepare()
    ends.connect(key=there.key ^ 0x55)
    ends.write(0)
    ends.write(1)
    first, *rest = completions(ends.sender, Did.WRITE, 3)
    assert first == Completion(Did.WRITE, 0, "REM_ACCESS_ERR")
    assert {failed.failure for failed in rest} == {"WR_FLUSH_ERR"}
    assert state(ends.sender) == ends.sender.verbs.IBV_QPS_ERR
    assert not ends.arrived(0)
    repair(ends)
    assert_works(ends, 2)


def test_the_page_of_counts_cannot_be_written(ends: Ends) -> None:
    there: VerbsEndpoint = ends.receiver.prepare()
    ends.connect(address=there.address - 4096)
    ends.write(0)
    assert completions(ends.sender, Did.WRITE, 1)[0].failure == "REM_ACCESS_ERR"


def test_stopping_flushes_every_receive(ends: Ends) -> None:
    ends.connect()
    assert not ends.receiver.drained
    ends.receiver.stop()
    receives = 2 * SLOTS + 2
    flushed = completions(ends.receiver, Did.RECEIVE, receives)
    assert [completion.failure for completion in flushed] == ["WR_FLUSH_ERR"] * receives
    assert ends.receiver.drained
    ends.write(0)
    begun_s = time.monotonic()
    failure = completions(ends.sender, Did.WRITE, 1)[0].failure
    assert failure == "RETRY_EXC_ERR", f"after {time.monotonic() - begun_s:.1f} s"
    assert not ends.arrived(0)
    repair(ends)
    assert_works(ends, 1)


def test_lost_packets_and_repair(ends: Ends) -> None:
    ends.connect()
    with packets_lost("a"):
        ends.write(0)
        assert completions(ends.sender, Did.WRITE, 1)[0].failure == "RETRY_EXC_ERR"
    assert state(ends.sender) == ends.sender.verbs.IBV_QPS_ERR
    repair(ends)
    assert_works(ends, 1)


def test_a_link_that_goes_down_is_an_event(ends: Ends) -> None:
    ends.connect()
    assert ends.receiver.port_active()
    with link_down("va1"):
        wait_until(lambda: not ends.receiver.port_active(), FAILS_S)
        events: list[str | None] = []
        wait_until(lambda: events.append(ends.receiver.event()) or events[-1] is not None, FAILS_S)
        assert events[-1] == "event PORT_ERR"
    wait_until(ends.receiver.port_active, FAILS_S)
    repair(ends)
    assert_works(ends, 0)
