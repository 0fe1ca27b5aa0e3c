# SPDX-License-Identifier: Apache-2.0
"""Separate the operations of two generations: none of the earlier one writes later, and results outside of calls stay.

Outside of calls an operation has one result, which all its ranks see. Where a rank fails in one, some have its result
and others have not: these get it from the lowest rank that has, over the job's store, or carry it out anew where none
has. Results are kept from one commit to the next: who commits call n has seen all others come to the end of their
attempts at n, so all have carried out what comes before it. Replicas may be several operations apart.

A rank that gives an attempt up leaves operations of torch.distributed under way. They go on in gloo's worker threads or
on the GPU, and would write their results into a gradient buffer that the next attempt has set to 0, or into a norm. All
replicas then agree on a wrong sum. So connections are shut down and communicators aborted, which wakes all that wait
for peers. Over NCCL a rank then waits until no kernel of its own is left, before it meets the others. Over gloo
operations have memory of their own (`FaultTolerantGroups`) and need not be waited for: some never wake, for gloo tells
an operation nothing whose message has come in half (3 of 400 tries with a member that was killed).

TCP connections of gloo's process groups can be shut down while operations use them.
torch's ProcessGroupGloo has no way to end what is under way: `abort()` does nothing, and its destructor first runs
what is queued to its end (ProcessGroupGloo.cpp, ~ProcessGroupGloo). A socket that is shut down fails the
operations on both ends within a millisecond (gloo/transport/tcp/pair.cc: an end of file is an error of the pair,
and so of all that waits in its context). Sockets are found by their addresses: each group has a device, and so a
listener, of its own. This process's own descriptors are asked, one by one: /proc/net/tcp has those of the whole
host, is read page by page while it changes, and leaves some out; and socket objects of Python would change the
blocking mode of what they duplicate where a script has set a default timeout.
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
"""Largest results of one operation that are kept."""
CHUNK_NBYTES = 512 << 10
"""Of one value in the store: torch's TCPStore carries 8 MiB, and all other requests wait meanwhile."""
_MANIFEST_NBYTES = 1 << 16


@dataclass(frozen=True)
class _Manifest:
    """What a holder has put into the store of one operation's result."""

    nbytes: tuple[Natural, ...] | None
    """Of each output, whose bytes follow one another; None: more than MOST_KEPT_NBYTES, and not kept."""


