# SPDX-License-Identifier: Apache-2.0
"""A reliable connected queue pair of libibverbs between the outbound ring here and the inbound ring of a peer.

A chunk is two RDMA WRITEs, posted together: its payload, then its header with the chunk's number as immediate data. On
one reliable connection the second completes after the first, so the receiver's completion means that both are in
memory. A grant of slots is an empty SEND with the number of chunks as immediate data.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import select
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from adaptra_megatron.common.log import logger_of
from adaptra_megatron.transport._ring import FRAME_HEADER_NBYTES, Ring
from adaptra_megatron.transport.wires.verbs.rail import Completion, Did, QueuePairError
from adaptra_megatron.transport.wires.verbs.verbs_device import Port, VerbsUnavailableError
from adaptra_megatron.transport.wires.verbs.verbs_messages import VerbsEndpoint

_RECEIVE, _PROBE, _GRANT, _FIRST_CHUNK = 0, 1, 2, 3
"""Ids of work requests; chunk n has n + _FIRST_CHUNK. The upper bits distinguish one use of the pair from the next."""
_USE_SHIFT = 48
_ACK_TIMEOUT, _RETRIES = 14, 5
"""4.096 us * 2**14 a try: a dead path shows after about 0.5 s. On rxe 7 tries mean for ever."""
_RECEIVER_NOT_READY_RETRIES, _RECEIVER_NOT_READY_TIMER = 6, 12
_HOPS = 64
_POLLED_AT_ONCE = 64
_ENDING = ("CQ_ERR", "QP_FATAL", "QP_REQ_ERR", "QP_ACCESS_ERR", "PORT_ERR", "DEVICE_FATAL")
"""Asynchronous events after which a rail is unusable."""

logger = logger_of(__name__)

Method = TypeVar("Method", bound=Callable[..., Any])


def _translated(method: Method) -> Method:
    """Turn errors of pyverbs into QueuePairError."""

    @functools.wraps(method)
    def translate(self: VerbsQueuePair, *arguments: Any) -> Any:
        try:
            return method(self, *arguments)
        except (self.verbs.Error, VerbsUnavailableError) as cause:
            raise QueuePairError(f"{self.device}: {method.__name__}: {cause}") from cause

    return cast(Method, translate)


class VerbsQueuePair:
    """Queue pair of one end of a rail, see rail.QueuePair. Owns its device context."""

    def __init__(self, verbs: SimpleNamespace, port: Port, outbound: Ring, inbound: Ring) -> None:
        """`verbs`: from load_verbs. Both rings must have the same number of slots. Raises QueuePairError."""
        self.verbs, self.device = verbs, port.device
        self._port, self._outbound, self._inbound = port, outbound, inbound
        self._receiving = self._use = 0
        self._peer: VerbsEndpoint | None = None
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
        slots = self._outbound.slots
        # A grant goes with at least one new slot, and what can be granted before the peer answers is bounded by the
        # slots: twice as many requests as chunks are enough for both, in either direction.
        self._send_requests, self._receive_requests = 4 * slots + 4, 2 * slots + 2
        entries = self._send_requests + self._receive_requests
        self._queue = self._own(verbs.CQ(self._context, entries, None, self._channel, 0))
        self._queue.req_notify()
        self._source = self._register(self._outbound, verbs.IBV_ACCESS_LOCAL_WRITE)
        self._target = self._register(self._inbound, verbs.IBV_ACCESS_LOCAL_WRITE | verbs.IBV_ACCESS_REMOTE_WRITE)
        self._create()
        # The same ones for all work requests: pyverbs does not free them, and they are copied when posted.
        self._payload_element, self._payload = self._request(verbs.IBV_WR_RDMA_WRITE)
        self._header_element, self._header = self._request(verbs.IBV_WR_RDMA_WRITE_WITH_IMM)
        self._payload.next_wr = self._header
        _none, self._grant = self._request(verbs.IBV_WR_SEND_WITH_IMM)
        _none, self._probe = self._request(verbs.IBV_WR_RDMA_WRITE)
        self._grant.num_sge = self._probe.num_sge = 0
        self._payload.send_flags = 0
        self._header_element.length = FRAME_HEADER_NBYTES
        self._poller = select.poll()
        for descriptor in (self.event_fd, self.completion_fd):
            self._poller.register(descriptor, select.POLLIN)
        nowhere = verbs.SGE(self._inbound.slots_address, 1, self._target.lkey)  # immediate data needs no memory
        self._receive = verbs.RecvWR(wr_id=_RECEIVE, num_sge=1, sg=[nowhere])

    def port_active(self) -> bool:
        return self._port.active()

    @_translated
    def prepare(self) -> VerbsEndpoint:
        self.reset()
        if self._pair is None:
            self._create()
        self._use = (self._use + 1) & 0xFFFF
        self._receive.wr_id = self._use << _USE_SHIFT | _RECEIVE
        self._pair.to_init(self._attributes())
        for _ in range(self._receive_requests):
            self._post_receive()
        port = self._context.query_port(self._port.number)
        self._gid_index, gid = self._port.gid()
        self._packet_sequence = secrets.randbits(24)
        return VerbsEndpoint(
            gid=gid,
            lid=port.lid,
            number=self._pair.qp_num,
            packet_sequence=self._packet_sequence,
            mtu=port.active_mtu,
            address=self._inbound.slots_address,
            key=self._target.rkey,
        )

    @_translated
    def connect(self, peer: VerbsEndpoint) -> None:
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
        """Post an empty RDMA WRITE, which the peer's RNIC acknowledges."""
        assert self._peer is not None
        self._probe.set_wr_rdma(self._peer.key, self._peer.address)
        self._post(self._probe, _PROBE)

    @_translated
    def write(self, chunk: int, nbytes: int) -> None:
        """Post an RDMA WRITE from a slot to the peer's slot of the same place."""
        peer, here = self._peer, self._outbound.slots_address
        assert peer is not None
        header, payload = self._outbound.slot_offsets(chunk)
        self._header_element.addr = here + header
        self._header.wr_id = self._use << _USE_SHIFT | chunk + _FIRST_CHUNK
        self._header.imm_data = socket.htonl(chunk & 0xFFFFFFFF)
        self._header.set_wr_rdma(peer.key, peer.address + header)
        if not nbytes:
            self._pair.post_send(self._header)
            return
        self._payload_element.addr, self._payload_element.length = here + payload, nbytes
        self._payload.wr_id = self._header.wr_id
        self._payload.set_wr_rdma(peer.key, peer.address + payload)
        self._pair.post_send(self._payload)

    @_translated
    def grant(self, chunks: int) -> None:
        self._grant.imm_data = socket.htonl(chunks & 0xFFFFFFFF)
        self._post(self._grant, _GRANT)

    @_translated
    def completions(self) -> list[Completion]:
        if self.completion_fd in self._readable():
            self._channel.get_cq_event(self._queue)
            self._queue.ack_events(1)
            self._queue.req_notify()  # before polling: what comes later notifies again
        found: list[Completion] = []
        while True:
            count, entries = self._queue.poll(_POLLED_AT_ONCE)
            found += [completion for entry in entries if (completion := self._completion(entry)) is not None]
            if count < _POLLED_AT_ONCE:
                return found

    @_translated
    def event(self) -> str | None:
        cause = None
        while self.event_fd in self._readable():
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
        """Reset the pair. If that fails, destroy it: `prepare` then creates another."""
        if self._pair is not None:
            try:
                self._modify(self.verbs.IBV_QPS_RESET)
            except self.verbs.Error:
                pair, self._pair = self._pair, None
                pair.close()
        self._receiving = 0

    def close(self) -> None:
        """Release everything. Errors are ignored: the remaining resources end with the process."""
        try:
            if self._pair is not None:
                self._pair.close()
            self._resources.close()
        except self.verbs.Error as cause:
            logger.debug("%s: closing: %s", self.device, cause)

    def _attributes(self) -> Any:
        """Return the attributes that every transition needs."""
        attributes = self.verbs.QPAttr(port_num=self._port.number)
        attributes.qp_access_flags = self.verbs.IBV_ACCESS_LOCAL_WRITE | self.verbs.IBV_ACCESS_REMOTE_WRITE
        return attributes

    def _own(self, resource: Any) -> Any:
        self._resources.callback(resource.close)
        return resource

    def _register(self, ring: Ring, access: int) -> Any:
        """Register the slots alone: a peer must not write to the ring's counters."""
        verbs, nbytes = self.verbs, ring.slots_nbytes
        return self._own(verbs.MR(self._domain, nbytes, access, address=ring.slots_address))

    def _create(self) -> None:
        verbs, sends, receives = self.verbs, self._send_requests, self._receive_requests
        capacity = verbs.QPCap(max_send_wr=sends, max_recv_wr=receives, max_send_sge=1, max_recv_sge=1)
        kind = verbs.QPInitAttr(qp_type=verbs.IBV_QPT_RC, scq=self._queue, rcq=self._queue, cap=capacity, sq_sig_all=0)
        self._pair = verbs.QP(self._domain, kind)

    def _modify(self, state: int) -> None:
        self._pair.modify(self.verbs.QPAttr(qp_state=state), self.verbs.IBV_QP_STATE)

    def _request(self, opcode: int) -> tuple[Any, Any]:
        """Return a scatter-gather entry of our ring and the work request that uses it."""
        verbs = self.verbs
        element = verbs.SGE(self._outbound.slots_address, 0, self._source.lkey)
        request = verbs.SendWR(opcode=opcode, num_sge=1, sg=[element], send_flags=verbs.IBV_SEND_SIGNALED)
        request.sg_list = element
        return element, request

    def _post(self, request: Any, identifier: int) -> None:
        request.wr_id = self._use << _USE_SHIFT | identifier
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
            # A completion of an earlier use reports data that had arrived by then, which is still true.
            if failure is not None:
                return Completion(Did.RECEIVE, 0, failure)
            written = entry.opcode == self.verbs.IBV_WC_RECV_RDMA_WITH_IMM
            return Completion(Did.RECEIVE if written else Did.ON_GRANT, socket.ntohl(entry.imm_data), None)
        if use != self._use:
            return None
        if identifier >= _FIRST_CHUNK:
            return Completion(Did.WRITE, identifier - _FIRST_CHUNK, failure)
        return Completion(Did.PROBE if identifier == _PROBE else Did.GRANT, 0, failure)

    def _received(self, failure: str | None) -> None:
        self._receiving -= 1
        if failure is None and self._pair is not None:
            # The peer's next chunk needs the slot that this one lets go: a receive is there before it.
            with contextlib.suppress(self.verbs.Error):  # given up meanwhile
                self._post_receive()

    def _readable(self) -> set[int]:
        """Return the descriptors that are readable."""
        return {descriptor for descriptor, _event in self._poller.poll(0)}


def _names(verbs: SimpleNamespace, prefix: str) -> dict[int, str]:
    return {number: name.removeprefix(prefix) for name, number in vars(verbs).items() if name.startswith(prefix)}


def _event_descriptors() -> set[int]:
    """Return libibverbs' event descriptors of this process; pyverbs has no way to get a context's."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            if "infinibandevent" in os.readlink(f"/proc/self/fd/{entry}"):
                found.add(int(entry))
    return found
