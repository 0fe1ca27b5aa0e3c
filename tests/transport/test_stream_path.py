# SPDX-License-Identifier: Apache-2.0
"""The stream transport: between processes over gloo, and call by call against a recorded torch.distributed."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from support.made_up_streams import MadeUpStreams

from adaptra_megatron.runtime.timers import make_timer
from adaptra_megatron.transport import stream_path
from adaptra_megatron.transport.device_clock import DeviceClock
from adaptra_megatron.transport.messages import Direction, MessageKey, TensorSpecification, TransportError
from adaptra_megatron.transport.shapes import encode_shape
from adaptra_megatron.transport.stream_path import StreamTransport

RANKS = str(Path(__file__).with_name("transport_ranks.py"))
CPU = torch.device("cpu")
FIXED = TensorSpecification((2, 3), torch.float32, CPU)
VARYING = TensorSpecification(None, torch.float32, CPU)
PIPELINES = ((0, 2, 4, 6), (1, 3, 5, 7))


def key(micro_batch: int, direction: Direction = Direction.ACTIVATION) -> MessageKey:
    return MessageKey(0, direction, 0, micro_batch)


class Work:
    """A transfer. `failure` is raised by wait, as a backend whose watchdog fired does."""

    def __init__(self) -> None:
        self.done = False
        self.failure: Exception | None = None
        self.waited: list[timedelta | None] = []

    def is_completed(self) -> bool:
        return self.done

    def _get_duration(self) -> float:
        return 0.0

    def wait(self, timeout: timedelta | None = None) -> None:
        self.waited.append(timeout)
        if self.failure is not None:
            raise self.failure


class Group:
    def __init__(self, ranks: tuple[int, ...], rank: int, timed: list[Group] | None = None) -> None:
        self.ranks = ranks
        self._rank = rank
        self._timed = timed

    def _enable_collectives_timing(self) -> None:
        assert self._timed is not None
        self._timed.append(self)

    def rank(self) -> int:
        return self.ranks.index(self._rank)

    def size(self) -> int:
        return len(self.ranks)


class RecordedDistributed:
    """torch.distributed as `rank` of a job with two pipelines of four stages sees it; fills receives from `inbox`."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.made: list[tuple[int, ...]] = []
        self.timed: list[Group] = []
        self.destroyed: list[Group] = []
        self.transfers: list[tuple[str, int, tuple[int, ...], torch.Tensor, Work]] = []
        self.inbox: dict[int, list[torch.Tensor]] = {}
        self.broken = False

    def new_group(self, ranks: list[int], timeout: timedelta, backend: str, group_desc: str) -> Group | None:
        assert (timeout, backend) == (timedelta(seconds=5), "nccl")
        self.made.append(tuple(ranks))
        return Group(tuple(ranks), self.rank, self.timed) if self.rank in ranks else None

    def get_backend(self, group: Group) -> str:
        return "nccl"

    def get_world_size(self) -> int:
        return 8

    def get_global_rank(self, group: Group, stage: int) -> int:
        return group.ranks[stage]

    def all_gather_object(self, gathered: list[Any], mine: Any) -> None:
        assert mine in PIPELINES
        gathered[:] = [PIPELINES[rank % 2] for rank in range(8)]

    def destroy_process_group(self, group: Group) -> None:
        self.destroyed.append(group)

    def isend(self, tensor: torch.Tensor, peer: int, group: Group) -> Work:
        return self._transfer("send", tensor, peer, group)

    def irecv(self, tensor: torch.Tensor, peer: int, group: Group) -> Work:
        if self.inbox.get(peer):
            tensor.copy_(self.inbox[peer].pop(0))
        return self._transfer("receive", tensor, peer, group)

    def _transfer(self, name: str, tensor: torch.Tensor, peer: int, group: Group) -> Work:
        if self.broken:
            raise RuntimeError("NCCL communicator was aborted")
        work = Work()
        self.transfers.append((name, peer, group.ranks, tensor, work))
        return work


@pytest.fixture
def distributed(monkeypatch: pytest.MonkeyPatch) -> RecordedDistributed:
    recorded = RecordedDistributed(rank=2)
    for name in ("new_group", "get_backend", "get_world_size", "get_global_rank", "all_gather_object"):
        monkeypatch.setattr(stream_path.dist, name, getattr(recorded, name))
    for name in ("destroy_process_group", "isend", "irecv"):
        monkeypatch.setattr(stream_path.dist, name, getattr(recorded, name))
    return recorded


@pytest.fixture
def transport(distributed: RecordedDistributed) -> StreamTransport:
    """Stage 1 of the pipeline (0, 2, 4, 6)."""
    return StreamTransport(Group(PIPELINES[0], rank=2), timeout_s=5.0)  # type: ignore[arg-type]


