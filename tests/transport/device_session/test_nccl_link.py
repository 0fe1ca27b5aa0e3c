# SPDX-License-Identifier: Apache-2.0
"""The device path between GPUs, on simulated devices and a simulated NCCL: order of the device's work, ends of
sessions, and links that go over to the host path. What reads without having waited shows as poison."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.gpu import simulated_nccl
from support.gpu.simulated_device import SimulatedDevice, SimulatedEvent
from support.gpu.simulated_nccl import Fabric, SimulatedCommunicator, SimulatedNccl, SimulatedWork

from adaptra_megatron.transport._ring import Ring
from adaptra_megatron.transport.device_session import link_watch
from adaptra_megatron.transport.device_session.communicator_config import CommunicatorConfig
from adaptra_megatron.transport.device_session.link_watch import Failure, LinkWatch
from adaptra_megatron.transport.device_session.nccl_link import NcclLink, NcclSide
from adaptra_megatron.transport.device_session.pair_group import PairEnds
from adaptra_megatron.transport.device_session.sessions import ReceivingSession, SendingSession
from adaptra_megatron.transport.dual_path.dual_link import DualLink
from adaptra_megatron.transport.dual_path.two_paths import SecondPath
from adaptra_megatron.transport.gpu.cuda_device import Computed
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.link_ends import LinkEnds
from adaptra_megatron.transport.link_paths import Path, PathSettings, ProbeTimes
from adaptra_megatron.transport.message_keys import Direction, MessageKey, TensorSpecification
from adaptra_megatron.transport.setup.link_setup import greet
from testing.waiting import until

NBYTES = 100_000
ANY = TensorSpecification(None, torch.uint8, torch.device("cpu"))
FIXED = TensorSpecification((NBYTES,), torch.uint8, torch.device("cpu"))
CONFIG = CommunicatorConfig(max_ctas=1, min_ctas=1, cga_cluster_size=0, net_name="Socket")
SETTINGS = HostSettings(timeout_s=20.0, grace_s=20.0)


def soon() -> float:
    return time.monotonic() + 10.0


def key(number: int) -> MessageKey:
    return MessageKey(0, Direction.ACTIVATION, 0, number)


def numbers(seed: int, nbytes: int = NBYTES) -> torch.Tensor:
    return torch.randint(0, 255, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


class Gpus:
    """Two stages, each with a GPU of its own and NCCL, whose links the test makes."""

    def __init__(self, first: str | None = None) -> None:
        self.devices = [SimulatedDevice(seed, first=first) for seed in range(2)]
        self.fabric = Fabric()
        self.libraries = [SimulatedNccl(self.fabric, device) for device in self.devices]
        self.headers = [device.new_stream() for device in self.devices]
        self.watches = [LinkWatch(interval_s=0.005) for _ in range(2)]
        self.store = dist.HashStore()
        self.timeout_s, self.config = 20.0, CONFIG
        self.streams: dict[tuple[int, bool], Any] = {}

    def side(self, stage: int, gpu: str = "") -> NcclSide:
        device: Any = self.devices[stage]
        library: Any = self.libraries[stage]
        return NcclSide(
            lambda: library,
            device,
            gpu or f"gpu {stage}",
            self.config,
            self.watches[stage],
            self.timeout_s,
            self.headers[stage],
        )

    def link(self, stage: int, name: str, *, sends: bool, timeout_s: float = 5.0, gpu: str = "") -> NcclLink:
        ends = PairEnds(stage, 1 - stage) if sends else PairEnds(1 - stage, stage)
        if (stage, sends) not in self.streams:
            self.streams[stage, sends] = self.devices[stage].new_stream()
        own, stream = dist.PrefixStore(name, self.store), self.streams[stage, sends]
        return NcclLink(own, ends, self.side(stage, gpu), stream, sends=sends, timeout_s=timeout_s)

    def pair(self, name: str = "pair", **settings: Any) -> tuple[NcclLink, NcclLink]:
        """From stage 0 to stage 1."""
        with ThreadPoolExecutor(2) as threads:
            source = threads.submit(self.link, 0, name, sends=True, **settings)
            target = threads.submit(self.link, 1, name, sends=False, **settings)
            return source.result(), target.result()

    def end_of(self, stage: int) -> SimulatedCommunicator:
        """The communicator that a stage has made last."""
        return self.fabric.of(self.devices[stage])[-1]

    def run(self) -> None:
        """Let both devices work until neither can go on."""
        while sum(device.run() for device in self.devices):
            pass


@pytest.fixture(params=["compute", "copies", None])
def gpus(request: pytest.FixtureRequest) -> Iterator[Gpus]:
    made = Gpus(request.param)
    yield made
    for watch in made.watches:
        watch.close()
        assert not any(thread.is_alive() for thread in watch._threads)


def began(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls that need each other: NCCL connects when both ends have come."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


def test_what_is_sent_is_read_when_it_is_computed_and_held_until_it_has_left(gpus: Gpus) -> None:
    source, target = gpus.pair()
    device = gpus.devices[0]
    device.compute.held = True
    tensors, buffer = [device.tensor(numbers(1))], target.empty((NBYTES,), torch.uint8)
    address = tensors[0].data_ptr()
    source.begin_after(device.record(device.compute))
    began(lambda: source.send(tensors.pop(), 0), lambda: target.receive(buffer, 0))
    gpus.run()
    assert address not in device.freed
    device.let_go(device.compute)
    gpus.run()
    seen = gpus.devices[1].read(buffer)
    gpus.run()
    assert torch.equal(seen, numbers(1))
    until(lambda: address in device.freed)


def test_transfers_are_on_their_stream_in_the_order_of_the_calls_when_these_return(gpus: Gpus) -> None:
    """NCCL launches in a thread of its own: a call that did not wait for that would leave the order to chance."""
    source, target = gpus.pair()
    buffers = [target.empty((8,), torch.uint8) for _ in range(6)]
    tensors = [torch.full((8,), number, dtype=torch.uint8) for number in range(6)]

    def receive() -> list[Any]:
        return [target.receive(buffer, 0) for buffer in buffers]

    works, _sent = began(receive, lambda: [source.send(tensor, 0) for tensor in tensors])
    assert [transfer.address for transfer in gpus.end_of(1).launched] == [each.data_ptr() for each in buffers]
    gpus.run()
    for number, (work, buffer) in enumerate(zip(works, buffers, strict=True)):
        target.wait(work, 1.0)
        assert buffer.tolist() == [number] * 8


def test_computation_follows_a_receive_and_the_thread_does_not(gpus: Gpus) -> None:
    source, target = gpus.pair()
    device = gpus.devices[1]
    buffer = device.empty((NBYTES,), torch.uint8, device.compute)
    target.begin_after(device.record(device.compute))
    tensor = numbers(3)
    work, _sent = began(lambda: target.receive(buffer, 0), lambda: source.send(tensor, 0))
    target.follow(work, soon())
    seen = device.read(buffer)
    assert not torch.equal(seen, numbers(3)), "nothing has run yet"
    gpus.run()
    assert torch.equal(seen, numbers(3))


def test_communicators_are_made_as_they_were_configured(gpus: Gpus) -> None:
    gpus.pair()
    for communicator in gpus.fabric.communicators:
        assert communicator.config == CONFIG
        assert communicator.name == "adaptra 0>1"


@pytest.mark.parametrize(
    ("gpus_of", "expected"),
    [
        (("a h 400 0", "b h 400 0"), 8),
        (("a h 400 0", "b i 400 0"), 4),
        (("a h 400 0", "b i 200 0"), 2),
        (("a h 400 8388608", "b h 400 16777216"), 2),
        (("a", "b"), 4),
    ],
)
def test_both_ends_take_as_many_blocks_as_what_is_between_them_needs(
    gpus_of: tuple[str, str], expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    """And the log says how many, and for what."""
    caplog.set_level("INFO", "adaptra_megatron")
    gpus = Gpus()
    gpus.config = CommunicatorConfig()
    began(*(lambda stage=stage: gpus.link(stage, "0", sends=stage == 0, gpu=gpus_of[stage]) for stage in range(2)))
    assert [each.config.max_ctas for each in gpus.fabric.communicators] == [expected] * 2
    said = f"link 0->1: NCCL may take {expected} CTAs of this GPU for a transfer, between {gpus_of[0]} and {gpus_of[1]}"
    assert any(said in each for each in caplog.messages)
    for watch in gpus.watches:
        watch.close()


class Sessions:
    """Both ends of a device session."""

    def __init__(self, gpus: Gpus) -> None:
        source, target = gpus.pair()
        self.arrived: list[torch.Tensor] = []
        self.failed: list[str] = []
        self.sending = SendingSession(source)
        self.receiving = ReceivingSession(
            target, 20.0, lambda tensor, _time: self.arrived.append(tensor), self.failed.append
        )

    def end(self) -> None:
        self.sending.end()
        self.receiving.end()
        assert not self.receiving._thread.is_alive()


@pytest.fixture
def sessions(gpus: Gpus) -> Iterator[Sessions]:
    made = Sessions(gpus)
    yield made
    made.end()


class Worker:
    """Works off what is on the devices."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus, self._over = gpus, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.wait(0.0005):
            self._gpus.run()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def test_a_message_is_read_when_it_is_computed_whichever_thread_sends_it(gpus: Gpus, sessions: Sessions) -> None:
    device = gpus.devices[0]
    device.compute.held = True
    messages = []
    for seed in range(4):
        tensor = device.tensor(numbers(seed))
        messages.append(Computed(tensor, device.record(device.compute)))

    def ask() -> None:
        for index in (1, 0, 2, 3):
            sessions.receiving.receive(index, FIXED)

    def send() -> None:
        with ThreadPoolExecutor(1) as keeper:
            for index in (0, 3, 2, 1):
                call = sessions.sending.send if index == 1 else keeper.submit
                arguments = () if index == 1 else (sessions.sending.send,)
                call(*arguments, index, messages[index], header=False)  # type: ignore[arg-type]

    with Worker(gpus):
        began(ask, send)
        time.sleep(0.02)
        assert not sessions.arrived
        device.let_go(device.compute)
        until(lambda: len(sessions.arrived) == 4)
    for seed, tensor in enumerate(sessions.arrived):
        assert torch.equal(tensor, numbers(seed))


