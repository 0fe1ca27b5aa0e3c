# SPDX-License-Identifier: Apache-2.0
"""Words by which a rank has all others end: of an error of its own, and of the end of the training."""

from __future__ import annotations

from contextlib import suppress

from adaptra_megatron.authentication.sealed_store import SealedStore
from adaptra_megatron.epochs.errors import OtherRankError, UnrecoverableError

_ERROR, _END = "last_word", "ended"


def say_error(store: SealedStore, name: str, error: Exception) -> None:
    """The rank of this `name` ends with an error of its own. A store that does not answer is left alone."""
    with suppress(RuntimeError):
        store.set(_ERROR, f"{name}: {type(error).__name__}: {str(error)[:500]}".encode())


def say_end(store: SealedStore) -> None:
    """A rank has come to the end of the training. A store that does not answer is left alone."""
    with suppress(RuntimeError):
        store.set(_END, b"ended")


def heed(store: SealedStore, name: str) -> None:
    """For a rank of this `name` that waits for others: raise OtherRankError where one has ended with an error of its
    own, UnrecoverableError where they have come to the end of the training."""
    if (word := store.peek(_ERROR)) is not None:
        raise OtherRankError(f"this job ends with an error of {word.decode()}")
    if store.peek(_END) is not None:
        raise UnrecoverableError(
            f"{name} cannot finish what was under way when a rank died, for others have come to the end of the "
            "training and left; checkpoints that were written before are whole"
        )
