# SPDX-License-Identifier: Apache-2.0
"""What each system takes in a published case, by exact simulation from the published times of the stages.

Compute and the delay of each message are counted; the optimizer, gradient reduction, the cost of handing a message to
another process and noise are not. What a slow link does to the systems without a host path is modelled: see System.
"""

from __future__ import annotations

import enum
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from adaptra_megatron.schedule.bounds import lower_bound
from adaptra_megatron.schedule.classic import interleaved, one_f_one_b, zb_h1, zb_h2
from adaptra_megatron.schedule.ir import Schedule
from adaptra_megatron.schedule.planner import plan
from adaptra_megatron.schedule.simulator import Simulation, simulate, simulate_online
from campaigns.published.cases import Case
from campaigns.published.stream_order import simulate_in_stream_order

CHUNKS = 2
CAP_PER_STAGE = 2
LARGER_CAP_PER_STAGE = 3
"""Activations that plans may hold, in multiples of the number of stages: as many as zero bubble's ZB-H2, and as many
as the published plans."""


class System(str, enum.Enum):
    """What is compared. The text is what tables say."""

    ONE_F_ONE_B = "1F1B"
    """Stock Megatron: sends and receives block the stage (schedule/transfers/blocking.py)."""
    INTERLEAVED = "interleaved"
    """Stock Megatron with the same work in two chunks per stage, blocking as well."""
    ZB_H1 = "ZB-H1"
    """Zero bubble in 1F1B's memory; transfers of a stage wait behind each other (stream_order.py)."""
    ZB_H2 = "ZB-H2"
    """Zero bubble in twice that memory, as ZB-H1 otherwise: the published system."""
    HOST_PATH_H1 = "host path, ZB-H1"
    """ZB-H1's order, every message on its own: it waits for nothing but the one before it on its link."""
    HOST_PATH_H2 = "host path, ZB-H2"
    """As HOST_PATH_H1, in ZB-H2's order: the published host path only."""
    FULL = "full, 2 PP"
    """Planned for these delays within CAP_PER_STAGE activations per stage; messages as on the host path."""
    FULL_LARGER = "full, 3 PP"
    """As FULL, within LARGER_CAP_PER_STAGE."""
    ONLINE = "online, 2 PP"
    """Whatever is ready, in FULL's memory; knows nothing of the delays."""


@dataclass(frozen=True, kw_only=True)
class SimulatedCase:
    """Seconds per iteration of one case."""

    case: Case
    slow_s: dict[System, float]
    healthy_s: dict[System, float]
    """Without any delay."""
    most_in_flight: dict[System, float]
    """Activations on the fullest stage, with the delay; of interleaved, in units of a whole stage's."""
    bound_s: float
    """No order in FULL's memory takes less."""
    larger_bound_s: float
    """The same of FULL_LARGER."""
    planning_s: float
    """Seconds that planning FULL took."""


def simulate_case(case: Case) -> SimulatedCase:
    """Simulate all systems in one case. Takes tens of milliseconds, most of it planning."""
    slow = {system: _simulate(system, case, slow=True) for system in System}
    healthy = {system: _simulate(system, case, slow=False).makespan_s for system in System}
    started_s = time.perf_counter()
    plan(case.costs(cap=CAP_PER_STAGE * case.stages))
    planning_s = time.perf_counter() - started_s
    most = {system: max(simulation.peak_in_flight) for system, simulation in slow.items()}
    most[System.INTERLEAVED] /= CHUNKS
    return SimulatedCase(
        case=case,
        slow_s={system: simulation.makespan_s for system, simulation in slow.items()},
        healthy_s=healthy,
        most_in_flight=most,
        bound_s=lower_bound(case.costs(cap=CAP_PER_STAGE * case.stages)).seconds,
        larger_bound_s=lower_bound(case.costs(cap=LARGER_CAP_PER_STAGE * case.stages)).seconds,
        planning_s=planning_s,
    )


def _simulate(system: System, case: Case, *, slow: bool) -> Simulation:
    costs = case.costs(slow=slow)
    if system is System.ONE_F_ONE_B:
        return simulate(one_f_one_b(case.stages, case.micro_batches), costs, blocking=True)
    if system is System.INTERLEAVED:
        order = interleaved(case.stages, case.micro_batches, CHUNKS)
        return simulate(order, case.costs(slow=slow, chunks=CHUNKS), blocking=True)
    if system is System.ONLINE:
        return simulate_online(case.costs(slow=slow, cap=CAP_PER_STAGE * case.stages))
    if system in (System.FULL, System.FULL_LARGER):
        cap = CAP_PER_STAGE if system is System.FULL else LARGER_CAP_PER_STAGE
        return simulate(plan(case.costs(slow=slow, cap=cap * case.stages)).schedule, costs)
    if system in (System.HOST_PATH_H1, System.HOST_PATH_H2):
        return simulate(zero_bubble(system, case), costs)
    return simulate_in_stream_order(zero_bubble(system, case), costs)


def zero_bubble(system: System, case: Case) -> Schedule:
    """The zero-bubble order that `system` runs."""
    make = zb_h1 if system in (System.ZB_H1, System.HOST_PATH_H1) else zb_h2
    return make(case.stages, case.micro_batches)


def published_ms(system: System, case: Case, *, slow: bool = True) -> float | None:
    """What was published for `system`; None where nothing was."""
    figures = case.published if slow else case.healthy
    return {
        System.ONE_F_ONE_B: figures.one_f_one_b_ms,
        System.ZB_H2: figures.zero_bubble_ms,
        System.HOST_PATH_H2: figures.host_path_ms,
        System.FULL: figures.full_ms,
    }.get(system)


def median_error(simulated: Sequence[SimulatedCase], system: System) -> float | None:
    """Median of |simulated / published - 1| of the slowdown by the delay; None where nothing was published.

    Slowdowns are compared (slow over healthy, each system against itself), since the times that were published contain
    what is not simulated.
    """
    errors = []
    for each in simulated:
        slow_ms, healthy_ms = published_ms(system, each.case), published_ms(system, each.case, slow=False)
        if slow_ms is not None and healthy_ms is not None:
            errors.append(abs(each.slow_s[system] / each.healthy_s[system] / (slow_ms / healthy_ms) - 1.0))
    return statistics.median(errors) if errors else None
