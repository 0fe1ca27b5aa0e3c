# SPDX-License-Identifier: Apache-2.0
"""Helpers make room while their rank is late, and have back what they had when that is over: of real processes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from adaptra_megatron.control.stragglers import straggler_host as host_policy
from adaptra_megatron.control.stragglers.straggler_host import NICENESS, HostPolicy

HELPER = """
import threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("up", flush=True)
input()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("another", flush=True)
time.sleep(60)
"""
OWN = os.getpriority(os.PRIO_PROCESS, 0)
CAUSE = "its host's CPUs are 97% busy with other processes"

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU has no room for helpers")


@pytest.fixture
def helper() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", HELPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    yield process
    process.kill()
    process.communicate()


def threads(pid: int) -> list[int]:
    return [int(name) for name in os.listdir(f"/proc/{pid}/task")]


def states(pid: int) -> list[tuple[set[int], int]]:
    return [(os.sched_getaffinity(each), os.getpriority(os.PRIO_PROCESS, each)) for each in threads(pid)]


def test_all_threads_of_a_helper_are_pinned_and_freed_again(
    helper: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(host_policy, "_can_raise_priority", lambda: os.geteuid() == 0)
    before, policy = states(helper.pid), HostPolicy("pin", 5)
    policy.follow("")
    assert states(helper.pid) == before
    policy.follow(CAUSE)
    policy.follow(CAUSE)
    allowed = os.sched_getaffinity(0)
    for cpus, niceness in states(helper.pid):
        assert cpus < allowed
        assert niceness == (max(OWN, NICENESS) if os.geteuid() == 0 else OWN)
    assert os.sched_getaffinity(0) == allowed, "training threads are left alone"
    assert helper.stdin is not None
    assert helper.stdout is not None
    helper.stdin.write("\n")
    helper.stdin.flush()
    assert helper.stdout.readline() == "another\n"
    policy.follow(CAUSE)  # sees a thread that was pinned from its start
    policy.follow("")
    assert states(helper.pid) == [before[0]] * 3
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert CAUSE in caplog.records[0].getMessage()
    assert "rank 5" in caplog.records[1].getMessage()


def test_observe_says_what_it_would_do_once(helper: subprocess.Popen[str], caplog: pytest.LogCaptureFixture) -> None:
    before, policy = states(helper.pid), HostPolicy("observe", 5)
    policy.follow(CAUSE)
    policy.follow(CAUSE)
    assert states(helper.pid) == before
    (record,) = caplog.records
    assert "would be pinned by --adaptra-host-policy pin to CPU" in record.getMessage()


def test_what_is_not_permitted_is_said_once_and_nothing_is_changed(
    helper: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(thread: int, cpus: set[int]) -> None:
        raise PermissionError(1, "Operation not permitted")

    before, policy = states(helper.pid), HostPolicy("pin", 5)
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    policy.follow(CAUSE)
    policy.follow(CAUSE)
    refused = [record for record in caplog.records if "stay as they are" in record.getMessage()]
    assert len(refused) == 1
    assert "Operation not permitted" in refused[0].getMessage()
    policy.undo()
    assert states(helper.pid) == before


def test_a_priority_that_could_not_be_raised_again_is_not_lowered(
    helper: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_policy, "_can_raise_priority", lambda: False)
    policy = HostPolicy("pin", 5)
    policy.follow(CAUSE)
    assert all(niceness == OWN and cpus < os.sched_getaffinity(0) for cpus, niceness in states(helper.pid))
    assert "ulimit -e 20" in caplog.text
    policy.undo()


def test_a_helper_that_has_ended_is_no_trouble(helper: subprocess.Popen[str]) -> None:
    policy = HostPolicy("pin", 5)
    policy.follow(CAUSE)
    helper.kill()
    helper.wait()
    deadline_s = time.monotonic() + 5
    while os.path.exists(f"/proc/{helper.pid}") and time.monotonic() < deadline_s:
        time.sleep(0.01)
    policy.follow(CAUSE)
    policy.undo()
