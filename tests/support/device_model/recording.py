# SPDX-License-Identifier: Apache-2.0
"""One host thread's program while it is being recorded: streams, and what they wait for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable

from support.device_model.calls import (
    Collective,
    Communicator,
    Compute,
    DeviceWait,
    HostWait,
    Launch,
    Program,
    Record,
    Signal,
    Transfer,
    Transfers,
)

COMPUTE = "compute"
"""The current stream of the training thread."""


class Recorder:
    """Waits of a stream are kept until something is launched on it, or waits for it: that is when they count."""

    def __init__(self) -> None:
        self.program: Program = []
        self._launched = 0
        self._latest: dict[str, int] = {}
        self._awaited: dict[str, list[int]] = defaultdict(list)

    def compute(self, seconds: float, label: object = None) -> int:
        """Kernels on the current stream."""
        return self._launch(Compute(COMPUTE, seconds, label, self._taken(COMPUTE)))

    def transfer(self, communicator: str, stream: str, *transfers: Transfer) -> int:
        """A kernel of NCCL on `stream`, behind what is on the current stream by now, and an event behind it."""
        self._launch(Transfers(stream, Communicator(communicator), transfers, self._behind(stream)))
        return self._launch(Record(stream))

    def collective(self, communicator: Communicator, members: int, seconds: float, label: object = None) -> int:
        """A kernel of NCCL on the communicator's own stream, behind what is on the current stream by now."""
        stream = communicator.name
        return self._launch(Collective(stream, communicator, members, seconds, label, self._behind(stream)))

    def mark(self) -> None:
        """An event on the current stream that tells the time."""
        self._launch(Record(COMPUTE, timed=True, after=tuple(self._awaited[COMPUTE])))

    def make_wait(self, work: int, stream: str = COMPUTE) -> None:
        """What comes next on `stream` waits for `work`."""
        self._awaited[stream].append(work)

    def signal(self, name: Hashable) -> None:
        """What another host waits for happens when the current stream has come here."""
        self.program.append(Signal(name, (self._latest[COMPUTE],)))

    def host_wait(self, work: int) -> None:
        """The host waits for `work`."""
        self.program.append(HostWait((work,)))

    def host_wait_for_stream(self) -> None:
        """The host waits for the current stream."""
        if behind := self._position():
            self.program.append(HostWait(behind))

    def device_wait(self) -> None:
        """torch.cuda.synchronize."""
        self.program.append(DeviceWait())

    def _position(self) -> tuple[int, ...]:
        """Position on the current stream: what an event recorded on it now waits for."""
        latest = self._latest.get(COMPUTE)
        return (*self._awaited[COMPUTE], *(() if latest is None else (latest,)))

    def _behind(self, stream: str) -> tuple[int, ...]:
        return (*self._taken(stream), *self._position())

    def _taken(self, stream: str) -> tuple[int, ...]:
        return tuple(self._awaited.pop(stream, ()))

    def _launch(self, call: Launch) -> int:
        number, self._launched = self._launched, self._launched + 1
        self._latest[call.stream] = number
        self.program.append(call)
        return number
