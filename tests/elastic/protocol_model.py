# SPDX-License-Identifier: Apache-2.0
"""A model of the recovery protocol: every order of failures, rejoins, late operations and unsound gradients.

Ranks are the product's own (`protocol.Rank`), one for each cell, and so is how the launcher's membership changes; here
are the store, and the memory in which a late operation writes. A step is one look at what others do, or one word for
them, with what a rank does by itself before it: the order of that and of others' steps is no matter. Looks of a rank go
together with its next word, and its failure comes before both. Each state is explored once. What no rank can look at
any more is left out of a state. Ranks of one stage that never lead are alike: states that differ by who of them is who
are one (Emerson and Sistla, FMSD 9, 1996).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from adaptra_megatron.common.layout import Cell, JobLayout, Worker
from adaptra_megatron.common.membership import Departure, Membership, Readiness
from adaptra_megatron.elastic import generation as generations
from adaptra_megatron.elastic.failure_errors import UnrecoverableError
from adaptra_megatron.elastic.protocol import (
    _ADMISSION,
    COMMIT,
    REPEAT,
    Agreement,
    Arrive,
    Arrived,
    Attempt,
    Await,
    AwaitAll,
    AwaitChange,
    Changed,
    Done,
    Found,
    HandedIn,
    HandOver,
    Interrupted,
    LookUp,
    Phase,
    Put,
    PutOnce,
    Rank,
    Ticket,
    Unsound,
)

READY = Readiness(0, 0, "host", "boot/net")
_INTERRUPTED = "is interrupted"
"""Label of the step in which a rank sees that another has failed."""
_NOT_YET_IN = (Phase.RECEIVING, Phase.COMING, Phase.AWAITING_WORD, Phase.CALLING_OFF, Phase.LEFT)
"""Of a process that rejoins: it does not train in its generation yet."""
_IN_ADMISSION = (*_ADMISSION, Phase.ADMITTING, Phase.CALLING_OFF, Phase.LEFT)
_GIVES = (
    *(Phase.HANDING_OVER, Phase.COMING, Phase.COUNTING, Phase.EXPECTING),
    *(Phase.ADMITS, Phase.AWAITING_WORD, Phase.CALLING_OFF),
)
"""In which a rank has begun to hand its state over; what it has begun may go on later."""


class ViolationError(AssertionError):
    """An invariant of the protocol does not hold; with the steps that lead there."""


@dataclass(frozen=True)
class Scope:
    """What is explored."""

    replicas: int = 2
    stages: int = 2
    calls: int = 2
    failures: int = 2
    admissions: int = 2
    late_operations: int = 1
    unsound: int = 0
    """Number of attempts in which a rank finds that gradients are not those of all micro-batches."""
    fenced: bool = True
    """False: rules without a fence."""


class Process(NamedTuple):
    """One process of a rank."""

    state: Rank | None
    """None: it has failed; or is started again, and waits for its ticket."""
    seen: int = 0
    """Epoch of the membership that it has seen last."""
    steps: tuple[int, int] = (0, 0)
    """How many optimizer steps the two halves of its parameters have taken; -1: not received yet."""
    late: int | None = None
    """Turn of an attempt whose operation may still write."""
    arrival: int = 0
    """Epoch of the membership in which it stands ready, of one that is started again."""
    source: int | None = None
    """Rank that sends it its parameters, once it has received half of them."""


Key = tuple[generations.GenerationId | None, str]
"""In the store: of a generation, or of the job."""

Names = tuple[int, ...]
"""Number of each rank, by rank: see `Model._names`."""


class World(NamedTuple):
    """A state of the whole job."""

    processes: tuple[Process, ...]
    memberships: tuple[Membership, ...]
    store: Mapping[Key, Any]
    came: frozenset[tuple[str, int]] = frozenset()
    """Which ranks have come to the ends of which attempts."""
    failures: int = 0
    admissions: int = 0
    lates: int = 0
    unsound: int = 0


Steps = Iterator[tuple[str, World]]


def layout_of(scope: Scope, rank: int) -> JobLayout:
    """One rank in each cell, replicas innermost."""
    cells = {each: Cell(each % scope.replicas, each // scope.replicas) for each in range(scope.replicas * scope.stages)}
    return JobLayout(rank, {each: Worker(cell, 0, "host", "boot/net") for each, cell in cells.items()}, "job")


class Model:
    """Explores a scope from the start, depth first."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.layouts = [layout_of(scope, rank) for rank in range(scope.replicas * scope.stages)]
        self.states = self.ends = 0
        self._chosen: random.Random | None = None

    def explore(self, most_states: int | None = None, seed: int | None = None) -> int:
        """Explore all states, or `most_states` of them; return their number. `seed`: of the order in which steps are
        looked at. Raises ViolationError."""
        self._chosen = None if seed is None else random.Random(seed)
        processes = tuple(self._settled(Process(Rank.first(layout))) for layout in self.layouts)
        first = World(processes, (Membership(0, len(self.layouts), 0.0, ()),), {})
        seen, stack, trace = {self._key(first)}, [self._steps(first)], list[str]()
        while stack:
            try:
                found = next(stack[-1], None)
            except ViolationError as violation:
                raise ViolationError("\n".join([*trace, str(violation)])) from None
            if found is None:
                stack.pop()
                del trace[-1:]
                continue
            label, after = found[0], self._needed(found[1])
            key = self._key(after)
            if key in seen:
                continue
            seen.add(key)
            if len(seen) == most_states:
                break
            trace.append(label)
            stack.append(self._steps(after))
        self.states = len(seen)
        return self.states

    # What can happen next.

    def _steps(self, world: World) -> Steps:
        """All worlds that follow. Raises ViolationError."""
        steps = self._in_order(world)
        if self._chosen is None:
            yield from steps
            return
        shuffled = list(steps)
        self._chosen.shuffle(shuffled)
        yield from shuffled

    def _in_order(self, world: World) -> Steps:
        if (alone := self._alone(world)) is not None:
            yield from alone
            return
        moved = False
        for rank in range(len(world.processes)):
            for label, after in self._moves(world, rank):
                moved = True
                yield f"{rank} {label}", after
        if not moved:
            self._check_end(world)
        yield from self._faults(world)

    def _alone(self, world: World) -> list[tuple[str, World]] | None:
        """Return the steps of one process that stand for those of all others, if there is one (a persistent set:
        Godefroid, LNCS 1032, 1996).

        Nothing can change the membership any more. The process has all the choices that it will ever have here, and no
        step of others changes what comes of them.
        """
        scope = self.scope
        left = (world.failures, world.admissions, world.unsound) != (scope.failures, scope.admissions, scope.unsound)
        if left or _admits(world):
            return None
        for rank in range(len(world.processes)):
            if steps := [(f"{rank} {label}", after) for label, after in self._by_itself(world, rank)]:
                return steps
        return None

    def _by_itself(self, world: World, rank: int) -> Steps:
        """Steps of a process that has all its choices, each with those that follow while it has."""

        def has_all_choices(world: World) -> bool:
            state = world.processes[rank].state
            return state is not None and _has_all_choices(world, state)

        if has_all_choices(world):
            yield from self._joined(world, rank, lambda _, after, __: has_all_choices(after))

    def _moves(self, world: World, rank: int) -> Steps:
        """Steps of a rank, each with the looks that come right before it.

        A look finds after others' steps what it finds before them (it is a right mover), and others cannot see it. So
        no order is missed where it comes right before the rank's next word (Lipton, CACM 18(12), 1975).
        """

        def only_looks(world: World, after: World, label: str) -> bool:
            state = world.processes[rank].state
            return state is not None and _only_looks(state, after.processes[rank].state, label)

        return self._joined(world, rank, only_looks)

    def _joined(self, world: World, rank: int, goes_on: Callable[[World, World, str], bool]) -> Steps:
        """Steps of a process, each with those that follow it while `goes_on(before, after, label)`."""
        for label, after in self._of_process(world, rank, world.processes[rank]):
            further = False
            for next_label, further_world in self._joined(after, rank, goes_on) if goes_on(world, after, label) else ():
                further = True
                yield f"{label}, {next_label}", further_world
            if not further:
                yield label, after

    def _of_process(self, world: World, rank: int, process: Process) -> Steps:
        state, newest = process.state, world.memberships[-1]
        if state is None:
            ticket = world.store.get((None, f"ticket/{rank}/{process.arrival}")) if process.arrival else None
            if ticket is not None and rank in newest.live:
                called = Process(Rank.rejoins(self.layouts[rank], ticket), newest.epoch, (-1, -1))
                yield "is called in", self._with(world, rank, called)
            return
        if state.phase is Phase.LEFT:
            return
        request = None if state.phase is Phase.BETWEEN else state.request
        if request is None or isinstance(request, (Attempt, Arrive, Await, AwaitAll, HandOver)):
            for membership in world.memberships[process.seen :]:
                if state.is_struck_by(membership):
                    struck = process._replace(seen=membership.epoch)
                    yield from self._interrupted(world, rank, struck, isinstance(request, Attempt))
                    break
        if request is not None:
            yield from self._carried_out(world, rank, process, request)

    def _interrupted(self, world: World, rank: int, process: Process, attempts: bool) -> Steps:
        state = process.state
        assert state is not None
        if state.phase is Phase.BETWEEN:
            yield _INTERRUPTED, self._with(world, rank, self._settled(process._replace(state=state.interrupted())))
            return
        yield _INTERRUPTED, self._answered(world, rank, process, Interrupted())
        if attempts and world.lates < self.scope.late_operations:
            after = self._answered(world, rank, process._replace(late=state.turn), Interrupted())
            if after.processes[rank].late is not None:  # else the fence has waited for it
                yield f"{_INTERRUPTED} and leaves an operation late", after._replace(lates=world.lates + 1)

    def _carried_out(self, world: World, rank: int, process: Process, request: Any) -> Steps:
        state = process.state
        assert state is not None
        match request:
            case Attempt(name):
                if world.unsound < self.scope.unsound and not state.repeated:
                    after = self._answered(world, rank, process, Unsound())
                    yield "finds gradients unsound", after._replace(unsound=world.unsound + 1)
                yield from self._arrives(world, rank, process, name)
            case AwaitChange(tried):
                for membership in world.memberships[process.seen :]:
                    if generations.live_ranks(state.layout, membership, state.generation.admitted) != tried:
                        sees = process._replace(seen=membership.epoch)
                        yield f"sees epoch {membership.epoch}", self._answered(world, rank, sees, Changed(membership))
            case Put():
                for turned in _in_any_order(state):
                    put = turned.request
                    assert isinstance(put, Put)
                    wrote = world._replace(store={**world.store, (put.generation, put.key): put.value})
                    yield f"puts {put.key}", self._answered(wrote, rank, process._replace(state=turned), Done())
            case PutOnce(generation, key, word):
                missing = any((state.attempt, each) not in world.came for each in state.generation.live)
                if missing and word.startswith(COMMIT):
                    raise ViolationError(f"{rank} commits {state.attempt}, to whose end not all have come")
                there = world.store.get((generation, key), word)
                wrote = world._replace(store={**world.store, (generation, key): there})
                yield f"puts {key} once: {there}", self._answered(wrote, rank, process, Found(there))
            case Await(generation, key):
                if (there := world.store.get((generation, key))) is not None:
                    yield f"finds {key}", self._answered(world, rank, process, Found(there))
            case AwaitAll(generation, keys):
                found = tuple(world.store.get((generation, key)) for key in keys)
                if None not in found:
                    yield f"finds {keys[0]}", self._answered(world, rank, process, Found(found))
                elif state.phase is Phase.EXPECTING or (generation, "admitted") in world.store:
                    yield "has waited for too long", self._answered(world, rank, process, Interrupted())
            case HandOver():
                yield from self._handed_over(world, rank, process)
            case _:
                raise AssertionError(request)

    def _arrives(self, world: World, rank: int, process: Process, name: str) -> Steps:
        """It comes to the end of its attempt, and knows any membership since the one that it has seen last."""
        state = process.state
        assert state is not None
        wrote = world._replace(came=world.came | {(name, rank)})
        last = all((name, each) in wrote.came for each in state.generation.live)
        arrives = process._replace(state=state.after(Done()))
        for newest in world.memberships[process.seen :] if last else world.memberships[-1:]:
            yield f"arrives, knowing epoch {newest.epoch}", self._answered(wrote, rank, arrives, Arrived(last, newest))

    def _handed_over(self, world: World, rank: int, process: Process) -> Steps:
        """The state goes half by half from a live rank of the stage, which may train on meanwhile: the lowest, but here
        from any of them, so that they are alike."""
        state = process.state
        assert state is not None
        assert state.next is not None
        if state.phase is Phase.HANDING_OVER:
            yield "hands over", self._answered(world, rank, process, Done())
            stages = {state.layout.workers[each].cell.stage for each in state.next.live - state.before}
            if state.layout.cell.stage in stages:
                yield "finds a rank late", self._answered(world, rank, process, Interrupted())
            return
        if (state.generation.id, "admitted") in world.store:
            alone = process._replace(source=None)
            yield "finds the admission called off", self._answered(world, rank, alone, Interrupted())
        sources = sorted(state.before) if process.source is None else [process.source]
        for each in sources:
            source = world.processes[each]
            if state.layout.workers[each].cell.stage != state.layout.cell.stage or source.state is None:
                continue
            if process.source is not None:
                whole = process._replace(steps=(process.steps[0], source.steps[1]), source=None)
                yield "receives the second half", self._answered(world, rank, whole, Done())
            elif source.state.phase in _GIVES and source.state.next and source.state.next.id == state.generation.id:
                half = process._replace(steps=(source.steps[0], -1), source=each)
                yield f"receives the first half from {each}", self._with(world, rank, half)

    def _faults(self, world: World) -> Steps:
        newest, scope = world.memberships[-1], self.scope
        for rank, process in enumerate(world.processes):
            state = process.state
            runs, lives = state is not None or process.arrival > 0, rank in newest.live
            if state is not None and state.phase is Phase.LEFT:
                yield f"{rank} ends", self._without(world, rank, newest, "was not admitted")
            elif runs and lives and world.failures < scope.failures and (state is None or state.call < scope.calls):
                failed = self._without(world, rank, newest, "failed")
                yield f"{rank} fails", failed._replace(failures=world.failures + 1)
            if not runs and not lives and world.admissions < scope.admissions:
                after = newest.with_ready({rank: READY}, 0.0)
                grown = world._replace(memberships=(*world.memberships, after), admissions=world.admissions + 1)
                yield f"{rank} stands ready", self._with(grown, rank, Process(None, arrival=after.epoch))

    def _without(self, world: World, rank: int, newest: Membership, why: str) -> World:
        after = newest.without([Departure(rank, newest.epoch + 1, "host", why, 0.0)], 0.0)
        return self._with(world._replace(memberships=(*world.memberships, after)), rank, Process(None))

    # What follows from steps, and what must hold.

    def _answered(self, world: World, rank: int, process: Process, answer: Any) -> World:
        before = process.state
        assert before is not None
        try:
            after = self._settled(self._advanced(process, before.after(answer)))
        except UnrecoverableError:  # the job is lost, which is said: nothing is wrong with that
            gone = tuple(Process(None) for _ in world.processes)
            ended = self.scope.failures, self.scope.admissions, 0, self.scope.unsound
            return World(gone, world.memberships[-1:], {}, frozenset(), *ended)
        return self._with(world, rank, after)

    def _settled(self, process: Process) -> Process:
        """Go on with what a rank does by itself, until it needs something of others."""
        while (state := process.state) is not None:
            if state.phase is Phase.BETWEEN and state.call < self.scope.calls:
                process = self._advanced(process, state.begin(trains=True))
            elif state.phase is Phase.FENCING:
                fenced = process._replace(late=None) if self.scope.fenced else process
                process = self._advanced(fenced, state.after(Done()))
            else:
                break
        return process

    def _advanced(self, process: Process, after: Rank) -> Process:
        before, steps = process.state, process.steps
        assert before is not None
        here, there = before.generation, after.generation
        if here.id == there.id and here.live != there.live:
            raise ViolationError(f"{after.rank}: generation {there.id} has another live set than before")
        if after.call > before.call:
            if steps != (before.call, before.call):
                raise ViolationError(f"{after.rank} takes step {before.call} after {steps}")
            steps = after.call, after.call
        process = process._replace(state=after, steps=steps)
        if after.phase is Phase.ATTEMPTING:
            if steps != (after.call, after.call):
                raise ViolationError(f"{after.rank} begins call {after.call} with {steps} steps")
            if process.late is not None:  # it may write at any time from now on
                raise ViolationError(
                    f"{after.rank}: an operation of turn {process.late} writes into gradients of turn {after.turn}"
                )
        return process

    def _with(self, world: World, rank: int, process: Process) -> World:
        state = process.state
        if state is not None and state.phase is Phase.ADMITTING:
            request = state.request
            assert isinstance(request, LookUp)
            membership = next(each for each in world.memberships if each.epoch == request.epoch)
            process = self._advanced(process, state.after(Changed(membership)))
        processes = (*world.processes[:rank], process, *world.processes[rank + 1 :])
        after = world._replace(processes=processes)
        self._check_generations(after)
        return after

    def _check_generations(self, world: World) -> None:
        """Ranks in one generation have one live set, and have committed the same calls but for the one under way."""
        known: dict[Any, tuple[frozenset[int], int]] = {}
        for process in world.processes:
            state = process.state
            if state is None or (state.generation is state.next and state.phase in _NOT_YET_IN):
                continue
            here = state.generation
            live, call = known.setdefault(here.id, (here.live, state.call))
            if live != here.live:
                raise ViolationError(f"generation {here.id} has live ranks {sorted(live)} and {sorted(here.live)}")
            if abs(call - state.call) > 1:
                raise ViolationError(f"ranks of generation {here.id} are at calls {call} and {state.call}")

    def _check_end(self, world: World) -> None:
        """Nothing but faults can happen: all live ranks have carried out all calls. None waits for what never comes."""
        self.ends += 1
        states = [each.state for each in world.processes if each.state is not None]
        waiting = [state for state in states if state.call < self.scope.calls and state.phase is not Phase.LEFT]
        if waiting:
            raise ViolationError(f"all wait: {[(each.rank, each.phase.value) for each in waiting]}")

    # States that go on alike are one.

    def _needed(self, world: World) -> World:
        """Return `world` without what no rank can look at any more."""
        states = [each.state for each in world.processes if each.state is not None]
        oldest = min((state.generation.id for state in states), default=generations.FIRST)
        meets = {state.next.id for state in states if state.next is not None}
        of_these = {key: value for key, value in world.store.items() if _may_be_met(key[0], oldest, meets)}
        names = {name for state in states for name in (state.attempt, state.attempted, *state.open)}
        names |= {value.attempted for value in of_these.values() if isinstance(value, HandedIn)}
        first = min(((state.call, state.turn) for state in states), default=(0, 0))
        names |= {key[5:] for (_, key), word in of_these.items() if word == REPEAT and _is_ahead(key, first)}
        store = {key: of_these[key] for key in of_these if key[1][:5] != "fate/" or key[1][5:] in names}
        came = frozenset(each for each in world.came if each[0] in names)
        return world._replace(store=store, came=came)

    def _key(self, world: World) -> int:
        names = self._names(world)
        newest = world.memberships[-1]
        first = min((each.seen for each in world.processes if each.state is not None), default=newest.epoch)
        members = tuple(
            (len(each.left), tuple((names[back.rank], back.epoch) for back in each.arrived))
            for each in world.memberships[first:]
        )
        left = tuple((names[each.rank], each.epoch) for each in newest.left)
        processes: list[Any] = [None] * len(names)
        for rank, each in enumerate(world.processes):
            source = each.source if each.source is None else names[each.source]
            processes[names[rank]] = each.state and _state_key(each.state, names), *each[1:-1], source
        store = frozenset(
            (_renamed_key(key, names), _renamed_value(value, names)) for key, value in world.store.items()
        )
        came = frozenset((name, names[rank]) for name, rank in world.came)
        counts = world.failures, world.admissions, world.lates, world.unsound
        return hash((tuple(processes), store, came, left, members, counts))

    def _names(self, world: World) -> Names:
        """Return a number for each rank: its own in the first stage, whose lowest live rank leads; by what it has done
        in the others. Ranks that have done the same keep their order."""
        came: dict[int, list[str]] = {rank: [] for rank in range(len(world.processes))}
        for name, rank in world.came:
            came[rank].append(name)
        replicas, newest = self.scope.replicas, world.memberships[-1]
        left = {each.rank: each.epoch for each in newest.left}

        def done(rank: int) -> tuple[int, int]:
            process = world.processes[rank]
            state = process.state
            here = state and (state.call, state.turn, state.phase, state.attempted, state.generation.id, state.due)
            further = state and state.next and state.next.id, left.get(rank), tuple(sorted(came[rank]))
            return rank // replicas, hash((here, process[1:-1], further))

        names = list(range(len(world.processes)))
        for number, rank in enumerate(sorted(names[replicas:], key=done), replicas):
            names[rank] = number
        return tuple(names)


