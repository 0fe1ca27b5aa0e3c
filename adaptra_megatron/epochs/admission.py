# SPDX-License-Identifier: Apache-2.0
"""Processes that take the places of ranks that had failed: what is written down for them, and who waits how long.

A process that stands ready says so to the launcher, whose membership says that it has arrived. `protocol` has the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from adaptra_megatron.authentication.sealed_store import SealedStore
from adaptra_megatron.authentication.tagged_json import packed, unpacked
from adaptra_megatron.epochs.awaiting import awaited
from adaptra_megatron.epochs.errors import UnrecoverableError
from adaptra_megatron.epochs.generation import Generation
from adaptra_megatron.epochs.protocol import Ticket
from adaptra_megatron.job.membership import Arrival

PATIENCE_S = 4.5
"""For how long the others wait for a process that rejoins, beyond what handing its state over takes: it may be stopped
or hang, and the host that has failed once is the likeliest to."""
_MOST_NBYTES = 1 << 20
_LATEST = "admission/latest"


@dataclass(frozen=True)
class Return:
    """Ranks that were admitted again."""

    generation: Generation
    """In which they take part first."""
    ranks: tuple[str, ...]
    """Their names."""
    seconds: float
    """For how long the others waited."""


class RejoiningLateError(RuntimeError):
    """A process that is to be admitted has not come in time."""

    def __init__(self, ranks: tuple[int, ...], waited_s: float) -> None:
        self.ranks, self.waited_s = ranks, waited_s
        super().__init__(f"ranks {', '.join(map(str, ranks))}, started again, are {waited_s:.1f} s late")


class Patience:
    """For how long one admission holds the others up by waiting."""

    def __init__(self, late_s: float = 0.0) -> None:
        """From now on they wait. `late_s`: by how much state was handed over too late before."""
        self._since_s = time.monotonic() - late_s

    def waited_s(self) -> float:
        """Return for how long they have waited."""
        return time.monotonic() - self._since_s


def note_admitted(store: SealedStore, ticket: Ticket) -> None:
    """Write down that the holders of this ticket take part, by the rank that has handed it out."""
    store.set(_LATEST, packed(ticket))


def admitted_so_far(store: SealedStore) -> Mapping[int, int]:
    """Return ranks that had failed and take part again: see `Generation`. Raises RuntimeError where the store does."""
    found = store.peek(_LATEST)
    if found is None:
        return {}
    ticket: Ticket = unpacked(found, Ticket, _MOST_NBYTES)
    return ticket.admitted


def read_ticket(store: SealedStore, arrival: Arrival, timeout_s: float, check: Callable[[], None]) -> Ticket:
    """Return that of a process that rejoins, once the others call it in. Raises UnrecoverableError where they do not,
    and as `check`."""
    key = f"ticket/{arrival.rank}/{arrival.epoch}"
    try:
        ticket: Ticket = unpacked(awaited(lambda: store.peek(key), timeout_s, check), Ticket, _MOST_NBYTES)
    except TimeoutError as cause:
        raise UnrecoverableError(
            f"rank {arrival.rank}, started again, has waited {timeout_s:g} s (--adaptra-timeout-s) to be admitted: an "
            "iteration, an evaluation or a checkpoint of the others takes longer, or they have ended; raise the limit"
        ) from cause
    return ticket
