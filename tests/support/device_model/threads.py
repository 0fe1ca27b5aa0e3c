# SPDX-License-Identifier: Apache-2.0
"""Second threads of ranks: what device sessions do, or could do, next to the training thread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from random import Random
from typing import Any
from unittest import mock

import torch
from support.device_model.calls import (
    Abort,
    AwaitSignal,
    Communicator,
    DeviceWait,
    HostWait,
    Pause,
    Program,
    Signal,
    Transfer,
    Transfers,
)
from support.device_model.from_runtime import Job, RecordingTransport

from adaptra_megatron.transport.message_keys import MessageKey

Threads = dict[str, Program]
_CALLS_PER_RECEIVE = 4


class SessionTransport(RecordingTransport):
    """The host waits for each message before it launches what needs it. Receives are posted by the training thread."""

    def wait(self, key: MessageKey, deadline_s: float) -> torch.Tensor:
        """The host waits."""
        self._recorder.host_wait(self._received.pop(key))
        return self._tensor


class OneAtATimeTransport(RecordingTransport):
    """As SessionTransport, but a thread for each neighbour begins a receive when the one before it is over."""

    def __init__(self, *arguments: Any, **how: Any) -> None:
        super().__init__(*arguments, **how)
        self.threads: Threads = defaultdict(list)
        self._peer: dict[MessageKey, int] = {}

    def post_receive(self, key: MessageKey, peer: int) -> None:
        """Ask the thread."""
        stage = self._stage
        cost, thread = self.costs.link(peer, stage), self.threads[f"receives from {peer}"]
        transfer = Transfer(peer, stage, key, cost.occupancy_s + cost.latency_s)
        self._recorder.program.append(Signal(("asked", peer, stage, key)))
        thread.append(AwaitSignal(("asked", peer, stage, key)))
        thread.append(Transfers(f"from {peer}", Communicator(f"{peer}>{stage}"), (transfer,)))
        thread += [HostWait((len(thread) // _CALLS_PER_RECEIVE,)), Signal(("here", peer, stage, key))]
        self._peer[key] = peer

    def wait(self, key: MessageKey, deadline_s: float) -> torch.Tensor:
        """The host waits for the thread."""
        self._recorder.program.append(AwaitSignal(("here", self._peer.pop(key), self._stage, key)))
        return self._tensor


class ByHost(RecordingTransport):
    """Messages by the host path: nothing of them waits in a queue of a device, and the host waits for those it needs.

    Copies between device and host memory are part of a link's latency and occupancy.
    """

    def __init__(self, links: Collection[tuple[int, int]] | None, *arguments: Any, **how: Any) -> None:
        """`links`: the directed ones whose messages go so, the others' by the device path; None: all."""
        super().__init__(*arguments, **how)
        self.threads: Threads = defaultdict(list)
        self._links, self._by_host = links, dict[MessageKey, int]()

    def post_send(self, key: MessageKey, peer: int, tensor: torch.Tensor) -> None:
        """A thread carries the messages of a link, one after the other."""
        if self._links is not None and (self._stage, peer) not in self._links:
            super().post_send(key, peer, tensor)
            return
        message, cost = (self._stage, peer, key), self.costs.link(self._stage, peer)
        self._recorder.signal(("made", message))
        carry = [
            AwaitSignal(("made", message)),
            Pause(cost.occupancy_s),
            Signal(("here", message), seconds=cost.latency_s),
        ]
        self.threads[f"carries to {peer}"] += carry

    def post_receive(self, key: MessageKey, peer: int) -> None:
        """Nothing of it is on the device."""
        if self._links is not None and (peer, self._stage) not in self._links:
            super().post_receive(key, peer)
        else:
            self._by_host[key] = peer

    def wait(self, key: MessageKey, deadline_s: float) -> torch.Tensor:
        """The host waits."""
        if key not in self._by_host:
            return super().wait(key, deadline_s)
        self._recorder.program.append(AwaitSignal(("here", (self._by_host.pop(key), self._stage, key))))
        return self._tensor


def record_by_host(job: Job, stage: int, links: Collection[tuple[int, int]] | None = None) -> Threads:
    """All calls of one rank of `stage` of a pipeline that is alone, by the host path, on these directed links alone
    where any are given."""
    made: list[ByHost] = []

    def make(*arguments: Any, **how: Any) -> ByHost:
        made.append(ByHost(links, *arguments, **how))
        return made[0]

    with mock.patch("support.device_model.from_runtime.RecordingTransport", make):
        program = job.record(stage)
    return {"training": program, **made[0].threads}


def makers(replica: int, stages: int, random: Random, *, greets: bool) -> list[Threads]:
    """For each stage of a replica, threads that make a communicator with each neighbour some time, and abort it again.

    Both ends meet by another way; what they allocate and free waits for the device. `greets`: they send something.
    """
    found: list[Threads] = [{} for _ in range(stages)]
    for stage in range(stages - 1):
        begun_s = random.uniform(0.0, 10.0 * stages)
        for end, peer in ((stage, stage + 1), (stage + 1, stage)):
            communicator = Communicator(f"another {stage}:{stage + 1}")
            program: Program = [Pause(begun_s + random.uniform(0.0, 2.0)), DeviceWait()]
            program += [Signal(("met", replica, stage, end)), AwaitSignal(("met", replica, stage, peer)), DeviceWait()]
            if greets:
                greeting = Transfer(stage, stage + 1, "greeting", 1e-3)
                program += [Transfers(f"another {peer}", communicator, (greeting,)), HostWait((0,))]
            found[end][f"makes one with {peer}"] = [*program, Abort(communicator), DeviceWait()]
    return found