def _may_be_met(generation: generations.GenerationId | None, oldest: generations.GenerationId, meets: set[Any]) -> bool:
    return generation is None or generation > oldest or generation in meets


def _is_ahead(fate: str, first: tuple[int, int]) -> bool:
    """Return whether the rank that has come least far, to the call and turn of `first`, may look at a fate yet."""
    _, call, _, turn = fate.split("/")
    return (int(call), int(turn)) >= first


def _admits(world: World) -> bool:
    """Return whether an admission is under way, or can begin before all ranks have come to the end of an attempt."""
    states = [each.state for each in world.processes if each.state is not None]
    if any(each.due is not None or each.phase in _IN_ADMISSION for each in states):
        return True
    return any(
        key.startswith("ticket/") or str(value).startswith(f"{COMMIT} ") for (_, key), value in world.store.items()
    )


def _has_all_choices(world: World, state: Rank) -> bool:
    """Return whether no step of others gives a rank another choice, where the membership stays, or changes its step."""
    if state.phase is Phase.BETWEEN:  # after its last call
        return True
    match state.request:
        case Put() | AwaitChange():
            return True
        case Await(generation, key):
            return (generation, key) in world.store
        case AwaitAll(generation, keys):
            return all((generation, key) in world.store for key in keys)
        case Attempt(name):  # whose end not all can come to: so it is not the last
            missing = [each for each in state.generation.live if (name, each) not in world.came]
            others = [world.processes[each].state for each in missing]
            return any(each is None or each.generation.id > state.generation.id for each in others)
    return False