def test_one_group_per_directed_link_made_alike_by_all_ranks(
    distributed: RecordedDistributed, transport: StreamTransport
) -> None:
    expected = []
    for p in PIPELINES:
        links = [(0, 1), (0, 3), (1, 0), (1, 2), (2, 1), (2, 3), (3, 0), (3, 2)]
        expected += [(p[source], p[target]) for source, target in links]
    assert distributed.made == expected
    transport.describe(FIXED)
    transport.post_send(key(0), 2, torch.zeros(2, 3))
    transport.post_send(key(0, Direction.GRADIENT), 0, torch.zeros(2, 3))
    transport.post_receive(key(1), 0)
    transport.post_receive(key(1, Direction.GRADIENT), 2)
    ends = [(name, peer, link) for name, peer, link, _tensor, _work in distributed.transfers]
    assert ends == [("send", 4, (2, 4)), ("send", 0, (2, 0)), ("receive", 0, (0, 2)), ("receive", 4, (4, 2))]
    transport.close()
    transport.close()
    assert sorted(group.ranks for group in distributed.destroyed) == [(0, 2), (2, 0), (2, 4), (4, 2)]


def test_receives_are_posted_at_once_and_in_order(distributed: RecordedDistributed, transport: StreamTransport) -> None:
    transport.describe(FIXED)
    distributed.inbox[0] = [torch.full((2, 3), float(number)) for number in range(3)]
    for number in range(3):
        transport.post_receive(key(number), 0)
    assert len(distributed.transfers) == 3
    assert not transport.ready(key(1))
    distributed.transfers[1][-1].done = True
    assert [transport.ready(key(number)) for number in range(3)] == [False, True, False]
    for number in (2, 0, 1):
        assert torch.equal(transport.wait(key(number), time.monotonic() + 1.0), torch.full((2, 3), float(number)))
    assert len(distributed.transfers) == 3


def test_a_header_goes_before_a_body_of_varying_shape(
    distributed: RecordedDistributed, transport: StreamTransport
) -> None:
    transport.describe(VARYING)
    body = torch.arange(12.0).view(3, 4).t()
    transport.post_send(key(0), 2, body)
    (_, _, _, header, _), (_, _, _, sent, _) = distributed.transfers
    assert torch.equal(header, encode_shape((4, 3), CPU))
    assert torch.equal(sent, body)
    assert sent.is_contiguous()


def test_varying_shapes_are_received_in_the_senders_order_whoever_is_asked_for_first(
    distributed: RecordedDistributed, transport: StreamTransport
) -> None:
    transport.describe(VARYING)
    bodies = [torch.full((number + 1, 2), float(number)) for number in range(3)]
    distributed.inbox[0] = [part for body in bodies for part in (encode_shape(body.shape, CPU), body)]
    for number in range(3):
        transport.post_receive(key(number), 0)
    assert distributed.transfers == []
    assert not transport.ready(key(0))
    for number in (1, 0, 2):
        assert torch.equal(transport.wait(key(number), time.monotonic() + 1.0), bodies[number])
    assert [tuple(tensor.shape) for *_, tensor, _work in distributed.transfers] == [
        shape for body in bodies for shape in ((9,), tuple(body.shape))
    ]


def test_sent_tensors_are_held_until_their_send_is_done(
    distributed: RecordedDistributed, transport: StreamTransport
) -> None:
    transport.describe(FIXED)
    works = []
    for number in range(3):
        transport.post_send(key(number), 2, torch.zeros(2, 3))
        works.append(distributed.transfers[-1][-1])
        works[0].done = True
    transport.flush(time.monotonic() + 1.0)
    assert [len(work.waited) for work in works] == [1, 1, 1]
    (asked,) = works[0].waited
    assert asked is not None
    assert asked < timedelta(seconds=0.1), "what has left is only asked whether it failed"
    transport.flush(time.monotonic() + 1.0)
    assert [len(work.waited) for work in works] == [1, 1, 1]


def test_a_send_that_completed_by_failing_is_not_taken_for_sent(
    distributed: RecordedDistributed, transport: StreamTransport
) -> None:
    transport.describe(FIXED)
    transport.post_send(key(7), 2, torch.zeros(2, 3))
    failed = distributed.transfers[-1][-1]
    failed.done, failed.failure = True, RuntimeError("NCCL error: remote process exited")
    with pytest.raises(TransportError, match=r"link 1->2: .*micro-batch 7 .*remote process exited"):
        transport.post_send(key(8), 2, torch.zeros(2, 3))
    transport.flush(time.monotonic() + 1.0)
    assert len(failed.waited) == 1, "it is reported once"
    assert len(distributed.transfers[-1][-1].waited) == 1, "what was posted meanwhile is still waited for"


