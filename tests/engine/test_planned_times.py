# SPDX-License-Identifier: Apache-2.0
"""Plans take on the model of the device what they are said to take, with one hardware queue and with many."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.device_model import Device, Rank, play
from support.device_model.cases import random_costs
from support.device_model.from_runtime import Iteration, Job

from adaptra_megatron.schedule.classic import stock_order
from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.ir import Schedule
from adaptra_megatron.schedule.planner import plan
from adaptra_megatron.schedule.simulator import simulate

ONE_PER_STREAM = 10_000


def modelled_s(schedule: Schedule, costs: Costs, device: Device) -> float:
    job = Job(iterations=(Iteration(schedule=schedule, costs=costs, planned_for=costs),))
    outcome = play({Rank(0, stage): {"training": job.record(stage)} for stage in range(costs.stages)}, device)
    assert outcome.deadlock is None, outcome.deadlock
    return max(end_s for (_rank, label), (_start_s, end_s) in outcome.times_s.items() if isinstance(label, tuple))


@settings(max_examples=12)
@given(seed=st.integers(0, 2**32), queue=st.sampled_from(("separate", "shared", "serial")))
def test_planned_times_hold_on_the_model_and_are_never_longer_than_stocks(seed: int, queue: str) -> None:
    random = Random(seed)
    stages, chunks = random.randint(2, 6), random.randint(1, 2)
    costs = random_costs(random, stages, chunks, stages * random.randint(1, 4))
    links = {ends: cost._replace(rendezvous=True) for ends, cost in costs.links.items()}
    shared, serial = queue != "separate", queue == "serial"
    costs = dataclasses.replace(costs, links=links, shared_queue=shared, serial_queue=serial, max_in_flight=())
    stock, planned = stock_order(stages, costs.micro_batches, chunks), plan(costs)
    # NCCL's trailing wait is what makes one queue serial.
    device = Device(queues=1 if shared else ONE_PER_STREAM, trailing_waits=serial)
    stock_s = modelled_s(stock, costs, device)
    planned_s = modelled_s(planned.schedule, costs, device)
    assert planned_s == pytest.approx(planned.makespan_s, rel=0.02)
    assert stock_s == pytest.approx(simulate(stock, costs).makespan_s, rel=0.02)
    assert planned_s <= stock_s * (1 + 1e-9)
