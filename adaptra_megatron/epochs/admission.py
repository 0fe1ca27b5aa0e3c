# SPDX-License-Identifier: Apache-2.0
"""Workers that take the places of ranks that had left: how those that live and they come to train together.

A process that stands ready says so to the launcher, whose membership tells of its arrival. The rank that commits a call
writes into its fate that newcomers are to be admitted, so all ranks stop at the same point: before the next training
iteration. There they hand parameters and optimizer state over, and all meet, newcomers included. One word that is
written once says whether they have: where any rank dies or is late before, they have not, those that lived before go on
as before, and the newcomer ends (its launcher may start it again).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from adaptra_megatron.authentication.sealed_store import SealedStore, peek
from adaptra_megatron.authentication.tagged_json import packed, unpacked
from adaptra_megatron.epochs.awaiting import awaited
from adaptra_megatron.epochs.epoch import Epoch, dead_cells, live_ranks
from adaptra_megatron.epochs.errors import EpochEndedError, UnrecoverableError
from adaptra_megatron.epochs.meeting import MOST_NBYTES
from adaptra_megatron.job.control_store import ControlStore
from adaptra_megatron.job.layout import JobLayout
from adaptra_megatron.job.membership import Arrival, Membership

_ADMITTED = "admitted"
_LATEST = "admission/latest"
_YES, _NO = "yes", "no"


@dataclass(frozen=True)
class Ticket:
    """What a newcomer has to know of those that it joins."""

    epoch: int
    """In which it takes part first."""
    call: int
    """Number of the first call of Megatron's schedules that it takes part in."""
    live: tuple[int, ...]
    """Ranks that take part in it."""
    before: tuple[int, ...]
    """Those of them that have taken part before."""
    admitted: Mapping[int, int]
    """Those of the epoch: see `Epoch`."""


def newcomers(layout: JobLayout, membership: Membership, epoch: Epoch) -> dict[int, Arrival]:
    """Ranks that stand ready to take part, and have not in `epoch`: of cells all of whose ranks do."""
    live = set(membership.live)
    ready = {
        each.rank: each
        for each in membership.arrived
        if each.rank in live and each.epoch > epoch.admitted.get(each.rank, 0)
    }
    whole = (layout.cells[cell] for cell in epoch.dead_cells if ready.keys() >= set(layout.cells[cell]))
    return {rank: ready[rank] for ranks in whole for rank in ranks}


def epoch_with(
    layout: JobLayout, control: ControlStore, membership: Membership, epoch: Epoch, arrived: Mapping[int, Arrival]
) -> Epoch:
    """The epoch in which those of `epoch` and those that have arrived take part; their hosts are known from now on."""
    for rank, each in arrived.items():
        layout.move(rank, each.ready.host, each.ready.identity)
    admitted = {**epoch.admitted, **{rank: each.epoch for rank, each in arrived.items()}}
    number = membership.epoch
    dead, live = dead_cells(layout, membership, admitted), live_ranks(layout, membership, admitted)
    return Epoch(number, live, dead, control.in_epoch(number), admitted, number)


def hand_tickets(store: SealedStore, epoch: Epoch, call: int, before: frozenset[int]) -> Ticket:
    """Call the newcomers of `epoch` in, by the lowest of the ranks that have taken part `before`. Returns what they
    get."""
    ticket = Ticket(epoch.number, call, tuple(sorted(epoch.live)), tuple(sorted(before)), epoch.admitted)
    for rank in sorted(epoch.live - before):
        store.set(f"ticket/{rank}/{epoch.admitted[rank]}", packed(ticket))
    return ticket


def note_admitted(store: SealedStore, ticket: Ticket) -> None:
    """Write down that the holders of this ticket take part, by the rank that has handed it out."""
    store.set(_LATEST, packed(ticket))


def admitted_so_far(store: SealedStore) -> Mapping[int, int]:
    """Ranks that had left and take part again: see `Epoch`. Raises RuntimeError where the store does."""
    found = store.peek(_LATEST)
    if found is None:
        return {}
    ticket: Ticket = unpacked(found, Ticket, MOST_NBYTES)
    return ticket.admitted


def read_ticket(store: SealedStore, arrival: Arrival, timeout_s: float, check: Callable[[], None]) -> Ticket:
    """A newcomer's, once the others call it in. Raises UnrecoverableError where they do not, and as `check`."""
    key = f"ticket/{arrival.rank}/{arrival.epoch}"
    try:
        ticket: Ticket = unpacked(awaited(lambda: store.peek(key), timeout_s, check), Ticket, MOST_NBYTES)
    except TimeoutError as cause:
        raise UnrecoverableError(
            f"rank {arrival.rank}, started again, has waited {timeout_s:g} s (--adaptra-timeout-s) to be admitted: an "
            "iteration, an evaluation or a checkpoint of the others takes longer, or they have ended; raise the limit"
        ) from cause
    return ticket


def all_meet(
    store: SealedStore, rank: int, epoch: Epoch, before: frozenset[int], timeout_s: float, check: Callable[[], None]
) -> bool:
    """Come to the point from which all of `epoch` train together; whether all have. `before`: without the newcomers.
    `check`: raises EpochEndedError where any that is waited for is gone. `store`: of the epoch.

    Raises RuntimeError where the store does.
    """
    try:
        store.set(f"here/{rank}", b"here")
        if rank == min(before):
            for each in sorted(epoch.live):
                awaited(functools.partial(_here_or_called_off, store, each), timeout_s, check)
            return _decide(store, _YES)
        return awaited(lambda: peek(store, _ADMITTED), timeout_s, check).decode() == _YES
    except (EpochEndedError, TimeoutError):
        return call_off(store)


def _here_or_called_off(store: SealedStore, rank: int) -> bytes | None:
    return store.peek(f"here/{rank}") or peek(store, _ADMITTED)


def call_off(store: SealedStore) -> bool:
    """Have newcomers not admitted, unless they are; whether they are. Raises RuntimeError where the store does."""
    return _decide(store, _NO)


def _decide(store: SealedStore, word: str) -> bool:
    found: bytes = store.compare_set(_ADMITTED, "", word)
    return found.decode() == _YES
