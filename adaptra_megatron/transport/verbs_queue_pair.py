# SPDX-License-Identifier: Apache-2.0
"""A reliable connected queue pair of libibverbs between the outbound ring here and the inbound ring of a peer.

A chunk is two RDMA WRITEs: its payload, then its header with the chunk's number as immediate data. On one reliable
connection the second completes after the first, so the receiver's completion means that both are in its memory.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import select
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from adaptra_megatron.transport._ring import FRAME_HEADER_NBYTES, Ring
from adaptra_megatron.transport.verbs_device import Port, VerbsUnavailableError
from adaptra_megatron.transport.verbs_messages import Endpoint
from adaptra_megatron.transport.verbs_rail import Completion, Did, QueuePairError

_RECEIVE, _PROBE, _FIRST_CHUNK = 0, 1, 2
"""Identifiers of work requests; chunk n has n + _FIRST_CHUNK. The upper bits tell one use of the pair from the next."""
_USE_SHIFT = 48
_ACK_TIMEOUT, _RETRIES = 14, 5
"""4.096 us * 2**14 a try: a dead path shows in about half a second. 7 tries mean for ever on rxe."""
_RECEIVER_NOT_READY_RETRIES, _RECEIVER_NOT_READY_TIMER = 6, 12
_HOPS = 64
_POLLED_AT_ONCE = 64
_ENDING = ("CQ_ERR", "QP_FATAL", "QP_REQ_ERR", "QP_ACCESS_ERR", "PORT_ERR", "DEVICE_FATAL")
"""Events after which a rail is of no use."""

logger = logging.getLogger("adaptra_megatron.transport.verbs")

Method = TypeVar("Method", bound=Callable[..., Any])


def _translated(method: Method) -> Method:
    """Errors of pyverbs become QueuePairError."""

    @functools.wraps(method)
    def translate(self: VerbsQueuePair, *arguments: Any) -> Any:
        try:
            return method(self, *arguments)
        except (self.verbs.Error, VerbsUnavailableError) as cause:
            raise QueuePairError(f"{self.device}: {method.__name__}: {cause}") from cause

    return cast(Method, translate)


class VerbsQueuePair:
    """One end of a rail, see verbs_rail.QueuePair. Owns its device context; `close` gives everything back."""

    def __init__(self, verbs: SimpleNamespace, port: Port, outbound: Ring, inbound: Ring) -> None:
        """`verbs`: from load_verbs. Both rings have the same number of slots. Raises QueuePairError."""
        self.verbs, self.device = verbs, port.device
        self._port, self._outbound, self._inbound = port, outbound, inbound
        self._receiving = self._use = 0
        self._peer: Endpoint | None = None
        self._resources = contextlib.ExitStack()
        self._pair: Any = None
        self._failures = _names(verbs, "IBV_WC_")
        self._events = {number: name for number, name in _names(verbs, "IBV_EVENT_").items() if name in _ENDING}
        try:
            self._open()
        except BaseException:
            self._resources.close()
            raise

    @_translated
    def _open(self) -> None:
        verbs = self.verbs
        before = _event_descriptors()
        self._context = self._own(verbs.Context(name=self.device))
        (self.event_fd,) = _event_descriptors() - before
        self._channel = self._own(verbs.CompChannel(self._context))
        (self.completion_fd,) = _event_descriptors() - before - {self.event_fd}
        for descriptor in (self.event_fd, self.completion_fd):
            os.set_blocking(descriptor, False)  # pyverbs waits with the GIL held
        self._domain = self._own(verbs.PD(self._context))
        self._queue = self._own(verbs.CQ(self._context, 4 * self._outbound.slots + 4, None, self._channel, 0))
        self._source = self._register(self._outbound, verbs.IBV_ACCESS_LOCAL_WRITE)
        self._target = self._register(self._inbound, verbs.IBV_ACCESS_LOCAL_WRITE | verbs.IBV_ACCESS_REMOTE_WRITE)
        self._create()
        # One of each, for all work requests: pyverbs does not free them, and they are copied when posted.
        self._element = verbs.SGE(self._outbound.slots_address, 0, self._source.lkey)
        self._send = verbs.SendWR(opcode=verbs.IBV_WR_RDMA_WRITE, num_sge=1, sg=[self._element])
        self._send.sg_list = self._element
        nowhere = verbs.SGE(self._inbound.slots_address, 1, self._target.lkey)  # immediate data needs no memory
        self._receive = verbs.RecvWR(wr_id=_RECEIVE, num_sge=1, sg=[nowhere])

    def port_active(self) -> bool:
        return self._port.active()

    @_translated
    def prepare(self) -> Endpoint:
        self.reset()
        if self._pair is None:
            self._create()
        self._use = (self._use + 1) & 0xFFFF
        self._receive.wr_id = self._use << _USE_SHIFT | _RECEIVE
        self._pair.to_init(self._attributes())
        for _ in range(self._inbound.slots):
            self._post_receive()
        port = self._context.query_port(self._port.number)
        self._gid_index, gid = self._port.gid()
        self._packet_sequence = secrets.randbits(24)
        return Endpoint(
            gid=gid,
            lid=port.lid,
            number=self._pair.qp_num,
            packet_sequence=self._packet_sequence,
            mtu=port.active_mtu,
            address=self._inbound.slots_address,
            key=self._target.rkey,
        )

    @_translated
    def connect(self, peer: Endpoint) -> None:
        verbs, attributes = self.verbs, self._attributes()
        attributes.path_mtu = min(self._context.query_port(self._port.number).active_mtu, peer.mtu)
        attributes.dest_qp_num, attributes.rq_psn = peer.number, peer.packet_sequence
        attributes.max_dest_rd_atomic, attributes.min_rnr_timer = 1, _RECEIVER_NOT_READY_TIMER
        route = verbs.GlobalRoute(dgid=verbs.GID(peer.gid), sgid_index=self._gid_index, hop_limit=_HOPS)
        attributes.ah_attr = verbs.AHAttr(gr=route, is_global=1, dlid=peer.lid, port_num=self._port.number)
        self._pair.to_rtr(attributes)
        attributes.sq_psn, attributes.max_rd_atomic = self._packet_sequence, 1
        attributes.timeout, attributes.retry_cnt = _ACK_TIMEOUT, _RETRIES
        attributes.rnr_retry = _RECEIVER_NOT_READY_RETRIES
        self._pair.to_rts(attributes)
        self._peer = peer

    @_translated
    def probe(self) -> None:
        """An empty RDMA WRITE, which the peer's RNIC acknowledges."""
        self._post(_PROBE, 0, 0)

    @_translated
    def write(self, chunk: int, nbytes: int) -> None:
        header, payload = self._outbound.slot_offsets(chunk)
        if nbytes:
            self._post(chunk + _FIRST_CHUNK, payload, nbytes, signaled=False)
        self._post(chunk + _FIRST_CHUNK, header, FRAME_HEADER_NBYTES, immediate=chunk)

    @_translated
    def completions(self) -> list[Completion]:
        self._take_notifications()
        found: list[Completion] = []
        while True:
            count, entries = self._queue.poll(_POLLED_AT_ONCE)
            found += [completion for entry in entries if (completion := self._completion(entry)) is not None]
            if count < _POLLED_AT_ONCE:
                return found

    @_translated
    def event(self) -> str | None:
        cause = None
        while _readable(self.event_fd):
            event = self._context.get_async_event()
            name = self._events.get(event.event_type)
            event.ack()
            # The other ports of a device have events too; an event of the link is old once the link is back.
            if name is not None and (name != "PORT_ERR" or not self.port_active()):
                cause = f"event {name}"
        return cause

    @_translated
    def stop(self) -> None:
        if self._pair is not None:
            self._modify(self.verbs.IBV_QPS_ERR)

    @property
    def drained(self) -> bool:
        return self._receiving == 0

    @_translated
    def reset(self) -> None:
        """A queue pair that does not obey is destroyed: `prepare` makes another."""
        if self._pair is not None:
            try:
                self._modify(self.verbs.IBV_QPS_RESET)
            except self.verbs.Error:
                pair, self._pair = self._pair, None
                pair.close()
        self._receiving = 0

    def close(self) -> None:
        """Give back everything. Errors change nothing: what is left goes with the process."""
        try:
            if self._pair is not None:
                self._pair.close()
            self._resources.close()
        except self.verbs.Error as cause:
            logger.debug("%s: closing: %s", self.device, cause)

    def _attributes(self) -> Any:
        """What every transition needs."""
        attributes = self.verbs.QPAttr(port_num=self._port.number)
        attributes.qp_access_flags = self.verbs.IBV_ACCESS_LOCAL_WRITE | self.verbs.IBV_ACCESS_REMOTE_WRITE
        return attributes

    def _own(self, resource: Any) -> Any:
        self._resources.callback(resource.close)
        return resource

    def _register(self, ring: Ring, access: int) -> Any:
        """The slots alone: a peer must not write where the ring keeps its counts."""
        verbs, nbytes = self.verbs, ring.slots_nbytes
        return self._own(verbs.MR(self._domain, nbytes, access, address=ring.slots_address))

    def _create(self) -> None:
        verbs, slots = self.verbs, self._outbound.slots
        capacity = verbs.QPCap(max_send_wr=2 * slots + 2, max_recv_wr=slots, max_send_sge=1, max_recv_sge=1)
        kind = verbs.QPInitAttr(qp_type=verbs.IBV_QPT_RC, scq=self._queue, rcq=self._queue, cap=capacity, sq_sig_all=0)
        self._pair = verbs.QP(self._domain, kind)

    def _modify(self, state: int) -> None:
        self._pair.modify(self.verbs.QPAttr(qp_state=state), self.verbs.IBV_QP_STATE)

    def _post(
        self, identifier: int, offset: int, nbytes: int, immediate: int | None = None, *, signaled: bool = True
    ) -> None:
        """An RDMA WRITE from our ring to the same place in the peer's."""
        verbs, request = self.verbs, self._send
        assert self._peer is not None
        self._element.addr, self._element.length = self._outbound.slots_address + offset, nbytes
        request.wr_id, request.num_sge = self._use << _USE_SHIFT | identifier, 1 if nbytes else 0
        request.opcode = verbs.IBV_WR_RDMA_WRITE if immediate is None else verbs.IBV_WR_RDMA_WRITE_WITH_IMM
        request.imm_data = 0 if immediate is None else socket.htonl(immediate & 0xFFFFFFFF)
        request.send_flags = verbs.IBV_SEND_SIGNALED if signaled else 0
        request.set_wr_rdma(self._peer.key, self._peer.address + offset)
        self._pair.post_send(request)

    def _post_receive(self) -> None:
        self._pair.post_recv(self._receive)
        self._receiving += 1

    def _completion(self, entry: Any) -> Completion | None:
        failure = None if entry.status == self.verbs.IBV_WC_SUCCESS else self._failures.get(entry.status, "unknown")
        use, identifier = divmod(entry.wr_id, 1 << _USE_SHIFT)
        if identifier == _RECEIVE:
            if use == self._use:
                self._received(failure)
            elif failure is not None:
                return None
            # One of an earlier use can only tell of what arrived then, which is as true now.
            return Completion(Did.RECEIVE, socket.ntohl(entry.imm_data) if failure is None else 0, failure)
        if use != self._use:
            return None
        did, number = (Did.PROBE, 0) if identifier == _PROBE else (Did.WRITE, identifier - _FIRST_CHUNK)
        return Completion(did, number, failure)

    def _received(self, failure: str | None) -> None:
        self._receiving -= 1
        if failure is None and self._pair is not None:
            # The peer's next chunk needs the slot that this one lets go: a receive is there before it.
            with contextlib.suppress(self.verbs.Error):  # given up meanwhile
                self._post_receive()

    def _take_notifications(self) -> None:
        """Before polling: what comes later notifies again."""
        while _readable(self.completion_fd):
            self._channel.get_cq_event(self._queue)
            self._queue.ack_events(1)
        self._queue.req_notify()


def _names(verbs: SimpleNamespace, prefix: str) -> dict[int, str]:
    return {number: name.removeprefix(prefix) for name, number in vars(verbs).items() if name.startswith(prefix)}


def _event_descriptors() -> set[int]:
    """libibverbs' descriptors in this process; no pyverbs shows that of a context."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            if "infinibandevent" in os.readlink(f"/proc/self/fd/{entry}"):
                found.add(int(entry))
    return found


def _readable(descriptor: int) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(0))