def test_headers_bodies_and_probes_come_in_the_senders_order(gpus: Gpus, sessions: Sessions) -> None:
    """NCCL matches by order alone, and a body's size is in its header: the simulated one fails on any other order."""
    device = gpus.devices[0]

    def ask() -> None:
        for index in range(6):
            sessions.receiving.receive(index, None if index == 3 else ANY)

    def send() -> None:
        for index in range(6):
            if index == 3:
                sessions.sending.probe(index)
            else:
                tensor = device.tensor(numbers(index, 1000 + index))
                sessions.sending.send(index, Computed(tensor, device.record(device.compute)), header=True)

    with Worker(gpus):
        began(ask, send)
        until(lambda: len(sessions.arrived) == 6)
    for index, tensor in enumerate(sessions.arrived):
        if index != 3:
            assert torch.equal(tensor, numbers(index, 1000 + index))
    assert not sessions.failed


def test_receives_of_messages_are_launched_at_once_by_who_asks_and_probes_one_after_the_other(
    gpus: Gpus, sessions: Sessions
) -> None:
    """A transfer that stands on the device behind another may hold up computation by the queue that they share."""
    receiving, end = sessions.receiving, gpus.end_of(1)
    began(lambda: receiving.receive(0, None), lambda: sessions.sending.probe(0))
    for index in range(1, 4):
        receiving.receive(index, None)
    assert len(end.launched) == 1
    with Worker(gpus):
        for index in range(1, 3):
            sessions.sending.probe(index)
        until(lambda: len(end.launched) == 4)
    for index in range(4, 7):
        receiving.receive(index, None)
    assert len(end.launched) == 4
    for index in range(7, 9):
        receiving.receive(index, FIXED)
    assert len(end.launched) == 9, "what the probes announced before a message leaves at once"
    assert end.threads[threading.current_thread().name] >= 5


