# SPDX-License-Identifier: Apache-2.0
"""Serve or reach the job's store, and assign a node rank in it to this host.

The launcher of node rank 0 serves the store. Another host may take over the node rank of a failed host.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

from torch._C._distributed_c10d import TCPStore

from adaptra_megatron.common.foreign_errors import is_address_in_use
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.common.membership import launch_store
from adaptra_megatron.common.sealed_store import SealedStore
from adaptra_megatron.elastic.launch.launch_messages import (
    JOB_KEY,
    START_KEY,
    HostReport,
    JobState,
    Start,
    host_key,
    read,
)

logger = logger_of(__name__)

_RETRY_S = 0.2
_ATTEMPT_S = 5.0
_DECLARED = 1.5
"""Multiple of --heartbeat-timeout within which a host that is gone counts as dead."""
NO_REJOINING = (
    "ranks that are started again are admitted where all run with --adaptra-reroute failures or all, from the job's "
    "first iteration on; else start the job again from its last checkpoint"
)


class Endpoint(NamedTuple):
    """Address of the job's store."""

    host: str
    port: int
    """0: any free port."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Seat(NamedTuple):
    """Node rank of this launcher, and its client of the store."""

    store: Any
    """TCPStore; on node rank 0 it includes the server."""
    node_rank: int
    turn: int = 0
    """Number of earlier launchers with this node rank, on hosts that are gone."""


class EndpointError(RuntimeError):
    """The store cannot be served or reached, or has no free node rank; names the endpoint and the remedy."""


def take_seat(
    endpoint: Endpoint,
    run_id: str,
    nodes: int,
    node_rank: int | None,
    nproc: int,
    *,
    join_timeout_s: float,
    heartbeat_timeout_s: float,
    given_up: Callable[[], bool],
) -> Seat:
    """Serve the store or connect to it, and take a free node rank, or that of a failed host.

    With `node_rank` None, the launcher on the endpoint's host serves the store and gets node rank 0. The others are
    numbered as they arrive, as in torchrun's c10d backend. This waits until the coordinator counts a failed host as
    dead before it takes its node rank. `nproc`: ranks of this host. `given_up`: called between attempts; True ends
    them. Raises EndpointError.
    """
    here = not node_rank and _is_here(endpoint.host)
    if node_rank == 0 and not here:  # no error: a name may lead here by way of another address
        logger.warning("%s is no address of this host, which is to serve the job's store there", endpoint.host)
    if node_rank == 0 or here:
        try:
            return Seat(_serve(endpoint, join_timeout_s), 0)
        except EndpointError:
            if node_rank == 0 or nodes == 1:
                raise  # else it is served by another launcher of this host
    store = _connect(endpoint, join_timeout_s, given_up)
    seats = _Seats(store, run_id, f"the job at {endpoint} (run id {run_id})")
    for free in seats.in_turn(nodes) if node_rank is None else (node_rank,):
        if seats.take(free, 0):
            return Seat(store, free)
    deadline_s = time.monotonic() + _DECLARED * heartbeat_timeout_s
    while (seat := seats.replace(node_rank, nproc)) is None:
        if time.monotonic() > deadline_s or given_up() or not seats.begun:
            raise seats.taken(node_rank, nodes)
        time.sleep(_RETRY_S)
    return seat


class _Seats:
    """Node ranks of a job, as a launcher sees them that needs one."""

    def __init__(self, store: TCPStore, run_id: str, job: str) -> None:
        """`job`: name of the job in messages."""
        self._store, self._job = store, job
        self._records: SealedStore = launch_store(store, run_id)
        self._mine = f"{socket.gethostname()} {uuid.uuid4()}"

    @property
    def begun(self) -> bool:
        """True once all hosts have arrived."""
        return read(self._records, START_KEY, Start) is not None

    def in_turn(self, nodes: int) -> Iterator[int]:
        """Return the node ranks to try, the likeliest first.

        A counter in the store suggests where to begin. It is not sealed, so it decides nothing else.
        """
        first = int(self._records.add("seats/taken", 1)) - 1
        return (1 + (first + more) % (nodes - 1) for more in range(nodes - 1))

    def take(self, node_rank: int, turn: int) -> bool:
        """Take a node rank unless another launcher has it; return whether this launcher has it."""
        return self._holder(node_rank, turn, self._mine) == self._mine

    def replace(self, node_rank: int | None, nproc: int) -> Seat | None:
        """Take the node rank of a failed host; None if there is none. `node_rank` None: any.

        Raises EndpointError if that host's ranks cannot be started on this one.
        """
        state = read(self._records, JOB_KEY, JobState)
        if state is None:
            return None
        for node in state.vacant:
            turn = state.turns.get(node, 0) + 1
            if node_rank not in (None, node) or self._holder(node, turn):
                continue
            before = read(self._records, host_key(node, turn - 1), HostReport)
            assert before is not None
            if not state.admits_restarted:
                raise EndpointError(
                    f"host {before.host} (node rank {node} of {self._job}) is gone, and no other can take its place: "
                    f"{NO_REJOINING}"
                )
            if before.nproc != nproc:
                raise EndpointError(
                    f"--nproc-per-node is {nproc} here, but host {before.host}, whose place as node rank {node} of "
                    f"{self._job} this one is to take, had {before.nproc} ranks: give that"
                )
            if self.take(node, turn):
                return Seat(self._store, node, turn)
        return None

    def taken(self, node_rank: int | None, nodes: int) -> EndpointError:
        """Return the error of a launcher that finds no free node rank."""
        if node_rank is None:
            return EndpointError(
                f"{self._job} has its {nodes} hosts already: see that --nnodes is the number of launchers, and that no "
                "launcher of an earlier attempt runs"
            )
        turn = 0
        while self._holder(node_rank, turn + 1):
            turn += 1
        return EndpointError(
            f"node rank {node_rank} of {self._job} is taken by a launcher on host "
            f"{self._holder(node_rank, turn).split()[0]}: give each launcher a --node-rank of its own"
        )

    def _holder(self, node_rank: int, turn: int, wanted: str = "") -> str:
        """Return the launcher that holds a node rank. If none does, let `wanted` take it and return "".

        Raises TamperedError if the entry is not sealed with the job's secret.
        """
        name = f"seats/{node_rank}/{turn}"
        # Launchers may ask at once: the store's compare-and-set lets one of them write.
        found = self._records.put_once(name, wanted.encode()) if wanted else self._records.peek(name)
        return "" if found is None else found.decode()


def serve_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Start the store's server, and return its client in this process. The server runs as long as that client exists.

    `port` 0: any free port. `timeout_s`: timeout of the client's requests. Raises RuntimeError and OSError.

    From then on this process resolves host names from local files alone. torch's server resolves the name of each
    client that connects, only to log it (TCPStoreLibUvBackend.cpp), and all other clients wait meanwhile. After a
    failure many ranks connect at once, and a name server that loses one request would delay all of them by 5 s.
    """
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        ask_no_name_server()  # before the first client connects, which is this process
    store = TCPStore(
        host, port, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False, multi_tenant=True
    )
    # After the store's own look-up of `host`, which may need the name server.
    ask_no_name_server()
    return store


def ask_no_name_server() -> None:
    """Resolve host names from local files alone in this process. Does nothing if the C library is not glibc."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"files")


def _serve(endpoint: Endpoint, timeout_s: float) -> TCPStore:
    try:
        return serve_store(*endpoint, timeout_s)
    except (RuntimeError, OSError) as cause:
        why = "another process listens there" if is_address_in_use(cause) else str(cause)
        raise EndpointError(
            f"the job's store cannot be served at {endpoint}: {why}; name another --master-port or --rdzv-endpoint, "
            "whose host is this launcher's"
        ) from cause


def _connect(endpoint: Endpoint, timeout_s: float, given_up: Callable[[], bool]) -> TCPStore:
    """Connect to the store, retrying for `timeout_s`: the launcher that serves it may start last."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            # TCPStore would retry by itself for its whole timeout, and could not be given up.
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
    """Return whether `host` has an address of this machine. Sockets can be bound to no other address."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _name, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
    return False
