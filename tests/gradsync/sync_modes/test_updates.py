# SPDX-License-Identifier: Apache-2.0
"""Whatever the order of arrivals, begins and meetings: all gradients are used once, none too late, none is stuck."""

from __future__ import annotations

import itertools
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptra_megatron.gradsync.sync_modes import Mode
from adaptra_megatron.gradsync.update_order import CatchUp, Event, Handover, Met, Update, Updates
from adaptra_megatron.schedule.ir import ScheduleError


def mode_of(replicas: int, choice: int) -> Mode:
    """Any of those of so many replicas."""
    if choice <= replicas:
        return Mode.x_order(replicas, max(choice, 1))
    split = 1 + choice % (replicas - 1) if replicas > 2 else 1
    return Mode.dynamic([range(split), range(split, replicas)])


class Script:
    """Replicas of one training: each computes, hands in, waits, and meets the others after every few updates."""

    def __init__(self, state: Updates, replicas: int, interval: int) -> None:
        self.state, self.interval = state, interval
        self.iteration, self.met = [0] * replicas, [0] * replicas
        self.begun, self.waits, self.there = [False] * replicas, [False] * replicas, [False] * replicas
        self.made: list[Update] = []
        self.given: dict[int, list[int]] = {}
        self.handed_in = 0

    def due(self, replica: int) -> bool:
        """Return whether the script meets before it goes on."""
        return self.iteration[replica] % self.interval == 0 and self.met[replica] < self.iteration[replica]

    @property
    def free(self) -> list[int]:
        """Replicas that have something to do."""
        return [
            each
            for each in range(len(self.iteration))
            if not self.there[each] and (self.due(each) or not self.waits[each])
        ]

    def act(self, replica: int) -> None:
        """The next thing of one."""
        if self.due(replica):
            self.there[replica] = True
            self.take(self.state.meets(replica))
        elif not self.begun[replica]:
            self.begun[replica] = True
            self.state.begins(replica)
        else:
            self.begun[replica], self.waits[replica] = False, True
            self.take(self.state.arrives(replica))
        while (update := self.state.next_update()) is not None:
            self.make(update)

    def take(self, events: list[Event]) -> None:
        """What all come to know."""
        for event in events:
            if isinstance(event, CatchUp):
                assert [each.target for each in event.handovers] == [event.replica]
                assert self.iteration[event.handovers[0].source] == event.version
                assert self.waits[event.replica]
                self.hold(
                    event.handovers[0].source, [self.iteration[event.replica], *self.given.pop(event.replica, ())]
                )
                self.iteration[event.replica], self.waits[event.replica] = event.version, False
            else:
                assert isinstance(event, Met)
                assert self.iteration == [event.version] * len(self.iteration)
                self.met, self.there = list(self.iteration), [False] * len(self.iteration)

    def hold(self, replica: int, read: list[int]) -> None:
        """It is given gradients of parameters of these versions."""
        self.handed_in += 1
        self.given.setdefault(replica, []).extend(read)

    def make(self, update: Update) -> None:
        """An update: of gradients that wait, none too old, after handovers from those that have its parameters."""
        assert update.version == len(self.made)
        assert all(self.waits[each] for each in update.members)
        assert not any(self.due(each) for each in range(len(self.iteration)) if self.iteration[each] == update.version)
        lacking = [each for each in update.members if self.iteration[each] < update.version]
        assert [each.target for each in update.handovers] == lacking
        assert all(self.iteration[each.source] == update.version for each in update.handovers)
        assert update.whole == (len(update.members) == len(self.iteration))
        read = [self.iteration[each] for each in update.members]
        read += [each for member in update.members for each in self.given.pop(member, ())]
        assert update.gradients == len(read)
        assert update.version - min(read) <= self.state.max_staleness
        for each in update.members:
            self.waits[each], self.iteration[each] = False, update.version + 1
        self.made.append(update)


@settings(max_examples=30)
@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 6), st.randoms(use_true_random=False))
def test_gradients_are_used_once_and_in_time(replicas: int, bound: int, interval: int, random: Random) -> None:
    """Any replica may be the next to do something, modes change, and meetings are not known of before."""
    state = Updates(replicas, bound)
    script = Script(state, replicas, interval)
    while len(script.made) < 20:
        assert script.free, "all wait"
        script.act(random.choice(script.free))
        if random.random() < 0.1:
            state.mode = mode_of(replicas, random.randint(1, 2 * replicas))
        read = state.read
        assert all(state.version - read[each] <= bound for each in range(replicas) if not script.waits[each])


