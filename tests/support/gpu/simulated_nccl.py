# SPDX-License-Identifier: Apache-2.0
"""NCCL between simulated devices: a stand-in for `nccl_library.NcclLibrary`, which calls libnccl.

What it does as communicators do that do not block (NCCL 2.27 to 2.32, src/init.cc, group.cc, enqueue.cc):

- `init_rank` returns at once, and is done when both ranks have come. A rank that does not come is waited for.
- The first transfer of a communicator connects, which is done when both ranks have come to it.
- Each transfer is launched by a thread of NCCL's: it is on the stream once `in_progress` has said so, not before.
- Nothing may be asked of a communicator while something goes on, by two threads at once, or after it was freed.
- A receive ends when its send runs. A send ends when NCCL's buffers have taken it, which is before its receive runs if
  they have room; its bytes arrive though the sender is closed by then.
- `abort` ends both, and those at the peer stay. Only a network says that the peer has gone, and only to who has sent or
  asked for something since.
- What was sent is in NCCL's hands when its kernel has ended; `finalize` waits until it has left.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from support.gpu.simulated_device import SimulatedDevice, SimulatedEvent

from adaptra_megatron.transport.device_session.communicator_config import CommunicatorConfig
from adaptra_megatron.transport.device_session.nccl_library import NcclError

LOOKS_TO_LAUNCH = 2
"""How often `in_progress` is to be asked until a transfer has been launched."""


ROOM_NBYTES = 1 << 20
"""As NCCL's buffers for one channel: 8 chunks of 128 KiB."""


class Transfer(SimulatedEvent):
    """A kernel: in a stream, what is waited for."""

    def __init__(self, communicator: SimulatedCommunicator, address: int, nbytes: int) -> None:
        self.communicator, self.address, self.nbytes = communicator, address, nbytes
        self.runs = self.over = False
        self.taken: bytes | None = None
        """What was sent, in NCCL's buffers until it is received."""

    @property
    def done(self) -> bool:  # type: ignore[override]
        """Looked at while the stream stands there: only now does it run."""
        return self.communicator.pair.run(self)


