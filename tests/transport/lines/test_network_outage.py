# SPDX-License-Identifier: Apache-2.0
"""Lines over a network that fails: between two network namespaces of Linux, joined by a virtual cable."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from line_ends import JOB, SECRET, End
from support.namespaces import ADDRESSES, Host, cut, joined_hosts, mend

from adaptra_megatron.transport.lines.lines import BEAT_S, ConnectionPlace, ControlConnections
from adaptra_megatron.transport.setup.host_placement import listen_tcp
from testing.waiting import until

SHORT_S = 2.0
GONE_S = 10.0
"""Twice what docs/transport.md says: the machine may be busy with other things."""


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with joined_hosts(2) as both:
        yield both


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that outlast a busy machine's way to mend the network."""
    monkeypatch.setattr("adaptra_megatron.transport.lines.lines.UNREACHABLE_S", 20.0)


@pytest.fixture
def ends(hosts: tuple[Host, Host]) -> Iterator[tuple[End, End]]:
    listening = [host.call(listen_tcp, host.address) for host in hosts]
    made: list[tuple[ControlConnections, End]] = []
    for stage, host in enumerate(hosts):
        place = ConnectionPlace(listening[1 - stage][1], ADDRESSES[stage])
        lines = ControlConnections(stage, lambda stage: f"rank {stage}", JOB, SECRET, [listening[stage][0]])
        made.append((lines, End(lines)))
        lines.add(1 - stage, place, made[-1][1])
        host.call(lines.begin)
    until(lambda: all(end.ups for _, end in made), "a line does not come up")
    for _, end in made:
        end.down = ""  # a new cable takes its time
    yield made[0][1], made[1][1]
    for lines, _end in made:
        lines.close()


@pytest.mark.usefixtures("patient")
def test_a_short_outage_is_waited_for(hosts: tuple[Host, Host], ends: tuple[End, End]) -> None:
    begun_s = time.monotonic()
    cut(hosts)
    ends[0].send("said into the void")
    ends[0].keep()
    time.sleep(max(0.0, begun_s + SHORT_S - time.monotonic()))
    assert not ends[1].read, "the network was not cut"
    mend(hosts)
    until(lambda: ends[1].read == [b"said into the void"], "what was said meanwhile does not come")
    time.sleep(2 * BEAT_S)
    assert [end.down for end in ends] == ["", ""]


def test_a_host_that_vanishes_is_seen_in_time(hosts: tuple[Host, Host], ends: tuple[End, End]) -> None:
    cut(hosts)
    began_s = time.monotonic()
    while not all(end.down for end in ends):
        assert time.monotonic() < began_s + GONE_S, "nothing was noticed"
        time.sleep(0.01)
    assert time.monotonic() > began_s + SHORT_S
    assert not [loss for end in ends for loss in end.failures], "it may have another path"
