# SPDX-License-Identifier: Apache-2.0
"""One order of all actions of a pipeline, by which its stages launch work and post receives on GPUs.

On a GPU a send ends only when its receive runs, a hardware queue starts operations in the order in which they were
issued, and some calls of the host wait for the whole device. Receives that are posted at will then make stages wait for
each other for ever. They cannot if all stages follow one order of the actions that respects what actions need of each
other. A message has the rank of the action that produces it. Before a stage launches its action of rank r it has
posted exactly the receives whose messages have a rank below r, in the order of their ranks over all links, and each
send follows its action at once. Of all transfers that have not ended, consider the one of the lowest rank: nothing that
both of its ends have issued before it is unfinished but computation, which ends by itself, and a host that still waits
for its device waits for transfers of lower rank alone. So it ends, and by induction all do.
"""

from __future__ import annotations

from adaptra_megatron.schedule import _native
from adaptra_megatron.schedule.actions import Schedule
from adaptra_megatron.schedule.costs import Costs, uniform_costs
from adaptra_megatron.schedule.native import encode_schedule, problem_from_costs
from adaptra_megatron.schedule.routing import Message, produced
from adaptra_megatron.schedule.simulator import simulate

LaunchRanks = tuple[tuple[int, ...], ...]
"""For each stage, the rank of each of its actions; ascending within a stage, different for all actions."""


def launch_ranks(schedule: Schedule, costs: Costs | None = None) -> LaunchRanks:
    """Ranks of all actions by the moment at which they are expected to end; at equal moments, the lower stage first.

    So every receive is posted by the time that its message is made. In a shared queue a receive would hold up what is
    behind it until the link's previous message has arrived. Where that takes longer than posting the receive after the
    action behind it delays the message, that action comes first. See csrc/schedule/launch.hpp.

    `costs`: what actions and links are expected to take; None: every F, I and W one unit, links nothing. Equal on every
    rank that has the same arguments. Raises SimulationError where the orders wait on each other for ever.
    """
    costs = costs or _unit_costs(schedule)
    simulate(schedule, costs)
    return tuple(map(tuple, _native.launch_ranks(problem_from_costs(costs), encode_schedule(schedule))))


def receives_before(schedule: Schedule, stage: int, ranks: LaunchRanks) -> tuple[tuple[Message, ...], ...]:
    """For each action of `stage`, the messages whose receives are posted right before it, in that order.

    Every message that the stage needs of another stage is among them once, no later than before the action that needs
    it.
    """
    stages, chunks = schedule.stages, schedule.chunks
    arriving = sorted(
        (ranks[source][index], message)
        for source in {(stage - 1) % stages, (stage + 1) % stages} - {stage}
        for index, action in enumerate(schedule.orders[source])
        if (message := produced(action, stages, chunks)) is not None and message.target == stage
    )
    batches = []
    posted = 0
    for rank in ranks[stage]:
        first = posted
        while posted < len(arriving) and arriving[posted][0] < rank:
            posted += 1
        batches.append(tuple(message for _rank, message in arriving[first:posted]))
    return tuple(batches)


def _unit_costs(schedule: Schedule) -> Costs:
    return uniform_costs(
        schedule.stages,
        schedule.micro_batches,
        chunks=schedule.chunks,
        forward_s=1.0,
        backward_input_s=1.0,
        backward_weight_s=1.0,
    )
