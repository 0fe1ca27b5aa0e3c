# SPDX-License-Identifier: Apache-2.0
"""The device path between GPUs, on simulated devices and a simulated NCCL: order of the device's work, ends of
sessions, and links that go over to the host path. What reads without having waited shows as poison."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.simulated_device import SimulatedDevice
from support.simulated_nccl import SimulatedNccl, Wire

from adaptra_megatron.transport import nccl_pair_group
from adaptra_megatron.transport._ring import Ring
from adaptra_megatron.transport.cuda_device import Computed
from adaptra_megatron.transport.device_session import ReceivingSession, SendingSession
from adaptra_megatron.transport.dual_link import DualLink
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.messages import Direction, MessageKey, TensorSpecification
from adaptra_megatron.transport.nccl_pair_group import NcclPairGroup
from adaptra_megatron.transport.note_mail import NoteMail
from adaptra_megatron.transport.pair_group import PairEnds
from adaptra_megatron.transport.paths import Path, PathSettings, ProbeTimes

NBYTES = 100_000
ANY = TensorSpecification(None, torch.uint8, torch.device("cpu"))
SETTINGS = HostSettings(timeout_s=20.0, grace_s=20.0)


def soon() -> float:
    return time.monotonic() + 10.0


def until(condition: Callable[[], bool]) -> None:
    deadline_s = soon()
    while not condition():
        assert time.monotonic() < deadline_s, "this never happens"
        time.sleep(0.001)


def key(number: int) -> MessageKey:
    return MessageKey(0, Direction.ACTIVATION, 0, number)


def numbers(seed: int, nbytes: int = NBYTES) -> torch.Tensor:
    return torch.randint(0, 255, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


class Fabric:
    """Stands in for torch.distributed's NCCL; knows every communicator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first: str | None = None) -> None:
        self.devices = [SimulatedDevice(seed, first=first) for seed in range(2)]
        self.made: list[SimulatedNccl] = []
        self.wires: dict[str, Wire] = {}
        self.store = dist.HashStore()
        self._making = threading.local()
        fabric = self

        class ProcessGroupNCCL:
            Options = SimulatedNccl.Options

            def __new__(cls, store: object, rank: int, size: int, options: object) -> Any:
                device, wire = fabric._making.what
                fabric.made.append(SimulatedNccl(device, wire))
                return fabric.made[-1]

        monkeypatch.setattr(nccl_pair_group.dist, "is_nccl_available", lambda: True)
        monkeypatch.setattr(nccl_pair_group.dist, "ProcessGroupNCCL", ProcessGroupNCCL, raising=False)

    def group(self, stage: int, name: str, *, sends: bool, timeout_s: float = 5.0, gpu: str = "") -> NcclPairGroup:
        self._making.what = (self.devices[stage], self.wires.setdefault(name, Wire()))
        device: Any = self.devices[stage]
        ends = PairEnds(stage, 1 - stage) if sends else PairEnds(1 - stage, stage)
        own = dist.PrefixStore(name, self.store)
        return NcclPairGroup(own, ends, device, gpu or f"gpu {stage}", sends=sends, timeout_s=timeout_s)

    def pair(self, **settings: Any) -> tuple[NcclPairGroup, NcclPairGroup]:
        """From stage 0 to stage 1."""
        with ThreadPoolExecutor(2) as threads:
            source = threads.submit(self.group, 0, "pair", sends=True, **settings)
            target = threads.submit(self.group, 1, "pair", sends=False, **settings)
            return source.result(), target.result()


