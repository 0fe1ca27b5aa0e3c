# SPDX-License-Identifier: Apache-2.0
"""Errors are distinguished by where they pass, whatever they say."""

from __future__ import annotations

import logging
import subprocess
import sys
import traceback
from collections.abc import Callable

import pytest
import torch.distributed as dist

from adaptra_megatron.common.control_store import SilentStoreError
from adaptra_megatron.control.exchange import ExchangeError
from adaptra_megatron.elastic.failure_errors import (
    EpochEndedError,
    JobLostError,
    LateRankError,
    OtherRankError,
    SwallowedErrors,
    is_communication,
    is_of_script,
    of_backend,
    of_script,
    owned,
)
from adaptra_megatron.engine.dispatch import StageTeamError
from adaptra_megatron.transport.message_keys import AbortedError, TransportError

LIKE_A_NETWORK = (
    RuntimeError("could not read shard from object store: request timed out"),
    ConnectionError("data server: connection refused"),
    RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:29389"),
    TimeoutError("socket timed out"),
    BrokenPipeError(32, "Broken pipe"),
)
OF_OURS = (EpochEndedError, LateRankError, TransportError, AbortedError, ExchangeError, StageTeamError)


def raised(error: Exception, *within: Callable[[], object]) -> Exception:
    """`error`, once it has been raised within contexts, the last of them inside all others."""

    def inside(rest: tuple[Callable[[], object], ...]) -> None:
        if not rest:
            raise error
        with rest[0]():  # type: ignore[attr-defined]
            inside(rest[1:])

    with pytest.raises(type(error)) as caught:
        inside(within)
    assert caught.value is error
    return error


@pytest.mark.parametrize("like", LIKE_A_NETWORK, ids=lambda error: type(error).__name__)
def test_the_text_of_an_error_says_nothing(like: Exception) -> None:
    def made() -> Exception:
        return type(like)(*like.args)

    assert not is_communication(raised(made()))
    assert not is_communication(raised(made(), of_script))
    assert is_communication(raised(made(), of_backend))
    assert is_communication(raised(made(), of_script, of_backend)), "a collective of the script's own forward_step"
    assert not is_communication(raised(made(), of_backend, of_script)), "what is innermost knows"


@pytest.mark.parametrize("kind", OF_OURS)
def test_our_own_waits_are_what_they_are_within_a_script(kind: type[Exception]) -> None:
    error = raised(kind("..."), of_script)
    assert is_communication(error)
    assert not is_of_script(error)


@pytest.mark.parametrize("kind", [OtherRankError, JobLostError, SilentStoreError])
def test_what_ends_the_job_is_no_communication(kind: type[Exception]) -> None:
    assert not is_communication(raised(kind("..."), of_backend))


def test_torchs_own_types_are_communication_unless_a_script_has_a_store_of_its_own() -> None:
    assert is_communication(raised(dist.DistNetworkError("...")))
    assert not is_communication(raised(dist.DistNetworkError("..."), of_script))


def test_a_script_that_hands_on_what_a_wait_has_raised_is_not_at_fault() -> None:
    def forward(*, explicit: bool) -> None:
        try:
            with of_backend():
                raise RuntimeError("closed")
        except RuntimeError as cause:
            if explicit:
                raise KeyError("no result") from cause
            raise KeyError("no result")  # noqa: B904

    for explicit in (True, False):
        with pytest.raises(KeyError) as caught:
            owned(forward)(explicit=explicit)
        assert is_communication(caught.value)


def test_a_script_that_has_got_over_a_wait_is_at_fault_for_what_comes_later() -> None:
    def forward() -> None:
        try:
            raise EpochEndedError("...")
        except EpochEndedError:
            pass
        raise KeyError("of its own")

    with pytest.raises(KeyError) as caught:
        owned(forward)()
    assert is_of_script(caught.value)


def test_an_error_of_a_script_is_as_it_was() -> None:
    """Type, message, cause and the lines of its traceback: what the script's own handlers see."""

    class ReceivePosted(ValueError):
        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(name)

    def forward() -> None:
        raise ReceivePosted("of its own") from KeyError("a cause")

    seen = []
    for call in (forward, owned(forward)):
        with pytest.raises(ReceivePosted, match="^of its own$") as caught:
            call()
        assert isinstance(caught.value.__cause__, KeyError)
        seen.append([frame.name for frame in traceback.extract_tb(caught.value.__traceback__)])
    own, marked = seen
    assert [name for name in marked if name != "call"] == own


def test_what_is_got_over_is_logged_once_for_each_line(caplog: pytest.LogCaptureFixture) -> None:
    swallowed = SwallowedErrors()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            swallowed.log(raised(RuntimeError("Connection closed by peer")))
        swallowed.log(raised(EpochEndedError("...")))
        swallowed.log(raised(RuntimeError("another line"), of_backend))
        try:
            raise RuntimeError("a third")
        except RuntimeError as error:
            swallowed.log(error)
    assert [record.exc_info[1].args[0] for record in caplog.records if record.exc_info and record.exc_info[1]] == [
        "Connection closed by peer",
        "a third",
    ]


UNCAUGHT = """
import atexit, sys
import torch.distributed as dist
from adaptra_megatron.elastic.process_group_manager import FaultTolerantGroups

class Torn:
    def __del__(self):
        print("torn down", file=sys.stderr)

groups, torn = FaultTolerantGroups(), Torn()
groups.install()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
groups.when_uncaught.append(lambda error: print("published:", error, file=sys.stderr))
atexit.register(print, "exit functions", file=sys.stderr)
raise ValueError("of the script")
"""


def test_an_uncaught_error_is_shown_then_published_and_ends_the_process_without_a_teardown() -> None:
    """Threads that are in torch meanwhile would abort it. torch's own hook shows what others print once they return."""
    ended = subprocess.run([sys.executable, "-c", UNCAUGHT], capture_output=True, text=True, timeout=60, check=False)
    shown = [
        line for line in ended.stderr.splitlines() if "script" in line or "exit functions" in line or "torn" in line
    ]
    assert shown[-3:] == ["[rank0]: ValueError: of the script", "published: of the script", "exit functions"]
    assert ended.returncode == 1
