# SPDX-License-Identifier: Apache-2.0
"""The job's store for those who know the job's secret: what others put there is refused, not read."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any

_SEAL_NBYTES = hashlib.sha256().digest_size


class TamperedError(RuntimeError):
    """A value in the job's store was not put there by a rank that knows the job's secret; names the key and remedy."""


class Seal:
    """Seal of values: an HMAC-SHA256 over the value and its place, in front of it. Needs neither torch nor a store."""

    def __init__(self, secret: bytes, place: str) -> None:
        """`place`: the same for all that share the keys and for no other user of the store: no value fits elsewhere."""
        self._secret, self.place = secret, place

    def closed(self, key: str, value: bytes) -> bytes:
        """Value to store under `key`."""
        return self._proof(key, value) + value

    def opened(self, key: str, found: bytes) -> bytes:
        """The value of what was found under `key`. Raises TamperedError."""
        seal, value = found[:_SEAL_NBYTES], found[_SEAL_NBYTES:]
        if not hmac.compare_digest(seal, self._proof(key, value)):
            raise TamperedError(
                f"what is under {key!r} in the job's store ({len(found)} bytes) was not put there by a rank that knows "
                "the job's secret: give all ranks the same ADAPTRA_SECRET_FILE or none, and keep MASTER_PORT closed"
            )
        return value

    def _proof(self, key: str, value: bytes) -> bytes:
        return hmac.digest(self._secret, f"{len(self.place)}:{self.place}/{key}\0".encode() + value, "sha256")


_NOTHING = "?"
"""Shorter than any seal: no value is this."""


def peek(store: Any, key: str) -> bytes | None:
    """Return what is under `key` in a torch.distributed store; None at once where nothing is, by one request.

    A store that compares with what is not there answers with what it was to compare (TCPStore.cpp: compareSetHandler,
    HashStore.cpp: compareSet), and changes nothing; `get` would wait, and ask twice.
    """
    found: bytes = store.compare_set(key, _NOTHING, _NOTHING)
    return None if found == _NOTHING.encode() else found


class SealedStore:
    """A torch.distributed store whose values are sealed (`Seal`).

    Who reaches the store still reads what is there, and can take it away. What has no value (counters, whether a key
    exists) is passed on as it is.
    """

    def __init__(self, store: Any, secret: bytes, place: str) -> None:
        """`place`: see `Seal`."""
        self._store, self._secret, self._place = store, secret, place
        self._seal = Seal(secret, place)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def clone(self) -> SealedStore:
        """Another client of the store, sealed as this one."""
        return SealedStore(self._store.clone(), self._secret, self._place)

    def set(self, key: str, value: bytes, /) -> None:
        """Store `value` under `key`. This and the other methods raise RuntimeError where the store does."""
        self._store.set(key, self._seal.closed(key, value))

    def get(self, key: str, /) -> bytes:
        """Raises TamperedError, too."""
        return self._seal.opened(key, self._store.get(key))

    def peek(self, key: str, /) -> bytes | None:
        """See `peek`, which never waits. Raises TamperedError, too."""
        found = peek(self._store, key)
        return None if found is None else self._seal.opened(key, found)

    def put_once(self, key: str, value: bytes, /) -> bytes:
        """Store `value` under `key` unless it has one; return the one that is there. Raises TamperedError."""
        return self._seal.opened(key, self._store.compare_set(key, "", self._seal.closed(key, value)))

    def get_all(self, keys: Sequence[str], /) -> list[bytes]:
        """Return what is under all `keys`, which are there, by one request. Raises TamperedError, too."""
        found = self._store.multi_get(list(keys))
        return [self._seal.opened(key, value) for key, value in zip(keys, found, strict=True)]
