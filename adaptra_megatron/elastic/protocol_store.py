# SPDX-License-Identifier: Apache-2.0
"""Requests of the protocol, carried out on the job's store. Each value is sealed, words that decide among them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from adaptra_megatron.common.authentication.sealed_store import SealedStore
from adaptra_megatron.common.job.control_store import ControlStore
from adaptra_megatron.common.typed_messages import packed, unpacked
from adaptra_megatron.elastic.awaiting import awaited
from adaptra_megatron.elastic.generation import GenerationId
from adaptra_megatron.elastic.protocol import Agreement, Answer, Await, AwaitAll, Done, Found, HandedIn, Put, PutOnce

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

    def carry_out(self, request: Put | PutOnce | Await | AwaitAll, check: Callable[[], None]) -> Answer:
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
            case Await():
                return Found(self._awaited(store, (request.key,), check)[0])
        return Found(self._awaited(store, request.keys, check))

    def look(self, generation: GenerationId, key: str) -> bool:
        """Return whether there is anything under a key."""
        return self._store_of(generation).peek(key) is not None

    def release(self) -> None:
        """Give the client of a generation back, once its ranks have met."""
        self._of = None
        self._lent.close()

    def _store_of(self, generation: GenerationId) -> SealedStore:
        if self._of is None or self._of[0] != generation:
            self.release()
            lent = self._control.in_generation(generation).lent("protocol", self._timeout_s)
            self._of = generation, self._lent.enter_context(lent)
        return self._of[1]

    def _awaited(self, store: SealedStore, keys: tuple[str, ...], check: Callable[[], None]) -> tuple[Any, ...]:
        found = list[Any]()

        def look() -> tuple[Any, ...] | None:
            while len(found) < len(keys) and (value := store.peek(keys[len(found)])) is not None:
                found.append(_read(keys[len(found)], value))
            return tuple(found) if len(found) == len(keys) else None

        try:
            return awaited(look, self._timeout_s, check, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        except TimeoutError as cause:
            raise TimeoutError(f"{keys[len(found)]} has been waited for {self._timeout_s:g} s") from cause


def _read(key: str, value: bytes) -> Any:
    kinds = {"state": HandedIn, "agreement": Agreement}
    kind = kinds.get(key.partition("/")[0])
    return value.decode() if kind is None else unpacked(value, kind, _MOST_NBYTES)