def test_to_abort_wakes_the_receiving_thread_and_ends_both_calls(gpus: Gpus, sessions: Sessions) -> None:
    """A receive that stands on the device, whose message never comes."""
    began(lambda: sessions.receiving.receive(0, FIXED), lambda: sessions.sending.probe(0, NBYTES))
    gpus.end_of(1).pair.lost = True
    gpus.run()
    assert not sessions.failed
    start_s = time.monotonic()
    sessions.receiving.abort()
    until(lambda: bool(sessions.failed))
    assert time.monotonic() - start_s < 10.0
    assert sessions.failed == ["torch.distributed reported: the session was ended"]
    until(lambda: sum(end.aborted for end in gpus.fabric.communicators) == 1)
    sessions.sending.abort()
    with pytest.raises(RuntimeError, match="the session was ended"):
        sessions.sending.probe(1)
    sessions.sending.abort()


def test_an_abort_that_hangs_holds_up_no_thread_and_keeps_the_memory(gpus: Gpus) -> None:
    source, target = gpus.pair()
    gpus.libraries[1].abort_hangs.set()
    buffers = [target.empty((NBYTES,), torch.uint8)]
    address = buffers[0].data_ptr()
    began(lambda: target.receive(buffers.pop(), 0), lambda: source.send(numbers(0), 0))
    start_s = time.monotonic()
    target.abort()
    assert time.monotonic() - start_s < 10.0
    assert not target.wait_until_freed(time.monotonic() + 0.05)
    with pytest.raises(RuntimeError, match="the session was ended"):
        target.receive(target.empty((1,), torch.uint8), 1)
    time.sleep(0.02)
    assert address not in gpus.devices[1].freed, "the device may still write there"
    gpus.run()
    gpus.libraries[1].abort_hangs.clear()
    assert target.wait_until_freed(soon())
    gpus.run()
    until(lambda: address in gpus.devices[1].freed)


