# SPDX-License-Identifier: Apache-2.0
"""Plays the calls of all host threads of a job on a model of their devices.

What the model does, and where that was read:

- Streams share `queues` hardware queues, at random. CUDA C++ Programming Guide, CUDA_DEVICE_MAX_CONNECTIONS: 1 to 32,
  8 by default. A queue starts work in the order in which it was issued. One whose predecessor in its stream, or
  whose event, is not done holds up all behind it, whatever their stream; what is behind it goes on once it has started.
  (Megatron's arguments.py demands one queue for tensor parallelism, to have kernels start in the order of the calls.)
  A `serial` device starts nothing before the end of what was issued before it on the queue: no device is stricter.
- Sends and receives are kernels that stand on the device until the other end's has started, and both end together:
  NCCL's p2p primitives (src/device/sendrecv.h, prims_simple.h) spin on flags of the peer. Small sends end earlier in
  fact, into buffers; nothing may rely on that.
- A kernel of a group (ncclGroupEnd, torch's batch_isend_irecv) starts as one and ends when all its transfers have.
- A direction of a communicator that was not used before blocks the hosts at both ends in their calls until both have
  come (src/group.cc groupLaunch waits for ncclP2PPreconnectFunc; src/transport.cc ncclTransportP2pSetup exchanges
  connection data with the peer). So does the making of a communicator, which torch puts off until its first use
  (ProcessGroupNCCL::pointToPoint, collective: initNCCLComm).
- A host that waits for its device waits for all that any thread has launched on it, and its context's lock keeps
  other threads from launching. CUDA C++ Programming Guide, Lazy Loading: loading a kernel may require the context to be
  synchronized; torch's CUDACachingAllocator, release_cached_blocks: synchronize_and_free_events and cudaFree.
- NCCL_LAUNCH_ORDER_IMPLICIT=1: a kernel of NCCL starts after the one that the host launched before, whatever their
  communicators, has started (src/enqueue.cc ncclLaunchPrepare, ncclLaunchFinish: ncclImplicitOrderLaunch), or before
  CUDA 12.3 has ended (ncclImplicitOrderSerial). Threads that race to launch are an error (src/misc/strongstream.cc,
  NCCL_LAUNCH_RACE_FATAL): `Outcome.racing` names the ranks where more than one thread launches.
- Behind each kernel NCCL records an event, and has a stream of the communicator wait for it (src/enqueue.cc
  ncclLaunchFinish, src/misc/strongstream.cc). With `trailing_waits` that holds up the queue which that stream is in, as
  any wait does. Whether it does where nothing is put on that stream behind it is known of no GPU yet; nor is it of
  events that tell the time (`timed_records`), but NVIDIA's answer in pytorch/pytorch#143890 says that they do.
- A host is kept in its call when a queue is full, at about 1000 launches (`launches`).
- ncclCommAbort first sets a flag in page-locked memory, which kernels look at (src/init.cc setCommAbortFlags): no lock
  of the context is needed for that.
- A block of NCCL takes a whole multiprocessor until its kernel ends: 640 threads of 96 registers (src/include/device.h
  NCCL_MAX_NTHREADS, makefiles/common.mk -maxrregcount). Computation needs room for one block to begin and to end.

Times are exact: a host takes no time for a call, work starts as soon as it may, a transfer lasts its `seconds` from the
start of the later of its ends. The same seed gives the same run.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from support.device_model.calls import (
    Abort,
    AwaitSignal,
    Collective,
    Compute,
    DeviceWait,
    HostWait,
    Pause,
    Program,
    Rank,
    Record,
    Signal,
    StreamWait,
    Transfers,
)
from support.device_model.queues import Clock, Queues
from support.device_model.state import Device, DeviceState, Outcome, Thread, Work

Threads = Mapping[str, Program]
"""The programs of one rank's host threads, by their names."""

_NEED_NO_LOCK = (HostWait, Pause, Signal, AwaitSignal, Abort)


