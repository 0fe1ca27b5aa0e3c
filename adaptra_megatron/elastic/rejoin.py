# SPDX-License-Identifier: Apache-2.0
"""Let a restarted process rejoin the job in the place of its failed rank, up to its first iteration.

The process reports to the launcher that it is ready, and the launcher publishes its arrival in a membership. `protocol`
has the rest.
"""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, TypeVar

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.layout import JobLayout, LayoutRecord, host_identity
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.common.membership import START_VARIABLE, Arrival, Departure, MembershipRecords, Readiness
from adaptra_megatron.common.sealed_store import MOST_NBYTES
from adaptra_megatron.common.typed_messages import unpacked
from adaptra_megatron.elastic.failure_errors import EpochEndedError, LateRankError, UnrecoverableError, is_communication
from adaptra_megatron.elastic.generation import Generation, refuse_lost_stages
from adaptra_megatron.elastic.job_abort import check_abort
from adaptra_megatron.elastic.process_group_manager import interruptible
from adaptra_megatron.elastic.protocol import Await, AwaitAll, Done, Interrupted, Phase, Put, PutOnce, Rank, Ticket
from adaptra_megatron.elastic.protocol_store import ALL_GENERATIONS, ProtocolStore, awaited

Made = TypeVar("Made")

PATIENCE_S = 4.5
"""Longest time that the others wait for a rejoining process, beyond the transfer of its state. The process may be
stopped or hang, and a host that has failed once is the likeliest to.
"""


@dataclass(frozen=True)
class Return:
    """A readmission: ranks that rejoined together."""

    generation: Generation
    """First generation in which they take part."""
    ranks: tuple[str, ...]
    """Names of the ranks."""
    seconds: float
    """Time for which the other ranks waited."""


class RejoiningLateError(RuntimeError):
    """A process that is to rejoin has not arrived in time."""

    def __init__(self, ranks: tuple[int, ...], waited_s: float) -> None:
        self.ranks, self.waited_s = ranks, waited_s
        super().__init__(f"ranks {', '.join(map(str, ranks))}, started again, are {waited_s:.1f} s late")


logger = logger_of(__name__)

_MOST_NBYTES = 1 << 26
# Longest wait for the coordinator, interval of polls, and interval of those that read the whole membership.
_SEEN_S, _LOOKS_S, _LOOKS_AT_ALL_S = 60.0, 0.05, 1.0


class JobRecord(NamedTuple):
    """Record of a job, for restarted processes."""

    layout: LayoutRecord
    settings: Mapping[str, str]
    """Values of the flags that must be the same on all ranks."""


@dataclass
class JoinResult:
    """Layout, store and protocol state of a process that has been admitted."""

    layout: JobLayout
    control: ControlStore
    rank: Rank
    """State of this rank in the protocol."""
    left: Sequence[Departure]
    """All departures so far."""

    @property
    def generation(self) -> Generation:
        """First generation in which the process takes part."""
        return self.rank.generation

    @property
    def before(self) -> frozenset[int]:
        """Ranks that trained before this admission."""
        return self.rank.before


