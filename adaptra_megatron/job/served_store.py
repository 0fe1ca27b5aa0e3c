# SPDX-License-Identifier: Apache-2.0
"""The job's store, as launchers serve it: apart from all ranks, and without a name server."""

from __future__ import annotations

import contextlib
import ctypes
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore


def serve_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """The store's server, which lives as long as what is returned: its client in this process. `port` 0: any that is
    free. `timeout_s`: of the client's requests.

    From then on this process looks hosts up in its own files alone. Torch's server looks up the name of each client
    that connects (TCPStoreLibUvBackend.cpp, for a line of its log) while all others wait, and many connect at once when
    ranks meet without a dead one: a name server that loses a request would cost them 5 s. Raises RuntimeError and
    OSError.
    """
    store = TCPStore(
        host, port, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False, multi_tenant=True
    )
    ask_no_name_server()
    return store


def ask_no_name_server() -> None:
    """Have this process look hosts up in its own files alone. Does nothing where the C library is not glibc."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"files")