class Job:
    """One run of all programs."""

    def __init__(self, programs: Mapping[Rank, Threads], device: Device, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._kind = device
        self._clock = Clock()
        self._queues = Queues(device, self._clock, self._random, self._ended, self._started)
        self.devices = {rank: DeviceState(rank, device.queues, device.blocks) for rank in programs}
        for rank, threads in programs.items():
            state = self.devices[rank]
            state.threads = [Thread(state, name, program) for name, program in threads.items()]
        self._issued: dict[Hashable, int] = defaultdict(int)
        self.works: dict[Hashable, Work] = {}
        """All that takes part in a transfer or collective, by what that is called and the rank."""
        self.connecting: dict[Hashable, set[Rank]] = defaultdict(set)
        """Who has come to connect, by communicator and direction."""
        self._at_connection: dict[Hashable, list[Thread]] = defaultdict(list)
        self.signalled: set[Hashable] = set()
        self.signals: dict[Work, list[Signal]] = defaultdict(list)
        """Moments that a work sets when it has ended."""
        self._listeners: dict[Hashable, list[Thread]] = defaultdict(list)
        self._times_s: dict[tuple[Rank, Hashable], tuple[float, float]] = {}
        self._calls: dict[type, Callable[[Thread, Any], bool]] = {
            Compute: self._launch,
            StreamWait: self._launch,
            Record: self._record,
            Transfers: self._launch_nccl,
            Collective: self._launch_nccl,
            HostWait: lambda thread, call: self._await(thread, [thread.works[index] for index in call.after]),
            DeviceWait: self._wait_for_device,
            Pause: self._pause,
            Signal: self._signal,
            AwaitSignal: self._await_signal,
            Abort: self._abort,
        }

    def run(self) -> Outcome:
        """Until nothing can go on."""
        for device in self.devices.values():
            for thread in self._random.sample(device.threads, len(device.threads)):
                self._advance(thread)
        self._clock.run()
        racing = (device.rank for device in self.devices.values() if len(device.launching) > 1)
        return Outcome(
            makespan_s=self._clock.now_s,
            times_s=self._times_s,
            racing=tuple(racing) if self._kind.launch_order else (),
        )

    def stuck(self) -> list[Thread | Work]:
        """What has not ended though nothing goes on."""
        threads = [thread for device in self.devices.values() for thread in device.threads if not thread.ended]
        return [*threads, *(work for device in self.devices.values() for work in device.unfinished)]

    # Calls. Each returns whether its thread goes on at once; if not, whatever it waits for advances it.

    def _advance(self, thread: Thread) -> None:
        program, device, calls = thread.program, thread.device, self._calls
        while thread.position < len(program):
            call = program[thread.position]
            if device.locked_by not in (None, thread) and not isinstance(call, _NEED_NO_LOCK):
                device.parked.append(thread)
                return
            if not calls[type(call)](thread, call):
                return
            thread.position += 1
        thread.ended = True

    def _go_on(self, thread: Thread) -> None:
        thread.position += 1
        self._advance(thread)

    def _launch(self, thread: Thread, call: Compute | StreamWait) -> bool:
        if self._full(thread, call.stream):
            return False
        self._queues.issue(self._make(thread, call))
        return True

    def _record(self, thread: Thread, call: Record) -> bool:
        if call.timed and self._kind.timed_records:
            return self._launch(thread, call)
        thread.works.append(thread.device.latest[call.stream])
        return True

    def _full(self, thread: Thread, stream: str) -> bool:
        """Return whether the thread is kept, for its queue has no room."""
        device, most = thread.device, self._kind.launches
        full = most is not None and len(device.queues[self._queue_of(device, stream)]) >= most
        if full:
            device.kept.append(thread)
        return full

    def _started(self, device: DeviceState) -> None:
        kept, device.kept = device.kept, []
        for thread in kept:
            self._clock.after(0.0, self._advance, thread)

    def _launch_nccl(self, thread: Thread, call: Transfers | Collective) -> bool:
        if self._full(thread, call.stream):
            return False
        if not self._kind.connected and not self._connected(thread, call):
            return False
        device, kind = thread.device, self._kind
        device.launching.add(thread.name)
        work = self._make(thread, call)
        if isinstance(call, Collective):
            names: list[Hashable] = ["all"]
            work.blocks = kind.blocks_per_collective
        else:
            names = [(transfer.source, transfer.target) for transfer in call.transfers]
            work.blocks = kind.blocks_per_transfer * len(names)
        key = call.communicator.key(device.rank)
        for name in names:
            end = (key, name, device.rank)
            number = self._issued[end]
            self._issued[end] += 1
            work.ends.append((key, name, number))
            self.works[key, name, number, device.rank] = work
        work.open = len(names)
        if kind.launch_order:
            work.ordered, device.ordered = device.ordered, work
        self._queues.issue(work)
        if kind.trailing_waits:
            self._queues.issue(self._on(device, StreamWait(f"NCCL's own of {call.communicator}"), [work]))
        return True

    def _make(self, thread: Thread, call: Any) -> Work:
        works = thread.works
        works.append(self._on(thread.device, call, [works[index] for index in getattr(call, "after", ())]))
        return works[-1]

    def _on(self, device: DeviceState, call: Any, after: list[Work]) -> Work:
        work = Work(device, call, self._queue_of(device, call.stream), after)
        work.previous = device.latest.get(call.stream)
        device.latest[call.stream] = work
        return work

    def _queue_of(self, device: DeviceState, stream: str) -> int:
        if stream not in device.queue_of:
            device.queue_of[stream] = self._random.randrange(self._kind.queues)
        return device.queue_of[stream]

    def _connected(self, thread: Thread, call: Transfers | Collective) -> bool:
        """Return whether all that `call` uses is connected, now that this host has come, too."""
        rank, key = thread.device.rank, call.communicator.key(thread.device.rank)
        if isinstance(call, Collective):
            wanted: list[tuple[Hashable, int]] = [((key, "all"), call.members)]
        else:
            wanted = [((key, each.source, each.target), 2) for each in call.transfers]
        thread.connecting = False
        for connection, members in wanted:
            come = self.connecting[connection]
            new = rank not in come
            come.add(rank)
            if len(come) < members:
                thread.connecting = True
                self._at_connection[connection].append(thread)
            elif new:
                for other in self._at_connection.pop(connection, ()):
                    self._clock.after(0.0, self._connect_again, other)
        return not thread.connecting

    def _connect_again(self, thread: Thread) -> None:
        if thread.connecting:
            self._advance(thread)

    def _await(self, thread: Thread, works: Sequence[Work]) -> bool:
        for work in works:
            if not work.ended:
                work.hosts.append(thread)
                thread.waits += 1
        return thread.waits == 0

    def _wait_for_device(self, thread: Thread, call: DeviceWait) -> bool:
        if self._await(thread, list(thread.device.unfinished)):
            return True
        if call.locks:
            thread.device.locked_by = thread
        return False

    def _pause(self, thread: Thread, call: Pause) -> bool:
        self._clock.after(call.seconds, self._go_on, thread)
        return False

    def _signal(self, thread: Thread, call: Signal) -> bool:
        pending = [thread.works[index] for index in call.after if not thread.works[index].ended]
        assert len(pending) <= 1, "a stream is in order: its last event says it all"
        if pending:
            self.signals[pending[0]].append(call)
        else:
            self._clock.after(call.seconds, self._signalled, call.name)
        return True

    def _signalled(self, name: Hashable) -> None:
        self.signalled.add(name)
        for thread in self._listeners.pop(name, ()):
            self._go_on(thread)

    def _await_signal(self, thread: Thread, call: AwaitSignal) -> bool:
        if call.name in self.signalled:
            return True
        self._listeners[call.name].append(thread)
        return False

    def _abort(self, thread: Thread, call: Abort) -> bool:
        self._queues.abort(thread.device, call.communicator)
        return True

    # What devices signal.

    def _ended(self, work: Work) -> None:
        label = getattr(work.call, "label", None)
        if label is not None:
            self._times_s[work.device.rank, label] = (work.started_s, self._clock.now_s)
        for signal in self.signals.pop(work, ()):
            self._clock.after(signal.seconds, self._signalled, signal.name)
        for thread in work.hosts:
            self._waited(thread)

    def _waited(self, thread: Thread) -> None:
        thread.waits -= 1
        if thread.waits:
            return
        device = thread.device
        if device.locked_by is not thread:
            self._go_on(thread)
            return
        device.locked_by = None
        parked, device.parked = device.parked, []
        for other in self._random.sample([thread, *parked], 1 + len(parked)):
            (self._go_on if other is thread else self._advance)(other)
