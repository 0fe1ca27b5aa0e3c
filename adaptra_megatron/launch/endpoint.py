# SPDX-License-Identifier: Apache-2.0
"""The job's store: served by the launcher of node rank 0, reached by all others."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

from torch._C._distributed_c10d import PrefixStore, TCPStore

from adaptra_megatron.job.served_store import serve_store
from adaptra_megatron.log import logger_of

logger = logger_of(__name__)

_RETRY_S = 0.2
_ATTEMPT_S = 5.0


class Endpoint(NamedTuple):
    """Where the job's store is."""

    host: str
    port: int
    """0: any that is free."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Seat(NamedTuple):
    """This launcher's place in the job, and its client of the store."""

    store: Any
    """TCPStore; of node rank 0, with the server."""
    node_rank: int


class EndpointError(RuntimeError):
    """The store cannot be served or reached, or has no place for this host; names the endpoint and the remedy."""


def take_seat(
    endpoint: Endpoint, run_id: str, nodes: int, node_rank: int | None, timeout_s: float, given_up: Callable[[], bool]
) -> Seat:
    """Serve the store, or connect to it, and take a node rank that no other launcher has.

    `node_rank` None: 0 for the launcher that serves the store, which is one on the endpoint's host, and the others in
    the order in which they come, as torchrun's c10d backend does. `given_up`: asked between attempts to connect.
    Raises EndpointError.
    """
    here = not node_rank and _is_here(endpoint.host)
    if node_rank == 0 and not here:  # no error: a name may lead here by way of another address
        logger.warning("%s is no address of this host, which is to serve the job's store there", endpoint.host)
    if node_rank == 0 or here:
        try:
            return Seat(_serve(endpoint, timeout_s), 0)
        except EndpointError:
            if node_rank == 0 or nodes == 1:
                raise  # else it is served by another launcher of this host
    store = _connect(endpoint, timeout_s, given_up)
    seats: Any = PrefixStore(f"adaptra/launch/{run_id}/seats", store)
    if node_rank is None:
        node_rank = int(seats.add("taken", 1))
        if node_rank >= nodes:
            raise EndpointError(
                f"the job {run_id!r} at {endpoint} has its {nodes} hosts already: see that --nnodes is the number of "
                "launchers, and that no launcher of an earlier attempt runs"
            )
    mine = f"{socket.gethostname()} {uuid.uuid4()}"
    first = seats.compare_set(str(node_rank), "", mine).decode()
    if first != mine:
        raise EndpointError(
            f"node rank {node_rank} of the job at {endpoint} is taken by a launcher on host {first.split()[0]}: give "
            "each launcher a --node-rank of its own"
        )
    return Seat(store, node_rank)


def _serve(endpoint: Endpoint, timeout_s: float) -> TCPStore:
    try:
        return serve_store(*endpoint, timeout_s)
    except (RuntimeError, OSError) as cause:
        why = "another process listens there" if errno.errorcode[errno.EADDRINUSE] in str(cause) else str(cause)
        raise EndpointError(
            f"the job's store cannot be served at {endpoint}: {why}; name another --master-port or --rdzv-endpoint, "
            "whose host is this launcher's"
        ) from cause


def _connect(endpoint: Endpoint, timeout_s: float, given_up: Callable[[], bool]) -> TCPStore:
    """Try for `timeout_s`: the launcher that serves the store may start last."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(endpoint, _ATTEMPT_S).close()
            return TCPStore(*endpoint, is_master=False, timeout=timedelta(seconds=timeout_s))
        except (RuntimeError, OSError) as cause:
            if time.monotonic() > deadline_s or given_up():
                raise EndpointError(
                    f"the coordinator at {endpoint} (launcher of node rank 0) cannot be reached within {timeout_s:g} "
                    f"s: {cause}; see whether it runs, and that this host can connect to it"
                ) from cause
        time.sleep(_RETRY_S)


def _is_here(host: str) -> bool:
    """Return True if an address of `host` is one of this machine: only to those can a socket be bound."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _name, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
    return False
