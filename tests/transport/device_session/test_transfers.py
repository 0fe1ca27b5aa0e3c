# SPDX-License-Identifier: Apache-2.0
"""One native call per receive, wait and send: what it asks of CUDA and NCCL, and that it keeps no other thread."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from support.gpu.device_calls import COMPUTE, LINK, DeviceCalls

from adaptra_megatron.transport._device import DeviceCallError, Transfers, Work
from adaptra_megatron.transport.device_session.link_watch import LinkWatch
from adaptra_megatron.transport.gpu import cuda_device
from testing.waiting import until

DISABLE_TIMING = 2
BYTES = torch.empty(64, dtype=torch.uint8)


def begin(transfers: Transfers, sends: bool, after: int | None, limit_s: float, tensor: torch.Tensor = BYTES) -> Work:
    return transfers.begin(sends, tensor, tensor.data_ptr(), tensor.nbytes, after, limit_s)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> DeviceCalls:
    return DeviceCalls(tmp_path_factory.mktemp("device"))


@pytest.fixture
def device(built: DeviceCalls) -> Iterator[DeviceCalls]:
    built.noted()
    yield built
    for name in ("launch_looks", "not_reached", "query_stands", "query_fails", "refuses", "captures", "capture_broken"):
        built.set(name, 0)


@pytest.fixture
def transfers(device: DeviceCalls) -> Transfers:
    return device.nccl().transfers(1, 0, LINK, 3)


def test_a_transfer_is_behind_computation_and_nothing_but_an_event_is_behind_it(
    device: DeviceCalls, transfers: Transfers
) -> None:
    event = begin(transfers, False, COMPUTE, 1.0)
    assert device.noted() == "ClRL"
    assert device.library.event_flags() == DISABLE_TIMING, "no time, and no thread that sleeps on it"
    transfers.follow(event, COMPUTE, time.monotonic() + 60.0)
    assert device.noted() == "c"
    begin(transfers, True, None, 1.0)
    assert device.noted() == "SL"


def test_events_are_of_the_links_device_whatever_thread_makes_them(device: DeviceCalls, transfers: Transfers) -> None:
    """A new thread has the first device of its host: on that an event could not be recorded on the link's stream."""
    begin(transfers, True, None, 1.0)
    assert device.get("made_on") == 3
    current = ctypes.c_int(-1)
    device.library.cudaGetDevice(ctypes.byref(current))
    assert current.value == 0, "the thread's own is what it was"


def test_events_are_used_again(device: DeviceCalls, transfers: Transfers) -> None:
    before = device.library.events_made()
    for _ in range(100):
        begin(transfers, True, COMPUTE, 1.0)
    assert device.library.events_made() - before <= 2


@pytest.mark.parametrize(("looks", "stand"), [(0, False), (0, True), (3, False)])
def test_a_message_asks_the_driver_and_nccl_no_more_than_it_must(
    device: DeviceCalls, transfers: Transfers, looks: int, stand: bool
) -> None:
    """NCCL once more than it says that it launches, the device for the first message that may be under way."""
    device.set("launch_looks", looks)
    device.set("not_reached", -1 if stand else 0)
    before = [device.get(name) for name in ("launches_asked", "events_asked")]
    work = [begin(transfers, True, COMPUTE, 1.0) for _ in range(100)]
    for each in work:
        transfers.follow(each, COMPUTE, 60.0)
    after = [device.get(name) for name in ("launches_asked", "events_asked")]
    assert [now - then for now, then in zip(after, before, strict=True)] == [100 * (looks + 1), 100]
    assert device.noted() == "ClSL" * 100 + "c" * 100
    transfers.free_done()
    assert device.get("events_asked") - after[1] == int(stand)


