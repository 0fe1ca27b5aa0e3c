# SPDX-License-Identifier: Apache-2.0
"""The rank that fails is seen first: in the log, and as the first process that ends."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from adaptra_megatron.common.sealed_store import SealedStore
from adaptra_megatron.common.typed_messages import packed
from adaptra_megatron.elastic import job_abort
from adaptra_megatron.elastic.failure_errors import OtherRankError, UnrecoverableError
from adaptra_megatron.elastic.job_abort import (
    Ending,
    EndingProcess,
    ErrorNotice,
    check_abort,
    process_identity,
    publish_error,
    publish_finished,
)

NAME = "rank 1 (stage 0 on host)"


@pytest.fixture
def store() -> SealedStore:
    return SealedStore(dist.HashStore(), bytes(32), "place")


def failed(error: Exception) -> Exception:
    with pytest.raises(type(error)) as caught:
        raise error
    return caught.value


class Silent:
    """A store that does not answer."""

    def put_once(self, key: str, value: bytes) -> bytes:
        raise dist.DistNetworkError("...")


def test_a_traceback_is_in_the_log_before_anything_is_said(caplog: pytest.LogCaptureFixture) -> None:
    error = failed(ValueError("a matrix is singular"))
    publish_error(Silent(), NAME, error)  # type: ignore[arg-type]
    assert "Traceback" in caplog.text
    assert "ValueError: a matrix is singular" in caplog.text
    assert NAME in caplog.text
    caplog.clear()
    publish_error(Silent(), NAME, error)  # type: ignore[arg-type]
    assert not caplog.text, "once is enough"
    publish_error(Silent(), NAME, failed(ValueError("seen by Python")), printed=True)  # type: ignore[arg-type]
    assert not caplog.text


def test_the_first_that_fails_is_the_one_that_counts(store: SealedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ErrorNotice, "wait_for_end", lambda word: None)
    check_abort(store, "rank 0")
    publish_error(store, NAME, failed(ValueError("first")))
    publish_error(store, "rank 2", failed(ValueError("second")))
    publish_finished(store)
    with pytest.raises(OtherRankError, match=r"an error of rank 1 \(stage 0 on host\): ValueError: first$"):
        check_abort(store, "rank 0")


def test_an_error_that_names_a_file_in_no_encoding_is_said(store: SealedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ErrorNotice, "wait_for_end", lambda word: None)
    publish_error(store, NAME, failed(FileNotFoundError("/data/\udcff")))
    with pytest.raises(OtherRankError, match=r"/data/\\udcff"):
        check_abort(store, "rank 0")


def test_the_end_of_the_training_is_no_error(store: SealedStore) -> None:
    publish_finished(store)
    with pytest.raises(UnrecoverableError, match="rank 0 cannot finish"):
        check_abort(store, "rank 0")


def test_a_rank_ends_after_the_process_that_has_failed(store: SealedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """And that has ended for its launcher, too, which looks now and then."""
    monkeypatch.setattr(job_abort, "_GOES_S", 60.0)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"])
    seen: list[float] = []

    def look() -> None:
        time.sleep(1.0)
        seen.append(time.monotonic())
        process.wait()

    launcher = threading.Thread(target=look)
    launcher.start()
    store.set("last_word", packed(ErrorNotice(NAME, "ValueError: ...", process.pid, process_identity())))
    with pytest.raises(OtherRankError):
        check_abort(store, "rank 0")
    ended_s = time.monotonic()
    launcher.join()
    assert seen[0] <= ended_s < seen[0] + 30.0


def test_a_process_that_does_not_end_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that cannot be seen from here: of another host, or in another container."""
    monkeypatch.setattr(job_abort, "_GOES_S", 0.3)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        here = ErrorNotice(NAME, "...", process.pid, process_identity())
        for word in (here, replace(here, process=2**22 + 1, identity="elsewhere")):
            begun_s = time.monotonic()
            word.wait_for_end()
            assert time.monotonic() - begun_s >= 0.3
        process.kill()
    monkeypatch.setattr(job_abort, "_GOES_S", 60.0)
    begun_s = time.monotonic()
    replace(here, process=2**22 + 1).wait_for_end()
    assert time.monotonic() - begun_s < 10.0


def test_an_error_is_logged_by_the_package(caplog: pytest.LogCaptureFixture) -> None:
    job_abort.log_own(NAME, failed(ValueError("...")))
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("adaptra_megatron.elastic.job_abort", logging.ERROR)


def test_the_process_that_serves_the_store_ends_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not waited for, and waits for those that it sees, which may be longer than they need; not for ever."""
    ErrorNotice(NAME, "...", os.getpid(), process_identity(), serves=True).wait_for_end()
    store = SealedStore(dist.HashStore(), bytes(32), "last word")
    lent = SimpleNamespace(lent=lambda *_: nullcontext(store))
    monkeypatch.setattr(job_abort, "_LAST_S", 60.0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        going = EndingProcess(other.pid, process_identity())
        store.set("going/1", packed(going))
        assert not going.over(process_identity())
        assert not going.over("another host's")
        threading.Timer(0.3, other.stdin.close).start()  # type: ignore[union-attr]
        Ending(lent, None, 1).wait()  # type: ignore[arg-type]
        assert going.over(process_identity()), "though nobody has asked for its exit status"
    assert going.over(process_identity())
    monkeypatch.setattr(job_abort, "_LAST_S", 0.2)
    Ending(lent, None, 2).wait()  # type: ignore[arg-type]
