# SPDX-License-Identifier: Apache-2.0
"""One rank's part in going on after rank failures, as a state machine. Pure: no store, thread or clock.

A `Rank` has a `request`, and `after` the answer to it becomes the next `Rank`. The training thread and rejoining
processes carry requests out on the job's store (`recovery`, `rejoin`). The model checker of the tests carries them out
on a dictionary, in every order in which ranks can fail and rejoin.

1. A call of Megatron's schedules is attempted until it commits, on all live ranks or on none.
2. An attempt has one fate, written once, which all ranks read. The last live rank to finish it writes COMMIT. A rank
   whose gradients are unsound writes REPEAT.
3. If a rank fails before, the others close their connections and wait until no operation of the attempt can write any
   more (the fence). Only then do they meet.
4. The lowest rank of the meeting writes REDO as the fate of each attempt whose fate some rank does not know. If COMMIT
   is there already, it stays, and the meeting commits the call.
5. A COMMIT may name a membership with restarted ranks that are ready. All ranks stop before the next training
   iteration, hand over their state, and meet. Only then are the restarted ranks late, if they do not come. One word,
   written once, says whether they take part.

Values are written once where ranks could disagree: a rank that fails after it has decided has decided for all.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from adaptra_megatron.elastic.generation import (
    Generation,
    GenerationId,
    after_failures,
    can_admit,
    first_generation,
    live_ranks,
    rejoining,
    with_rejoining,
)

if TYPE_CHECKING:
    from adaptra_megatron.common.layout import JobLayout
    from adaptra_megatron.common.membership import Membership

COMMIT, REDO, REPEAT = "commit", "redo", "repeat"
"""Fates of an attempt, written once. REDO: a rank has failed. REPEAT: none has, but a rank has found that gradients
are not those of all micro-batches."""
YES, NO = "yes", "no"
"""Whether ranks that rejoin take part, written once."""


class Phase(enum.Enum):
    """Phase of a rank in the protocol."""

    BETWEEN = "between calls"
    ATTEMPTING = "in an attempt"
    REPEATING = "has the attempt repeated"
    ARRIVING = "at the end of an attempt"
    DECIDING = "last at the end of an attempt"
    AWAITING_FATE = "waits for the fate of an attempt"
    FENCING = "waits for operations that may still write"
    CHANGING = "waits for the launcher to say who has failed"
    HANDING_IN = "hands in its state"
    GATHERING = "gathers the states of all"
    FORCING = "decides on attempts whose fate a rank does not know"
    AGREEING = "writes what all begin with"
    AWAITING_AGREEMENT = "waits for what all begin with"
    ADMITTING = "looks up who rejoins"
    CALLING_IN = "calls those in that rejoin"
    HANDING_OVER = "hands its state over"
    RECEIVING = "receives the state of the job"
    COMING = "comes to the point from which all train together"
    COUNTING = "waits for all that hand over to come to that point"
    EXPECTING = "waits for those that rejoin to come to that point"
    ADMITS = "says that all take part"
    AWAITING_WORD = "waits for the word that all take part"
    CALLING_OFF = "says that those who rejoin do not take part"
    LEFT = "has not been admitted"


_MEETS = frozenset({Phase.HANDING_IN, Phase.GATHERING, Phase.FORCING, Phase.AGREEING, Phase.AWAITING_AGREEMENT})
_ADMISSION = frozenset({Phase.CALLING_IN, Phase.HANDING_OVER, Phase.RECEIVING, Phase.COMING, Phase.COUNTING})
_ADMISSION |= {Phase.EXPECTING, Phase.ADMITS, Phase.AWAITING_WORD}


# Requests. Keys are of the job, or with a `generation` of that one alone.


@dataclass(frozen=True)
class Attempt:
    """Run the attempt. Answer: Done or Unsound."""

    name: str


@dataclass(frozen=True)
class Arrive:
    """Say that this rank has come to the end of the attempt. Answer: Arrived or Unsound."""

    name: str


@dataclass(frozen=True)
class AwaitFence:
    """Close connections, and wait until no operation of an earlier generation can write. Answer: Done."""


@dataclass(frozen=True)
class AwaitChange:
    """Wait for a membership with other live ranks. Answer: Changed."""

    tried: frozenset[int]


@dataclass(frozen=True)
class LookUp:
    """Look a membership up. Answer: Changed."""

    epoch: int


@dataclass(frozen=True)
class Put:
    """Write a value under a key of this rank. Answer: Done."""

    generation: GenerationId | None
    key: str
    value: Any


@dataclass(frozen=True)
class PutOnce:
    """Write a word, unless the key has one. Answer: Found, with the word that is there."""

    generation: GenerationId | None
    key: str
    word: str


@dataclass(frozen=True)
class Await:
    """Wait for a value. Answer: Found, with the value."""

    generation: GenerationId | None
    key: str


@dataclass(frozen=True)
class AwaitAll:
    """Wait for values under all keys. Answer: Found, with a tuple."""

    generation: GenerationId | None
    keys: tuple[str, ...]


@dataclass(frozen=True)
class HandOver:
    """Give those that rejoin what they need of this rank, or receive that. Answer: Done."""

    next: Generation


# Answers. Each wait may also be answered by Interrupted: a rank has failed; in an admission also where one is late.


@dataclass(frozen=True)
class Done:
    """It is done."""


@dataclass(frozen=True)
class Interrupted:
    """A rank has failed, as far as this one knows."""


@dataclass(frozen=True)
class Unsound:
    """Gradients of the attempt are not those of all micro-batches: see `conservation`."""


@dataclass(frozen=True)
class Arrived:
    """This rank has said that it has come to the end of the attempt."""

    last: bool
    """Whether all others have come before."""
    newest: Membership | None
    """The newest membership that it knows."""


@dataclass(frozen=True)
class Changed:
    """There is another membership."""

    membership: Membership


@dataclass(frozen=True)
class Found:
    """Values under the keys."""

    value: Any


Request = Attempt | Arrive | AwaitFence | AwaitChange | LookUp | Put | PutOnce | Await | AwaitAll | HandOver
Answer = Done | Interrupted | Unsound | Arrived | Changed | Found


@dataclass(frozen=True)
class HandedIn:
    """Progress of one rank, for the others that it meets."""

    attempted: str | None
    """The attempt whose fate it does not know; None: it has come to the end of none since its last commit."""
    turn: int
    call: int = 0
    """How many calls it has committed."""
    operations: Mapping[str, int] = field(default_factory=dict)
    """Number of operations outside of calls since then, by name of the group: see `fence.KeptResults`."""


@dataclass(frozen=True)
class Agreement:
    """State that all ranks of a generation begin with."""

    committed: tuple[str, ...]
    """Attempts to be committed, of those whose fate some rank did not know."""
    turn: int
    holders: Mapping[str, int] = field(default_factory=dict)
    """Which rank has the results of operations outside of calls that another lacks: see `fence.KeptResults`."""


@dataclass(frozen=True)
class Ticket:
    """Everything that a rejoining process has to know of the live ranks."""

    membership: int
    admission: int
    """Together the identity of the generation in which it takes part first."""
    call: int
    """Number of the first call of Megatron's schedules that it takes part in."""
    turn: int
    dead: tuple[int, ...]
    """Ranks that take no part in it."""
    new: tuple[int, ...]
    """Ranks that take part in it, and have not before."""
    admitted: Mapping[int, int]
    """See `Generation`."""
    refused: Mapping[int, int]
    """See `Generation`."""


