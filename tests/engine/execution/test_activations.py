# SPDX-License-Identifier: Apache-2.0
"""The executor counts activations as the simulator does, and stops before the cap."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.schedules import named_schedules, random_schedules

from adaptra_megatron.engine.execution.executor import ActivationAccount, ActivationCapError
from adaptra_megatron.schedule.ir import Action, Kind, Order, Schedule
from adaptra_megatron.schedule.simulator import peak_in_flight

schedules = st.one_of(named_schedules(), random_schedules())
released = st.sampled_from([0.0, 0.25, 0.5, 1.0, -0.75]) | st.floats(-2.0, 1.0)


def run(account: ActivationAccount, order: Order) -> None:
    for action in order:
        account.before(action)
        account.after(action)


@given(schedules, released)
def test_the_peak_is_the_simulators(schedule: Schedule, released: float) -> None:
    for order, expected in zip(schedule.orders, peak_in_flight(schedule, released), strict=True):
        account = ActivationAccount(0, None, released)
        run(account, order)
        assert math.isclose(account.peak, expected, abs_tol=1e-9)
        assert math.isclose(account.held, 0.0, abs_tol=1e-9), "all is given back at the end of an iteration"


@given(schedules, released)
def test_a_cap_of_the_peak_is_kept_and_less_is_not(schedule: Schedule, released: float) -> None:
    for stage, (order, peak) in enumerate(zip(schedule.orders, peak_in_flight(schedule, released), strict=True)):
        run(ActivationAccount(stage, peak, released), order)
        account = ActivationAccount(stage, peak - 0.001, released)
        with pytest.raises(ActivationCapError):
            run(account, order)
        assert account.held <= peak - 0.001
        assert account.peak <= peak - 0.001


def test_the_error_names_stage_action_count_cap_and_remedy() -> None:
    account = ActivationAccount(3, 2.0, 0.0)
    for micro_batch in range(2):
        account.before(Action(3, Kind.FORWARD, 0, micro_batch))
    with pytest.raises(ActivationCapError) as failed:
        account.before(Action(3, Kind.FORWARD, 1, 7))
    for part in ("stage 3", "holds 2 activations", "micro-batch 7, chunk 1", "cap of 2", "--adaptra-max-in-flight"):
        assert part in str(failed.value)
