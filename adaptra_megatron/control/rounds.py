# SPDX-License-Identifier: Apache-2.0
"""What all ranks of a replica measured in an iteration, as it is in the job's store: all under one key, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from adaptra_megatron.authentication.seal import Seal
from adaptra_megatron.authentication.sealed_store import SealedStore
from adaptra_megatron.control.measurements import StageMeasurement, measurement_of
from adaptra_megatron.control.wire_format import encoded

Round = Sequence[StageMeasurement]
"""What all ranks measured in one iteration, by pipeline and stage."""


class SealedRound(NamedTuple):
    """The same, not looked at yet."""

    iteration: int
    entries: bytes
    own: bytes = b""
    """One more entry, of the leading rank itself, which needs no store to hand it in."""

    @property
    def nbytes(self) -> int:
        """Size of all."""
        return len(self.entries) + len(self.own)


def round_key(iteration: int) -> str:
    """Under which the measurements of an iteration are."""
    return f"measured/{iteration}"


def count_key(iteration: int) -> str:
    """Under which there are as many bytes as those measurements."""
    return f"count/{iteration}"


def entry_of(seal: Seal, iteration: int, measurement: StageMeasurement) -> bytes:
    """What one rank measured, as it is among the others'."""
    return seal.entry(round_key(iteration), encoded(measurement))


def hand_in(store: SealedStore, iteration: int, measurement: StageMeasurement) -> None:
    """Add what one rank measured, without an answer of the store to wait for. Raises RuntimeError where that does."""
    store.append(round_key(iteration), encoded(measurement))
    store.count(count_key(iteration))


def read_round(found: SealedRound, seal: Seal) -> Round:
    """Raises TamperedError, or ValueError for what is no measurement."""
    entries = seal.entries(round_key(found.iteration), found.entries + found.own)
    return sorted(map(measurement_of, entries), key=lambda one: (one.pipeline, one.stage))