@dataclass(frozen=True)
class Rank:
    """One rank, between two steps of the protocol."""

    layout: JobLayout = field(compare=False)
    generation: Generation
    """The one that it is in."""
    call: int = 0
    """How many calls it has committed: the number of the one under way or the next."""
    turn: int = 0
    """How many attempts have ended without a commit, over the whole job: later messages have a greater one."""
    phase: Phase = Phase.BETWEEN
    inside: bool = False
    """True in a call: then an attempt follows a meeting."""
    repeated: bool = False
    """True in a call of which an attempt was unsound: another one is an error."""
    attempted: str | None = None
    """See `HandedIn`."""
    due: int | None = None
    """Epoch of the membership whose ranks that stand ready are to be admitted before the next training iteration."""
    next: Generation | None = None
    """The one that it meets in, or that ranks are to be admitted to."""
    before: frozenset[int] = frozenset()
    """Ranks that have taken part before, while others are admitted."""
    open: tuple[str, ...] = ()
    """Attempts still to be decided on, by the lowest rank of a meeting."""
    agreement: Agreement | None = None
    """Of the last meeting."""

    @classmethod
    def first(cls, layout: JobLayout) -> Rank:
        """Return a rank as the job begins."""
        return cls(layout, first_generation(layout))

    @classmethod
    def rejoins(cls, layout: JobLayout, ticket: Ticket) -> Rank:
        """Return a process that has been called in. Its first answers are to requests of RECEIVING."""
        live = frozenset(layout.workers).difference(ticket.dead)
        identity = GenerationId(ticket.membership, ticket.admission)
        dead = frozenset(layout.workers[rank].cell for rank in ticket.dead)
        generation = Generation(identity, live, dead, ticket.admitted, ticket.membership, ticket.refused)
        before = live.difference(ticket.new)
        return cls(layout, generation, ticket.call, ticket.turn, Phase.RECEIVING, next=generation, before=before)

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.layout.rank

    @property
    def attempt(self) -> str:
        """Name of the attempt under way: no other of the job has it."""
        return f"{self.call}/{self.generation.id}/{self.turn}"

    def begin(self, *, trains: bool) -> Rank:
        """Begin a call. `trains`: whether it is a training iteration, before which ranks may be admitted."""
        assert self.phase is Phase.BETWEEN, self.phase
        admits = trains and self.due is not None
        return replace(self, inside=True, repeated=False, phase=Phase.ADMITTING if admits else Phase.ATTEMPTING)

    def interrupted(self) -> Rank:
        """Go on after an operation outside of calls has failed."""
        assert self.phase is Phase.BETWEEN, self.phase
        return replace(self, phase=Phase.FENCING, due=None)

    def is_struck_by(self, membership: Membership) -> bool:
        """Return whether `membership` ends what this rank waits for: a rank has failed that it counts on."""
        known = self.generation
        if self.phase in _ADMISSION:
            assert self.next is not None
            of_next, since = self.next.live, self.next.id.membership
            # By departures: `live_ranks` counts rejoining ranks as dead until they are admitted, and does not see them
            # fail.
            return any(each.rank in of_next and each.epoch > since for each in membership.left)
        if self.phase in _MEETS:
            assert self.next is not None
            newer = membership.epoch > self.next.id.membership
            return newer and live_ranks(self.layout, membership, known.admitted) != self.next.live
        return live_ranks(self.layout, membership, known.admitted) != known.live

    @property
    def request(self) -> Request:
        """Return what this rank needs next."""
        met = self.next.id if self.next is not None else None
        live = tuple(sorted(self.next.live)) if self.next is not None else ()
        match self.phase:
            case Phase.ATTEMPTING:
                return Attempt(self.attempt)
            case Phase.ARRIVING:
                return Arrive(self.attempt)
            case Phase.REPEATING:
                return PutOnce(None, f"fate/{self.attempt}", REPEAT)
            case Phase.DECIDING:
                return PutOnce(None, f"fate/{self.attempt}", COMMIT if self.due is None else f"{COMMIT} {self.due}")
            case Phase.AWAITING_FATE:
                return Await(None, f"fate/{self.attempt}")
            case Phase.FENCING:
                return AwaitFence()
            case Phase.CHANGING:
                return AwaitChange((self.next or self.generation).live)
            case Phase.HANDING_IN:
                return Put(met, f"state/{self.rank}", HandedIn(self.attempted, self.turn, self.call))
            case Phase.GATHERING:
                return AwaitAll(met, tuple(f"state/{each}" for each in live))
            case Phase.FORCING:
                return PutOnce(None, f"fate/{self.open[0]}", REDO)
            case Phase.AGREEING:
                return Put(met, "agreement", self.agreement)
            case Phase.AWAITING_AGREEMENT:
                return Await(met, "agreement")
            case _:
                return self._request_in_admission(met, live)

    def _request_in_admission(self, met: GenerationId | None, live: tuple[int, ...]) -> Request:
        match self.phase:
            case Phase.ADMITTING:
                assert self.due is not None
                return LookUp(self.due)
            case Phase.CALLING_IN:
                assert self.next is not None
                rank = int(self.open[0])
                return Put(None, f"ticket/{rank}/{self.next.admitted[rank]}", self.ticket)
            case Phase.HANDING_OVER | Phase.RECEIVING:
                assert self.next is not None
                return HandOver(self.next)
            case Phase.COMING:
                return Put(met, f"here/{self.rank}", "here")
            case Phase.COUNTING:
                return AwaitAll(met, tuple(f"here/{each}" for each in sorted(self.before)))
            case Phase.EXPECTING:
                return AwaitAll(met, tuple(f"here/{each}" for each in live if each not in self.before))
            case Phase.ADMITS | Phase.CALLING_OFF:
                return PutOnce(met, "admitted", YES if self.phase is Phase.ADMITS else NO)
            case Phase.AWAITING_WORD:
                return Await(met, "admitted")
        raise AssertionError(f"rank {self.rank} needs nothing: {self.phase.value}")

    @property
    def ticket(self) -> Ticket:
        """Return what those get that are to be admitted."""
        assert self.next is not None
        to, refused = self.next, dict(self.next.refused)
        dead, new = tuple(sorted(self.layout.workers.keys() - to.live)), tuple(sorted(to.live - self.before))
        return Ticket(*to.id, self.call, self.turn + 1, dead, new, to.admitted, refused)

    def after(self, answer: Answer) -> Rank:
        """Return this rank after its request has been carried out."""
        if isinstance(answer, Interrupted):
            return self._after_interruption()
        if isinstance(answer, Unsound):
            return replace(self, phase=Phase.REPEATING)
        match self.phase:
            case Phase.ATTEMPTING:
                return replace(self, phase=Phase.ARRIVING, attempted=self.attempt)
            case Phase.ARRIVING:
                return self._arrived(answer)
            case Phase.DECIDING | Phase.AWAITING_FATE | Phase.REPEATING:
                return self._decided(_value(answer))
            case Phase.FENCING:
                return replace(self, phase=Phase.CHANGING, next=None)
            case Phase.CHANGING:
                assert isinstance(answer, Changed)
                met = after_failures(self.layout, answer.membership, self.generation)
                return replace(self, phase=Phase.HANDING_IN, next=met)
            case Phase.HANDING_IN:
                assert self.next is not None
                leads = self.rank == min(self.next.live)
                return replace(self, phase=Phase.GATHERING if leads else Phase.AWAITING_AGREEMENT)
            case Phase.GATHERING:
                return self._gathered(_value(answer))
            case Phase.FORCING:
                return self._forced(_value(answer))
            case Phase.AGREEING:
                return self._entered(self.agreement)
            case Phase.AWAITING_AGREEMENT:
                return self._entered(_value(answer))
            case _:
                return self._after_in_admission(answer)

    def _after_in_admission(self, answer: Answer) -> Rank:
        match self.phase:
            case Phase.ADMITTING:
                assert isinstance(answer, Changed)
                # Of the membership that the COMMIT named, not of the newest one, which ranks learn of at different
                # times.
                met = with_rejoining(self.layout, answer.membership, self.generation, self.call)
                arrived = rejoining(self.layout, answer.membership, self.generation)
                leads = self.rank == min(self.generation.live)
                phase = Phase.CALLING_IN if leads else Phase.HANDING_OVER
                called = tuple(map(str, sorted(arrived))) if leads else ()
                return replace(self, phase=phase, next=met, before=self.generation.live, open=called, due=None)
            case Phase.CALLING_IN:
                rest = self.open[1:]
                return replace(self, phase=self.phase if rest else Phase.HANDING_OVER, open=rest)
            case Phase.HANDING_OVER | Phase.RECEIVING:
                return replace(self, phase=Phase.COMING)
            case Phase.COMING:
                # Not the lowest of all: a rejoining rank takes no part in the decision to admit it.
                leads = self.rank == min(self.before)
                return replace(self, phase=Phase.COUNTING if leads else Phase.AWAITING_WORD)
            case Phase.COUNTING:
                return replace(self, phase=Phase.EXPECTING)
            case Phase.EXPECTING:
                return replace(self, phase=Phase.ADMITS)
            case Phase.ADMITS | Phase.CALLING_OFF | Phase.AWAITING_WORD:
                return self._admitted() if _value(answer) == YES else self._not_admitted()
        raise AssertionError(f"rank {self.rank} has asked for nothing: {self.phase.value}")

    def _after_interruption(self) -> Rank:
        if self.phase in _ADMISSION:
            # No attempt is under way, so there is nothing to fence. If YES has been written, it stays: these ranks are
            # admitted, and the failure is handled in their generation.
            return replace(self, phase=Phase.CALLING_OFF)
        if self.phase in _MEETS:
            # This rank is fenced already: only the live ranks have changed again.
            return replace(self, phase=Phase.CHANGING)
        # An admission that was due is dropped: the next commit looks for ready ranks anew.
        return replace(self, phase=Phase.FENCING, due=None)

    def _arrived(self, answer: Answer) -> Rank:
        assert isinstance(answer, Arrived)
        if not answer.last:
            return replace(self, phase=Phase.AWAITING_FATE)
        due = self.due
        # An evaluation commits without admitting: the admission that was due before it still is.
        if due is None and answer.newest is not None and can_admit(self.layout, answer.newest, self.generation):
            due = answer.newest.epoch
        return replace(self, phase=Phase.DECIDING, due=due)

    def _decided(self, fate: str) -> Rank:
        word, _, due = fate.partition(" ")
        if word == COMMIT:
            return self._committed(int(due) if due else self.due)
        # No rank has failed, and all read the same fate: they repeat the attempt without a meeting.
        if word == REPEAT:
            return replace(self, phase=Phase.ATTEMPTING, turn=self.turn + 1, attempted=None, repeated=True)
        return replace(self, phase=Phase.FENCING, due=None)

    def _committed(self, due: int | None) -> Rank:
        return replace(self, call=self.call + 1, phase=Phase.BETWEEN, inside=False, attempted=None, due=due)

    def _gathered(self, states: Iterable[HandedIn]) -> Rank:
        states = tuple(states)
        attempts = tuple(sorted({each.attempted for each in states if each.attempted is not None}))
        # Above the turn of every rank: no message of an attempt before is taken for one of the next.
        agreement = Agreement((), 1 + max(each.turn for each in states), holders_of(states, self.next))
        return replace(self, phase=Phase.FORCING if attempts else Phase.AGREEING, open=attempts, agreement=agreement)

    def _forced(self, fate: str) -> Rank:
        assert self.agreement is not None
        attempt, *rest = self.open
        # The last rank to arrive may have written COMMIT before a rank failed.
        committed = self.agreement.committed + (attempt,) * fate.startswith(COMMIT)
        agreement = replace(self.agreement, committed=committed)
        return replace(self, phase=Phase.FORCING if rest else Phase.AGREEING, open=tuple(rest), agreement=agreement)

    def _entered(self, agreement: Agreement | None) -> Rank:
        assert agreement is not None
        assert self.next is not None
        entered = replace(self, generation=self.next, next=None, turn=agreement.turn, agreement=agreement)
        if entered.attempted in agreement.committed:
            # Without the admission that its COMMIT may name: a rank has failed since.
            return entered._committed(None)
        phase = Phase.ATTEMPTING if self.inside else Phase.BETWEEN
        return replace(entered, phase=phase, attempted=None)

    def _admitted(self) -> Rank:
        assert self.next is not None
        rejoined = self.generation.id == self.next.id
        phase = Phase.BETWEEN if rejoined else Phase.ATTEMPTING
        turn = self.turn + (not rejoined)  # of a rejoining rank the ticket has it already
        return replace(self, generation=self.next, next=None, turn=turn, phase=phase, before=frozenset())

    def _not_admitted(self) -> Rank:
        assert self.next is not None
        if self.generation.id == self.next.id:
            return replace(self, phase=Phase.LEFT)
        admitted = self.generation.admitted
        # Their processes end themselves (LEFT): the same arrivals must not be admitted at the next commit.
        late = {rank: epoch for rank, epoch in self.next.admitted.items() if admitted.get(rank) != epoch}
        kept = replace(self.generation, refused={**self.generation.refused, **late})
        return replace(self, generation=kept, next=None, phase=Phase.ATTEMPTING, before=frozenset())


def _value(answer: Answer) -> Any:
    assert isinstance(answer, Found), answer
    return answer.value


def holders_of(states: tuple[HandedIn, ...], met: Generation | None) -> dict[str, int]:
    """Return, by name of a group, the lowest rank that has carried out the most operations outside of calls in it, for
    those groups in which another member has carried out fewer."""
    assert met is not None
    newest, holders = max(each.call for each in states), {}
    for group in sorted({name for each in states for name in each.operations}):
        # Who has not seen the newest commit has carried out none since.
        counts = {
            rank: each.operations[group] * (each.call == newest)
            for rank, each in zip(sorted(met.live), states, strict=True)
            if group in each.operations
        }
        if min(counts.values()) < (most := max(counts.values())):
            holders[group] = min(rank for rank, count in counts.items() if count == most)
    return holders