@pytest.mark.parametrize("first", [0, 1])
def test_links_of_a_pair_end_though_each_freeing_waits_for_the_others_kernels(gpus: Gpus, first: int) -> None:
    """As where NCCL frees memory (pytorch#150690): one thread for both would wait for ever."""
    forth, _peer = gpus.pair("forth")
    _peer, back = began(lambda: gpus.link(1, "back", sends=True), lambda: gpus.link(0, "back", sends=False))
    for each in gpus.fabric.communicators:
        each.connected = True
    forth.send(numbers(0), 0)
    back.receive(back.empty((NBYTES,), torch.uint8), 0)
    gpus.libraries[0].freeing_waits = True
    links = (forth, back)
    links[first].abort()
    time.sleep(0.02)
    assert not links[first].wait_until_freed(time.monotonic())
    links[1 - first].abort()
    assert all(link.wait_until_freed(soon()) for link in links)


def test_a_new_session_does_not_begin_behind_what_an_old_one_left(gpus: Gpus) -> None:
    source, target = gpus.pair()
    gpus.libraries[1].abort_hangs.set()
    tensor = numbers(0)
    began(lambda: target.receive(target.empty((NBYTES,), torch.uint8), 0), lambda: source.send(tensor, 0))
    gpus.end_of(1).pair.lost = True
    target.abort()
    with pytest.raises(RuntimeError, match="work of an earlier session on the link's stream has not ended"):
        gpus.link(1, "again", sends=False)
    gpus.libraries[1].abort_hangs.clear()
    assert target.wait_until_freed(soon())


def test_a_message_that_finds_no_memory_is_reported_as_that(gpus: Gpus, sessions: Sessions, monkeypatch: Any) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB")

    monkeypatch.setattr(gpus.devices[1], "empty", full)
    sessions.receiving.receive(0, FIXED)
    until(lambda: bool(sessions.failed))
    assert sessions.failed[0].startswith("link 0->1: the device has no memory left for a received message: CUDA out")
    assert "--adaptra-max-in-flight" in sessions.failed[0]


def test_an_error_of_nccl_ends_the_session_without_a_call(gpus: Gpus, sessions: Sessions) -> None:
    began(lambda: sessions.receiving.receive(0, FIXED), lambda: sessions.sending.probe(0, NBYTES))
    gpus.end_of(1).pair.lost = True
    gpus.end_of(1).error = "remote process exited or there was a network error"
    until(lambda: bool(sessions.failed))
    assert "remote process exited" in sessions.failed[0]
    assert not sessions.arrived
    until(lambda: gpus.end_of(1).aborted)  # by another thread than the one that says why


def test_a_wait_that_expires_ends_the_session(gpus: Gpus) -> None:
    source, target = gpus.pair()
    tensor, buffer = numbers(0), target.empty((NBYTES,), torch.uint8)
    work, _sent = began(lambda: target.receive(buffer, 0), lambda: source.send(tensor, 0))
    gpus.end_of(1).pair.lost = True
    with pytest.raises(RuntimeError, match="a message of 100000 bytes did not come in time"):
        target.wait(work, 0.05)
    with pytest.raises(RuntimeError, match="did not come in time"):
        target.receive(target.empty((10,), torch.uint8), 1)


def test_closing_lets_what_was_sent_leave(gpus: Gpus) -> None:
    source, target = gpus.pair()
    tensor, buffer = numbers(0), target.empty((NBYTES,), torch.uint8)
    work, _sent = began(lambda: target.receive(buffer, 0), lambda: source.send(tensor, 0))
    with Worker(gpus):
        source.close(soon())
        target.wait(work, 5.0)
        target.close(soon())
        assert source.wait_until_freed(soon())
        assert target.wait_until_freed(soon())
    assert [(end.finalized, end.aborted) for end in gpus.fabric.communicators] == [(True, False)] * 2
    assert torch.equal(buffer, numbers(0))


