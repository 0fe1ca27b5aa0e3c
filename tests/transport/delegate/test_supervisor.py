# SPDX-License-Identifier: Apache-2.0
"""Two supervisors and their real delegates, joined over shared memory, while this process runs out of things."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.supervised import supervised

import adaptra_megatron
from adaptra_megatron.common import child_process
from adaptra_megatron.transport._ring import Inbox, Ring
from adaptra_megatron.transport.delegate import supervisor
from adaptra_megatron.transport.delegate.supervisor import Supervisor
from adaptra_megatron.transport.host_link.host_link_state import GiveUp
from testing.waiting import until


class End:
    """Records the calls that it gets."""

    def __init__(self) -> None:
        self.finished = False
        self.causes: list[str] = []
        self.rings: tuple[Ring, Ring] | None = None
        self.supervisor: Supervisor | None = None

    def connected(self, outbound: Ring, inbound: Ring, give_up: GiveUp) -> None:
        self.rings = outbound, inbound

    def disconnected(self, cause: str) -> None:
        self.causes.append(cause)
        self.rings = None


@pytest.fixture
def start() -> Iterator[Callable[[], tuple[End, End]]]:
    """Start both stages; they are closed at the end."""
    running: list[Supervisor] = []

    def start() -> tuple[End, End]:
        ends = End(), End()
        running.extend(supervised(ends))
        ends[0].supervisor, ends[1].supervisor = running
        return ends

    yield start
    for each in running:
        each.close()


def joined(one: End, other: End) -> None:
    """They come up, and what one writes the other reads."""
    until(lambda: one.rings and other.rings, lambda: f"the link does not come up: {one.causes} {other.causes}")
    assert one.rings is not None
    assert other.rings is not None
    one.rings[0].write_ack(7, time.monotonic() + 5.0)
    event = Inbox(max_message_nbytes=0, pooled_nbytes=0).next(other.rings[1], time.monotonic() + 5.0)
    assert event is not None
    assert event.sequence == 7


def both(one: End, other: End) -> list[Supervisor]:
    found = [end.supervisor for end in (one, other)]
    assert all(found)
    return found


def process_of(keeper: Supervisor) -> int:
    """Process number of its delegate."""
    until(lambda: keeper.process_id, lambda: "there is no delegate")
    assert keeper.process_id is not None
    return keeper.process_id


def test_signals_to_all_of_a_job_end_no_delegate(start: Callable[[], tuple[End, End]]) -> None:
    ends = start()
    for moment in ("beginning", "up"):
        for keeper in both(*ends):
            process = process_of(keeper)
            assert os.getsid(process) == process, "a terminal's signals reach it"
            for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
                os.kill(process, each)
        joined(*ends)
        assert [keeper.starts for keeper in both(*ends)] == [1, 1], moment


def test_a_delegate_that_is_killed_again_and_again_is_started_less_and_less_often(
    start: Callable[[], tuple[End, End]], caplog: pytest.LogCaptureFixture
) -> None:
    ends = start()
    joined(*ends)
    (keeper, _), kills, began_s = both(*ends), 0, time.monotonic()
    with caplog.at_level(logging.WARNING):
        while time.monotonic() < began_s + 6.0 or kills < 2:
            process, starts = process_of(keeper), keeper.starts
            if ends[0].rings is not None:  # it has come up: that alone does not make it a delegate that lives
                os.kill(process, signal.SIGKILL)
                kills += 1
                until(lambda starts=starts: keeper.starts > starts, lambda: "no other delegate")
            time.sleep(0.01)
    joined(*ends)
    assert 1 < kills < 12, f"{kills} kills in 6 s"
    said = [text for text in caplog.messages if "starting another" in text]
    assert len(said) <= 6, said


class Undying:
    """A process that the kernel keeps though it was killed."""

    def __init__(self, real: subprocess.Popen[bytes]) -> None:
        self._real, self.killed = real, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def kill(self) -> None:
        self.killed += 1

    def wait(self, timeout: float) -> int:
        raise subprocess.TimeoutExpired("delegate", timeout)


def test_a_delegate_that_does_not_even_end_when_killed_is_left_behind(
    start: Callable[[], tuple[End, End]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "ENDED_S", 0.1)
    ends = start()
    joined(*ends)
    keeper, _ = both(*ends)
    assert keeper._delegate is not None
    undying = Undying(keeper._delegate.process)
    keeper._delegate.process = undying  # type: ignore[assignment]
    os.kill(undying.pid, signal.SIGSTOP)
    until(lambda: keeper.starts == 2, lambda: "no other delegate")
    joined(*ends)
    assert undying.killed == 1
    undying._real.kill()
    undying._real.wait(10.0)


class Scarce:
    """Refuses the first calls of something real, as the kernel does when it has run out of it."""

    def __init__(self, real: Callable[..., Any], error: Exception, times: int) -> None:
        self.refused = 0
        self._real, self._error, self._times = real, error, times

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.refused < self._times:
            self.refused += 1
            raise self._error
        return self._real(*arguments, **named)


def test_a_host_without_room_for_a_process_is_asked_again(
    start: Callable[[], tuple[End, End]], monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce = Scarce(child_process.subprocess.Popen, BlockingIOError(11, "Resource temporarily unavailable"), 3)
    monkeypatch.setattr(child_process.subprocess, "Popen", scarce)
    one, other = start()
    joined(one, other)
    assert scarce.refused == 3
    assert any("cannot be started: " in cause for cause in one.causes + other.causes)


def test_a_process_without_room_for_a_ring_tries_again(
    start: Callable[[], tuple[End, End]], monkeypatch: pytest.MonkeyPatch
) -> None:
    create = Scarce(Ring.create, RuntimeError("creating a ring: Too many open files"), 3)
    attach = Scarce(Ring.attach, RuntimeError("mapping a ring: Cannot allocate memory"), 1)

    class ScarceRing:
        pass

    ScarceRing.create, ScarceRing.attach = create, attach  # type: ignore[attr-defined]
    monkeypatch.setattr(supervisor, "Ring", ScarceRing)
    one, other = start()
    joined(one, other)
    assert (create.refused, attach.refused) == (3, 1)
    causes = " ".join(one.causes + other.causes)
    assert "Too many open files" in causes
    assert "Cannot allocate memory" in causes


def test_the_working_directory_does_not_hide_pythons_modules(
    start: Callable[[], tuple[End, End]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("asyncio", "json", "selectors"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('this is not the module you look for')\n")
    monkeypatch.chdir(tmp_path)
    joined(*start())


def test_a_package_next_to_ours_does_not_hide_pythons_modules(
    start: Callable[[], tuple[End, End]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As site-packages with an old backport in it: the training process does not see that, nor must its delegate."""
    (tmp_path / "asyncio.py").write_text("raise ImportError('an old backport')\n")
    ours = Path(adaptra_megatron.__file__).parent
    (tmp_path / ours.name).symlink_to(ours)
    monkeypatch.setattr(adaptra_megatron, "__file__", str(tmp_path / ours.name / "__init__.py"))
    joined(*start())


