# SPDX-License-Identifier: Apache-2.0
"""The job's store, as one generation uses it for control: with keys of its own, and values sealed with the job's
secret.
"""

from __future__ import annotations

import hashlib
import os
import queue
import re
import secrets
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from adaptra_megatron.common.handshake import SECRET_NBYTES
from adaptra_megatron.common.sealed_store import Seal, SealedStore

# The job's store for threads that are not to wait for it without end.


class SilentStoreError(RuntimeError):
    """The job's store has not answered in time; says what is stalled and what to do."""


class DeadlineStore:
    """A torch.distributed store whose requests all return or raise by a deadline.

    Torch's own timeout covers only waits for values: a request to a stopped server process, or to a host that is cut
    off, never returns. So another thread makes the requests, one at a time. Once the store is silent, that thread is
    abandoned and all further requests raise.
    """

    def __init__(self, connect: Callable[[], Any], timeout_s: float) -> None:
        """`connect`: makes the client, as the first request. `timeout_s`: longest time of each request."""
        self._timeout_s, self._silent = timeout_s, False
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=_answer, args=(self._requests,), name="adaptra-store", daemon=True).start()
        try:
            self.client = self._ask(connect)
        except BaseException:
            self.close()
            raise

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return the client's method of this name, wrapped to raise SilentStoreError by the deadline."""
        method = getattr(self.client, name)

        def request(*arguments: Any) -> Any:
            return self._ask(lambda: method(*arguments))

        return request

    def close(self) -> None:
        """End the thread."""
        self._requests.put(None)

    def _ask(self, request: Callable[[], Any]) -> Any:
        answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

        def answer() -> None:
            try:
                answers.put((request(), None))
            except Exception as cause:
                answers.put((None, cause))

        # A request behind a silent one would wait, too: TCPStore's client handles one at a time.
        if not self._silent:
            self._requests.put(answer)
        try:
            found, failure = answers.get(timeout=0.0 if self._silent else self._timeout_s)
        except queue.Empty:
            self._silent = True
            raise SilentStoreError(
                f"the job's store has not answered for {self._timeout_s:g} s (--adaptra-timeout-s): the process that "
                "serves it, the launcher of node rank 0, is stalled, or its host cannot be reached; fix that, and "
                "restart from the last checkpoint"
            ) from None
        if failure is not None:
            raise failure
        return found


