# SPDX-License-Identifier: Apache-2.0
"""T5: sessions of links over real NCCL, made and ended again and again, and links that go over to the other path."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from adaptra_megatron.transport.dual_path.host_transport import HostTransport
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.link_paths import Path, PathSettings
from adaptra_megatron.transport.message_keys import Direction, MessageKey, TensorSpecification
from adaptra_megatron.transport.setup.link_setup import LinkMaker
from gpu_check.findings import Report
from gpu_check.stages import Stage

SESSIONS = 40
SETTLED = 10
"""Sessions after which what they leave behind is counted."""
GROWTH_NBYTES = 64 << 20
GROWTH_THREADS = 2
MADE_S = 15.0
FREED_S = 5.0
SHAPE = (512, 1024)
COMES_S = 40.0
MESSAGES = 10
ABORTS = 4
QUEUED, QUEUED_NBYTES = 600, 1 << 30
"""Computation of some tenths of a second, of fewer kernels than a stream takes before its host has to wait."""
THERE, BACK = (0, 1), (1, 0)


def run(stage: Stage, report: Report, part: str) -> None:
    """`part`: a name in PARTS."""
    PARTS[part](stage, report)


def sessions(stage: Stage, report: Report) -> None:
    """Many in a row; then some that meet with a receive that stands on the device."""
    maker = stage.maker()
    _many(stage, report, maker)
    _while_a_receive_stands(stage, report, maker)
    promise = "a receive that stands is aborted, and its session freed"
    report.begin(promise)
    link: Any = maker.make(THERE, 2 * SESSIONS + 2, MADE_S)
    stage.rendezvous.gather("a receive is to be aborted", None)
    if stage.stage == 1:
        link.receive(link.empty((1 << 20,), torch.uint8), 0)
        begun_s = time.monotonic()
        link.abort()
        freed = link.wait_until_freed(begun_s + FREED_S)
        report.show(promise, f"{'freed' if freed else 'not freed'} after {time.monotonic() - begun_s:.2f} s", freed)
    stage.rendezvous.gather("a receive was aborted", None)
    link.abort()
    link.wait_until_freed(time.monotonic() + FREED_S)
    maker.close()


def _many(stage: Stage, report: Report, maker: LinkMaker) -> None:
    promise = f"{SESSIONS} sessions come up and are freed, and leave nothing behind"
    report.begin(promise)
    seconds, unfreed, before = [], 0, (0, 0, 0)
    for number in range(SESSIONS):
        begun_s = time.monotonic()
        link: Any = maker.make(THERE, 2 + number, MADE_S)
        seconds.append(time.monotonic() - begun_s)
        if number % 2:
            link.abort()
        else:
            link.close(time.monotonic() + FREED_S)
        unfreed += not link.wait_until_freed(time.monotonic() + FREED_S)
        del link
        # Both ends have freed theirs.
        stage.rendezvous.gather(f"session {number} is over", None)
        if number == SETTLED - 1:
            before = _left(stage)
    nbytes, threads, streams = (after - earlier for earlier, after in zip(before, _left(stage), strict=True))
    if stage.stage == 0:
        seen = f"{unfreed} not freed; {nbytes / (1 << 20):.1f} MiB and {threads} threads more than after {SETTLED}"
        shown = unfreed == 0 and nbytes <= GROWTH_NBYTES and threads <= GROWTH_THREADS
        report.show(promise, f"{seen}; the first came up in {seconds[0]:.2f} s, the last in {seconds[-1]:.2f} s", shown)
        seen = f"{streams} streams more than after {SETTLED} sessions, of {stage.streams()} in all"
        report.show("all sessions of a link share its stream", seen, streams == 0)


def _left(stage: Stage) -> tuple[int, int, int]:
    gc.collect()
    return stage.used_nbytes(), len(os.listdir("/proc/self/task")), stage.streams()


def _while_a_receive_stands(stage: Stage, report: Report, maker: LinkMaker) -> None:
    promise = f"while a receive stands, another link's session comes up within {MADE_S:g} s"
    report.begin(promise)
    link: Any = maker.make(THERE, 2 * SESSIONS, MADE_S)
    if stage.stage == 1:
        buffer = link.empty((1 << 20,), torch.uint8)
        work = link.receive(buffer, 0)
    stage.rendezvous.gather("a receive stands", None)
    begun_s, cause = time.monotonic(), None
    try:
        maker.make(BACK, 2 * SESSIONS + 1, MADE_S).abort()
    except RuntimeError as error:
        cause = str(error)
    seconds = time.monotonic() - begun_s
    stage.rendezvous.gather("the other link has been tried", None)
    if stage.stage == 0:
        work = link.send(link.bring(torch.ones(1 << 20, dtype=torch.uint8)), 0)
    link.wait(work, MADE_S)
    if stage.stage == 1:
        came = bool((link.read(buffer) == 1).all())
        seen = f"{cause or 'it came up'} after {seconds:.2f} s; the message {'came' if came else 'was lost'}"
        report.show(promise, seen, cause is None and came)
    stage.rendezvous.gather("the message came", None)
    link.abort()


def death(stage: Stage, report: Report) -> None:
    """One end dies when both have met and before it comes to the communicator."""
    limit_s = MADE_S / 3
    if stage.stage == 1:
        stage.maker(lambda library: _DiesAtInit(library, stage.die)).make(THERE, 2, limit_s)
        return
    promise = f"a peer that dies between meeting and joining is given up after {limit_s:g} s"
    maker = stage.maker()
    report.begin(promise)
    begun_s, cause = time.monotonic(), "it came up"
    try:
        maker.make(THERE, 2, limit_s)
    except RuntimeError as error:
        cause = str(error)
    seconds = time.monotonic() - begun_s
    freed_s = time.monotonic() + FREED_S
    while _ending() and time.monotonic() < freed_s:
        time.sleep(0.01)
    shown = cause != "it came up" and seconds <= 2 * limit_s and not _ending()
    report.show(promise, f"after {seconds:.1f} s: {cause}; {'not ' * _ending()}freed", shown)
    maker.close()


class _DiesAtInit:
    """A decorator of NCCL."""

    def __init__(self, library: Any, die: Callable[[], None]) -> None:
        self._library, self._die = library, die

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def init_rank(self, *arguments: Any) -> int:
        """Ends the process."""
        self._die()
        raise AssertionError("it lives")


def _ending() -> bool:
    """Return whether a communicator is still being freed."""
    return any(thread.name.startswith("adaptra-nccl-end") for thread in threading.enumerate())


def paths(stage: Stage, report: Report) -> None:
    """The device path carries messages once it is proven, also when its sessions are aborted under the traffic."""
    transport = _two_paths(stage, stage.maker())
    peer = 1 - stage.stage
    promise = "messages go by the device path once it is proven, with and without known shapes"
    report.begin(promise)
    _until(lambda: _path(transport) is Path.DEVICE, "the device path did not come up")
    stage.rendezvous.gather("up", None)
    wrong = sum(_exchange(transport, stage, iteration) for iteration in range(3))
    transport.describe(TensorSpecification(None, torch.float32, stage.tensors))
    stage.rendezvous.gather("described", None)
    wrong += _exchange(transport, stage, 3)
    counters = transport.link_counters()[peer].paths
    sent = -1 if counters is None else counters.sent_by_device
    if stage.stage == 0:
        seen = f"{sent} of {4 * MESSAGES} by the device path, {wrong} wrong"
        report.show(promise, seen, (wrong, sent) == (0, 4 * MESSAGES))
    _probes(stage, report, transport)
    promise = "no message is lost when sessions are aborted under the traffic, and the device path comes back"
    report.begin(promise)
    link: Any = transport._links[peer]
    wrong = 0
    for iteration in range(4, 4 + ABORTS):
        _until(lambda: _path(transport) is Path.DEVICE, "the device path did not come back")
        stage.rendezvous.gather(f"up again {iteration}", None)
        if stage.stage == iteration % 2:
            link._paths.abort_all()
        wrong += _exchange(transport, stage, iteration)
    _until(lambda: _path(transport) is Path.DEVICE, "the device path did not come back at last")
    if stage.stage == 0:
        lost = link.path_counters().sessions_lost
        report.show(promise, f"{wrong} messages wrong, {lost} sessions lost", wrong == 0 and lost >= ABORTS)
    stage.rendezvous.gather("done", None)
    transport.close()


def _probes(stage: Stage, report: Report, transport: HostTransport) -> None:
    promise = "the host path is probed while computation is queued, and the probes do not wait for it"
    report.begin(promise)
    if stage.stage == 0:
        tensor = stage.tensor(1, QUEUED_NBYTES)
        begun_s = time.monotonic()
        for _ in range(QUEUED):
            tensor = stage.plus(tensor, 1)
        transport.measure(1)
        found: list[Any] = []

        def came() -> bool:
            found.extend(transport.take_probes())
            return bool(found)

        _until(came, "no probe came back")
        probed_s = time.monotonic() - begun_s
        stage.synchronize()
        computed_s = time.monotonic() - begun_s
        latency_ms = 1e3 * max(probe.arrived_s - probe.sent_s for probe in found)
        seen = f"{latency_ms:.2f} ms each at most, all after {probed_s:.3f} s; computation took {computed_s:.3f} s"
        report.show(promise, seen, stage.device is None or probed_s < computed_s)
    stage.rendezvous.gather("probed", None)


def one_gpu(stage: Stage, report: Report) -> None:
    """NCCL does not connect two ranks of one GPU: everything goes by the host path, and nothing fails."""
    promise = "two stages on one GPU use the host path"
    report.begin(promise)
    transport = _two_paths(stage, stage.maker(identity="one GPU"))
    link: Any = transport._links[1 - stage.stage]
    _until(lambda: link._paths.sender._sessions >= 3, "the device path was not tried again")
    wrong = sum(_exchange(transport, stage, iteration) for iteration in range(3))
    if stage.stage == 0:
        shown = wrong == 0 and _path(transport) is Path.HOST and "one GPU" in link._paths.sender.cause
        report.show(promise, f"{wrong} messages wrong; {link._paths.sender.cause}", shown)
    stage.rendezvous.gather("done", None)
    transport.close()


def _two_paths(stage: Stage, maker: LinkMaker) -> HostTransport:
    maker.connect(wrap=False)
    settings = PathSettings(probe_limit_s=MADE_S, first_rest_s=0.1, longest_rest_s=0.2)
    host = HostSettings(transport="shm", timeout_s=60.0)
    transport = HostTransport(stage.rendezvous, 1, host, settings, maker, stage.device)
    transport.describe(TensorSpecification(SHAPE, torch.float32, stage.tensors))
    return transport


def _path(transport: HostTransport) -> Path:
    """By which this rank sends."""
    counters = transport.link_counters()[1 - transport.rank].paths
    assert counters is not None
    return counters.path


def _exchange(transport: HostTransport, stage: Stage, iteration: int) -> int:
    """Messages in both directions, each computed behind those before it; returns how many came wrong."""
    here, peer = stage.stage, 1 - stage.stage
    for number in range(MESSAGES):
        transport.post_receive(MessageKey(iteration, Direction.ACTIVATION, peer, number), peer)
        tensor = torch.full(SHAPE, 1.0, device=stage.tensors)
        for _ in range(20):
            tensor = tensor.mul(1.0)
        tensor.add_(100.0 * iteration + number + here)
        transport.post_send(MessageKey(iteration, Direction.ACTIVATION, here, number), peer, tensor)
        del tensor
    wrong = []
    for number in range(MESSAGES):
        key = MessageKey(iteration, Direction.ACTIVATION, peer, number)
        received = transport.wait(key, time.monotonic() + COMES_S)
        wrong.append((received != 1.0 + 100.0 * iteration + number + peer).any())
        del received
    transport.flush(time.monotonic() + COMES_S)
    return sum(bool(each.item()) for each in wrong)


def _until(condition: Callable[[], bool], otherwise: str) -> None:
    deadline_s = time.monotonic() + COMES_S
    while not condition():
        if time.monotonic() >= deadline_s:
            raise RuntimeError(otherwise)
        time.sleep(0.005)


PARTS = {each.__name__: each for each in (sessions, death, paths, one_gpu)}
