# SPDX-License-Identifier: Apache-2.0
"""Waits for what another rank puts into the job's store."""

from __future__ import annotations

import time
from collections.abc import Callable

from adaptra_megatron.authentication.sealed_store import SealedStore

_LOOKS_S = 0.002


def said_by_one(store: SealedStore, key: str, mine: bytes | None, timeout_s: float, check: Callable[[], None]) -> bytes:
    """What one rank puts under `key`, for all to read: this one, where it has `mine` to say. `check`: see `awaited`.

    Raises TimeoutError after `timeout_s`, and RuntimeError where the store cannot be reached.
    """
    if mine is not None:
        store.set(key, mine)
    return awaited(lambda: store.peek(key), timeout_s, check)


def awaited(look: Callable[[], bytes | None], timeout_s: float, check: Callable[[], None]) -> bytes:
    """What `look` finds, once it is there. `check`: raises what ends the wait, and is called between two looks.

    Raises TimeoutError after `timeout_s`, and as `look`.
    """
    deadline_s = time.monotonic() + timeout_s
    while (found := look()) is None:
        check()
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"nothing within {timeout_s:g} s")
        time.sleep(_LOOKS_S)
    return found