def _answer(requests: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (request := requests.get()) is not None:
        request()


SECRET_VARIABLE = "ADAPTRA_SECRET_FILE"
_LONGEST_SECRET = 4096
_LEAST_S = 0.1
"""Minimum time for a connection to the store, even past a deadline, and pause between two tries."""
_SECRET_KEY = "adaptra/transport/secret"
MOST_SPARE = 4
"""Clients kept for the next borrower: a stage has four directed links to its neighbours."""


class SecretError(RuntimeError):
    """The job's secret cannot be read; names the file or the store, the problem and the remedy."""


class ControlStore:
    """Creates clients of the store, one for each thread: a client handles one request at a time, and some wait."""

    def __init__(
        self, store: Any, secret: bytes, token: str, generation: str = "0", spare: deque[Any] | None = None
    ) -> None:
        """`store`: torch.distributed's. `token`: of the job's layout. `generation`: identity of the present generation.

        `spare`: returned clients that `lent` may reuse, MOST_SPARE at most.
        """
        self.secret = secret
        self._spare: deque[Any] = deque(maxlen=MOST_SPARE) if spare is None else spare
        self._store, self._token, self._prefix = store, token, f"adaptra/{token}/{generation}"

    @classmethod
    def of_job(cls, token: str) -> ControlStore:
        """Return the store that torch.distributed was initialised with, in the first generation.

        Raises the errors of `job_secret`.
        """
        store: Any = _get_default_store()
        return cls(store, job_secret(store), token)

    def in_generation(self, identity: object) -> ControlStore:
        """Return the same store for the generation of this identity."""
        return ControlStore(self._store, self.secret, self._token, str(identity), self._spare)

    @property
    def timeout_s(self) -> float:
        """Timeout of the job's store, in seconds: the one that torch.distributed was initialised with."""
        return float(self._store.timeout.total_seconds())

    def client(self, place: str, within_s: float | None = None) -> SealedStore:
        """Return a new client, as `unsealed`. `place`: prefix of its keys, equal for all clients that share them."""
        return self._sealed(place, self.unsealed(place, within_s))

    def punctual(self, place: str, timeout_s: float) -> SealedStore:
        """Return a new client whose requests raise SilentStoreError if they are not answered within `timeout_s`."""
        return self._sealed(place, DeadlineStore(lambda: self.unsealed(place), timeout_s))

    def _sealed(self, place: str, store: Any) -> SealedStore:
        return SealedStore(store, self.secret, f"{self._prefix}/{place}")

    def seal(self, place: str) -> Seal:
        """Return the seal of the values under `place`."""
        return Seal(self.secret, f"{self._prefix}/{place}")

    def unsealed(self, place: str, within_s: float | None = None) -> Any:
        """Return a new client without a seal. `within_s`: longest time to connect; None: the store's timeout."""
        return PrefixStore(f"{self._prefix}/{place}", self._new_client(within_s))

    @contextmanager
    def lent(self, place: str, timeout_s: float, *, sealed: bool = True) -> Iterator[Any]:
        """Lend a client within this context, as for an exchange of addresses. Torch's process groups need unsealed
        clients.

        A returned client is reused, because the server resolves each new client's name while all others wait. A client
        whose context raised is not reused: a late answer may still arrive on it. `timeout_s`: timeout of each request;
        a sealed client then raises SilentStoreError. Raises RuntimeError if the store cannot be reached.
        """
        try:
            client = self._spare.pop()
        except IndexError:
            client = self._new_client(timeout_s)
        client.set_timeout(timedelta(seconds=max(_LEAST_S, timeout_s)))
        store = PrefixStore(f"{self._prefix}/{place}", client)
        if sealed:
            with closing(DeadlineStore(lambda: store, timeout_s)) as punctual:
                yield self._sealed(place, punctual)
        else:
            yield store
        # Not after an error: the next borrower would take a late answer to its request for one to its own.
        self._spare.append(client)

    def _new_client(self, within_s: float | None) -> Any:
        limit_s = self.timeout_s if within_s is None else within_s

        def connect() -> Any:
            self.reach(limit_s)  # torch would try to reach a server that has ended for the store's whole timeout
            return self._store.clone()

        # A stopped server accepts connections, and torch waits for its answer to the first request without end.
        with closing(DeadlineStore(connect, max(limit_s, _LEAST_S))) as connected:
            return connected.client

    def reach(self, within_s: float) -> None:
        """Check that the server accepts a connection within this time. Raises RuntimeError.

        Creating a client is no substitute: if the server has ended, it retries for the store's own, much longer
        timeout, and logs a stack trace each time.
        """
        store = self._store
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        deadline_s = time.monotonic() + max(within_s, _LEAST_S)
        while isinstance(store, TCPStore):
            try:
                socket.create_connection((store.host, store.port), max(deadline_s - time.monotonic(), _LEAST_S)).close()
                return
            except OSError as cause:
                # Refused: its server has ended. An answer about its name, or its route, may be there in a moment.
                if isinstance(cause, ConnectionRefusedError) or time.monotonic() > deadline_s:
                    where = f"{store.host}:{store.port}"
                    raise dist.DistNetworkError(f"the job's store at {where} cannot be reached: {cause}") from cause
            time.sleep(_LEAST_S)


def job_secret(store: Any, environment: Mapping[str, str] = os.environ) -> bytes:
    """Return the job's secret, the same on every rank: from the launcher's file, or else from the job's store.

    The first rank that asks for it creates it in the store. Raises SecretError if other users can read the file, or if
    file or store hold no valid secret. Error messages never contain the content.
    """
    if path := environment.get(SECRET_VARIABLE):
        return _secret_of(path)
    mine = secrets.token_hex(SECRET_NBYTES)
    # The first rank sets it; all others get the same value back.
    found: bytes = store.compare_set(_SECRET_KEY, "", mine)
    if re.fullmatch(rb"[0-9a-f]{%d}" % (2 * SECRET_NBYTES), found) is None:
        raise SecretError(
            f"the job's store has {len(found)} bytes under {_SECRET_KEY!r} that are no secret of this release: install "
            "the same release on all ranks, and keep MASTER_PORT closed to others"
        )
    return bytes.fromhex(found.decode())


def _secret_of(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            status, content = os.fstat(file.fileno()), file.read(_LONGEST_SECRET).strip()
    except OSError as cause:
        raise SecretError(f"{SECRET_VARIABLE}: {cause}; it must name a file that this rank can read") from cause
    # fstat of the open file: a check by path could see another file than the one that was read.
    if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077 or status.st_uid not in (0, os.geteuid()):
        raise SecretError(
            f"{SECRET_VARIABLE}: {path} has mode {stat.filemode(status.st_mode)} and is user {status.st_uid}'s: only "
            "its owner, the user of this job, may be able to read it (chmod 600)"
        )
    if len(content) < SECRET_NBYTES:
        raise SecretError(
            f"{SECRET_VARIABLE}: {path} has {len(content)} bytes, fewer than {SECRET_NBYTES}: make it with "
            "head -c 32 /dev/urandom | base64"
        )
    return hashlib.sha256(b"adaptra-megatron\n" + content).digest()