def test_late_gradients_are_part_of_a_later_update() -> None:
    state = Updates(3, 4)
    state.mode = Mode.x_order(3, 2)
    for replica in (0, 1):
        state.arrives(replica)
    assert state.next_update() == Update(0, (0, 1), (), (), False, 2)
    assert state.arrives(2) == [CatchUp(1, 2, (Handover(0, 2),))], "goes on, and its parent has the gradient"
    assert state.next_update() is None
    state.arrives(1)
    state.arrives(0)
    late = state.next_update()
    assert late == Update(1, (0, 1), (), (), False, 3)
    assert not late.together


def test_late_gradients_of_small_updates_wait_for_one_that_they_are_part_of() -> None:
    state = Updates(4, 4)
    state.mode = Mode.x_order(4, 2)
    for replica in (0, 1):
        state.arrives(replica)
    assert state.next_update() == Update(0, (0, 1), (), (), False, 2)
    assert state.arrives(2) == []
    state.arrives(1)
    late = state.next_update()
    assert late == Update(1, (1, 2), (2,), (Handover(0, 2),), False, 2)
    assert late.begins == 1


def test_a_small_group_gives_its_gradients_to_the_others_and_a_large_one_does_not() -> None:
    state = Updates(5, 4)
    state.mode = Mode.dynamic([(1, 2, 3, 4), (0,)])
    for replica in (1, 2, 3, 4):
        assert state.next_update() is None
        state.arrives(replica)
    assert state.next_update() == Update(0, (1, 2, 3, 4), (), (), False, 4)
    assert state.arrives(0) == [CatchUp(1, 0, (Handover(1, 0),))]
    state = Updates(4, 4)
    state.mode = Mode.dynamic([(2, 3), (0, 1)])
    for replica in (2, 3):
        state.arrives(replica)
    assert state.next_update() == Update(0, (2, 3), (), (), False, 2)
    state.begins(2)
    assert state.arrives(0) == []
    assert state.arrives(1) == []
    assert state.next_update() == Update(1, (0, 1), (0, 1), (Handover(2, 0), Handover(3, 1)), False, 2)


def test_the_others_wait_for_one_that_would_be_too_late() -> None:
    state = Updates(2, 2)
    state.mode = Mode.x_order(2, 1)
    for _ in range(2):
        state.arrives(0)
        assert state.next_update() is not None
    state.arrives(0)
    assert state.next_update() is None
    assert state.missing == [1]
    state.arrives(1)
    assert state.next_update() == Update(2, (0, 1), (1,), (Handover(0, 1),), True, 2)


def test_no_update_passes_a_meeting_that_is_not_known_of_yet() -> None:
    state = Updates(2, 8)
    state.mode = Mode.x_order(2, 1)
    state.arrives(0)
    assert state.next_update() is not None
    state.arrives(1)
    assert state.next_update() is None, "replica 0 may be about to meet"
    events = state.meets(0)
    assert [type(each) for each in events] == [CatchUp]
    assert state.absent == [1]
    assert state.meets(1) == [Met(1)]
    assert state.next_update() is None
    state.arrives(0)
    assert state.next_update() == Update(1, (0,), (), (), False, 2)


def test_all_orders_of_arrival_of_synchronous_training_are_one_update() -> None:
    for order in itertools.permutations(range(4)):
        state = Updates(4, 1)
        for replica in order:
            state.arrives(replica)
        update = state.next_update()
        assert update is not None
        assert update.together


def test_what_scripts_do_wrong_is_named() -> None:
    state = Updates(2, 1)
    state.mode = Mode.x_order(2, 1)
    state.arrives(0)
    with pytest.raises(ScheduleError, match="replica 0 hands in a gradient, and waits already"):
        state.arrives(0)
    assert state.next_update() is not None
    with pytest.raises(ScheduleError, match="replica 1 comes to a meeting at version 1 with version 0"):
        state.meets(1)
