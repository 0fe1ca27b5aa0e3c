# SPDX-License-Identifier: Apache-2.0
"""One end of a directed link over NCCL: a communicator of two ranks for one session, on a stream of the link's own.

Links with a device path alone and device sessions of links with two paths both use it. A send or receive is on the
stream when the call returns, so the device gets them in the order of a thread's calls. A non-blocking communicator
launches in a thread of NCCL's own; each call waits for that.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from adaptra_megatron.common.layout import boot_identity
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.common.sealed_store import SealedStore
from adaptra_megatron.transport.device_session.communicator_config import CommunicatorConfig, most_ctas
from adaptra_megatron.transport.device_session.link_watch import Failure, LinkWatch
from adaptra_megatron.transport.device_session.nccl_library import Communicator, NcclLibrary
from adaptra_megatron.transport.device_session.pair_group import ENDED, PairEnds
from adaptra_megatron.transport.gpu.cuda_device import CudaEvent, Device, DeviceThread, Stream

if TYPE_CHECKING:
    from adaptra_megatron.transport._device import Work

logger = logger_of(__name__)

_SPIN_S = 2e-3
_PAUSE_S = 1e-3


@dataclass(frozen=True)
class NcclSide:
    """Parts that all links of one process share."""

    load: Callable[[], NcclLibrary]
    """Loads NCCL. Raises NcclError if there is none."""
    device: Device
    identity: str
    """Identity of this process's GPU, unique in the job; then, separated by spaces, host, rate of its RNICs, size of
    messages.
    """
    config: CommunicatorConfig
    watch: LinkWatch
    timeout_s: float
    """Longest time for NCCL to launch a transfer: a full queue waits for the peers."""
    headers: Stream
    """Stream for small copies from host memory: on the link's own stream they would wait behind a transfer."""

    def link(self, store: SealedStore, ends: PairEnds, stream: Stream, *, sends: bool, timeout_s: float) -> NcclLink:
        """Return one end of a session of a link: see `NcclLink`."""
        return NcclLink(store, ends, self, stream, sends=sends, timeout_s=timeout_s)


