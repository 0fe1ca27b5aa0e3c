# SPDX-License-Identifier: Apache-2.0
"""Rings whose memory is corrupted while they are in use, under real delegates: a new session, and nothing lost."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from support.raw_frames import Frame, put_frame
from support.supervised import supervised

from adaptra_megatron.transport.delegate.supervisor import Supervisor
from adaptra_megatron.transport.dual_path.dual_link import DualLink
from adaptra_megatron.transport.host_link.host_link_state import MAX_CORRUPTED_SESSIONS
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.link_ends import LinkEnds
from adaptra_megatron.transport.message_keys import Direction, MessageKey, TransportError
from testing.faults.network.corrupted_rings import WORDS, corrupt
from testing.waiting import until

SLOTS, PAGE = 4, 4096
HEALS_S = 20.0
"""It takes a second; the machine may be busy. A link that does not heal is an error after 60 s."""
SETTINGS = HostSettings(timeout_s=90.0, grace_s=60.0, slots=SLOTS, slot_nbytes=PAGE)
CAUSES = {
    "closed": "its rings were closed, and no delegate said why",
    "published": "more slots than there are|count of slots published|more slots than were filled",
    "released": "more slots than were filled|count of slots released",
    "waiting for filled": "count of who waits",
    "urgent for filled": "count of who waits",
    "waiting for emptied": "count of who waits",
    "urgent for emptied": "count of who waits",
    "together for filled": "count of who waits",
    "together for emptied": "count of who waits",
}
OF_A_DESCRIPTION = "description of its slots"


class Causes:
    """Collects the causes that an end of a link is given; the log has only a few in a row."""

    def __init__(self, link: DualLink, causes: list[str]) -> None:
        self._disconnected, self._causes = link.disconnected, causes
        link.disconnected = self  # type: ignore[method-assign]

    def __call__(self, cause: str) -> None:
        self._causes.append(cause)
        self._disconnected(cause)


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def supervisors() -> list[Supervisor]:
    """Supervisors of the links, once these are there."""
    return []


@pytest.fixture
def links(transport: str, supervisors: list[Supervisor]) -> Iterator[list[DualLink]]:
    made = [DualLink(LinkEnds(stage, 1 - stage), SETTINGS) for stage in range(2)]
    supervisors += supervised(made, transport, SLOTS, PAGE)
    for link in made:
        link.wait_until_up(time.monotonic() + 30.0)
    yield made
    for link in made:
        link.close()
    for each in supervisors:
        each.close()


numbers = itertools.count()


def exchange(links: list[DualLink], nbytes: int = 3 * PAGE) -> None:
    """A message each way, which arrives as it was sent."""
    number = next(numbers)
    key = MessageKey(number, Direction.ACTIVATION, 0, 0)
    for link in links:
        link.post_receive(key)
        link.post_send(key, torch.full((nbytes,), number % 251, dtype=torch.uint8))
    for link in links:
        received, _times = link.wait(key, time.monotonic() + 30.0)
        assert torch.equal(received, torch.full((nbytes,), number % 251, dtype=torch.uint8))


def test_a_corrupted_word_is_healed_by_a_new_session(links: list[DualLink], caplog: pytest.LogCaptureFixture) -> None:
    causes: list[str] = []
    for link in links:
        Causes(link, causes)
    longest_s = 0.0
    for number, (word, side) in enumerate(itertools.product(WORDS, ("outbound", "inbound"))):
        how = (number + number // 4) % 4
        exchange(links)
        session, sessions = links[0]._state.session, links[0].sessions
        assert session is not None
        causes.clear()
        began_s = time.monotonic()
        corrupt(getattr(session, side).fd, word, how)
        while links[0].sessions == sessions:
            exchange(links)
            took_s = time.monotonic() - began_s
            assert took_s < HEALS_S, f"{word} of the {side} ring, way {how}: {causes}"
        longest_s = max(longest_s, took_s)
        exchange(links)
        until(lambda: causes, lambda: "no cause was given")
        assert re.search(CAUSES.get(word, OF_A_DESCRIPTION), " ".join(causes)), f"{word}, way {how}: {causes}"
    sys.stdout.write(f"healed in {longest_s:.2f} s at most\n")
    said = [text for text in caplog.messages if "the host path is down (" in text]
    assert said[0].startswith("adaptra: link ")
    assert OF_A_DESCRIPTION in " ".join(said[:2]), said


def send_junk(links: list[DualLink]) -> None:
    """From the first end, a frame that no sender writes; until the other has ended the session."""
    until(lambda: all(link._state.session for link in links), lambda: "the link is not up")
    session, theirs = links[0]._state.session, links[1]._state.session
    assert session is not None
    put_frame(session.outbound, Frame(sequence=1 << 40, dtype=255))
    until(lambda: links[1]._state.session is not theirs, lambda: "the session goes on")


def test_bad_data_once_is_healed_and_again_and_again_is_an_error(links: list[DualLink], transport: str) -> None:
    for _ in range(MAX_CORRUPTED_SESSIONS):
        send_junk(links)
        exchange(links)
    if transport == "tcp":
        return  # its own delegate sees it first, and tells the peer's nothing of what it was
    for _ in range(MAX_CORRUPTED_SESSIONS):
        send_junk(links)
    key = MessageKey(next(numbers), Direction.ACTIVATION, 0, 0)
    with pytest.raises(TransportError, match=r"rank 0 sent an invalid frame: .* \(3 times in a row\)"):
        links[1].post_send(key, torch.zeros(1))


def test_the_log_says_why_and_not_what_the_writer_saw_first(
    links: list[DualLink], supervisors: list[Supervisor], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        sessions, process = links[0].sessions, supervisors[0].process_id
        assert process is not None
        os.kill(process, signal.SIGKILL)
        while links[0].sessions == sessions:
            exchange(links)
    said = [text for text in caplog.messages if "the host path is down (" in text]
    assert "this rank's delegate ended by signal SIGKILL" in " ".join(said)
    assert "its rings were closed" not in " ".join(said), said
