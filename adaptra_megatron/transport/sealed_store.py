# SPDX-License-Identifier: Apache-2.0
"""The job's store for those who know the job's secret: what others put there is refused, not read."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any

_SEAL_NBYTES = hashlib.sha256().digest_size


class TamperedError(RuntimeError):
    """What is in the job's store was not put there by a rank that knows the job's secret; names the key and remedy."""


class SealedStore:
    """A torch.distributed store whose values carry an HMAC-SHA256 over their place and content.

    Who reaches the store still reads what is there, and can take it away. What has no value (counters, whether a key
    exists) is passed on as it is.
    """

    def __init__(self, store: Any, secret: bytes, place: str) -> None:
        """`place`: the same for all that share the keys and for no other user of the store: no value fits elsewhere."""
        self._store, self._secret, self._place = store, secret, place

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: bytes, /) -> None:
        """As the store's; raises RuntimeError as it does, as the others do."""
        self._store.set(key, self._seal(key, value) + value)

    def get(self, key: str, /) -> bytes:
        """Raises TamperedError, too."""
        return self._opened(key, self._store.get(key))

    def multi_get(self, keys: Sequence[str], /) -> list[bytes]:
        """Raises TamperedError, too."""
        return [self._opened(key, found) for key, found in zip(keys, self._store.multi_get(keys), strict=True)]

    def _opened(self, key: str, found: bytes) -> bytes:
        seal, value = found[:_SEAL_NBYTES], found[_SEAL_NBYTES:]
        if not hmac.compare_digest(seal, self._seal(key, value)):
            raise TamperedError(
                f"what is under {key!r} in the job's store ({len(found)} bytes) was not put there by a rank that knows "
                "the job's secret: give all ranks the same ADAPTRA_SECRET_FILE or none, and keep MASTER_PORT closed"
            )
        return value

    def _seal(self, key: str, value: bytes) -> bytes:
        return hmac.digest(self._secret, f"{len(self._place)}:{self._place}/{key}\0".encode() + value, "sha256")