class NcclLink:
    """One end of one session of a link over NCCL. One thread sends, one receives; `abort` is for any thread."""

    tagged = False

    def __init__(
        self, store: SealedStore, ends: PairEnds, side: NcclSide, stream: Stream, *, sends: bool, timeout_s: float
    ) -> None:
        """Connect to the other end, which constructs its own NcclLink at about the same time.

        `store`: client used only by this session. `stream`: of this link and direction. `sends`: True at the source.
        Raises RuntimeError if the other end does not come within `timeout_s`, or is on the same GPU.
        """
        self.ends = ends
        self.timeout_s = side.timeout_s
        self._side, self._stream, self._library = side, stream, side.load()
        self._peer = 1 if sends else 0
        self._lock = threading.Lock()
        self._brought: deque[tuple[torch.Tensor, CudaEvent]] = deque()
        """Host memory being copied from, with the event after each copy."""
        self._retained: list[torch.Tensor] = []
        """Tensors that the device may still use, without an event for their end: NCCL has not reported their launch."""
        self._calls = threading.Lock()
        """Serialises NCCL's calls on the communicator, freeing included."""
        self._ended, self._freed = threading.Event(), threading.Event()
        self._cause = ENDED
        self._finalize_until_s: float | None = None
        self._connects_until_s: float | None = time.monotonic() + timeout_s
        """Deadline for NCCL to connect; None once it has connected."""
        # A kernel that an earlier session left on this stream would block all transfers of this one.
        if not side.device.idle(stream):
            raise RuntimeError("work of an earlier session on the link's stream has not ended")
        # The two ends meet in the store first: ncclCommInitRank of a peer that does not come would wait, and keep
        # listening for it.
        unique_id, peer = self._meet(store, 1 - self._peer, timeout_s)
        name, config = f"adaptra {ends.source}>{ends.target}", _with_ctas(side.config, side.identity, peer)
        source = "as asked for" if config == side.config else f"between {side.identity} and {peer}"
        logger.info("link %d->%d: NCCL may take %s CTAs of this GPU for a transfer, %s", *ends, config.max_ctas, source)
        with side.device.use(stream):
            self._communicator: Communicator = self._library.init_rank(unique_id, 1 - self._peer, name, config)
        index = side.device.device.index or 0
        self._transfers = self._library.transfers(self._communicator, self._peer, side.device.handle(stream), index)
        side.watch.add(self)
        # Started now, to wait for the session's end: an interpreter that shuts down starts no threads.
        name = f"adaptra-nccl-end-{ends.source}>{ends.target}"
        DeviceThread(self._free_when_ended, name).start()
        try:
            with self._calls:
                self._await_nccl("the other end did not join the communicator")
        except RuntimeError as cause:
            self.abort(str(cause))
            raise

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._side.device.empty(shape, dtype, self._side.device.memory_stream)

    def bring(self, host: torch.Tensor) -> torch.Tensor:
        device = self._side.device
        # A copy from pageable memory may block this thread until all earlier work in the stream has ended.
        locked = device.page_locked(host.nbytes)
        locked.copy_(host.view(torch.uint8))
        tensor = self.empty(host.shape, host.dtype)
        device.copy(tensor.view(torch.uint8), locked, self._side.headers)
        copied = device.record(self._side.headers)
        device.make_wait(self._stream, copied)
        while self._brought and self._brought[0][1].query():
            self._brought.popleft()
        self._brought.append((locked, copied))
        return tensor

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        device = self._side.device
        locked = device.page_locked(tensor.nbytes)
        device.copy(locked, tensor.view(torch.uint8), self._stream)
        device.record(self._stream).synchronize()  # nothing is on this stream that is not done
        return locked.view(tensor.dtype).clone()

    def begin_after(self, event: CudaEvent) -> None:
        self._side.device.make_wait(self._stream, event)

    # Looked up on the class at each call: fault injection and instrumentation replace them there.
    def send(self, tensor: torch.Tensor, tag: int, after: int | None = None) -> Work:
        """Put a send on the link's stream, after the present end of stream `after` (a cudaStream_t).

        The bytes are held until it is complete. NCCL ignores `tag`: messages match by order.
        """
        return self._begin(True, tensor, after)

    def receive(self, buffer: torch.Tensor, tag: int, after: int | None = None) -> Work:
        """Put a receive on the link's stream, after the present end of stream `after`."""
        return self._begin(False, buffer, after)

    def follow(self, work: Work, deadline_s: float) -> None:
        """Make the calling thread's later computation wait for `work`. Returns at once.

        `deadline_s` (time.monotonic): time by which `work` must be complete.
        """
        if self._ended.is_set():
            raise RuntimeError(self._cause)
        self._transfers.follow(work, self._side.device.current_handle(), deadline_s)

    def wait(self, work: Work, timeout_s: float) -> None:
        """Sleep until `work` is done. The watch keeps the deadline and ends the session."""
        if not self._ended.is_set():
            work.deadline_s = time.monotonic() + timeout_s
            work.synchronize()
        if self._ended.is_set():  # an aborted transfer is done, too
            raise RuntimeError(self._cause)

    def free_done(self) -> None:
        """Release the tensors of finished transfers."""
        self._transfers.free_done()

    def abort(self, cause: str = ENDED) -> None:
        """Abort the session: waits at this end raise. Returns at once; for any thread, any number of times."""
        self._end(cause, finalize_until_s=None)

    def close(self, deadline_s: float) -> None:
        """Close the session once all sends have left, or abort it at `deadline_s` (time.monotonic)."""
        while self._transfers.under_way() and not self._ended.is_set() and time.monotonic() < deadline_s:
            time.sleep(_PAUSE_S)
        self._end("the link was closed", finalize_until_s=deadline_s)

    def wait_until_freed(self, deadline_s: float) -> bool:
        """Return whether NCCL has freed the session's memory by `deadline_s` (time.monotonic)."""
        return self._freed.wait(max(0.0, deadline_s - time.monotonic()))

    # What the watch asks.

    def failure(self, now_s: float) -> Failure | None:
        """Return why the session is no longer usable; None while it is, and after it has ended. Never waits."""
        if self._ended.is_set():
            return None
        late = min(
            (each for each in self._transfers.under_way() if now_s >= each.deadline_s), key=_deadline_s, default=None
        )
        if late is not None:
            return Failure(late.deadline_s, f"a message of {late.tensor.nbytes} bytes did not come in time")
        if not self._calls.acquire(blocking=False):
            return None
        try:
            if not self._ended.is_set():
                self._library.in_progress(self._communicator)
        except RuntimeError as cause:
            return Failure(now_s, str(cause))
        finally:
            self._calls.release()
        return None

    @property
    def settled(self) -> bool:
        """Return whether the session has ended and the device has finished everything on its stream."""
        if not self._freed.is_set() or self._transfers.under_way():
            return False
        return not (self._retained or self._brought) or self._side.device.idle(self._stream)

    def _meet(self, store: SealedStore, rank: int, timeout_s: float) -> tuple[bytes, str]:
        """Exchange GPU identities with the other end; return the ncclUniqueId and the identity of the other end's GPU.

        Rank 0 creates the id only once the other end has arrived.
        """
        store.set_timeout(timedelta(seconds=max(_PAUSE_S, timeout_s)))
        store.set(f"gpu/{rank}", self._side.identity.encode())
        peer = store.get(f"gpu/{1 - rank}").decode()
        # NCCL refuses this, too (Duplicate GPU detected), but only while it connects.
        if peer == self._side.identity:
            raise RuntimeError("both stages are on one GPU, and NCCL connects different GPUs only")
        # The id starts a listener in NCCL. It is created once the peer is there, so that no listener is left for a peer
        # that failed.
        if rank == 0:
            store.set("id", self._library.new_unique_id())
        return store.get("id"), peer

    def _begin(self, sends: bool, tensor: torch.Tensor, after: int | None) -> Work:
        calls, until_s = self._calls, self._connects_until_s
        # Mostly free: one thread sends or receives on a link, and the watch holds it for microseconds.
        if not calls.acquire(False):
            self._take_turn()
        try:
            if self._ended.is_set():
                raise RuntimeError(self._cause)
            # The first transfer connects the two ends, which takes NCCL up to seconds; it has the time limit of
            # connecting.
            limit_s = self.timeout_s if until_s is None else until_s - time.monotonic()
            try:
                work = self._transfers.begin(sends, tensor, tensor.data_ptr(), tensor.nbytes, after, limit_s)
            except BaseException:  # an event now would stand where the launch stands, and keep this thread without end
                self._retained.append(tensor)
                if self._ended.is_set():
                    raise RuntimeError(self._cause) from None
                raise
            self._connects_until_s = None
            return work
        finally:
            calls.release()

    def _await_nccl(self, otherwise: str) -> None:
        """Wait until NCCL's own thread has finished the call in progress."""
        began_s = time.monotonic()
        assert self._connects_until_s is not None, "it is made"
        deadline_s = self._connects_until_s
        while self._library.in_progress(self._communicator):
            now_s = time.monotonic()
            if self._ended.is_set():
                raise RuntimeError(self._cause)
            if now_s >= deadline_s:
                raise RuntimeError(f"{otherwise} within {now_s - began_s:.0f} s")
            if now_s - began_s > _SPIN_S:  # a launch takes tens of microseconds; to connect takes much longer
                self._ended.wait(_PAUSE_S)

    def _end(self, cause: str, finalize_until_s: float | None) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._cause, self._finalize_until_s = cause, finalize_until_s
                self._ended.set()
                self._transfers.end()

    def _free_when_ended(self) -> None:
        """Free the communicator in a thread of its own, since freeing waits for the device."""
        self._ended.wait()
        link = f"link from rank {self.ends.source} to rank {self.ends.target}"
        if not self._calls.acquire(timeout=self.timeout_s):
            logger.warning("%s: NCCL does not return from a call; its communicator is left as it is", link)
            return
        # Not released: there is nothing left to call.
        until_s = self._finalize_until_s
        try:
            # ncclCommDestroy waits for pending transfers for ever, ncclCommAbort ends them. So destroy only if all have
            # ended.
            if until_s is not None and not self._transfers.under_way() and self._finalized(until_s):
                self._library.destroy(self._communicator)
            else:
                self._library.abort(self._communicator)
        except RuntimeError as cause:
            logger.debug("%s: NCCL could not end the session: %s", link, cause)
        self._freed.set()

    def _finalized(self, until_s: float) -> bool:
        """Return whether all sends have left NCCL by `until_s`; an abort before that would lose them."""
        self._library.finalize(self._communicator)
        while self._library.in_progress(self._communicator):
            if time.monotonic() >= until_s:
                return False
            time.sleep(_PAUSE_S)
        return True

    def _take_turn(self) -> None:
        # The watch holds it for a moment. What ends the session may hold it for long, and is not waited for.
        while not self._calls.acquire(timeout=_PAUSE_S):
            if self._ended.is_set():
                raise RuntimeError(self._cause)


def _deadline_s(work: Work) -> float:
    return work.deadline_s


def _with_ctas(config: CommunicatorConfig, identity: str, peer: str) -> CommunicatorConfig:
    """Return the settings with one number of CTAs for both ends, unless the user set one."""
    if config.max_ctas is not None:
        return config
    ends = [[*each.split(), *[""] * 3][1:4] for each in (identity, peer)]
    (host, peer_host), rates, sizes = zip(*ends, strict=True)
    slower, larger = min(float(rate or 0.0) for rate in rates), max(float(size or 0.0) for size in sizes)
    most = max(most_ctas(host == peer_host != "", slower, larger), config.min_ctas or 1)
    return replace(config, max_ctas=most)


def gpu_identity(device: torch.device, rnic_gbit_per_s: float = 0.0, message_nbytes: int = 0) -> str:
    """Return the identity of a GPU, unique over hosts, with its host, the rate of its RNICs, and the size of
    messages (0: varies)."""
    properties: Any = torch.cuda.get_device_properties(device)
    return f"{properties.uuid} {boot_identity()} {rnic_gbit_per_s:g} {message_nbytes}"
