# SPDX-License-Identifier: Apache-2.0
"""Separate the operations of two generations: none of the earlier one writes later, and results outside of calls are
kept.

A rank that abandons an attempt leaves operations of torch.distributed pending, in gloo's worker threads or on the GPU.
They could still write into a gradient buffer that the next attempt has zeroed, or into a norm, and all replicas would
agree on a wrong sum. So connections are shut down and communicators aborted, which ends all waits for peers. With NCCL
a rank then waits until none of its kernels runs, before it meets the others. With gloo it does not wait, as operations
write into memory of their own (`FaultTolerantGroups`) and some never end: gloo does not fail an operation whose message
has arrived in part (3 of 400 tries with a killed member).

torch's ProcessGroupGloo cannot end pending operations: `abort()` does nothing, and its destructor first runs all queued
ones (ProcessGroupGloo.cpp, ~ProcessGroupGloo). Shutting down a socket fails the operations on both ends within a
millisecond (gloo/transport/tcp/pair.cc: an end of file is an error of the pair, and so of all waits in its context).
Sockets are found by their addresses: each group has a device, and so a listener, of its own. This process's own
descriptors are queried one by one. Two alternatives fail: /proc/net/tcp lists the whole host's sockets, changes while
it is read, and omits some; Python's socket objects change the blocking mode of duplicates if a script has set a default
timeout.

Outside of calls an operation has one result, the same on all its ranks. If a rank fails during an operation, some ranks
may have the result and others not. The others copy it over the job's store from the lowest rank that has it, or run the
operation again if no rank has it. Results are kept from one commit to the next: a rank that commits call n has seen
that all others finished their attempts at n, so all of them have run the operations before it. Replicas may be several
operations apart.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from adaptra_megatron.common.gathering import gloo_group
from adaptra_megatron.common.sealed_store import SealedStore
from adaptra_megatron.common.typed_messages import Natural, packed, unpacked
from adaptra_megatron.elastic.failure_errors import LateRankError, UnrecoverableError
from adaptra_megatron.elastic.protocol_store import awaited
from adaptra_megatron.transport.gpu.cuda_device import DeviceThread

MOST_KEPT_NBYTES = 16 << 20
"""Maximum size of an operation's results that are kept, in bytes."""
_MANIFEST_NBYTES = 1 << 16


@dataclass(frozen=True)
class _Manifest:
    """Description of one operation's result, which its holder puts into the store."""

    nbytes: tuple[Natural, ...] | None
    """Size of each output; their bytes follow one another. None: not kept, as it is larger than MOST_KEPT_NBYTES or
    differs between ranks.
    """


