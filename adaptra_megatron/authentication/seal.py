# SPDX-License-Identifier: Apache-2.0
"""Proof that a value was put into the job's store by a rank that knows the job's secret, and in this place."""

from __future__ import annotations

import hashlib
import hmac
import struct

_SEAL_NBYTES = hashlib.sha256().digest_size
_LENGTH = struct.Struct(">I")


class TamperedError(RuntimeError):
    """What is in the job's store was not put there by a rank that knows the job's secret; names the key and remedy."""


class Seal:
    """An HMAC-SHA256 over a value and where it is, in front of the value. Neither torch nor a store here."""

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

    def entry(self, key: str, value: bytes) -> bytes:
        """Bytes to append to the value of `key`, where many ranks append."""
        closed = self.closed(key, value)
        return _LENGTH.pack(len(closed)) + closed

    def entries(self, key: str, found: bytes) -> list[bytes]:
        """The values of all that was appended under `key`, as they came. Raises TamperedError."""
        values, at = [], 0
        while at < len(found):
            end = at + _LENGTH.size
            if end <= len(found):
                end += _LENGTH.unpack_from(found, at)[0]
            values.append(self.opened(key, found[at + _LENGTH.size : end]))
            at = end
        return values

    def _proof(self, key: str, value: bytes) -> bytes:
        return hmac.digest(self._secret, f"{len(self.place)}:{self.place}/{key}\0".encode() + value, "sha256")
