# SPDX-License-Identifier: Apache-2.0
"""Waits for what another rank puts into the job's store."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from adaptra_megatron.common.authentication.sealed_store import SealedStore
from adaptra_megatron.common.backoff import Backoff

_LOOKS_S = 0.002
Found = TypeVar("Found")


def said_by_one(store: SealedStore, key: str, mine: bytes | None, timeout_s: float, check: Callable[[], None]) -> bytes:
    """Return what one rank puts under `key`, for all to read: this one, where it has `mine` to say. `check`: see
    `awaited`.

    Raises TimeoutError after `timeout_s`, and RuntimeError where the store cannot be reached.
    """
    if mine is not None:
        store.set(key, mine)
    return awaited(lambda: store.peek(key), timeout_s, check)


def awaited(
    look: Callable[[], Found | None],
    timeout_s: float,
    check: Callable[[], None],
    first_pause_s: float = _LOOKS_S,
    longest_pause_s: float = _LOOKS_S,
) -> Found:
    """What `look` finds, once it is there. `check`: raises what ends the wait, and is called between two looks. Pauses
    between these grow by half from the first to the longest.

    Raises TimeoutError after `timeout_s`, and as `look`.
    """
    deadline_s, backoff = time.monotonic() + timeout_s, Backoff(first_pause_s, longest_pause_s, 1.5)
    while (found := look()) is None:
        check()
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"nothing within {timeout_s:g} s")
        time.sleep(backoff.next_s())
    return found
