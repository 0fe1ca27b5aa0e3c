# SPDX-License-Identifier: Apache-2.0
"""Proof that a value was put into the job's store by a rank that knows the job's secret, and in this place."""

from __future__ import annotations

import hashlib
import hmac

_SEAL_NBYTES = hashlib.sha256().digest_size


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

    def _proof(self, key: str, value: bytes) -> bytes:
        return hmac.digest(self._secret, f"{len(self.place)}:{self.place}/{key}\0".encode() + value, "sha256")