def test_a_forked_process_holds_nothing_of_the_links(start: Callable[[], tuple[End, End]]) -> None:
    """As a data-loader worker, which may run longer than the training: that one's peers are refused once it is gone."""
    gc.collect()
    of_other_tests = Path("/proc/self/maps").read_text().count("memfd:adaptra-ring")
    one, other = start()
    joined(one, other)
    supervisor, rings = one.supervisor, one.rings
    assert supervisor is not None
    assert rings is not None
    (listener,) = supervisor._listeners
    address = listener.getsockname()
    said_by_child, says = os.pipe()
    until_read, let_go = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for ring in rings:
                ring.close()  # as its own end would do
            found = Path("/proc/self/maps").read_text().count("memfd:adaptra-ring")
            os.write(says, f"{found} {[ring.fd for ring in rings]}".encode())
            os.close(let_go)
            os.read(until_read, 1)
        finally:
            os._exit(0)
    try:
        assert os.read(said_by_child, 100).decode() == f"{of_other_tests} [-1, -1]"
        joined(one, other)  # over the same rings: what the child did was its own affair
        assert one.rings is rings
        supervisor.close()
        with socket.socket(socket.AF_UNIX) as peer, pytest.raises(ConnectionRefusedError):
            peer.connect(address)
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the child does not live any more"
    finally:
        for end in (said_by_child, says, until_read, let_go):
            os.close(end)
    os.waitpid(child, 0)
