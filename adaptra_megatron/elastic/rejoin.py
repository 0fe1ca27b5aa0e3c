# SPDX-License-Identifier: Apache-2.0
"""A process that takes the place of a rank that had left: from its first word to its first iteration.

Processes that take the places of ranks that had failed: what is written down for them, and who waits how long.
A process that stands ready says so to the launcher, whose membership says that it has arrived. `protocol` has the
rest.
"""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.layout import JobLayout, LayoutRecord, host_identity
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.common.membership import START_VARIABLE, Arrival, Departure, MembershipRecords, Readiness
from adaptra_megatron.common.sealed_store import SealedStore
from adaptra_megatron.common.typed_messages import packed, unpacked
from adaptra_megatron.elastic.failure_errors import EpochEndedError, UnrecoverableError
from adaptra_megatron.elastic.generation import Generation, refuse_lost_stages
from adaptra_megatron.elastic.job_abort import check_abort
from adaptra_megatron.elastic.protocol import Await, AwaitAll, Done, Interrupted, Phase, Put, PutOnce, Rank, Ticket
from adaptra_megatron.elastic.protocol_store import ProtocolStore, awaited

PATIENCE_S = 4.5
"""For how long the others wait for a process that rejoins, beyond what handing its state over takes: it may be stopped
or hang, and the host that has failed once is the likeliest to."""
_ADMISSION_MOST_NBYTES = 1 << 20
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
    ticket: Ticket = unpacked(found, Ticket, _ADMISSION_MOST_NBYTES)
    return ticket.admitted


def read_ticket(store: SealedStore, arrival: Arrival, timeout_s: float, check: Callable[[], None]) -> Ticket:
    """Return that of a process that rejoins, once the others call it in. Raises UnrecoverableError where they do not,
    and as `check`."""
    key = f"ticket/{arrival.rank}/{arrival.epoch}"
    try:
        ticket: Ticket = unpacked(awaited(lambda: store.peek(key), timeout_s, check), Ticket, _ADMISSION_MOST_NBYTES)
    except TimeoutError as cause:
        raise UnrecoverableError(
            f"rank {arrival.rank}, started again, has waited {timeout_s:g} s (--adaptra-timeout-s) to be admitted: an "
            "iteration, an evaluation or a checkpoint of the others takes longer, or they have ended; raise the limit"
        ) from cause
    return ticket


logger = logger_of(__name__)

_MOST_NBYTES = 1 << 26
_SEEN_S, _LOOKS_S, _LOOKS_AT_ALL_S = 60.0, 0.05, 1.0


class JobRecord(NamedTuple):
    """Record of a job for processes that are started again."""

    layout: LayoutRecord
    settings: Mapping[str, str]
    """Flags that are the same on all ranks, and their values."""


@dataclass
class JoinResult:
    """Groups and generation that a process is part of once it has been called in."""

    layout: JobLayout
    control: ControlStore
    rank: Rank
    """Its state in the protocol."""
    left: Sequence[Departure]
    """All so far."""

    @property
    def generation(self) -> Generation:
        """The one that it takes part in first."""
        return self.rank.generation

    @property
    def before(self) -> frozenset[int]:
        """Ranks that have taken part before."""
        return self.rank.before


