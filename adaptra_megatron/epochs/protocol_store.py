# SPDX-License-Identifier: Apache-2.0
"""Requests of the protocol, carried out on the job's store. Each value is sealed, words that decide among them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from adaptra_megatron.authentication.sealed_store import SealedStore
from adaptra_megatron.authentication.tagged_json import packed, unpacked
from adaptra_megatron.epochs.generation import GenerationId
from adaptra_megatron.epochs.protocol import Agreement, Answer, Await, Done, Found, HandedIn, Put, PutOnce
from adaptra_megatron.job.control_store import ControlStore

_MOST_NBYTES = 1 << 20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0003, 0.01
"""Between two looks: the last rank to come to the end of an attempt writes its fate at once."""


class ProtocolStore:
    """One rank's. For the training thread."""

    def __init__(self, control: ControlStore, store: SealedStore, timeout_s: float) -> None:
        """`store`: for keys of the job. `timeout_s`: longest wait for another rank, and of each request."""
        self._control, self._store, self._timeout_s = control, store, timeout_s
        self._lent = ExitStack()
        self._of: tuple[GenerationId, SealedStore] | None = None

    def carry_out(self, request: Put | PutOnce | Await, check: Callable[[], None]) -> Answer:
        """Do what is requested. `check`: raises what ends a wait, and is called between two looks.

        Raises TimeoutError where another rank does not write within the timeout, and RuntimeError where the store does.
        """
        store = self._store if request.generation is None else self._store_of(request.generation)
        match request:
            case Put():
                value = request.value
                store.set(request.key, value.encode() if isinstance(value, str) else packed(value))
                return Done()
            case PutOnce():
                return Found(store.put_once(request.key, request.word.encode()).decode())
        values = self._awaited(store, request.keys, check)
        return Found(values[0] if len(values) == 1 and not request.keys[0].startswith("state/") else values)

    def look(self, generation: GenerationId, key: str) -> bool:
        """Return whether there is anything under a key."""
        return self._store_of(generation).peek(key) is not None

    def release(self) -> None:
        """Give the client of a generation back, once its ranks have met."""
        self._of = None
        self._lent.close()

    def abandon(self) -> None:
        """Leave a client to itself whose request may still be answered."""
        self._of, self._lent = None, ExitStack()

    def _store_of(self, generation: GenerationId) -> SealedStore:
        if self._of is None or self._of[0] != generation:
            self.release()
            lent = self._control.in_generation(generation).lent("protocol", self._timeout_s)
            self._of = generation, self._lent.enter_context(lent)
        return self._of[1]

    def _awaited(self, store: SealedStore, keys: tuple[str, ...], check: Callable[[], None]) -> tuple[Any, ...]:
        deadline_s, pause_s, found = time.monotonic() + self._timeout_s, _FIRST_PAUSE_S, list[Any]()
        while True:
            while len(found) < len(keys) and (value := store.peek(keys[len(found)])) is not None:
                found.append(_read(keys[len(found)], value))
            if len(found) == len(keys):
                return tuple(found)
            check()
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{keys[len(found)]} has been waited for {self._timeout_s:g} s")
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)


def _read(key: str, value: bytes) -> Any:
    kinds = {"state": HandedIn, "agreement": Agreement}
    kind = kinds.get(key.partition("/")[0])
    return value.decode() if kind is None else unpacked(value, kind, _MOST_NBYTES)