@pytest.fixture(params=["compute", "copies", None])
def fabric(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Fabric:
    return Fabric(monkeypatch, request.param)


class Sessions:
    """Both ends of a device session."""

    def __init__(self, fabric: Fabric) -> None:
        source, target = fabric.pair()
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
def sessions(fabric: Fabric) -> Iterator[Sessions]:
    made = Sessions(fabric)
    yield made
    made.end()


def test_a_message_is_read_when_it_is_computed_whichever_thread_sends_it(fabric: Fabric, sessions: Sessions) -> None:
    device = fabric.devices[0]
    device.compute.held = True
    messages = []
    for seed in range(4):
        tensor = device.tensor(numbers(seed))
        messages.append(Computed(tensor, device.record(device.compute)))
    specification = TensorSpecification((NBYTES,), torch.uint8, torch.device("cpu"))
    for index in (1, 0, 2, 3):
        sessions.receiving.receive(index, specification)
    with ThreadPoolExecutor(1) as keeper:
        for index in (0, 3, 2, 1):
            send = sessions.sending.send if index == 1 else keeper.submit
            arguments = () if index == 1 else (sessions.sending.send,)
            send(*arguments, index, messages[index], header=False)  # type: ignore[arg-type]
    time.sleep(0.02)
    assert not sessions.arrived
    device.let_go(device.compute)
    until(lambda: device.run() or len(sessions.arrived) == 4)
    for seed, tensor in enumerate(sessions.arrived):
        assert torch.equal(tensor, numbers(seed))


def test_headers_bodies_and_probes_come_in_the_senders_order(fabric: Fabric, sessions: Sessions) -> None:
    """NCCL matches by order alone, and a body's size is in its header: the simulated one fails on any other order."""
    device = fabric.devices[0]
    for index in range(6):
        sessions.receiving.receive(index, None if index == 3 else ANY)
    for index in range(6):
        if index == 3:
            sessions.sending.probe(index)
        else:
            tensor = device.tensor(numbers(index, 1000 + index))
            sessions.sending.send(index, Computed(tensor, device.record(device.compute)), header=True)
    until(lambda: device.run() or len(sessions.arrived) == 6)
    for index, tensor in enumerate(sessions.arrived):
        if index != 3:
            assert torch.equal(tensor, numbers(index, 1000 + index))
    assert not sessions.failed


def test_to_abort_wakes_the_receiving_thread_and_ends_both_calls(fabric: Fabric, sessions: Sessions) -> None:
    sessions.receiving.receive(0, ANY)
    until(lambda: len(fabric.made[0].threads) + len(fabric.made[1].threads) == 3)
    assert not sessions.failed
    start_s = time.monotonic()
    sessions.receiving.abort()
    until(lambda: bool(sessions.failed))
    assert time.monotonic() - start_s < 1.0
    assert sessions.failed == ["torch.distributed reported: the session was ended"]
    assert [group.aborted for group in fabric.made].count(True) == 1
    sessions.sending.abort()
    with pytest.raises(RuntimeError, match="the session was ended"):
        sessions.sending.probe(0)
    sessions.sending.abort()


def test_an_error_of_nccl_ends_the_session(fabric: Fabric, sessions: Sessions) -> None:
    sessions.receiving.receive(0, ANY)
    target = next(group for group in fabric.made if group.device is fabric.devices[1])
    until(lambda: len(target.works) == 2)
    target.works[-1].error = RuntimeError("NCCL error: remote process exited")
    until(lambda: bool(sessions.failed))
    assert "remote process exited" in sessions.failed[0]
    assert not sessions.arrived


def test_a_wait_that_expires_ends_the_session(fabric: Fabric) -> None:
    source, target = fabric.pair()
    work = target.receive(target.empty((10,), torch.uint8), 0)
    with pytest.raises(RuntimeError, match=r"did not arrive in 0\.05 s"):
        target.wait(work, 0.05)
    with pytest.raises(RuntimeError, match="the session was ended"):
        target.receive(target.empty((10,), torch.uint8), 1)
    source.abort()


def test_nobody_else_is_told_of_what_a_group_is_told_by_the_environment(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    before = dict(os.environ)
    seen: list[str | None] = []
    made = nccl_pair_group.dist.ProcessGroupNCCL

    class Looks(made):  # type: ignore[misc, valid-type]
        def __new__(cls, *arguments: Any) -> Any:
            seen.append(os.environ.get("TORCH_NCCL_BLOCKING_WAIT"))
            if len(seen) == 3:
                raise RuntimeError("no")
            return made(*arguments)

    monkeypatch.setattr(nccl_pair_group.dist, "ProcessGroupNCCL", Looks)
    for group in fabric.pair():
        group.abort()
    assert seen == ["1", "1"]
    assert dict(os.environ) == before
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT")
    fabric.store.set("late/gpu/0", "another")
    with pytest.raises(RuntimeError, match="no"):
        fabric.group(1, "late", sends=False)
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ


def test_two_stages_on_one_gpu_are_told_apart_before_nccl_is_asked(fabric: Fabric) -> None:
    with pytest.raises(RuntimeError, match="both stages are on one GPU"):
        fabric.pair(gpu="GPU-1")
    assert not fabric.made


def test_a_peer_that_does_not_come_is_not_waited_for_in_nccl(fabric: Fabric) -> None:
    start_s = time.monotonic()
    with pytest.raises(RuntimeError):
        fabric.group(0, "alone", sends=True, timeout_s=0.1)
    assert time.monotonic() - start_s < 3.0
    assert not fabric.made


class Links:
    """Two stages, a device each, with both paths between them."""

    def __init__(self, fabric: Fabric, gpu: str = "", **paths: Any) -> None:
        self.fabric = fabric
        self.ends: list[DualLink] = []
        for stage in range(2):

            def make_group(as_sender: bool, session: int, timeout_s: float, stage: int = stage) -> NcclPairGroup:
                source = stage if as_sender else 1 - stage
                return fabric.group(stage, f"{source}/{session}", sends=as_sender, timeout_s=timeout_s, gpu=gpu)

            device: Any = fabric.devices[stage]
            mail = NoteMail(fabric.store, f"notes/{stage}", f"notes/{1 - stage}")  # type: ignore[arg-type]
            self.ends.append(DualLink(stage, 1 - stage, SETTINGS, PathSettings(**paths), make_group, mail, device))
            self.ends[-1].describe(ANY)
        there, back = (Ring.create(SETTINGS.slots, SETTINGS.slot_nbytes) for _ in range(2))
        self.ends[0].connected(there, back)
        self.ends[1].connected(back, there)
        self._over = threading.Event()
        self._worker = threading.Thread(target=self._work)
        self._worker.start()

    def _work(self) -> None:
        """The sender's device works by itself; the receiver's whenever somebody looks for a message."""
        while not self._over.wait(0.001):
            self.fabric.devices[0].run()

    def close(self) -> None:
        for end in self.ends:
            end.close()
        self._over.set()
        self._worker.join()

    def send(self, number: int) -> None:
        self.ends[0].post_send(key(number), self.fabric.devices[0].tensor(numbers(number)))

    def receive(self, number: int) -> torch.Tensor:
        """What computation that is queued behind the message reads."""
        tensor, _times = self.ends[1].wait(key(number), soon())
        return self.fabric.devices[1].read(tensor)


@pytest.fixture
def make_links(fabric: Fabric) -> Iterator[Callable[..., Links]]:
    made: list[Links] = []

    def make(**settings: Any) -> Links:
        made.append(Links(fabric, **settings))
        return made[-1]

    yield make
    for links in made:
        links.close()


def test_messages_take_the_device_path_once_it_is_proven(make_links: Callable[..., Links]) -> None:
    links = make_links()
    until(lambda: links.ends[0].path_counters().path is Path.DEVICE)
    for number in range(10):
        links.ends[1].post_receive(key(number))
        links.send(number)
    seen = [links.receive(number) for number in range(10)]
    device = links.fabric.devices[1]
    device.run()
    for number, read in enumerate(seen):
        assert torch.equal(read, numbers(number))
    assert links.ends[0].path_counters().sent_by_device == 10
    assert [name for _address, name in device.kept].count("compute") == 10, "memory of another stream is kept"
    assert not any("MainThread" in group.threads for group in links.fabric.made if group.device is device)


def test_what_a_dead_session_carried_is_staged_when_it_is_computed(make_links: Callable[..., Links]) -> None:
    """By another thread than the training's: without the event of the posting it would be read too early."""
    links = make_links(first_rest_s=60.0)
    until(lambda: links.ends[0].path_counters().path is Path.DEVICE)
    compute = links.fabric.devices[0].compute
    compute.held = True
    for number in range(4):
        links.send(number)
    links.ends[0]._device.abort_all()
    links.ends[1]._device.abort_all()
    for number in range(4):
        links.ends[1].post_receive(key(number))
    until(lambda: links.ends[0].unacknowledged == 4)
    time.sleep(0.02)
    links.fabric.devices[0].run()
    assert not links.ends[1].ready(key(0))
    links.fabric.devices[0].let_go(compute)
    seen = [links.receive(number) for number in range(4)]
    links.fabric.devices[1].run()
    for number, read in enumerate(seen):
        assert torch.equal(read, numbers(number))
    links.ends[0].flush(soon())
    assert links.ends[0].path_counters().sent_by_device == 4
    assert links.ends[0].path_counters().sessions_lost >= 1


def test_a_message_that_is_not_computed_yet_is_not_missed(make_links: Callable[..., Links]) -> None:
    links = make_links(suspicion_s=0.02, stall_s=0.1)
    until(lambda: links.ends[0].path_counters().path is Path.DEVICE)
    compute = links.fabric.devices[0].compute
    compute.held = True
    links.ends[1].post_receive(key(0))
    links.send(0)
    threading.Timer(0.5, links.fabric.devices[0].let_go, [compute]).start()
    read = links.receive(0)
    links.fabric.devices[1].run()
    assert torch.equal(read, numbers(0))
    assert links.ends[1].path_counters().sessions_lost == 0


def test_a_lost_message_comes_by_the_host_path(make_links: Callable[..., Links]) -> None:
    links = make_links(suspicion_s=0.02, stall_s=0.1)
    until(lambda: links.ends[0].path_counters().path is Path.DEVICE)
    for wire in links.fabric.wires.values():
        wire.lost = True
    links.ends[1].post_receive(key(0))
    links.send(0)
    read = links.receive(0)
    links.fabric.devices[1].run()
    assert torch.equal(read, numbers(0))
    assert links.ends[0].path_counters().path is Path.HOST


def test_stages_on_one_gpu_stay_on_the_host_path_and_say_so_once(
    make_links: Callable[..., Links], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "adaptra_megatron")
    links = make_links(gpu="GPU-1", first_rest_s=0.01, longest_rest_s=0.02)
    until(lambda: links.ends[0]._outlet._sessions > 5)
    links.ends[1].post_receive(key(0))
    links.send(0)
    read = links.receive(0)
    links.fabric.devices[1].run()
    assert torch.equal(read, numbers(0))
    told = [record for record in caplog.records if "both stages are on one GPU" in record.getMessage()]
    assert len(told) == 4, "each end of each direction says it once"
    assert {record.levelname for record in told} == {"INFO"}


def test_either_path_is_measured_without_a_wait_of_computation(make_links: Callable[..., Links]) -> None:
    """Though computation stands still: probes are on streams of their own, and made by none of it."""
    links = make_links()
    source, compute = links.ends[0], links.fabric.devices[0].compute
    until(lambda: source.path_counters().path is Path.DEVICE)
    probes: list[ProbeTimes] = []
    seen = []
    for number, path in enumerate((Path.HOST, Path.DEVICE)):
        links.ends[1].post_receive(key(number))
        links.send(number)
        seen.append(links.receive(number))
        compute.held = True
        links.fabric.devices[0].tensor(numbers(number))  # something is queued
        source.measure()
        until(lambda: bool(probes.extend(source.take_probes()) or probes))
        links.fabric.devices[0].let_go(compute)
        assert {(probe.path, probe.nbytes) for probe in probes} == {(path, NBYTES)}
        probes.clear()
        source.prefer(Path.HOST)
        until(lambda: source.path_counters().path is Path.HOST)
    links.fabric.devices[1].run()
    for number, read in enumerate(seen):
        assert torch.equal(read, numbers(number))
