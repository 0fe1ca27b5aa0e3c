# SPDX-License-Identifier: Apache-2.0
"""Device sessions that cannot be made: neither threads nor closing grow with the attempts."""

from __future__ import annotations

import threading
import time

from adaptra_megatron.transport.device_session.pair_group import LinkGroup
from adaptra_megatron.transport.device_session.sessions import _MOST_MAKERS, DevicePath

MEETING_S = 0.2


class Failures:
    """A link that is only reported of failures."""

    def __init__(self) -> None:
        self.causes: list[tuple[int, str]] = []

    def device_failed(self, as_sender: bool, session: int, cause: str) -> None:
        self.causes.append((session, cause))


def test_a_stopped_store_does_not_gather_threads() -> None:
    goes_on, meeting = threading.Event(), threading.Semaphore(0)

    def make_group(as_sender: bool, session: int, timeout_s: float) -> LinkGroup:
        meeting.release()
        assert goes_on.wait(30.0)
        raise RuntimeError("the other end is gone")

    link = Failures()
    path = DevicePath(make_group, link, meeting_s=MEETING_S, timeout_s=1.0)  # type: ignore[arg-type]
    for session in range(_MOST_MAKERS + 2):
        path.begin(True, session)
    for _ in range(_MOST_MAKERS):
        assert meeting.acquire(timeout=5.0)
    assert [session for session, _ in link.causes] == [_MOST_MAKERS, _MOST_MAKERS + 1]
    assert "the job's store does not answer" in link.causes[0][1]
    begun_s = time.monotonic()
    path.close()
    assert time.monotonic() - begun_s < 3.0 + MEETING_S, "each attempt is waited for in turn"
    goes_on.set()