class KeptResults:
    """Results of one rank's operations outside of calls since the last commit. For the training thread."""

    def __init__(self) -> None:
        self._kept: dict[str, list[list[bytes] | None]] = {}
        """Results by name of the group, in the order of its operations."""
        self._holders: Mapping[str, int] = {}
        self._fetch: Callable[[str], bytes] = _nowhere

    def counts(self, groups: Sequence[str]) -> dict[str, int]:
        """Return the number of operations since the last commit, by name of the `groups` that this rank is in."""
        return {group: len(self._kept.get(group, ())) for group in groups}

    def forget(self) -> None:
        """Drop all results: every live rank has them."""
        self._kept.clear()
        self.look_nowhere()

    def look_nowhere(self) -> None:
        """Stop requesting results from other ranks: no rank lacks one that another has."""
        self._holders = {}

    def keep(self, group: str, outputs: Sequence[torch.Tensor] | None) -> None:
        """Keep the `outputs` of an operation of `group`; None: only that it ended, for each rank has others."""
        results = self._kept.setdefault(group, [])
        if outputs is None or sum(output.nbytes for output in outputs) > MOST_KEPT_NBYTES:
            results.append(None)
            return
        flat = [output.detach().cpu().contiguous().reshape(-1) for output in outputs]
        results.append([each.view(torch.uint8).numpy().tobytes() if each.numel() else b"" for each in flat])

    def publish(self, store: SealedStore, groups: Sequence[str]) -> None:
        """Put the results of `groups` that some other ranks lack into the new generation's store."""
        for group in groups:
            for number, outputs in enumerate(self._kept[group]):
                place = f"kept/{group}/{number}"
                store.set_parts(f"{place}/outputs", b"".join(outputs or ()))
                manifest = _Manifest(None if outputs is None else tuple(map(len, outputs)))
                # The manifest after the outputs, and the group's count after all: a reader that sees either finds
                # everything behind it.
                store.set(place, packed(manifest))
            store.set(f"kept/{group}", str(len(self._kept[group])).encode())

    def found_with(
        self, holders: Mapping[str, int], store: SealedStore, timeout_s: float, check: Callable[[], None]
    ) -> None:
        """Request the results that this rank lacks from the `holders`, from now on.

        `store`: the generation's. `check`: raises the error that ends a wait for a result.
        """
        self._holders = holders

        def fetch(key: str) -> bytes:
            try:
                return awaited(lambda: store.peek(key), timeout_s, check)
            except TimeoutError as cause:
                raise LateRankError(f"timed out: no rank has given {key} within {timeout_s:g} s") from cause

        self._fetch = fetch

    def known(self, group: str, outputs: Sequence[torch.Tensor]) -> bool:
        """Copy the result of the next operation of `group` into `outputs` if another rank has it; return whether one
        has.

        Raises RuntimeError if it was not kept, LateRankError if its holder does not publish it in time, and
        the errors of `check`.
        """
        number = len(self._kept.get(group, ()))
        if group not in self._holders or number >= int(self._fetch(f"kept/{group}")):
            return False
        place = f"kept/{group}/{number}"
        manifest: _Manifest = unpacked(self._fetch(place), _Manifest, _MANIFEST_NBYTES)
        if manifest.nbytes is None:
            raise RuntimeError(
                f"the result of operation {number} of {group} is lost: it has more than {MOST_KEPT_NBYTES >> 20} MiB, "
                "or differs between ranks (scatter, reduce-scatter, all-to-all); restart from the last checkpoint"
            )
        whole = self._fetch(f"{place}/outputs")
        begin = 0
        for output, nbytes in zip(outputs, manifest.nbytes, strict=True):
            if nbytes:
                flat = torch.frombuffer(bytearray(whole[begin : begin + nbytes]), dtype=torch.uint8)
                output.copy_(flat.view(output.dtype).view(output.shape))
            begin += nbytes
        return True


def _nowhere(key: str) -> Any:
    raise AssertionError(f"{key} is looked for before ranks have met")


_MAKES_DEVICE = threading.Lock()
_TRIES = 20
_LONGEST_NBYTES = 128
"""Size of an address (sockaddr_storage), in bytes."""


class GlooSockets(NamedTuple):
    """Addresses of the connections of one gloo group, as `_Socket` has them."""

    own: str
    """Address of this process's listener."""
    peers: frozenset[str]
    """Addresses of the other members' listeners."""

    def shut_down(self) -> None:
        """Shut down all connections, so that all operations of the group fail, here and at its other members."""
        # shutdown(2), not close(2): gloo's threads still use the descriptors, whose numbers could be reused.
        libc = ctypes.CDLL(None)
        for each in _sockets():
            if each.remote and (each.local == self.own or each.remote in self.peers):
                libc.shutdown(each.number, socket.SHUT_RDWR)


class _Socket(NamedTuple):
    """A TCP socket of this process."""

    number: int
    """File descriptor of the duplicate."""
    inode: str
    local: str
    """Port and address."""
    remote: str
    """Port and address of the peer; empty for a listener."""


def connected_group(store: Any, rank: int, size: int, timeout_s: float) -> tuple[Any, GlooSockets]:
    """Create a gloo group of `size` processes that meet in `store`; this one has rank `rank` in it.

    Raises RuntimeError if one does not come within `timeout_s`.
    """
    device, own = _device()
    store.set(f"listener/{rank}", own)
    group = gloo_group(store, rank, size, timedelta(seconds=timeout_s), [device])
    others = [f"listener/{each}" for each in range(size) if each != rank]
    peers = frozenset(found.decode() for found in store.multi_get(others)) if others else frozenset[str]()
    return group, GlooSockets(own, peers)


def _device() -> tuple[Any, str]:
    """Create a gloo device; return it and the address of its listener."""
    # The device's listener is the one socket that is new afterwards, so no other thread may create a device meanwhile.
    with _MAKES_DEVICE:
        for _ in range(_TRIES):
            before = {each.inode for each in _sockets()}
            device = _default_device()
            new = [each.local for each in _sockets() if each.inode not in before and not each.remote]
            if len(new) == 1:  # else another thread has opened a socket in the same moment
                return device, new[0]
    raise RuntimeError(f"gloo's listener cannot be identified among those of other threads, in {_TRIES} tries")