def test_waits_are_bounded_by_the_deadline(distributed: RecordedDistributed, transport: StreamTransport) -> None:
    transport.describe(FIXED)
    transport.post_receive(key(0), 0)
    transport.wait(key(0), time.monotonic() + 2.0)
    (allowed,) = distributed.transfers[0][-1].waited
    assert allowed is not None
    assert timedelta(seconds=1.5) < allowed <= timedelta(seconds=2.0)
    transport.post_receive(key(1), 0)
    transport.wait(key(1), time.monotonic() - 1.0)
    (allowed,) = distributed.transfers[1][-1].waited
    assert allowed is not None
    assert timedelta(0) < allowed < timedelta(seconds=0.1), "an expired deadline is not an endless one"


def test_waits_on_a_device_block_no_thread(distributed: RecordedDistributed, transport: StreamTransport) -> None:
    """NCCL's wait blocks the calling thread until the transfer is over if, and only if, it is given a timeout."""
    device = torch.device("meta")
    transport.describe(TensorSpecification((2, 3), torch.float32, device))
    transport.post_receive(key(0), 0)
    transport.post_send(key(0), 2, torch.zeros(2, 3, device=device))
    transport.wait(key(0), time.monotonic() + 2.0)
    transport.flush(time.monotonic() + 2.0)
    assert [work.waited for *_, work in distributed.transfers] == [[None], [None]]


def _fail_receive(distributed: RecordedDistributed, transport: StreamTransport) -> None:
    transport.post_receive(key(7), 0)
    distributed.transfers[-1][-1].failure = RuntimeError("watchdog timeout")
    transport.wait(key(7), time.monotonic() + 1.0)


def _fail_send(distributed: RecordedDistributed, transport: StreamTransport) -> None:
    transport.post_send(key(7), 2, torch.zeros(2, 3))
    distributed.transfers[-1][-1].failure = RuntimeError("watchdog timeout")
    transport.flush(time.monotonic() + 1.0)


def _post_receive_on_broken_link(distributed: RecordedDistributed, transport: StreamTransport) -> None:
    distributed.broken = True
    transport.post_receive(key(7), 0)


def _post_send_on_broken_link(distributed: RecordedDistributed, transport: StreamTransport) -> None:
    distributed.broken = True
    transport.post_send(key(7), 2, torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("fail", "link", "cause"),
    [
        (_fail_receive, "0->1", "watchdog timeout"),
        (_fail_send, "1->2", "watchdog timeout"),
        (_post_receive_on_broken_link, "0->1", "communicator was aborted"),
        (_post_send_on_broken_link, "1->2", "communicator was aborted"),
    ],
)
def test_errors_name_stage_link_key_cause_and_remedy(
    distributed: RecordedDistributed,
    transport: StreamTransport,
    fail: Callable[[RecordedDistributed, StreamTransport], None],
    link: str,
    cause: str,
) -> None:
    transport.describe(FIXED)
    with pytest.raises(TransportError) as failed:
        fail(distributed, transport)
    for part in ("stage 1", f"link {link}", str(key(7)), cause, "Look at the stage at the other end"):
        assert part in str(failed.value)
    assert isinstance(failed.value.__cause__, RuntimeError)


def test_without_a_clock_nothing_is_timed(distributed: RecordedDistributed, transport: StreamTransport) -> None:
    transport.describe(FIXED)
    transport.post_send(key(0), 2, torch.zeros(2, 3))
    transport.post_receive(key(0), 0)
    transport.wait(key(0), time.monotonic() + 1.0)
    assert transport.take_times() == ((), ())


class TimedWork(Work):
    """A receive that stands in its link's stream from when it can begin until a given moment, and tells how long."""

    def __init__(self, streams: MadeUpStreams, link: dict[str, float], arrives_s: float) -> None:
        super().__init__()
        begun_s = max(link.get("free_s", 0.0), streams.now_s(), streams.begun_s())
        link["free_s"] = max(begun_s, arrives_s)
        self._duration_s = link["free_s"] - begun_s

    def _get_duration(self) -> float:
        return 1e3 * self._duration_s