@dataclass
class Pair:
    """Two ranks that have one unique id."""

    lost: bool = False
    """True if what is sent does not arrive."""
    spoils: bool = False
    """True if it arrives changed."""
    room_nbytes: int = ROOM_NBYTES
    """For what was sent and is not received yet."""
    network: bool = False
    """True if this is between hosts."""
    ends: dict[int, SimulatedCommunicator] = field(default_factory=dict)
    sends: list[Transfer] = field(default_factory=list)
    receives: list[Transfer] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, transfer: Transfer) -> bool:
        """Return whether it is over, now that it runs."""
        with self.lock:
            transfer.runs = True
            if transfer.communicator.aborted:
                return True
            own, others = self.sends, self.receives
            if transfer in self.receives:
                own, others = others, own
            place = own.index(transfer)
            if own is self.sends and not transfer.over:
                self._take(transfer)
            if not self.lost and place < len(others) and others[place].runs and not self.receives[place].over:
                self._carry(self.sends[place], self.receives[place])
            return transfer.over

    def _take(self, send: Transfer) -> None:
        if send.nbytes + sum(len(each.taken) for each in self.sends if each.taken is not None) <= self.room_nbytes:
            send.taken, send.over = ctypes.string_at(send.address, send.nbytes), True

    def _carry(self, send: Transfer, receive: Transfer) -> None:
        if receive.communicator.aborted or (send.communicator.aborted and send.taken is None):
            return
        assert send.nbytes == receive.nbytes, "the two ends do not agree on the order of messages"
        ctypes.memmove(receive.address, send.address if send.taken is None else send.taken, send.nbytes)
        send.taken = None
        if self.spoils:
            ctypes.memset(receive.address + receive.nbytes // 2, 0xFF, 1)
        send.over = receive.over = True


class SimulatedCommunicator:
    """One end."""

    def __init__(self, pair: Pair, rank: int, name: str, config: CommunicatorConfig, device: SimulatedDevice) -> None:
        self.pair, self.rank, self.name, self.config, self.device = pair, rank, name, config, device
        self.aborted = self.freed = self.finalized = False
        self.error: str | None = None
        """Reported from now on."""
        self.connecting = self.connected = False
        self.launching: tuple[Transfer, int] | None = None
        """What has been asked for, and on which stream."""
        self.looks = 0
        self.launched: list[Transfer] = []
        self.threads: Counter[str] = Counter()
        """Threads that asked for transfers, by name."""
        self._in_call = threading.Lock()

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Hold the library: one thread at a time calls it."""
        assert not self.freed, "a communicator is used that was freed"
        assert self._in_call.acquire(blocking=False), "two threads call for one communicator"
        try:
            yield
        finally:
            self._in_call.release()

    def _peer_has_gone(self) -> bool:
        peer = self.pair.ends.get(1 - self.rank)
        open_ones = (each for each in self.launched if not each.over or each.taken is not None)
        return self.pair.network and peer is not None and peer.aborted and any(open_ones)

    def goes_on(self) -> bool:
        """Return whether anything goes on; a transfer that can be launched now is."""
        if self.error is None and self._peer_has_gone():
            self.error = "remote process exited or there was a network error"
        if self.error is not None:
            raise NcclError(f"what was begun with NCCL failed: {self.error}")
        if len(self.pair.ends) < 2:
            return True
        if self.launching is None:
            return False
        peer = self.pair.ends[1 - self.rank]
        self.looks += 1
        if not self.connected and not (peer.connecting or peer.connected):
            return True
        if self.looks < LOOKS_TO_LAUNCH:
            return True
        self.connected = True
        (transfer, stream), self.launching = self.launching, None
        self.device.make_wait(self.device.streams[stream], transfer)
        self.launched.append(transfer)
        return False


class Fabric:
    """What connects all devices of a job."""

    def __init__(self) -> None:
        self.pairs: dict[bytes, Pair] = {}
        """By unique id; NCCL listens for the ranks of each."""
        self.communicators: list[SimulatedCommunicator] = []
        self.adding = threading.Lock()
        self.spoils = self.network = False

    def of(self, device: SimulatedDevice) -> list[SimulatedCommunicator]:
        """All those of a device, in the order in which they were made."""
        return [each for each in self.communicators if each.device is device]


class SimulatedWork:
    """As _device.Work."""

    def __init__(self, tensor: torch.Tensor, ended: SimulatedEvent) -> None:
        self.tensor, self.ended, self.deadline_s = tensor, ended, float("inf")
        self.query, self.synchronize = ended.query, ended.synchronize


class SimulatedTransfers:
    """As _device.Transfers, which does the same by calls of CUDA and NCCL."""

    def __init__(self, library: SimulatedNccl, handle: int, peer: int, stream: int) -> None:
        self._library, self._link = library, (handle, peer, stream)
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self.works: deque[SimulatedWork] = deque()

    def begin(
        self, sends: bool, tensor: torch.Tensor, address: int, nbytes: int, after: int | None, limit_s: float
    ) -> SimulatedWork:
        """Put a transfer on the link's stream."""
        device, (handle, peer, stream) = self._library.device, self._link
        own = device.streams[stream]
        if after is not None:
            device.make_wait(own, device.record(device.streams[after]))
        until_s = time.monotonic() + limit_s
        (self._library.send if sends else self._library.receive)(handle, address, nbytes, peer, stream)
        while self._library.in_progress(handle):
            if self._ended.wait(1e-4):
                raise RuntimeError("the session was ended while NCCL launched a transfer")
            if time.monotonic() >= until_s:
                cause = "NCCL did not launch a transfer, for which it may have to wait for the device,"
                raise RuntimeError(f"{cause} within {limit_s:.0f} s")
        self.works.append(work := SimulatedWork(tensor, device.record(own)))
        self.free_done()
        return work

    def follow(self, work: SimulatedWork, stream: int, deadline_s: float) -> None:
        """A wait."""
        work.deadline_s = deadline_s
        self._library.device.make_wait(self._library.device.streams[stream], work.ended)

    def free_done(self) -> None:
        """In the order of the stream; a device that failed keeps all."""
        with contextlib.suppress(RuntimeError, IndexError):
            while (work := self.works[0]).query():
                with self._lock:
                    if self.works[0] is work:
                        self.works.popleft()

    def under_way(self) -> list[SimulatedWork]:
        """What is not done."""
        self.free_done()
        return list(self.works)

    def end(self) -> None:
        """Who waits in `begin` leaves."""
        self._ended.set()


class SimulatedNccl:
    """libnccl as one process has it, with one device."""

    def __init__(self, fabric: Fabric, device: SimulatedDevice) -> None:
        self.fabric, self.device = fabric, device
        self.abort_hangs = threading.Event()
        """While it is set, `abort` does not return, and ends nothing."""
        self.freeing_waits = False
        """True if `abort` and `destroy`, which free memory, wait for all kernels of the device."""

    def new_unique_id(self) -> bytes:
        """As ncclGetUniqueId."""
        with self.fabric.adding:
            unique_id = len(self.fabric.pairs).to_bytes(128, "little")
            self.fabric.pairs[unique_id] = Pair(spoils=self.fabric.spoils, network=self.fabric.network)
            return unique_id

    def init_rank(self, unique_id: bytes, rank: int, name: str, config: CommunicatorConfig) -> int:
        """As ncclCommInitRankConfig."""
        pair = self.fabric.pairs[unique_id]
        assert rank not in pair.ends
        communicator = SimulatedCommunicator(pair, rank, name, config, self.device)
        pair.ends[rank] = communicator
        with self.fabric.adding:
            self.fabric.communicators.append(communicator)
            return len(self.fabric.communicators)

    def transfers(self, handle: int, peer: int, stream: int, device: int) -> SimulatedTransfers:
        """As NcclLibrary's."""
        return SimulatedTransfers(self, handle, peer, stream)

    def in_progress(self, handle: int) -> bool:
        """As ncclCommGetAsyncError."""
        communicator = self._at(handle)
        with communicator.call():
            return communicator.goes_on()

    def send(self, handle: int, address: int, nbytes: int, peer: int, stream: int) -> None:
        """As ncclSend."""
        self._begin(handle, address, nbytes, peer, stream, self._at(handle).pair.sends)

    def receive(self, handle: int, address: int, nbytes: int, peer: int, stream: int) -> None:
        """As ncclRecv."""
        self._begin(handle, address, nbytes, peer, stream, self._at(handle).pair.receives)

    def finalize(self, handle: int) -> None:
        """As ncclCommFinalize."""
        communicator = self._at(handle)
        with communicator.call():
            communicator.finalized = True

    def destroy(self, handle: int) -> None:
        """As ncclCommDestroy."""
        communicator = self._at(handle)
        with communicator.call():
            assert communicator.finalized, "what has been sent may not have left"
            communicator.freed = True
            self._free()

    def abort(self, handle: int) -> None:
        """As ncclCommAbort: kernels exit."""
        communicator = self._at(handle)
        with communicator.call():
            while self.abort_hangs.is_set():
                time.sleep(1e-3)
            communicator.aborted = communicator.freed = True
            self._free()

    def _free(self) -> None:
        while self.freeing_waits and self._kernels_stand():
            time.sleep(1e-3)

    def _kernels_stand(self) -> bool:
        ends = [end for end in self.fabric.of(self.device) if not end.aborted]
        return any(not transfer.over for end in ends for transfer in end.launched)

    def _begin(self, handle: int, address: int, nbytes: int, peer: int, stream: int, queue: list[Transfer]) -> None:
        communicator = self._at(handle)
        with communicator.call():
            assert peer == 1 - communicator.rank
            if communicator.goes_on():
                raise NcclError("used before the previous operation returned ncclSuccess")
            communicator.threads[threading.current_thread().name] += 1
            transfer = Transfer(communicator, address, nbytes)
            with communicator.pair.lock:
                queue.append(transfer)
            communicator.connecting, communicator.looks = True, 0
            communicator.launching = transfer, stream

    def _at(self, handle: int) -> SimulatedCommunicator:
        return self.fabric.communicators[handle - 1]