class RejoiningRank:
    """A restarted process until it trains with the others. Used by the training thread only."""

    def __init__(
        self, place: Departure, records: MembershipRecords, timeout_s: float | None, settings: Mapping[str, str]
    ) -> None:
        """Read the job's record. `place`: departure of the rank that this process replaces. `settings`: see
        `JobRecord`.

        `timeout_s`: longest wait for other ranks; None: the timeout of torch.distributed. Raises UnrecoverableError if
        the job has not begun or has other settings, RuntimeError if a store cannot be reached.
        """
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
        self._store = self.control.client(ALL_GENERATIONS)
        self._steps = ProtocolStore(self.control, self._store, self.timeout_s, len(self.layout.workers))

    def stand_ready(self) -> JoinResult:
        """Report that this process is ready, and wait until the others admit it before one of their next iterations.

        Raises UnrecoverableError if they do not within the timeout once all ranks of its cell are there, JobLostError
        if they no longer can, OtherRankError if the job has ended with an error, RuntimeError if a store cannot be
        reached.
        """
        place, identity, store = self._place, host_identity(), self._store
        # The job may be ending: then no rank would ever admit this one.
        check_abort(store, self.layout.name(place.rank))
        ready = Readiness(place.epoch, int(os.environ[START_VARIABLE]), socket.gethostname(), identity)
        # Links choose their wire by hosts, and the launcher may have restarted the rank elsewhere.
        self.layout.move(place.rank, ready.host, identity)
        self._records.say_ready(place.rank, ready)
        arrival = self._arrival(ready)
        looked_s, whole_s = time.monotonic(), inf

        def check() -> None:
            nonlocal looked_s, whole_s
            check_abort(store, self.layout.name(place.rank))
            if (now_s := time.monotonic()) - looked_s > _LOOKS_AT_ALL_S:
                # Until then it waits as long as the job: another host of its cell may be replaced in an hour.
                whole_s, looked_s = min(whole_s, now_s) if self._cell_is_whole() else inf, now_s
            if now_s - whole_s > self.timeout_s:
                raise UnrecoverableError(
                    f"rank {place.rank}, started again, has waited {self.timeout_s:g} s (--adaptra-timeout-s) to be "
                    "admitted: an iteration, an evaluation or a checkpoint of the others takes longer, or they have "
                    "ended; raise the limit"
                )
            # `awaited` polls every 2 ms, and this process may wait for minutes.
            time.sleep(_LOOKS_S)

        key = f"ticket/{arrival.rank}/{arrival.epoch}"
        ticket: Ticket = unpacked(awaited(lambda: store.peek(key), inf, check), Ticket, MOST_NBYTES)
        # Not the newest: live ranks have moved exactly the arrivals of this one (RecoveryManager._admission_begins).
        membership = self._records.of_epoch(ticket.membership)
        for each in membership.arrived:
            self.layout.move(each.rank, each.ready.host, each.ready.identity)
        return JoinResult(self.layout, self.control, Rank.rejoins(self.layout, ticket), membership.left)

    def _cell_is_whole(self) -> bool:
        """Return whether all ranks of this process's cell live or stand ready: the others admit none before.

        Raises JobLostError if the ranks that could have admitted this process have failed themselves.
        """
        newest, workers = self._records.newest(), self.layout.workers
        if newest is None:
            return False
        refuse_lost_stages(self.layout, newest, self._records.admitted())
        return all(workers[each].cell != self.layout.cell for each in workers.keys() - set(newest.live))

    def check(self, joined: JoinResult) -> None:
        """Raise EpochEndedError once a rank has failed, including other rejoining ranks, or the others have called the
        admission off. Makes two requests, then sleeps briefly.
        """
        # While it receives; later it waits for the word itself.
        off = joined.rank.phase is Phase.RECEIVING and self._steps.look(joined.generation.id, "admitted")
        newest, name = self._records.newest(), self.layout.name(self.layout.rank)
        if off or (newest is not None and joined.rank.is_struck_by(newest)):
            # Which one it was does not show: a late rank is ended as the word is written.
            raise EpochEndedError(f"another rank was late or has failed while {name} was to take its place")
        time.sleep(_LOOKS_S)

    def wait(self, joined: JoinResult, make: Callable[[], Made], what: str) -> Made:
        """Return the result of `make`, which waits for other ranks. `what`: see `interruptible`.

        Raises EpochEndedError if a rank fails meanwhile, and the other errors of `interruptible`.
        """
        check = functools.partial(self.check, joined)
        try:
            return interruptible(make, check, self.timeout_s, what)
        except Exception as cause:
            if is_communication(cause) and not isinstance(cause, (EpochEndedError, LateRankError)):
                # A broken connection may be seen before the departure of the rank at its other end, which explains it.
                deadline_s = time.monotonic() + PATIENCE_S
                while time.monotonic() < deadline_s:
                    check()
            raise

    def meet(self, joined: JoinResult) -> None:
        """Meet the other ranks once this process has the job's state. From then on all train together.

        Raises UnrecoverableError if another rank failed or was late meanwhile; this process is then not admitted.
        """
        rank = joined.rank
        while rank.phase not in (Phase.BETWEEN, Phase.LEFT):
            request = rank.request
            try:
                if isinstance(request, (Put, PutOnce, Await, AwaitAll)):
                    rank = rank.after(self._steps.carry_out(request, functools.partial(self.check, joined)))
                else:  # the state has been received
                    rank = rank.after(Done())
            except (EpochEndedError, TimeoutError):
                rank = rank.after(Interrupted())
            joined.rank = rank
        self._steps.release()
        if rank.phase is Phase.LEFT:
            raise UnrecoverableError(
                f"{self.layout.name(self.layout.rank)} has not been admitted, as another rank has failed or was late "
                "meanwhile"
            )
        # The leader writes the same, but it may fail before it does.
        self._records.say_admitted(rank.generation.admitted)

    def _arrival(self, ready: Readiness) -> Arrival:
        deadline_s = time.monotonic() + _SEEN_S
        while time.monotonic() < deadline_s:
            newest = self._records.newest()
            for each in () if newest is None else newest.arrived:
                # By the whole notice: an earlier process of this rank may have arrived, too.
                if (each.rank, each.ready) == (self._place.rank, ready):
                    return each
            time.sleep(_LOOKS_S)
        raise UnrecoverableError(
            f"rank {self._place.rank}, started again, stands ready, but its launcher's coordinator has not seen that "
            f"within {_SEEN_S:g} s; look at the launcher of node rank 0"
        )


def refuse_other_settings(rank: int, here: Mapping[str, str], there: Mapping[str, str]) -> None:
    """Raise UnrecoverableError, naming all differences, if the settings of a restarted `rank` differ from its job's
    (`there`).
    """
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