def _default_device() -> Any:
    """Create a device as torch.distributed does for a group: for GLOO_SOCKET_IFNAME, or else this host's name."""
    gloo: Any = dist.ProcessGroupGloo
    name = next(filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")), None)
    return gloo.create_default_device() if name is None else gloo.create_device(interface=name)


def _sockets() -> Iterator[_Socket]:
    """Iterate over duplicates of this process's TCP sockets.

    A duplicate stays the same socket even if the original descriptor is closed or reused. It is closed when the next is
    requested.
    """
    libc = ctypes.CDLL(None)
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it has been closed meanwhile
            kind = os.readlink(f"/proc/self/fd/{name}")
            if not kind.startswith("socket:"):
                continue
            number = os.dup(int(name))
            try:
                if local := _address(libc.getsockname, number):
                    inode, remote = str(os.fstat(number).st_ino), _address(libc.getpeername, number)
                    yield _Socket(number, inode, local, remote)
            finally:
                os.close(number)


def _address(ask: Callable[..., int], number: int) -> str:
    """Return port and address of a socket from a function of libc; empty if it is no TCP socket."""
    found, length = ctypes.create_string_buffer(_LONGEST_NBYTES), ctypes.c_uint32(_LONGEST_NBYTES)
    if ask(number, found, ctypes.byref(length)):
        return ""
    family = int.from_bytes(found.raw[:2], sys.byteorder)
    if family == socket.AF_INET:
        return found.raw[2:8].hex()
    # Without flow label and scope id, which differ between hosts (struct sockaddr_in6).
    return (found.raw[2:4] + found.raw[8:24]).hex() if family == socket.AF_INET6 else ""


FENCE_S = 30.0
"""Time limit for operations to end once their connections are shut down: normally milliseconds."""
_LOOKS_S = 0.0005


class OperationStillRunsError(UnrecoverableError):
    """An operation of an earlier generation may still write, so this process must not go on."""

    def __init__(self, running: str, waited_s: float) -> None:
        """`running`: the operation with its group and ranks."""
        self.running, self.waited_s = running, waited_s
        super().__init__(
            f"{running} has not ended {waited_s:.1f} s after connections were shut down, and may still write into what "
            "the next attempt uses: this rank ends, and the others go on without it; see whether its device or the "
            "kernel hangs"
        )


class Fence:
    """Operations and process groups of one process in one generation. For the training thread, but for `abort`."""

    def __init__(self) -> None:
        self._launched: list[tuple[Any, str]] = []
        """Torch's handles of operations in progress, and what these are."""
        self._groups: list[FencedGroup] = []
        self._aborts: dict[FencedGroup, threading.Thread] = {}
        self._not_aborted: list[str] = []
        """Communicators whose abort has failed, and why."""
        self._aborting = threading.Lock()

    def guarded(self, native: Any, name: str, members: tuple[int, ...], sockets: GlooSockets | None) -> FencedGroup:
        """Wrap torch's group `native`, so that its operations are recorded here. `sockets`: of a gloo group."""
        group = FencedGroup(native, name, members, sockets, self._note)
        self._groups.append(group)
        return group

    def close(self) -> None:
        """Shut down all connections and abort communicators: pending operations end, here and at peers."""
        for group in self._groups:
            if group.is_gloo:
                group.close()
        self.abort()

    def abort(self) -> None:
        """Begin to abort all communicators, from any thread.

        Each in a thread of its own: NCCL waits in it for the communicator's kernels, which may be queued behind those
        of another one (init.cc, commReclaim), and torch for its result (ProcessGroupNCCL::abort).
        """
        with self._aborting:
            for group in [each for each in self._groups if not each.is_gloo and each not in self._aborts]:
                self._aborts[group] = DeviceThread(self._abort, "adaptra-abort", (group,))
                self._aborts[group].start()

    def _abort(self, group: FencedGroup) -> None:
        try:
            group.close()
        except Exception as cause:
            self._not_aborted.append(f"the communicator of {group.place} ({cause})")

    def wait(self, timeout_s: float) -> None:
        """Wait until no operation can write any more. Call `close` first.

        Raises OperationStillRunsError if one has not ended after `timeout_s`, torch's error if the device has failed.
        """
        begun_s = time.monotonic()
        for group, thread in self._aborts.items():
            thread.join(max(0.0, begun_s + timeout_s - time.monotonic()))
            if thread.is_alive():
                running = f"the abort of the communicator of {group.place}"
                raise OperationStillRunsError(running, time.monotonic() - begun_s)
        self._prune()
        while self._launched:
            if time.monotonic() - begun_s > timeout_s:
                raise OperationStillRunsError(self._launched[0][1], time.monotonic() - begun_s)
            time.sleep(_LOOKS_S)
            self._prune()
        if torch.cuda.is_available():
            self._wait_for_device(begun_s + timeout_s)
        if self._not_aborted:
            raise OperationStillRunsError("; ".join(self._not_aborted), time.monotonic() - begun_s)
        # Destructors of gloo's groups join their worker threads, which may hang for ever. So the last reference is
        # dropped in a thread of its own.
        natives = [group.native for group in self._groups]
        for group in self._groups:
            group.native = None
        self._groups.clear()
        DeviceThread(natives.clear, "adaptra-leave").start()

    def _note(self, work: Any, operation: str) -> None:
        self._prune()
        self._launched.append((work, operation))

    def _prune(self) -> None:
        self._launched = [each for each in self._launched if not each[0].is_completed()]

    def _wait_for_device(self, deadline_s: float) -> None:
        """Wait until the kernels of aborted communicators have ended.

        torch counts their operations as completed once aborted (ProcessGroupNCCL.cpp, WorkNCCL::isCompleted), and
        buffers are zeroed on another stream. Raises torch's error if the device has failed.
        """
        done, device, begun_s = threading.Event(), torch.cuda.current_device(), time.monotonic()
        failures: list[Exception] = []

        # In a thread, as cudaDeviceSynchronize has no timeout and may hang with the device.
        def synchronize() -> None:
            try:
                torch.cuda.synchronize(device)
            except Exception as cause:
                failures.append(cause)
            done.set()

        DeviceThread(synchronize, "adaptra-fence").start()
        if not done.wait(max(0.0, deadline_s - begun_s)):
            last = "; ".join(group.last for group in self._groups if group.last) or "nothing"
            running = f"an unknown kernel on device {device} (launched last over NCCL: {last})"
            raise OperationStillRunsError(running, time.monotonic() - begun_s)
        if failures:
            raise failures[0]


class StreamWork:
    """One of torch's handles of an operation over NCCL. To wait for it makes the current stream wait.

    Without the timeout: with one, torch blocks the thread, and aborts the communicator once the time has passed
    (ProcessGroupNCCL.cpp, WorkNCCL::wait).
    """

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, *_timeout: timedelta) -> None:
        self._work.wait()

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        return bool(self._work.is_success())


