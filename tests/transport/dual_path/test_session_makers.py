# SPDX-License-Identifier: Apache-2.0
"""Device sessions that cannot be made, or too late: neither threads nor closing grow with the attempts."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from adaptra_megatron.transport.device_session.pair_group import LinkGroup
from adaptra_megatron.transport.dual_path.dual_link import DualLink
from adaptra_megatron.transport.dual_path.two_paths import _MOST_MAKERS, DeviceWork, SecondPath
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.link_ends import LinkEnds
from adaptra_megatron.transport.link_paths import PathSettings

MEETING_S = 0.2


class Group:
    """A session's group that is only aborted."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def abort(self) -> None:
        self.aborted.set()


def soon_closed(make_group: Any) -> DualLink:
    second = SecondPath(PathSettings(probe_limit_s=MEETING_S), make_group, lambda number, packet: None)
    return DualLink(LinkEnds(0, 1), HostSettings(), second=second)


def test_a_stopped_store_does_not_gather_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, meeting = threading.Event(), threading.Semaphore(0)
    failures: list[tuple[int, str]] = []

    def make_group(as_sender: bool, session: int, timeout_s: float) -> LinkGroup:
        assert timeout_s == MEETING_S
        meeting.release()
        assert goes_on.wait(30.0)
        raise RuntimeError("the other end is gone")

    link = soon_closed(make_group)
    monkeypatch.setattr(link._paths.sender, "failed", lambda session, cause: failures.append((session, cause)))
    link._paths.perform(DeviceWork(begin=[(True, session) for session in range(_MOST_MAKERS + 2)]))
    for _ in range(_MOST_MAKERS):
        assert meeting.acquire(timeout=5.0)
    assert [session for session, _ in failures] == [_MOST_MAKERS, _MOST_MAKERS + 1]
    assert "the job's store does not answer" in failures[0][1]
    begun_s = time.monotonic()
    link.close()
    assert time.monotonic() - begun_s < 3.0 + MEETING_S, "each attempt is waited for in turn"
    goes_on.set()


def test_a_session_that_is_made_after_its_link_was_closed_is_ended() -> None:
    goes_on, group = threading.Event(), Group()

    def make_group(as_sender: bool, session: int, timeout_s: float) -> Group:
        assert goes_on.wait(30.0)
        return group

    link = soon_closed(make_group)
    link._paths.perform(DeviceWork(begin=[(True, 1)]))
    link.close()
    assert not group.aborted.is_set()
    goes_on.set()
    assert group.aborted.wait(10.0), "nothing else would end it"