def test_bytes_are_held_until_the_device_is_through_with_them(device: DeviceCalls, transfers: Transfers) -> None:
    """And let go of with the next transfer, or when somebody asks; where the device has failed, never."""
    device.set("not_reached", -1)
    tensors = [torch.empty(8, dtype=torch.uint8) for _ in range(2)]
    held = [weakref.ref(each) for each in tensors]
    for _ in held:
        begin(transfers, True, None, 1.0, tensors.pop(0))
    assert [work.tensor is each() for work, each in zip(transfers.under_way(), held, strict=True)] == [True, True]
    device.set("not_reached", 0)
    device.set("query_fails", 700)
    transfers.free_done()
    assert len(transfers.under_way()) == 2
    device.set("query_fails", 0)
    assert all(each() is not None for each in held)
    begin(transfers, True, None, 1.0)
    assert [each() for each in held] == [None, None]
    assert transfers.under_way() == []


def test_a_launch_that_is_given_up_leaves_no_event_behind(device: DeviceCalls, transfers: Transfers) -> None:
    device.set("launch_looks", -1)
    begun_s = time.monotonic()
    with pytest.raises(DeviceCallError, match="NCCL did not launch a transfer, for which it may have to wait"):
        begin(transfers, True, None, 0.1)
    assert 0.1 <= time.monotonic() - begun_s < 5.0
    assert device.noted() == "S"
    threading.Timer(0.1, transfers.end).start()
    with pytest.raises(DeviceCallError, match="the session was ended"):
        begin(transfers, True, None, 60.0)
    assert device.noted() == "S"


def test_what_nccl_refuses_is_told_in_its_words(device: DeviceCalls, transfers: Transfers) -> None:
    device.set("refuses", 6)
    with pytest.raises(DeviceCallError, match=r"ncclRecv failed: remote process exited \(the peer closed its socket\)"):
        begin(transfers, False, None, 1.0)


def test_a_driver_that_does_not_answer_keeps_the_thread_that_asks_alone(
    device: DeviceCalls, transfers: Transfers
) -> None:
    """torch.cuda.Event.query would keep the GIL, and with it all threads of Python."""
    event = begin(transfers, True, None, 1.0)
    device.set("query_stands", 1)
    answers: list[bool] = []
    asks = threading.Thread(target=lambda: answers.append(event.query()))
    asks.start()
    until(lambda: device.get("standing") == 1)
    assert not answers
    device.set("query_stands", 0)
    asks.join(10.0)
    assert answers == [True]


def test_a_thread_sleeps_until_the_device_is_there(device: DeviceCalls, transfers: Transfers) -> None:
    event = begin(transfers, False, None, 1.0)
    device.set("not_reached", 50)
    used_s, begun_s = time.thread_time(), time.monotonic()
    event.synchronize()
    assert device.get("not_reached") == 0
    assert time.monotonic() - begun_s > 0.005
    assert time.thread_time() - used_s < 0.004


def test_the_watch_of_links_breaks_no_capture_of_another_thread(
    device: DeviceCalls, transfers: Transfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of --optimizer-cuda-graph: a query by a thread that is as it began would (pytorch#104487)."""
    monkeypatch.setattr(cuda_device, "cuda_runtime", lambda: device.library)
    monkeypatch.setattr(cuda_device, "_cuda", SimpleNamespace(is_initialized=lambda: True))
    device.set("not_reached", -1)
    work = begin(transfers, False, None, 1.0)
    looks: list[float] = []

    class Looked:
        timeout_s, settled = 60.0, False

        def failure(self, now_s: float) -> None:
            looks.append(now_s)
            assert transfers.under_way() == [work]

        def abort(self, cause: str) -> None:
            raise AssertionError(cause)

    device.set("captures", 1)
    watch = LinkWatch(interval_s=0.001)
    watch.add(Looked())
    until(lambda: len(looks) > 3)
    assert device.get("capture_broken") == 0
    threading.Thread(target=transfers.free_done).start()
    until(lambda: device.get("capture_broken") == 1)
    watch.close()