class FencedGroup:
    """One of torch's own process groups, for one generation. Operations over NCCL are recorded when launched."""

    def __init__(
        self,
        native: Any,
        name: str,
        members: tuple[int, ...],
        sockets: GlooSockets | None,
        note: Callable[[Any, str], None],
    ) -> None:
        self.native, self.place = native, f"{name} over ranks {', '.join(map(str, members))}"
        self.is_gloo = isinstance(native, dist.ProcessGroupGloo)
        self._sockets, self._note = sockets, note
        self.last = ""
        """The last operation over NCCL, with group and ranks."""

    def close(self) -> None:
        """Make all pending operations fail."""
        if self._sockets is not None:
            self._sockets.shut_down()
        elif not self.is_gloo:
            self.native.abort()

    def __getattr__(self, name: str) -> Any:
        """Return torch's method of this name; if it launches an operation over NCCL, the wrapper records that."""
        method = getattr(self.native, name)
        # gloo's operations write into memory of their own, so they need not be waited for.
        if self.is_gloo or not callable(method):
            return method

        def launched(*given: Any, **keywords: Any) -> Any:
            for options in given:
                # Without it torch returns no handle, as it makes the current stream wait itself.
                if hasattr(options, "asyncOp"):
                    options.asyncOp = True
            found = method(*given, **keywords)
            # What a graph captures is run by its replays: torch's handle of it never completes.
            captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
            if not hasattr(found, "is_completed"):
                return found
            if not captured:
                self.last = f"{name.strip('_')} of {self.place}"
                self._note(found, self.last)
            return StreamWork(found)

        return launched