@pytest.mark.parametrize("aborts", [False, True])
def test_a_small_message_leaves_before_it_is_asked_for_and_arrives_without_its_sender(gpus: Gpus, aborts: bool) -> None:
    """As NCCL's buffers have it (nccl_host_ranks.sent_before_it_is_asked_for)."""
    source, target = gpus.pair()
    for each in gpus.fabric.communicators:
        each.connected = True
    with Worker(gpus):
        source.wait(source.send(numbers(0), 0), 5.0)
        if aborts:
            source.abort()
        source.close(soon())
        assert source.wait_until_freed(soon())
        buffer = target.empty((NBYTES,), torch.uint8)
        target.wait(target.receive(buffer, 0), 5.0)
    assert gpus.end_of(0).aborted == aborts
    assert torch.equal(buffer, numbers(0))
    target.abort()


@pytest.mark.parametrize("network", [False, True])
def test_a_peer_that_aborted_is_learnt_of_by_network_alone_and_after_the_next_message(
    gpus: Gpus, network: bool
) -> None:
    """Until then what is small counts as sent: only its receiver can say that it has come."""
    gpus.fabric.network = network
    source, target = gpus.pair()
    for each in gpus.fabric.communicators:
        each.connected = True
    target.abort()
    assert target.wait_until_freed(soon())
    assert source.failure(time.monotonic()) is None
    work = source.send(numbers(0), 0)
    gpus.run()
    assert work.query()
    if network:
        until(lambda: source.wait_until_freed(soon()))
        with pytest.raises(RuntimeError, match="remote process exited or there was a network error"):
            source.send(numbers(1), 0)
    else:
        assert source.failure(time.monotonic()) is None
        source.abort()


def test_closing_does_not_wait_for_what_never_leaves(gpus: Gpus) -> None:
    source, target = gpus.pair()
    tensor, buffer = numbers(0), target.empty((NBYTES,), torch.uint8)
    began(lambda: target.receive(buffer, 0), lambda: source.send(tensor, 0))
    gpus.end_of(0).pair.lost = True
    start_s = time.monotonic()
    source.close(start_s + 0.1)
    assert source.wait_until_freed(soon())
    assert time.monotonic() - start_s < 10.0
    assert gpus.end_of(0).aborted
    target.abort()


def test_two_stages_on_one_gpu_are_distinguished_before_nccl_is_asked(gpus: Gpus) -> None:
    with pytest.raises(RuntimeError, match="both stages are on one GPU"):
        gpus.pair(gpu="GPU-1")
    assert not gpus.fabric.pairs


def test_a_peer_that_does_not_come_is_not_waited_for_in_nccl(gpus: Gpus) -> None:
    start_s = time.monotonic()
    with pytest.raises(RuntimeError):
        gpus.link(0, "alone", sends=True, timeout_s=0.1)
    assert time.monotonic() - start_s < 10.0
    assert not gpus.fabric.pairs, "NCCL waits for no connection"


@pytest.mark.parametrize("dies", ["before it joins", "before it sends"])
def test_a_peer_that_dies_on_the_way_is_an_error_at_the_deadline(gpus: Gpus, dies: str) -> None:
    """Between the unique id and the communicator, or between that and the first message: NCCL would wait for ever."""
    if dies == "before it joins":
        gpus.store.set("alone/gpu/1", "gpu 1")
        start_s = time.monotonic()
        with pytest.raises(RuntimeError, match="the other end did not join the communicator within"):
            gpus.link(0, "alone", sends=True, timeout_s=2.0)
    else:
        source, _target = gpus.pair(timeout_s=3.0)
        start_s = time.monotonic()
        with pytest.raises(RuntimeError, match="NCCL did not launch a transfer"):
            source.send(numbers(0), 0)
        source.abort()
    assert 0.15 < time.monotonic() - start_s < 15.0
    until(lambda: gpus.end_of(0).aborted)


def test_a_thread_that_launches_is_left_when_another_ends_the_session(gpus: Gpus) -> None:
    source, _target = gpus.pair()
    start_s = time.monotonic()
    threading.Timer(0.1, source.abort).start()
    with pytest.raises(RuntimeError, match="the session was ended"):
        source.send(numbers(0), 0)  # connects, which the other end never comes to
    assert 0.09 < time.monotonic() - start_s < 15.0
    until(lambda: gpus.end_of(0).aborted)


