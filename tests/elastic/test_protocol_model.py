# SPDX-License-Identifier: Apache-2.0
"""The recovery protocol holds in every order in which ranks fail and rejoin; rules of old do not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from elastic.protocol_model import Model, Names, Scope, ViolationError, World, layout_of

from adaptra_megatron.elastic import protocol
from adaptra_megatron.elastic.generation import GenerationId


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "scope",
    [
        Scope(calls=2, failures=1, admissions=0),
        Scope(calls=2, failures=1, admissions=1),
        Scope(replicas=3, stages=1, failures=2, admissions=1),
        Scope(calls=2, failures=1, admissions=0, unsound=1),
    ],
    ids=["fails", "fails-and-rejoins", "two-of-three-fail-and-one-rejoins", "an-attempt-is-unsound"],
)
def test_invariants_hold_in_every_order(scope: Scope) -> None:
    model = Model(scope)
    assert model.explore() > 1000
    assert model.ends


class Unreduced(Model):
    """Explores all orders of steps; with `names`, states that differ by who is who each on its own."""

    def __init__(self, scope: Scope, names: Names | None = None) -> None:
        super().__init__(scope)
        self.names, self.alike = names, set[int]()

    def _alone(self, world: World) -> list[tuple[str, World]] | None:
        return None

    def _names(self, world: World) -> Names:
        return super()._names(world) if self.names is None else self.names

    def _key(self, world: World) -> int:
        if self.names is None:
            return super()._key(world)
        own, replicas = self.names, self.scope.replicas
        keys = []
        for others in itertools.permutations(own[replicas:]):
            self.names = (*own[:replicas], *others)
            keys.append(super()._key(world))
        self.names = own
        self.alike.add(min(keys))
        return keys[0]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("scope", "twice"),
    [
        (Scope(failures=1, admissions=0), 0),
        pytest.param(Scope(failures=1, admissions=1), 50, marks=pytest.mark.slow),
        pytest.param(Scope(3, 2, failures=1, admissions=0), 50, marks=pytest.mark.slow),
    ],
)
def test_only_states_that_differ_by_who_is_who_are_one(scope: Scope, twice: int) -> None:
    """As many are explored as there are sets of alike states, among all: none is missed. `twice`: most that are
    explored for a second time, as ranks that have done the same keep their order."""
    each = Unreduced(scope, tuple(range(scope.replicas * scope.stages)))
    explored, all_states = Unreduced(scope).explore(), each.explore()
    assert 0 <= explored - len(each.alike) <= twice
    assert explored < 0.6 * all_states


@pytest.mark.timeout(300)
@pytest.mark.parametrize("replicas", [2, 3])
def test_invariants_hold_in_some_orders_of_two_failures_and_two_admissions(replicas: int) -> None:
    """As many as fit into seconds; slow tests have all of 2 x 2 cells, and millions of 3 x 2."""
    assert Model(Scope(replicas=replicas)).explore(25_000, seed=replicas) == 25_000


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("scope", "more_than"),
    [
        (Scope(3, 1, failures=2, admissions=2), 100_000),
        (Scope(3, 2, failures=2, admissions=0), 1_000_000),
        (Scope(3, 2, failures=1, admissions=1), 500_000),
        (Scope(2, 2, failures=1, admissions=1, unsound=1), 500_000),
        (Scope(2, 2, failures=2, admissions=2), 1_000_000),
    ],
)
def test_invariants_hold_in_every_order_of_more(scope: Scope, more_than: int) -> None:
    """Minutes each. An operation may be late in front of the fence, which waits for it: it adds no state, but would,
    and break an invariant, where a rank left the fence out."""
    assert Model(scope).explore() > more_than


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_invariants_hold_in_millions_of_orders_with_three_replicas() -> None:
    """Two failures and two admissions in 3 x 2 cells: too many to explore them all."""
    Model(Scope(replicas=3)).explore(2_000_000, seed=3)


def test_without_a_fence_a_late_operation_writes_into_the_next_attempt() -> None:
    with pytest.raises(ViolationError, match="an operation of turn 0 writes into gradients of turn 1"):
        Model(Scope(failures=1, admissions=0, fenced=False)).explore()


def numbered_by_membership(original: Callable[..., Any]) -> Callable[..., Any]:
    """Rules of old: an admission takes the number of the membership that it follows from."""

    def old(layout: Any, membership: Any, before: Any, call: int) -> Any:
        found = original(layout, membership, before, call)
        return replace(found, id=GenerationId(membership.epoch))

    return old


def test_an_admission_that_shares_its_number_with_a_failure_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "with_rejoining", numbered_by_membership(protocol.with_rejoining))
    with pytest.raises(ViolationError, match="generation 3 has another live set than before"):
        Model(Scope(late_operations=0, admissions=1)).explore(60_000, seed=3)


def test_all_ranks_know_that_an_attempt_is_repeated_until_the_next_call() -> None:
    """Whichever rank finds the next one unsound: it is an error then."""
    finds, other = (protocol.Rank.first(layout_of(Scope(), rank)).begin(trains=True) for rank in (0, 1))
    finds = finds.after(protocol.Unsound())
    assert finds.request == protocol.PutOnce(None, f"fate/{other.attempt}", protocol.REPEAT)
    found = protocol.Found(protocol.REPEAT)
    again = [finds.after(found), other.after(protocol.Done()).after(protocol.Arrived(False, None)).after(found)]
    assert {(each.phase, each.turn, each.repeated) for each in again} == {(protocol.Phase.ATTEMPTING, 1, True)}
    arrived = [each.after(protocol.Done()).after(protocol.Arrived(False, None)) for each in again]
    committed = [each.after(protocol.Found(protocol.COMMIT)) for each in arrived]
    assert [(each.call, each.begin(trains=True).repeated) for each in committed] == [(1, False)] * 2
