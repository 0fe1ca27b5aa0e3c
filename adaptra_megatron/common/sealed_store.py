# SPDX-License-Identifier: Apache-2.0
"""Seal the values in the job's store with the job's secret, so that values from other processes are refused."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any

_SEAL_NBYTES = hashlib.sha256().digest_size
MOST_NBYTES = 1 << 20
"""Maximum size of a sealed value, in bytes: all other requests wait while the store's server takes or gives one."""


class TamperedError(RuntimeError):
    """A value in the job's store was not written by a rank that knows the job's secret; names the key and remedy."""


class Seal:
    """Seal of values: an HMAC-SHA256 over the value and its place, in front of the value. Needs neither torch nor a
    store.
    """

    def __init__(self, secret: bytes, place: str) -> None:
        """`place`: prefix of the keys, unique to their users, so that no sealed value is valid under another prefix."""
        self._secret, self.place = secret, place

    def closed(self, key: str, value: bytes) -> bytes:
        """Return the sealed value to store under `key`. Raises ValueError if it is larger than MOST_NBYTES."""
        if (nbytes := _SEAL_NBYTES + len(value)) > MOST_NBYTES:
            raise ValueError(f"{key!r} would have {nbytes} bytes in the job's store, of {MOST_NBYTES} at most")
        return self._proof(key, value) + value

    def opened(self, key: str, found: bytes) -> bytes:
        """Return the value that was stored under `key`. Raises TamperedError."""
        seal, value = found[:_SEAL_NBYTES], found[_SEAL_NBYTES:]
        if not hmac.compare_digest(seal, self._proof(key, value)):
            raise TamperedError(
                f"what is under {key!r} in the job's store ({len(found)} bytes) was not put there by a rank that knows "
                "the job's secret: give all ranks the same ADAPTRA_SECRET_FILE or none, and keep MASTER_PORT closed"
            )
        return value

    def _proof(self, key: str, value: bytes) -> bytes:
        # Key and place are part of the seal, so a sealed value cannot be moved to another key. Their lengths are
        # unambiguous: the place has its length, the key ends with a NUL.
        return hmac.digest(self._secret, f"{len(self.place)}:{self.place}/{key}\0".encode() + value, "sha256")


_PART_NBYTES = MOST_NBYTES // 2
_IN_PARTS = b"adaptra/in-parts/"
"""Comes before the number of parts, where a value has several."""
_NOTHING = "?"
"""Shorter than any seal: no value is this."""


def peek(store: Any, key: str) -> bytes | None:
    """Return the value under `key` in a torch.distributed store; None if there is none. Never waits; one request.

    It is a compare-and-set of a missing key, which returns the expected value and changes nothing (TCPStore.cpp:
    compareSetHandler, HashStore.cpp: compareSet). `get` would wait, and send two requests.
    """
    found: bytes = store.compare_set(key, _NOTHING, _NOTHING)
    return None if found == _NOTHING.encode() else found


class SealedStore:
    """A torch.distributed store whose values are sealed (`Seal`).

    Any process that reaches the store can still read and delete values. Requests without values (counters, whether a
    key exists) are passed on as they are.
    """

    def __init__(self, store: Any, secret: bytes, place: str) -> None:
        """`place`: see `Seal`."""
        self._store, self._secret, self._place = store, secret, place
        self._seal = Seal(secret, place)
        self._parts: dict[str, int] = {}
        """Number of parts of the values that have several, by key."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def over(self, store: Any) -> SealedStore:
        """Return the same store over another client of torch's, such as the clone of this one's."""
        return SealedStore(store, self._secret, self._place)

    def set(self, key: str, value: bytes, /) -> None:
        """Store `value` under `key`. Raises ValueError if it is too large (see `Seal.closed`; `set_parts`).

        This and the other methods raise RuntimeError if the store cannot be reached.
        """
        self._store.set(key, self._seal.closed(key, value))

    def set_parts(self, key: str, value: bytes, /) -> None:
        """Store `value`, of any size, for `get` and `peek`; once for each key, as readers could get parts of two."""
        parts = [value[begin : begin + _PART_NBYTES] for begin in range(0, len(value), _PART_NBYTES)]
        if len(parts) > 1 or value.startswith(_IN_PARTS):
            for number, part in enumerate(parts):
                self.set(f"{key}/{number}", part)
            self._parts[key], value = len(parts), _IN_PARTS + str(len(parts)).encode()
        # After its parts: a reader that sees it finds them.
        self.set(key, value)

    def delete_key(self, key: str, /) -> bool:
        """Delete the value under `key`, with the parts that this object has stored. Return whether there was one."""
        found: bool = self._store.delete_key(key)
        for number in range(self._parts.pop(key, 0)):
            self._store.delete_key(f"{key}/{number}")
        return found

    def get(self, key: str, /) -> bytes:
        """Return the value under `key`, waiting for it. Raises TamperedError."""
        return self._whole(key, self._store.get(key))

    def peek(self, key: str, /) -> bytes | None:
        """Return the value under `key`; None if there is none. Never waits. Raises TamperedError."""
        found = peek(self._store, key)
        return None if found is None else self._whole(key, found)

    def put_once(self, key: str, value: bytes, /) -> bytes:
        """Store `value` under `key` unless the key has a value; return its value. Raises TamperedError."""
        return self._seal.opened(key, self._store.compare_set(key, "", self._seal.closed(key, value)))

    def get_all(self, keys: Sequence[str], /) -> list[bytes]:
        """Return the values under `keys`, all of which exist, by one request. Raises TamperedError."""
        found = self._store.multi_get(list(keys))
        return [self._seal.opened(key, value) for key, value in zip(keys, found, strict=True)]

    def _whole(self, key: str, found: bytes) -> bytes:
        value = self._seal.opened(key, found)
        if not value.startswith(_IN_PARTS):
            return value
        parts = (f"{key}/{number}" for number in range(int(value.removeprefix(_IN_PARTS))))
        return b"".join(self._seal.opened(part, self._store.get(part)) for part in parts)
