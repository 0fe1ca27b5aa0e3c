# SPDX-License-Identifier: Apache-2.0
"""Who wakes whom for a message: a thread that reads what it waits for needs no other thread, and looks only briefly."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from transport_checks import slow_to_end

from adaptra_megatron.transport._ring import Inbox, Ring
from adaptra_megatron.transport.dual_path.dual_link import DualLink
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.link_ends import LinkEnds
from adaptra_megatron.transport.message_keys import Direction, MessageKey
from testing.waiting import until

PAGE = 4096
SETTINGS = HostSettings(timeout_s=20.0)
MESSAGES = 50


def soon() -> float:
    return time.monotonic() + 20.0


@pytest.fixture
def rings() -> list[Ring]:
    return [Ring.create(SETTINGS.slots, SETTINGS.slot_nbytes) for _ in range(2)]


@pytest.fixture
def links(rings: list[Ring]) -> Iterator[list[DualLink]]:
    made = [DualLink(LinkEnds(stage, 1 - stage), SETTINGS) for stage in range(2)]
    there, back = rings
    made[0].connected(there, back, lambda cause: None)
    made[1].connected(back, there, lambda cause: None)
    yield made
    for link in made:
        link.close()


def test_a_thread_that_reads_its_own_message_wakes_no_other(links: list[DualLink], rings: list[Ring]) -> None:
    sender, receiver = links
    key = MessageKey(0, Direction.ACTIVATION, 0, 0)
    receiver.post_receive(key)
    received: list[torch.Tensor] = []
    waiting = threading.Thread(target=lambda: received.append(receiver.wait(key, soon())[0]))
    waiting.start()
    time.sleep(0.2)  # it waits by now, and reads before the link's own thread does
    sender.post_send(key, torch.arange(8))
    waiting.join(20.0)
    assert torch.equal(received[0], torch.arange(8))
    assert rings[0].pokes == 0
    sender.flush(soon())


def test_a_message_that_the_links_own_thread_reads_reaches_the_waiting_thread(links: list[DualLink]) -> None:
    sender, receiver = links
    for number in range(MESSAGES):
        key = MessageKey(number, Direction.GRADIENT, 0, 0)
        receiver.post_receive(key)
        # Posted just before the wait begins: now the one thread reads it, now the other.
        sender.post_send(key, torch.full((4,), number))
        assert torch.equal(receiver.wait(key, soon())[0], torch.full((4,), number))
        sender.flush(soon())
    assert sender.unacknowledged == 0


def test_a_link_leaves_no_thread_behind() -> None:
    before = threading.enumerate()
    with slow_to_end() as slow:
        DualLink(LinkEnds(0, 1), SETTINGS).close()
        assert set(threading.enumerate()) <= set(before)
    assert slow == {"adaptra-links-send", "adaptra-links-receive"}


def test_waiting_in_vain_costs_hardly_any_processor_time() -> None:
    ring, inbox = Ring.create(2, PAGE), Inbox(max_message_nbytes=PAGE, pooled_nbytes=0)
    before_s = time.thread_time()
    for _ in range(100):
        assert inbox.next(ring, time.monotonic() + 0.005) is None
    assert time.thread_time() - before_s < 0.1, "of half a second of waiting"


def test_what_comes_again_is_acknowledged_though_nothing_follows_it() -> None:
    """The acknowledgement was lost with a session; in the next one it is put off while more parts are to be read."""
    settings = HostSettings(timeout_s=20.0, slots=8, slot_nbytes=PAGE)
    sender, receiver = (DualLink(LinkEnds(stage, 1 - stage), settings) for stage in range(2))
    there, lost, never, there_again, back_again = (Ring.create(8, PAGE) for _ in range(5))
    key, content = MessageKey(0, Direction.ACTIVATION, 0, 0), torch.arange(3 * PAGE, dtype=torch.uint8)
    try:
        sender.connected(there, never, lambda cause: None)
        receiver.connected(lost, there, lambda cause: None)
        receiver.post_receive(key)
        sender.post_send(key, content)
        assert torch.equal(receiver.wait(key, soon())[0], content)
        until(lambda: lost.backlog == 1, lambda: "it has not been acknowledged")
        for ring in (there, never, lost):
            ring.close()
        for link in (sender, receiver):
            link.disconnected("the session is over")
        sender.connected(there_again, back_again, lambda cause: None)
        until(lambda: there_again.backlog == 3, lambda: f"{there_again.backlog} of 3 parts came again")
        assert sender.unacknowledged == 1
        receiver.connected(back_again, there_again, lambda cause: None)
        sender.flush(soon())
    finally:
        for link in (sender, receiver):
            link.close()
