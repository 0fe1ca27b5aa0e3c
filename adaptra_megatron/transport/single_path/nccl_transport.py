# SPDX-License-Identifier: Apache-2.0
"""The device path for GPU tensors, without a host path: links over NCCL, whose streams computation waits for.

Posted sends and receives wait on the device, in the order of the training thread's calls (see transfers.launch_order
for why that order matters). A wait only makes computation wait: the CPU never sees an arrival. The time of an arrival
is computed afterwards, from events on computation's stream before and after a wait. A timed event behind the transfer
on the link's own stream would block all streams that share its hardware queue.

A link that fails ends the run. Its receives stay pending: if they ended, queued computation would use the contents of
their buffers as messages, and its results might be saved. So the training thread gets an error at its next call. If it
makes no call because it waits for the device, the process is ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from adaptra_megatron.common.log import logger_of
from adaptra_megatron.transport.device_session.link_watch import LinkWatch, end_process
from adaptra_megatron.transport.device_session.nccl_link import NcclLink
from adaptra_megatron.transport.gpu.cuda_device import Device, OutOfMemory, out_of_memory
from adaptra_megatron.transport.gpu.device_clock import DeviceClock, Mark
from adaptra_megatron.transport.link_paths import Path
from adaptra_megatron.transport.message_keys import MessageKey, MessageTimes, TensorSpecification, TransportError
from adaptra_megatron.transport.setup.link_setup import FREED_S, Link
from adaptra_megatron.transport.shapes import HEADER_NUMBERS, decode_shape, encode_shape

logger = logger_of(__name__)

LAST_MESSAGES_S = 5.0
"""Longest wait of closing for the last sends to leave."""
GRACE_S = 5.0
"""Time for the training thread to raise the error of a failed link before the process is ended."""


STOOD_S = 5e-5
"""Wait of computation below which a message counts as early: its time of arrival is then unknown."""
_NO_TAG = 0
"""NCCL matches by order alone."""


_Receive = tuple[int, torch.Tensor, Any, Mark]
"""Peer, buffer, transfer, and mark at which computation reached the post."""


class StreamTransport:
    """Transport over NCCL links, each for one direction. Computation waits for their receives on its own stream."""

    def __init__(
        self,
        rank: int,
        links: Mapping[Link, NcclLink],
        device: Device,
        clock: DeviceClock | None,
        watch: LinkWatch,
        timeout_s: float,
        last_resort: Callable[[], None] | None = None,
        name: Callable[[int], str] = "rank {}".format,
    ) -> None:
        """`links`: connected links of this rank. `clock`: of the device, to time messages; `take_times` then requires
        that computation has finished with them; None: no times. `watch`: of the links; reports failures from now on.
        `timeout_s`: longest wait for the size of a message. `last_resort`: ends the process if the training thread does
        not; None: `end_process`. `name`: returns the name of a rank for messages.
        """
        self._rank, self._links, self._name = rank, links, name
        self._device, self._clock, self._watch, self._timeout_s = device, clock, watch, timeout_s
        self._last_resort = last_resort or end_process
        self._specification = TensorSpecification((), torch.float32, torch.device("cpu"))
        self._sending = [link for (source, _target), link in links.items() if source == rank]
        self._receives: dict[MessageKey, _Receive] = {}
        self._sent: list[tuple[MessageKey, int, float, int]] = []
        """(key, peer, time, bytes): cheapest for the training thread."""
        self._received: list[tuple[MessageKey, int, int, Mark, Mark, Mark]] = []
        """(key, peer, bytes, marks at the post, before and after the wait) of received messages, without the
        tensors."""
        self._failure: TransportError | None = None
        self._timer: threading.Timer | None = None
        self._closed = False
        watch.failed = self._link_failed

    def describe(self, specification: TensorSpecification) -> None:
        """Set shape, dtype and device of the messages to come (fixed within an iteration)."""
        self._specification = specification

    def post_send(self, key: MessageKey, peer: int, tensor: torch.Tensor) -> None:
        outgoing = tensor.detach()
        if not outgoing.is_contiguous():
            outgoing = outgoing.contiguous()
        link = (self._rank, peer)
        now_s = time.monotonic()
        try:
            group = self._usable(link)
            if self._specification.shape is None:
                header = group.bring(encode_shape(outgoing.shape, torch.device("cpu")))
                group.send(header, _NO_TAG)
            group.send(outgoing, _NO_TAG, self._device.current_handle())
        except RuntimeError as cause:
            raise self._error(key, link, cause) from cause
        if self._clock is not None:
            self._sent.append((key, peer, now_s, outgoing.nbytes))

    def post_receive(self, key: MessageKey, peer: int) -> None:
        """Post a receive. If sizes vary, this waits for the header; a missing header ends the run."""
        specification = self._specification
        shape = specification.shape
        if shape is None:
            _peer, header, work, _posted = self._receive(key, peer, (HEADER_NUMBERS,), torch.int64)
            group = self._links[peer, self._rank]
            try:
                group.wait(work, self._timeout_s)
                shape = decode_shape(group.read(header))
            except RuntimeError as cause:
                raise self._error(key, (peer, self._rank), cause) from cause
        receive = self._receive(key, peer, shape, specification.dtype)
        if self._receives.setdefault(key, receive) is not receive:  # keys are hashed once: that is not cheap
            raise AssertionError(f"{key} was posted twice")

    def ready(self, key: MessageKey) -> bool:
        return False

    def can_poll(self, peer: int) -> bool:
        """Return False: computation waits for arrivals, not the CPU."""
        return False

    def wait_any(self, keys: Collection[MessageKey], until_s: float) -> bool:
        return False

    def last_receive_path(self, peer: int) -> Path:
        return Path.DEVICE

    def wait(self, key: MessageKey, deadline_s: float) -> torch.Tensor:
        peer, buffer, work, posted = self._receives.pop(key)
        clock = self._clock
        came = None if clock is None else clock.mark()
        link = (peer, self._rank)
        try:
            self._usable(link).follow(work, deadline_s)
        except RuntimeError as cause:
            raise self._error(key, link, cause) from cause
        if clock is not None:
            self._received.append((key, peer, buffer.nbytes, posted, came, clock.mark()))
        return buffer

    def flush(self, deadline_s: float) -> None:
        """Return at once: links hold the tensors of pending sends, and computation does not wait for them."""
        self._raise_failure()

    def take_times(self) -> tuple[Sequence[MessageTimes], Sequence[MessageTimes]]:
        if self._clock is None:
            return (), ()
        sent, self._sent = self._sent, []
        received, self._received = self._received, []
        times = []
        for key, peer, nbytes, *marks in received:
            posted_s, came_s, went_on_s = self._clock.seconds(marks)
            if went_on_s - came_s < STOOD_S:
                posted_s = went_on_s  # says nothing of the link, like what was sent before it was asked for
            times.append(MessageTimes(key, peer, posted_s, went_on_s, nbytes, Path.DEVICE))
            self._clock.use_again(marks)
        return [MessageTimes(key, peer, at_s, at_s, nbytes, Path.DEVICE) for key, peer, at_s, nbytes in sent], times

    def close(self, *, drained: bool = True) -> bool:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        now_s = time.monotonic()
        for group in self._links.values():
            if drained and self._failure is None:
                group.close(now_s + LAST_MESSAGES_S)
            else:
                group.abort()
        until_s = time.monotonic() + FREED_S
        freed = [group.wait_until_freed(until_s) for group in self._links.values()]
        self._watch.close()
        return all(freed)

    def _receive(self, key: MessageKey, peer: int, shape: tuple[int, ...], dtype: torch.dtype) -> _Receive:
        link = (peer, self._rank)
        try:
            group = self._usable(link)
            for sending in self._sending:  # the memory of what has left may serve this message
                sending.free_done()
            # Memory from computation's own pool may still be in use by queued work, so the receive must come after
            # that.
            buffer = self._device.empty(shape, dtype)
            posted = None if self._clock is None else self._clock.mark()
            return peer, buffer, group.receive(buffer, _NO_TAG, self._device.current_handle()), posted
        except RuntimeError as cause:
            raise self._error(key, link, cause) from cause

    def _link_failed(self, link: Any, cause: str) -> None:
        """Record a link's failure; called by the watch's thread."""
        # The first failure is the cause. While closing, peers that have closed already look like failures.
        if self._failure is not None or self._closed:
            return
        source, target = link.ends
        self._failure = TransportError(
            f"{self._name(self._rank)}, link {source}->{target}: the device path failed: {cause}. Look at the rank at "
            "the other end first: it died, hangs, or cannot be reached; restart from the last checkpoint"
        )
        logger.error("%s. This process ends within %g s", self._failure, GRACE_S)
        # The training thread may be blocked in a wait for the device, which never ends: then only the timer can end the
        # process.
        self._timer = threading.Timer(GRACE_S, self._last_resort)
        self._timer.daemon = True
        self._timer.start()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _usable(self, link: Link) -> NcclLink:
        """Return a link if no link has failed. Raises TransportError."""
        if self._failure is not None:
            raise self._failure
        return self._links[link]

    def _error(self, key: MessageKey, link: Link, cause: RuntimeError) -> TransportError:
        """Return the error for a message."""
        if self._failure is not None or isinstance(cause, TransportError):
            return self._failure or cause  # type: ignore[return-value]
        if isinstance(cause, OutOfMemory):
            return out_of_memory(f"{link[0]}->{link[1]}", cause)
        return TransportError(
            f"{self._name(self._rank)}, link {link[0]}->{link[1]}: the "
            f"{key.spelled(self._specification.micro_batches)} did not get through: {cause}. Look at the rank at "
            "the other end first: it died, hangs, or cannot be reached"
        )