class KeptResults:
    """Results of one rank's operations, since its last commit. For the training thread."""

    def __init__(self) -> None:
        self._kept: dict[str, list[list[bytes] | None]] = {}
        """By name of a group, in the order of its operations."""
        self._holders: Mapping[str, int] = {}
        self._fetch: Callable[[str], bytes] = _nowhere

    def counts(self, groups: Sequence[str]) -> dict[str, int]:
        """Return how many operations have been carried out, by name of the `groups` that this rank is in."""
        return {group: len(self._kept.get(group, ())) for group in groups}

    def forget(self) -> None:
        """Forget all: every live rank has them."""
        self._kept.clear()
        self.look_nowhere()

    def look_nowhere(self) -> None:
        """Look for no results any more: no rank lacks one that another has."""
        self._holders = {}

    def keep(self, group: str, outputs: Sequence[torch.Tensor]) -> None:
        """Keep what an operation of `group` has come to."""
        results = self._kept.setdefault(group, [])
        if sum(output.nbytes for output in outputs) > MOST_KEPT_NBYTES:
            results.append(None)
            return
        flat = [output.detach().cpu().contiguous().reshape(-1) for output in outputs]
        results.append([each.view(torch.uint8).numpy().tobytes() if each.numel() else b"" for each in flat])

    def publish(self, store: SealedStore, groups: Sequence[str]) -> None:
        """Put the results in `groups`, of which another rank lacks some, into the store of the new generation."""
        for group in groups:
            for number, outputs in enumerate(self._kept[group]):
                place = f"kept/{group}/{number}"
                whole = b"".join(outputs or ())
                for chunk, begin in enumerate(range(0, len(whole), CHUNK_NBYTES)):
                    store.set(f"{place}/{chunk}", whole[begin : begin + CHUNK_NBYTES])
                manifest = _Manifest(None if outputs is None else tuple(map(len, outputs)))
                store.set(place, packed(manifest))
            store.set(f"kept/{group}", str(len(self._kept[group])).encode())

    def found_with(
        self, holders: Mapping[str, int], store: SealedStore, timeout_s: float, check: Callable[[], None]
    ) -> None:
        """Look for results that this rank lacks with their `holders`, from now on. `check`: raises what ends the wait
        for one. `store`: of the generation."""
        self._holders = holders

        def fetch(key: str) -> bytes:
            try:
                return awaited(lambda: store.peek(key), timeout_s, check)
            except TimeoutError as cause:
                raise LateRankError(f"timed out: no rank has given {key} within {timeout_s:g} s") from cause

        self._fetch = fetch

    def known(self, group: str, outputs: Sequence[torch.Tensor]) -> bool:
        """Fill the `outputs` of the next operation of `group` with its result, if another rank has it.

        Returns whether one has. Raises RuntimeError where it was too large to be kept, LateRankError where its
        holder does not give it, and what `check` raises.
        """
        number = len(self._kept.get(group, ()))
        if group not in self._holders or number >= int(self._fetch(f"kept/{group}")):
            return False
        place = f"kept/{group}/{number}"
        manifest: _Manifest = unpacked(self._fetch(place), _Manifest, _MANIFEST_NBYTES)
        if manifest.nbytes is None:
            raise RuntimeError(
                f"the result of operation {number} of {group} is lost: it has more than {MOST_KEPT_NBYTES >> 20} MiB"
            )
        chunks = range(-(-sum(manifest.nbytes) // CHUNK_NBYTES))
        whole = b"".join(self._fetch(f"{place}/{chunk}") for chunk in chunks)
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
"""Of an address (sockaddr_storage)."""


class GlooSockets(NamedTuple):
    """Ends of the connections of one group: addresses as `_Socket` has them."""

    own: str
    """Listener of this process."""
    peers: frozenset[str]
    """Listeners of the other members."""

    def shut_down(self) -> None:
        """End all connections, so that all operations of the group fail, here and at its other members."""
        libc = ctypes.CDLL(None)
        for each in _sockets():
            if each.remote and (each.local == self.own or each.remote in self.peers):
                libc.shutdown(each.number, socket.SHUT_RDWR)


class _Socket(NamedTuple):
    """A TCP socket of this process."""

    number: int
    """File descriptor of a duplicate."""
    inode: str
    local: str
    """Port and address."""
    remote: str
    """The same of its peer; empty: it has none, as a listener."""


def connected_group(store: Any, rank: int, size: int, timeout_s: float) -> tuple[Any, GlooSockets]:
    """Make a gloo group of `size` processes that meet in `store`, of which this is number `rank`.

    Raises RuntimeError when one does not come within `timeout_s`.
    """
    device, own = _device()
    store.set(f"listener/{rank}", own)
    group = gloo_group(store, rank, size, timedelta(seconds=timeout_s), [device])
    others = [f"listener/{each}" for each in range(size) if each != rank]
    peers = frozenset(found.decode() for found in store.multi_get(others)) if others else frozenset[str]()
    return group, GlooSockets(own, peers)


def _device() -> tuple[Any, str]:
    """Make a device, and find the address that its listener has."""
    with _MAKES_DEVICE:
        for _ in range(_TRIES):
            before = {each.inode for each in _sockets()}
            device = _default_device()
            new = [each.local for each in _sockets() if each.inode not in before and not each.remote]
            if len(new) == 1:  # else another thread has opened a socket in the same moment
                return device, new[0]
    raise RuntimeError(f"gloo's listener cannot be identified among those of other threads, in {_TRIES} tries")


def _default_device() -> Any:
    """Make a device as torch.distributed does for a group: for GLOO_SOCKET_IFNAME, or this host's name."""
    gloo: Any = dist.ProcessGroupGloo
    name = next(filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")), None)
    return gloo.create_default_device() if name is None else gloo.create_device(interface=name)


def _sockets() -> Iterator[_Socket]:
    """List this process's TCP sockets. Each duplicate is closed once the next is asked for: whatever becomes of the
    descriptor that it was made of, it stays the same socket."""
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
    """Return the port and address that a function of libc gives of a socket; empty where there is none of TCP."""
    found, length = ctypes.create_string_buffer(_LONGEST_NBYTES), ctypes.c_uint32(_LONGEST_NBYTES)
    if ask(number, found, ctypes.byref(length)):
        return ""
    family = int.from_bytes(found.raw[:2], sys.byteorder)
    if family == socket.AF_INET:
        return found.raw[2:8].hex()
    # Without flow and scope, which are each host's own (struct sockaddr_in6).
    return (found.raw[2:4] + found.raw[8:24]).hex() if family == socket.AF_INET6 else ""


FENCE_S = 30.0
"""For operations to end once their connections are shut down: that takes milliseconds."""
_LOOKS_S = 0.0005


class OperationStillRunsError(UnrecoverableError):
    """An operation of an earlier generation may still write, so this process must not go on."""

    def __init__(self, operation: str, group: str, members: tuple[int, ...], waited_s: float) -> None:
        self.operation, self.group, self.members, self.waited_s = operation, group, members, waited_s
        super().__init__(
            f"{operation} of {group} over ranks {', '.join(map(str, members))} has not ended {waited_s:.1f} s after "
            "its connections were shut down, and may still write into what the next attempt uses: this rank ends, and "
            "the others go on without it; see whether its device or the kernel hangs"
        )


@dataclass(frozen=True)
class _Launched:
    """One operation."""

    work: Any
    """Torch's handle."""
    operation: str
    group: FencedGroup


class Fence:
    """Operations and process groups of one process in one generation. For the training thread."""

    def __init__(self) -> None:
        self._launched: list[_Launched] = []
        self._groups: list[FencedGroup] = []

    def guarded(self, native: Any, name: str, members: tuple[int, ...], sockets: GlooSockets | None) -> FencedGroup:
        """Return torch's `native` group, whose operations are noted here. `sockets`: of gloo's."""
        group = FencedGroup(native, name, members, sockets, self._note)
        self._groups.append(group)
        return group

    def close(self) -> None:
        """Shut all connections down and abort communicators, so that what is under way ends, here and at peers."""
        for group in self._groups:
            group.close()

    def wait(self, timeout_s: float) -> None:
        """Wait until no operation can write any more. To be called after `close`.

        Raises OperationStillRunsError where one has not ended after `timeout_s`.
        """
        begun_s = time.monotonic()
        self._prune()
        while self._launched:
            if time.monotonic() - begun_s > timeout_s:
                first = self._launched[0]
                raise OperationStillRunsError(
                    first.operation, first.group.name, first.group.members, time.monotonic() - begun_s
                )
            time.sleep(_LOOKS_S)
            self._prune()
        if torch.cuda.is_available():
            self._wait_for_device(begun_s + timeout_s)
        # Destructors of gloo's groups join their threads, and no name here may be the last to hold one.
        natives = [group.native for group in self._groups]
        for group in self._groups:
            group.native = None
        self._groups.clear()
        DeviceThread(natives.clear, "adaptra-leave").start()

    def _note(self, work: Any, operation: str, group: FencedGroup) -> None:
        self._prune()
        self._launched.append(_Launched(work, operation, group))

    def _prune(self) -> None:
        self._launched = [each for each in self._launched if not each.work.is_completed()]

    def _wait_for_device(self, deadline_s: float) -> None:
        """Wait until kernels of aborted communicators are over: torch counts them as completed once they are aborted
        (ProcessGroupNCCL.cpp, WorkNCCL::isCompleted), and buffers are set to 0 on another stream."""
        done, device, begun_s = threading.Event(), torch.cuda.current_device(), time.monotonic()

        def synchronize() -> None:
            torch.cuda.synchronize(device)
            done.set()

        DeviceThread(synchronize, "adaptra-fence").start()
        if not done.wait(max(0.0, deadline_s - begun_s)):
            raise OperationStillRunsError("a kernel", f"device {device}", (), time.monotonic() - begun_s)


class FencedGroup:
    """Torch's own process group of one generation. Those over NCCL note operations as they are launched."""

    def __init__(
        self,
        native: Any,
        name: str,
        members: tuple[int, ...],
        sockets: GlooSockets | None,
        note: Callable[[Any, str, FencedGroup], None],
    ) -> None:
        self.native, self.name, self.members = native, name, members
        self.is_gloo = isinstance(native, dist.ProcessGroupGloo)
        self._sockets, self._note = sockets, note

    def close(self) -> None:
        """Have all that is under way fail."""
        if self._sockets is not None:
            self._sockets.shut_down()
        elif not self.is_gloo:
            self.native.abort()

    def __getattr__(self, name: str) -> Any:
        """Return torch's method of this name; where it launches an operation over NCCL, that is noted."""
        method = getattr(self.native, name)
        if self.is_gloo or not callable(method):
            return method

        def launched(*given: Any, **keywords: Any) -> Any:
            found = method(*given, **keywords)
            if hasattr(found, "is_completed"):
                self._note(found, name.strip("_"), self)
            return found

        return launched