class RejoiningRank:
    """One process, until it trains with the others. For the training thread."""

    def __init__(
        self, place: Departure, records: MembershipRecords, timeout_s: float | None, settings: Mapping[str, str]
    ) -> None:
        """`place`: that it takes. `timeout_s`: longest wait for others; None: that of torch.distributed. `settings`:
        see `JobRecord`.

        Raises UnrecoverableError where the job has not begun or has other settings, RuntimeError where a store cannot
        be reached."""
        self._place, self._records = place, records
        found = records.layout()
        if found is None:
            raise UnrecoverableError(
                f"rank {place.rank} has been started again, but the job has not begun an iteration that it could join"
            )
        record: JobRecord = unpacked(found, JobRecord, _MOST_NBYTES)
        refuse_other_settings(place.rank, settings, record.settings)
        self.layout = JobLayout.recorded(record.layout, place.rank)
        self.control = ControlStore.of_job(record.layout.token)
        self.timeout_s = self.control.timeout_s if timeout_s is None else timeout_s

    def stand_ready(self) -> JoinResult:
        """Say so, and wait until the others call this process in, before one of their next iterations.

        Raises UnrecoverableError where they do not within the timeout, JobLostError where they cannot, OtherRankError
        where the job has ended with an error, RuntimeError where a store does.
        """
        place, identity, store = self._place, host_identity(), self.control.client("survival")
        check_abort(store, self.layout.name(place.rank))
        ready = Readiness(place.epoch, int(os.environ[START_VARIABLE]), socket.gethostname(), identity)
        self.layout.move(place.rank, ready.host, identity)
        self._records.say_ready(place.rank, ready)
        arrival = self._arrival(ready)
        looked_s = time.monotonic()

        def check() -> None:
            nonlocal looked_s
            check_abort(store, self.layout.name(place.rank))
            if time.monotonic() - looked_s > _LOOKS_AT_ALL_S:
                self._refuse_lost_stages(store)
                looked_s = time.monotonic()
            time.sleep(_LOOKS_S)

        ticket = read_ticket(store, arrival, self.timeout_s, check)
        membership = self._records.of_epoch(ticket.membership)
        for each in membership.arrived:
            self.layout.move(each.rank, each.ready.host, each.ready.identity)
        return JoinResult(self.layout, self.control, Rank.rejoins(self.layout, ticket), membership.left)

    def _refuse_lost_stages(self, store: SealedStore) -> None:
        """Raise JobLostError where all that could have called this process in are dead themselves."""
        admitted, newest = admitted_so_far(store), self._records.newest()
        if newest is not None:
            refuse_lost_stages(self.layout, newest, admitted)

    def check(self, joined: JoinResult) -> None:
        """Raise EpochEndedError once a rank has failed, also one that stands ready again. Takes a moment."""
        newest = self._records.newest()
        if newest is not None and joined.rank.is_struck_by(newest):
            name = self.layout.name(self.layout.rank)
            raise EpochEndedError(f"a rank has failed while {name} was to take its place")
        time.sleep(_LOOKS_S)

    def meet(self, joined: JoinResult) -> None:
        """Come to the point from which all train together, with the state of the job. Raises UnrecoverableError where
        another rank has failed or was late meanwhile, so that this process has no place."""
        steps = ProtocolStore(self.control, self.control.client("survival"), self.timeout_s)
        rank = joined.rank
        while rank.phase not in (Phase.BETWEEN, Phase.LEFT):
            request = rank.request
            try:
                if isinstance(request, (Put, PutOnce, Await, AwaitAll)):
                    rank = rank.after(steps.carry_out(request, functools.partial(self.check, joined)))
                else:  # the state has been received
                    rank = rank.after(Done())
            except (EpochEndedError, TimeoutError):
                rank = rank.after(Interrupted())
            joined.rank = rank
        steps.release()
        if rank.phase is Phase.LEFT:
            raise UnrecoverableError(
                f"{self.layout.name(self.layout.rank)} has not been admitted, as another rank has failed or was late "
                "meanwhile"
            )
        # As the rank that leads the others does, which may fail before.
        self._records.say_admitted(rank.generation.admitted)

    def _arrival(self, ready: Readiness) -> Arrival:
        deadline_s = time.monotonic() + _SEEN_S
        while time.monotonic() < deadline_s:
            newest = self._records.newest()
            for each in () if newest is None else newest.arrived:
                if (each.rank, each.ready) == (self._place.rank, ready):
                    return each
            time.sleep(_LOOKS_S)
        raise UnrecoverableError(
            f"rank {self._place.rank}, started again, stands ready, but its launcher's coordinator has not seen that "
            f"within {_SEEN_S:g} s; look at the launcher of node rank 0"
        )


def refuse_other_settings(rank: int, here: Mapping[str, str], there: Mapping[str, str]) -> None:
    """Raise UnrecoverableError, with the names of all differences, where a `rank` that is started again has other
    settings than its job: `there`."""
    differences = [
        f"{flag} is {here.get(flag, 'not known')} here and {there.get(flag, 'not known')} there"
        for flag in sorted({*here, *there})
        if here.get(flag) != there.get(flag)
    ]
    if differences:
        raise UnrecoverableError(
            f"rank {rank} has been started again with other settings than the job's: {'; '.join(differences)}; start "
            "it with the command line of the others"
        )