@pytest.mark.parametrize("specification", [FIXED, VARYING])
def test_receives_are_timed_where_the_device_can_tell(
    distributed: RecordedDistributed, specification: TensorSpecification, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that has come early is told to have come then, though computation came to it much later."""
    streams, link = MadeUpStreams(host_s=time.monotonic), dict[str, float]()
    clock = DeviceClock(streams)
    transport = StreamTransport(Group(PIPELINES[0], rank=2), 5.0, clock)  # type: ignore[arg-type]
    assert [group.ranks for group in distributed.timed] == [(0, 2), (4, 2)], "the links on which it receives"
    arrivals_s = iter([7.0, 6.0, 9.0] if specification is FIXED else [20.5, 20.7, 20.9, 21.2, 21.0, 23.0])
    monkeypatch.setattr(distributed, "_transfer", lambda *_: TimedWork(streams, link, next(arrivals_s)))
    transport.describe(specification)
    streams.current.stand_still_until(5.0)
    if specification is VARYING:
        distributed.inbox[0] = [part for _ in range(3) for part in (encode_shape((2, 3), CPU), torch.zeros(2, 3))]
    for number in range(3):
        transport.post_receive(key(number), 0)
    for number in (1, 0, 2):
        streams.current.stand_still_until(20.0 + number)
        transport.wait(key(number), time.monotonic() + 1.0)
    host_of_device_zero_s = streams.zero_s
    sent, received = transport.take_times()
    assert sent == []
    assert [(times.key, times.peer, times.nbytes) for times in received] == [(key(n), 0, 24) for n in range(3)]
    arrived_s = [times.done_s - host_of_device_zero_s for times in received]
    posted_s = [times.posted_s - host_of_device_zero_s for times in received]
    if specification is FIXED:
        assert arrived_s == pytest.approx([7.0, 7.0, 9.0], abs=0.05), "none before the one that was sent before it"
        assert posted_s == pytest.approx([5.0] * 3, abs=0.05), "when computation came to the post"
    else:
        # Asked for when the second of them was waited for: headers tell no sizes before.
        assert arrived_s == pytest.approx([21.0, 21.2, 23.0], abs=0.05)
        assert posted_s == pytest.approx([21.0, 21.0, 22.0], abs=0.05)
    assert transport.take_times() == ([], []), "once"


def test_a_backend_that_tells_no_times_is_not_asked_again(
    distributed: RecordedDistributed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(work: Work) -> float:
        raise RuntimeError("getDuration only works if timing was enabled")

    monkeypatch.setattr(Work, "_get_duration", refuse)
    clock = DeviceClock(MadeUpStreams(host_s=time.monotonic))
    transport = StreamTransport(Group(PIPELINES[0], rank=2), 5.0, clock)  # type: ignore[arg-type]
    transport.describe(FIXED)
    for number in range(2):
        transport.post_receive(key(number), 0)
        transport.wait(key(number), time.monotonic() + 1.0)
        assert transport.take_times() == ((), ())
    (said,) = caplog.messages
    assert (
        said == "stage 1: arrivals from other GPUs are not timed any more: getDuration only works if timing was enabled"
    )


def test_sends_are_timed_by_the_post(distributed: RecordedDistributed) -> None:
    """When they had been computed, the executor knows."""
    clock = DeviceClock(MadeUpStreams(host_s=time.monotonic))
    transport = StreamTransport(Group(PIPELINES[0], rank=2), 5.0, clock)  # type: ignore[arg-type]
    transport.describe(FIXED)
    before_s = time.monotonic()
    transport.post_send(key(3), 2, torch.zeros(2, 3))
    (sent,), _ = transport.take_times()
    assert (sent.key, sent.peer, sent.nbytes) == (key(3), 2, 24)
    assert before_s <= sent.posted_s == sent.done_s <= time.monotonic()


def test_events_are_made_once_and_used_again(distributed: RecordedDistributed) -> None:
    streams = MadeUpStreams(host_s=time.monotonic)
    clock = DeviceClock(streams)
    transport = StreamTransport(Group(PIPELINES[0], rank=2), 5.0, clock)  # type: ignore[arg-type]
    timer = make_timer(clock)
    made = []
    for iteration in range(3):
        transport.describe(FIXED)
        marks = []
        for number in range(4):
            marks.append(timer.mark())
            message = MessageKey(iteration, Direction.ACTIVATION, 0, number)
            transport.post_receive(message, 0)
            transport.wait(message, time.monotonic() + 1.0)
        waits = streams.synchronized
        timer.resolve(marks)
        assert streams.synchronized == waits + 1, "the end of the iteration"
        transport.take_times()
        assert streams.synchronized == waits + 1
        made.append(streams.events_made)
    assert made == [made[0]] * 3


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_link_carries_messages_between_processes(start_ranks: Callable[..., object], ranks: int) -> None:
    scenarios = ["contents", "varying", "every_link"] if ranks == 2 else ["every_link"]
    start_ranks(ranks, [RANKS, "stream", *scenarios], timeout_s=60.0)