def connected(gpus: Gpus) -> tuple[NcclLink, NcclLink]:
    """A pair over which something has gone."""
    source, target = gpus.pair()
    tensor, buffer = numbers(0, 8), target.empty((8,), torch.uint8)
    began(lambda: source.send(tensor, 0), lambda: target.receive(buffer, 0))
    gpus.run()
    return source, target


def test_a_launch_may_take_as_long_as_messages_may(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that is given up leaves no event behind: where the launch stands, that would keep the thread as long."""
    gpus.timeout_s = 0.3
    source, _target = connected(gpus)
    monkeypatch.setattr(simulated_nccl, "LOOKS_TO_LAUNCH", 1 << 40)
    tensors, recorded = [numbers(1)], len(source._stream.operations)
    address, begun_s = tensors[0].data_ptr(), time.monotonic()
    with pytest.raises(RuntimeError, match="NCCL did not launch a transfer, for which it may .* within 0 s"):
        source.send(tensors.pop(), 0)
    assert 0.29 < time.monotonic() - begun_s < 10.0
    assert len(source._stream.operations) == recorded
    assert any(each.data_ptr() == address for each in source._retained), "the device may still read it"


def test_a_launch_that_stands_keeps_the_watch_from_no_deadline(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = connected(gpus)
    work = target.receive(target.empty((NBYTES,), torch.uint8), 0)
    monkeypatch.setattr(simulated_nccl, "LOOKS_TO_LAUNCH", 1 << 40)
    target.follow(work, time.monotonic() + 0.1)
    begun_s = time.monotonic()
    with pytest.raises(RuntimeError, match="a message of 100000 bytes did not come in time"):
        target.receive(target.empty((8,), torch.uint8), 0)
    assert time.monotonic() - begun_s < 10.0
    source.abort()


def test_a_question_that_the_driver_does_not_answer_keeps_no_other_thread(gpus: Gpus) -> None:
    """Nor the link from being ended; and when the watch has stood for long, the process is."""
    source, target = connected(gpus)
    answers, ended = threading.Event(), threading.Event()

    class Stands(SimulatedEvent):
        def query(self) -> bool:
            answers.wait(20.0)
            return False

    watch = LinkWatch(interval_s=0.005, stands_s=0.2, last_resort=ended.set)
    target.timeout_s = 0.0
    transfers: Any = target._transfers
    transfers.works.append(SimulatedWork(numbers(0), Stands(gpus.devices[1])))
    watch.add(target)
    try:
        time.sleep(0.05)
        begun_s = time.monotonic()
        target.abort()
        assert time.monotonic() - begun_s < 5.0
        assert ended.wait(5.0)
    finally:
        answers.set()
        watch.close()
        source.abort()


class Pauses:
    """The end of the watch, for which its watcher waits a few times: each time comes `between`."""

    def __init__(self, between: list[Callable[[], object]]) -> None:
        self._between = deque(between)

    def wait(self, pause_s: float) -> bool:
        if not self._between:
            return True
        self._between.popleft()()
        return False


@pytest.mark.parametrize("stopped", [True, False])
def test_a_process_that_was_stopped_has_a_watch_that_does_not_stand(
    monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    """When it goes on, an hour is over since the last look, and who looks whether the watch stands may be first."""
    now_s, ended = [0.0], list[float]()
    monkeypatch.setattr(link_watch, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    watch = LinkWatch(stands_s=2.0, last_resort=lambda: ended.append(now_s[0]))

    def passes(seconds: float, *, looks: bool) -> Callable[[], None]:
        def happen() -> None:
            now_s[0] += seconds
            if looks:
                watch._looks += 1

        return happen

    looked = [passes(0.5, looks=True)] * 3
    stood = [passes(3600.0, looks=False)] if stopped else [passes(0.5, looks=False)] * 5
    pauses: Any = Pauses([*looked, *stood, *looked])
    watch._closed = pauses
    watch._watch_itself()
    assert ended == ([] if stopped else [4.0])


class Failing:
    """A link that fails, or whose watching does."""

    timeout_s = 0.0
    settled = False

    def __init__(self, at_s: float, error: Exception | None = None) -> None:
        self._at_s, self._error = at_s, error

    def failure(self, now_s: float) -> Failure | None:
        if self._error is not None:
            raise self._error
        return Failure(self._at_s, f"since {self._at_s:g}")

    def abort(self, cause: str) -> None:
        """It stays as it is."""


class Looked(Failing):
    """A link that is well: the first look at it ends when the test lets it."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.looked_at, self.ends = threading.Event(), threading.Event()

    def failure(self, now_s: float) -> Failure | None:
        self.looked_at.set()
        assert self.ends.wait(5.0)
        return None


def test_the_link_that_failed_first_is_reported_first_and_the_watch_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    outcome: list[str] = []

    def failed(link: object, cause: str) -> None:
        outcome.append(cause)
        if len(outcome) == 1:
            raise StopIteration

    watch = LinkWatch(interval_s=0.005)
    watch.failed = failed
    looked = Looked()
    watch.add(looked)
    assert looked.looked_at.wait(5.0)
    for link in (Failing(7.0), Failing(3.0), Failing(0.0, KeyError("gone"))):
        watch.add(link)
    looked.ends.set()  # the next look is the first at the others, at all three of them
    until(lambda: len(outcome) >= 6)
    watch.close()
    assert outcome[:3] == ["since 3", "since 7", "it cannot be watched: KeyError: 'gone'"] == outcome[3:6]
    assert len(caplog.records) == 2, "each error is said once"


class Links:
    """Two stages, a device each, with both paths between them."""

    def __init__(self, gpus: Gpus, gpu: str = "", specification: TensorSpecification = ANY, **paths: Any) -> None:
        self.gpus = gpus
        self.ends: list[DualLink] = []
        for stage in range(2):

            def make_group(as_sender: bool, session: int, timeout_s: float, stage: int = stage) -> NcclLink:
                source = stage if as_sender else 1 - stage
                made = gpus.link(stage, f"{source}/{session}", sends=as_sender, timeout_s=timeout_s, gpu=gpu)
                greet(made, as_sender, soon())
                return made

            device: Any = gpus.devices[stage]
            # The host path brings all notes.
            second = SecondPath(PathSettings(**paths), make_group, lambda number, packet: None)
            self.ends.append(DualLink(LinkEnds(stage, 1 - stage), SETTINGS, device, second=second))
            self.ends[-1].describe(specification)
        there, back = (Ring.create(SETTINGS.slots, SETTINGS.slot_nbytes) for _ in range(2))
        self.ends[0].connected(there, back, lambda cause: None)
        self.ends[1].connected(back, there, lambda cause: None)
        for end in self.ends:
            end.begin()
        self._over = threading.Event()
        self._worker = threading.Thread(target=self._work)
        self._worker.start()

    def _work(self) -> None:
        """The sender's device works by itself; the receiver's whenever a thread looks for a message."""
        while not self._over.wait(0.001):
            self.gpus.devices[0].run()

    def close(self) -> None:
        for end in self.ends:
            end.close()
        self._over.set()
        self._worker.join()

    def send(self, number: int) -> None:
        self.ends[0].post_send(key(number), self.gpus.devices[0].tensor(numbers(number)))

    def receive(self, number: int) -> torch.Tensor:
        """What computation that is queued behind the message reads."""
        tensor, _times = self.ends[1].wait(key(number), soon())
        return self.gpus.devices[1].read(tensor)


@pytest.fixture
def make_links(gpus: Gpus) -> Iterator[Callable[..., Links]]:
    made: list[Links] = []

    def make(**settings: Any) -> Links:
        made.append(Links(gpus, **settings))
        return made[-1]

    yield make
    for links in made:
        links.close()


def test_messages_take_the_device_path_once_it_is_proven(make_links: Callable[..., Links]) -> None:
    links = make_links(specification=FIXED)

    # Both directions: a thread that posts also launches the probes that the other direction has pending.
    def proven() -> bool:
        links.gpus.devices[1].run()
        return all(end.path_counters().path is Path.DEVICE and end._paths.receiver.carries for end in links.ends)

    until(proven)
    for number in range(10):
        links.ends[1].post_receive(key(number))
        links.send(number)
    seen = [links.receive(number) for number in range(10)]
    device = links.gpus.devices[1]
    device.run()
    for number, read in enumerate(seen):
        assert torch.equal(read, numbers(number))
    assert links.ends[0].path_counters().sent_by_device == 10
    assert [name for _address, name in device.kept].count("compute") == 10, "memory of another stream is kept"
    launched = sum(end.threads[threading.current_thread().name] for end in links.gpus.fabric.of(device))
    assert launched == 10, "receives are launched by who asks for them"


def test_what_a_dead_session_carried_is_staged_when_it_is_computed(make_links: Callable[..., Links]) -> None:
    """By another thread than the training's: without the event of the posting it would be read too early."""
    links = make_links(first_rest_s=60.0)
    until(lambda: links.ends[0].path_counters().path is Path.DEVICE)
    compute = links.gpus.devices[0].compute
    compute.held = True
    for number in range(4):
        links.send(number)
    links.ends[0]._paths.abort_all()
    links.ends[1]._paths.abort_all()
    for number in range(4):
        links.ends[1].post_receive(key(number))
    until(lambda: links.ends[0].unacknowledged == 4)
    time.sleep(0.02)
    links.gpus.devices[0].run()
    assert not links.ends[1].ready(key(0))
    links.gpus.devices[0].let_go(compute)
    seen = [links.receive(number) for number in range(4)]
    links.gpus.devices[1].run()
    for number, read in enumerate(seen):
        assert torch.equal(read, numbers(number))
    links.ends[0].flush(soon())
    assert links.ends[0].path_counters().sent_by_device == 4
    assert links.ends[0].path_counters().sessions_lost >= 1


def test_a_message_that_is_not_computed_yet_is_not_missed(make_links: Callable[..., Links]) -> None:
    links = make_links(suspicion_s=0.02, stall_s=0.1)
    until(lambda: links.ends[0].path_counters().path is Path.DEVICE)
    compute = links.gpus.devices[0].compute
    compute.held = True
    links.ends[1].post_receive(key(0))
    links.send(0)
    lost: list[int] = []

    def let_go() -> None:
        lost.append(links.ends[1].path_counters().sessions_lost)
        links.gpus.devices[0].let_go(compute)

    threading.Timer(0.5, let_go).start()
    read = links.receive(0)
    links.gpus.devices[1].run()
    assert torch.equal(read, numbers(0))
    assert lost == [0]


def test_a_lost_message_comes_by_the_host_path(make_links: Callable[..., Links]) -> None:
    links = make_links(suspicion_s=0.02, stall_s=0.1, first_rest_s=60.0)
    until(lambda: links.ends[0].path_counters().path is Path.DEVICE)
    for pair in links.gpus.fabric.pairs.values():
        pair.lost = True
    links.ends[1].post_receive(key(0))
    links.send(0)
    read = links.receive(0)
    links.gpus.devices[1].run()
    assert torch.equal(read, numbers(0))
    assert links.ends[0].path_counters().path is Path.HOST


def test_stages_on_one_gpu_stay_on_the_host_path_and_say_so_once(
    make_links: Callable[..., Links], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "adaptra_megatron")
    links = make_links(gpu="GPU-1", first_rest_s=0.01, longest_rest_s=0.02)
    until(lambda: links.ends[0]._paths.sender._sessions > 5)
    links.ends[1].post_receive(key(0))
    links.send(0)
    read = links.receive(0)
    links.gpus.devices[1].run()
    assert torch.equal(read, numbers(0))

    def said() -> list[logging.LogRecord]:
        return [record for record in caplog.records if "both stages are on one GPU" in record.getMessage()]

    until(lambda: len(said()) >= 4)
    outcome = said()
    assert len(outcome) == 4, "each end of each direction says it once"
    assert {record.levelname for record in outcome} == {"INFO"}


def test_either_path_is_measured_without_a_wait_of_computation(make_links: Callable[..., Links]) -> None:
    """Though computation stands still: probes are on streams of their own, and made by none of it."""
    links = make_links()
    source, compute = links.ends[0], links.gpus.devices[0].compute
    until(lambda: source.path_counters().path is Path.DEVICE)
    probes: list[ProbeTimes] = []
    seen = []
    for number, path in enumerate((Path.HOST, Path.DEVICE)):
        links.ends[1].post_receive(key(number))
        links.send(number)
        seen.append(links.receive(number))
        compute.held = True
        links.gpus.devices[0].tensor(numbers(number))  # something is queued
        source.measure()
        until(lambda: bool(probes.extend(source.take_probes()) or probes))
        links.gpus.devices[0].let_go(compute)
        assert {(probe.path, probe.nbytes) for probe in probes} == {(path, NBYTES)}
        probes.clear()
        source.prefer(Path.HOST)
        until(lambda: source.path_counters().path is Path.HOST)
    links.gpus.devices[1].run()
    for number, read in enumerate(seen):
        assert torch.equal(read, numbers(number))
