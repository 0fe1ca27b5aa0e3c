# SPDX-License-Identifier: Apache-2.0
"""Requests for traces, and for another policy, come to one replica's leader, where a user puts them, and go to the
leaders of all others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from adaptra_megatron.authentication.tagged_json import packed, unpacked
from adaptra_megatron.control.decisions import MOST_NBYTES, TelemetrySection


class SharedRequests:
    """One leader's end, for one thread."""

    def __init__(self, store: Any, take: Callable[[], TelemetrySection] | None) -> None:
        """`store`: a SealedStore that all leaders share. `take`: of the leader that requests come to."""
        self._store, self._take, self._number = store, take, 0

    def new(self) -> TelemetrySection:
        """Those since the last call; none where the store cannot be reached."""
        key, found = f"requests/{self._number}", TelemetrySection() if self._take is None else self._take()
        with contextlib.suppress(RuntimeError):  # at the end of a job the store goes with its process
            if found != TelemetrySection():
                self._store.set(key, packed(found))
            elif self._take is None and (entry := self._store.peek(key)) is not None:
                found = unpacked(entry, TelemetrySection, MOST_NBYTES)
        self._number += found != TelemetrySection()
        return found