def _only_looks(before: Rank, after: Rank | None, label: str) -> bool:
    """Return whether a step changes nothing that others look at, and is possible later, too."""
    if after is None:
        return False
    if label == _INTERRUPTED or after.phase is Phase.DECIDING:  # the last to arrive
        return True
    match before.request if before.phase is not Phase.BETWEEN else None:
        case Await() | AwaitAll() | AwaitChange():
            return not (before.phase is Phase.EXPECTING and after.phase is Phase.CALLING_OFF)  # too late: not so later
        case HandOver():
            return before.phase is Phase.HANDING_OVER
        case _:
            return False


def _in_any_order(state: Rank) -> Iterator[Rank]:
    """Return `state`, or where it calls several in, with each of them as the next: the lowest, but ranks are alike."""
    if state.phase is not Phase.CALLING_IN:
        yield state
        return
    for first in state.open:
        yield replace(state, open=(first, *(each for each in state.open if each != first)))


def _state_key(state: Rank, names: Names) -> Any:
    here, met = state.generation, state.next
    called = state.phase is Phase.CALLING_IN
    return (
        *(state.call, state.turn, state.phase, state.inside, state.repeated, state.attempted, state.due),
        tuple(sorted(names[int(each)] for each in state.open)) if called else state.open,
        (here.id, _renamed(here.live, names), _epochs(here.admitted, names), _epochs(here.refused, names)),
        None if met is None else (met.id, _renamed(met.live, names)),
        None if state.agreement is None else (state.agreement.committed, state.agreement.turn),
    )


def _epochs(epochs: Mapping[int, int], names: Names) -> tuple[tuple[int, int], ...]:
    return tuple(sorted((names[rank], epoch) for rank, epoch in epochs.items())) if epochs else ()


@cache
def _renamed(ranks: frozenset[int], names: Names) -> frozenset[int]:
    return frozenset(names[rank] for rank in ranks)


@cache
def _renamed_key(key: Key, names: Names) -> Any:
    generation, text = key
    kind, *rest = text.split("/")
    return generation, (text if kind == "fate" or not rest else (kind, names[int(rest[0])], *rest[1:]))


def _renamed_value(value: Any, names: Names) -> Any:
    match value:
        case str():
            return value
        case HandedIn():
            return value.attempted, value.turn, value.call
        case Agreement():
            return value.committed, value.turn
        case Ticket():
            ranks = (_renamed(frozenset(each), names) for each in (value.dead, value.new))
            epochs = (_epochs(each, names) for each in (value.admitted, value.refused))
            return value.membership, value.admission, value.call, value.turn, *ranks, *epochs
    raise AssertionError(value)
