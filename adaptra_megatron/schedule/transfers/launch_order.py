# SPDX-License-Identifier: Apache-2.0
"""Define one order of all actions and transfers of a pipeline, in which stages launch work and post receives on GPUs.

On a GPU a send ends only when its receive runs, a hardware queue starts operations in the order in which they were
issued, and some calls of the host wait for the whole device. So stages that post receives in arbitrary order may wait
for each other for ever. They cannot if all stages follow one order with two properties: it respects the dependencies of
actions, and each transfer comes after the action that makes its message and before the next action of that stage. Every
stage launches its own part of that order: its actions, its sends and its receives, over all links.

Proof: suppose nothing makes progress, and take the first operation in the order that has not ended. A stage that takes
part in it has issued only earlier operations before it, which have all ended. A host waits only for operations that it
has issued, on its own device or a peer's, or for the other end of one that it is issuing. So no host is blocked before
the operation, and it has been issued at all its ends. Nothing is in front of it in any queue, and everything that it
needs has ended: it runs, and ends.

The proof makes no other assumptions: the number of a device's queues does not matter, nor how often a host waits for
it, nor whether communicators connect at their first use. Collectives of replicas belong to the action with which they
are launched, if replicas run one plan in one order; if not, their reductions have places in all orders alike
(engine.execution.stage_program). Two conditions remain. Later operations may start earlier, in another queue, so the
device must have room for one kernel of each stream at once. And a single thread must launch everything, since work of a
second thread would have no place in the order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from adaptra_megatron.schedule import _native
from adaptra_megatron.schedule.costs import Costs, PerChunk, uniform_costs_for
from adaptra_megatron.schedule.ir import Action, Kind, Order, Placement, Schedule
from adaptra_megatron.schedule.native import encode_schedule, problem_from_costs
from adaptra_megatron.schedule.simulator import check_fits, sent_s, simulate


class OrderedMessage(NamedTuple):
    """An activation (`gradient` False) or a gradient for `chunk` of the receiving stage.

    `source` equals `target` where one stage has two successive virtual stages: then nothing is sent.
    """

    source: int
    target: int
    gradient: bool
    chunk: int
    micro_batch: int


def produced(action: Action, placement: Placement) -> OrderedMessage | None:
    """Return the message that `action` makes; None for weight gradients and at the ends of the model."""
    stage, kind, chunk, micro_batch, _ = action
    if kind is Kind.BACKWARD_WEIGHT:
        return None
    gradient = kind is not Kind.FORWARD
    receiver = (placement.previous_place if gradient else placement.next_place)(stage, chunk)
    return None if receiver is None else OrderedMessage(stage, receiver.stage, gradient, receiver.chunk, micro_batch)


def needed(action: Action, placement: Placement) -> OrderedMessage | None:
    """Return the message that must arrive before `action` starts; None if it needs none."""
    stage, kind, chunk, micro_batch, _ = action
    if kind is Kind.BACKWARD_WEIGHT:
        return None
    gradient = kind is not Kind.FORWARD
    sender = (placement.next_place if gradient else placement.previous_place)(stage, chunk)
    return None if sender is None else OrderedMessage(sender.stage, stage, gradient, chunk, micro_batch)


def sent_to(order: Order, target: int, placement: Placement) -> list[OrderedMessage]:
    """Return the messages from a stage with `order` to stage `target`, in sending order."""
    messages = (produced(action, placement) for action in order)
    return [message for message in messages if message is not None and message.target == target]


LaunchRanks = tuple[tuple[int, ...], ...]
"""Rank of each action of each stage: ascending within a stage, unique over all."""

_SHORTEST = 1e-6
"""Shortest action as a fraction of the longest: none may start together with what it needs."""


def launch_ranks(schedule: Schedule, costs: Costs | None = None) -> LaunchRanks:
    """Return the ranks of all actions by expected end; at equal times, the lower stage comes first.

    So every receive is posted before its message is made. In a shared queue a receive delays later work until the
    link's previous message has arrived; an action goes before a receive if that costs less (csrc/schedule/launch.hpp).

    `costs`: expected costs; None: one unit for every F, I and W, and 0 for links. The result is the same on every rank
    for equal arguments. Raises SimulationError for orders that deadlock.
    """
    costs = costs or uniform_costs_for(schedule)
    check_fits(schedule, costs)
    try:
        ranks = _native.launch_ranks(problem_from_costs(costs), encode_schedule(schedule))
    except ValueError:
        simulate(schedule, costs)  # raises: it says which actions wait for each other
        raise
    return tuple(map(tuple, ranks))


def start_ranks(schedule: Schedule, costs: Costs | None = None) -> LaunchRanks:
    """Return the ranks of all actions by expected start, the order of `receives_at_ends`. See `launch_ranks`."""
    start_s = simulate(schedule, _positive(costs if costs is not None else uniform_costs_for(schedule))).start_s
    places = sorted((each_s, stage, index) for stage, row in enumerate(start_s) for index, each_s in enumerate(row))
    ranks = {(stage, index): rank for rank, (_start_s, stage, index) in enumerate(places)}
    return tuple(tuple(ranks[stage, index] for index in range(len(row))) for stage, row in enumerate(start_s))


class Posting(NamedTuple):
    """Messages whose receives are posted around one action."""

    before: tuple[OrderedMessage, ...]
    before_send: tuple[OrderedMessage, ...]
    """Messages to post after the action is launched and before its own message is sent."""


def receives_before(schedule: Schedule, stage: int, ranks: LaunchRanks) -> tuple[Posting, ...]:
    """Return, for each action of `stage`, the messages whose receives are posted right before it, in order.

    Each transfer follows the action that makes its message. Each message from another stage is posted once, at the
    latest before the action that needs it.
    """
    arriving = sorted((ranks[source][index], message) for source, index, message in _arriving(schedule, stage))
    postings, posted = [], 0
    for rank in ranks[stage]:
        first = posted
        while posted < len(arriving) and arriving[posted][0] < rank:
            posted += 1
        postings.append(Posting(tuple(message for _rank, message in arriving[first:posted]), ()))
    return tuple(postings)


def receives_at_ends(schedule: Schedule, stage: int, costs: Costs | None = None) -> tuple[Posting, ...]:
    """Return the receives as `receives_before`, with each transfer at the expected end of the action that makes it.

    For messages of unknown size: the host waits for the size before it posts the receive. The wait is short, as the
    message is then about to be sent. With known sizes this is slower, since receives are posted later.
    """
    expected = _positive(costs if costs is not None else uniform_costs_for(schedule))
    simulation = simulate(schedule, expected)
    start_s, end_s = simulation.start_s, sent_s(simulation, expected)
    is_transfer, is_action = 0, 1  # at equal moments: an action may need what has just ended
    events: list[tuple[float, int, int, int, OrderedMessage | None]] = [
        (end_s[source][index], is_transfer, source, index, message)
        for source, index, message in _arriving(schedule, stage)
    ]
    for index, action in enumerate(schedule.orders[stage]):
        events.append((start_s[stage][index], is_action, stage, index, None))
        if produced(action, schedule.placement) is not None:
            events.append((end_s[stage][index], is_transfer, stage, index, None))
    postings = [Posting((), ())] * len(schedule.orders[stage])
    due: list[OrderedMessage] = []
    for _moment_s, kind, _stage, index, message in sorted(events, key=lambda event: event[:4]):
        if message is not None:
            due.append(message)
            continue
        batch, due = tuple(due), []
        posting = postings[index]
        postings[index] = Posting(batch, ()) if kind == is_action else Posting(posting.before, batch)
    return tuple(postings)


def _arriving(schedule: Schedule, stage: int) -> Iterator[tuple[int, int, OrderedMessage]]:
    """Return the messages for `stage`, each with the stage and position of the action that makes it."""
    placement = schedule.placement
    for source in placement.peers(stage):
        for index, action in enumerate(schedule.orders[source]):
            message = produced(action, placement)
            if message is not None and message.target == stage:
                yield source, index, message


def _positive(costs: Costs) -> Costs:
    """Return `costs` with no action of zero length."""
    shortest_s = _SHORTEST * max(max(map(max, table)) for table in costs.tables().values()) or 1.0

    def clamped(table: PerChunk) -> PerChunk:
        return tuple(tuple(max(seconds, shortest_s) for seconds in row) for row in table)

    return costs.with_tables({name: clamped(table) for name, table in costs.tables().items()})
