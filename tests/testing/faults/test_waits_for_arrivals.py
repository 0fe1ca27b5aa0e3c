# SPDX-License-Identifier: Apache-2.0
"""Iterations that wait until ranks that have died are back."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from adaptra_megatron.common.membership import Arrival, Departure, Membership, Readiness
from testing.faults import deaths
from testing.faults.deaths import Arrivals
from testing.faults.emulated_compute import EmulationError

LOST = Departure(1, 1, "node0", "was killed by SIGKILL", 0.0)
BACK = Arrival(1, 2, Readiness(1, 1, "node0", "boot/net"))
WHOLE, WITHOUT, AGAIN = (
    Membership(0, 2, 0.0, ()),
    Membership(1, 2, 1.0, (LOST,)),
    Membership(2, 2, 2.0, (LOST,), (BACK,)),
)


class Records:
    """What the job's store has, one look after the other, and the last of it from then on."""

    def __init__(self, *found: Membership | None) -> None:
        self._found: Iterator[Membership | None] = iter(found)
        self._last: Membership | None = None
        self.looks = 0

    def newest(self) -> Membership | None:
        self.looks += 1
        self._last = next(self._found, self._last)
        return self._last


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> type[Arrivals]:
    monkeypatch.setattr(deaths, "ARRIVES_S", 0.2)
    monkeypatch.setattr(deaths, "_LOOKS_S", 0.001)
    monkeypatch.delenv(deaths.START_VARIABLE, raising=False)
    return Arrivals


def keeping(records: Records, monkeypatch: pytest.MonkeyPatch) -> Records:
    monkeypatch.setattr(deaths.MembershipRecords, "of_rank", lambda timeout_s: records)
    return records


def test_it_goes_on_once_all_are_back(waits: type[Arrivals], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deaths, "ARRIVES_S", 20.0)
    records = keeping(Records(None, WHOLE, WITHOUT, WITHOUT, AGAIN), monkeypatch)
    waits([3]).set_iteration(2)
    assert records.looks == 0
    waits([3]).set_iteration(3)
    assert records.looks == 5


def test_a_process_that_was_started_again_is_waited_for_and_does_not_wait(
    waits: type[Arrivals], monkeypatch: pytest.MonkeyPatch
) -> None:
    records = keeping(Records(AGAIN), monkeypatch)
    monkeypatch.setenv(deaths.START_VARIABLE, "1")
    again = waits([3, 4])
    again.set_iteration(3)
    assert records.looks == 0
    again.set_iteration(4)
    assert records.looks == 1


def test_it_goes_on_where_the_others_do_not_come_back(waits: type[Arrivals], monkeypatch: pytest.MonkeyPatch) -> None:
    keeping(Records(WHOLE, WITHOUT), monkeypatch)
    begun_s = time.monotonic()
    waits([3]).set_iteration(3)
    assert time.monotonic() - begun_s >= 0.2


@pytest.mark.parametrize("found", [WHOLE, None])
def test_an_iteration_in_which_no_rank_dies_is_an_error(
    found: Membership | None, waits: type[Arrivals], monkeypatch: pytest.MonkeyPatch
) -> None:
    keeping(Records(found), monkeypatch)
    with pytest.raises(EmulationError, match=r"iteration 3: no rank has failed for 0\.2 s"):
        waits([3]).set_iteration(3)
