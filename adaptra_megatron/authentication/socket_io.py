# SPDX-License-Identifier: Apache-2.0
"""What asyncio lacks for sockets: reading an exact number of bytes, and file descriptors over unix sockets."""

from __future__ import annotations

import asyncio
import os
import socket
import struct

_TCP_INFO = struct.Struct("=2xB53xI")
"""Fields of the kernel's tcp_info: tcpi_retransmits (timeouts in a row) and tcpi_last_ack_recv (ms ago)."""
_RECEIVE_FLAGS = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC


class ConnectionEndedError(ConnectionError):
    """The other side ended the connection, or it broke."""


async def receive_exactly(connection: socket.socket, nbytes: int) -> bytes:
    """Exactly `nbytes`, never reading beyond them. Raises ConnectionEndedError if they do not come."""
    loop = asyncio.get_running_loop()
    received = bytearray()
    while len(received) < nbytes:
        part = await loop.sock_recv(connection, nbytes - len(received))
        if not part:
            raise ConnectionEndedError(f"it ended after {len(received)} of {nbytes} bytes")
        received += part
    return bytes(received)


async def receive_descriptor(connection: socket.socket) -> int:
    """One file descriptor from a non-blocking unix socket; the caller owns it. Raises ConnectionEndedError."""
    await wait_readable(connection)
    data, descriptors, _flags, _address = socket.recv_fds(connection, 1, 4, _RECEIVE_FLAGS)
    if not data or len(descriptors) != 1:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ConnectionEndedError(f"{len(descriptors)} file descriptors came instead of 1")
    return descriptors[0]


def send_descriptor(connection: socket.socket, descriptor: int) -> None:
    """The counterpart; the descriptor stays the caller's too."""
    socket.send_fds(connection, [b"\0"], [descriptor])


async def wait_readable(connection: socket.socket) -> None:
    """Wait until there is something to read, or the end."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(connection, wake)
    try:
        await readable
    finally:
        loop.remove_reader(connection)


def tune_connection(connection: socket.socket) -> None:
    """For a TCP connection between delegates: no delays, and an end within 15 s when the other host is gone.

    Of a connection with nothing under way: the kernel's limit for data, TCP_USER_TIMEOUT, also counts against a peer
    that answers and has no room because its training process does not run. See `acknowledges` instead.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)


def acknowledges(connection: socket.socket, within_s: float) -> bool:
    """Return whether the other host has acknowledged anything within `within_s`, or nothing has to be sent to it again.

    What waits for room at the other end has not been sent.
    """
    information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    timeouts, last_ms = _TCP_INFO.unpack(information)
    return not timeouts or last_ms <= within_s * 1e3
