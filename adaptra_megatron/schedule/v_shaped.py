# SPDX-License-Identifier: Apache-2.0
"""Generate the schedules of V placements: chunk 0 runs down the stages and chunk 1 back up, so stage 0 holds both ends.

They accept any number of micro-batches: too few to fill the pipeline run as in a full iteration, without its last ones.
Activations are counted as in the papers: nothing is released before the weight gradient.
"""

from __future__ import annotations

from collections import deque
from itertools import product

from adaptra_megatron.schedule.ir import Action, Kind, Order, Placement, Schedule, require_counts, v_shape

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741
_PERIOD = 6
"""Length of the repeated block in unit times: F, I and W of two chunks."""


def zb_v(stages: int, micro_batches: int) -> Schedule:
    """ZB-V of Zero Bubble Pipeline Parallelism (arXiv 2401.10241, section 6); V-ZB of arXiv 2405.15362.

    With equal times of F, I and W no stage idles between its first and its last action, and every stage holds at most
    `2 stages` activations of one chunk: as much of the model's as 1F1B's first stage.
    """
    require_counts(stages=stages, micro_batches=micro_batches)
    filled = max(micro_batches, 2 * stages - 1)
    return _schedule(stages, micro_batches, [_zb_v_order(stage, stages, filled) for stage in range(stages)])


def dualpipe_v(stages: int, micro_batches: int) -> Schedule:
    """DualPipe-V: DeepSeek's DualPipe cut in half, by the steps of its `dualpipe/dualpipev.py`.

    DualPipe overlaps a forward with a backward of the other chunk; here the two run one after the other. With equal
    times of F, I and W, no stage idles longer than `stages - 1` of them, and every stage holds at most `2 stages + 1`
    activations of one chunk.
    """
    require_counts(stages=stages, micro_batches=micro_batches)
    filled = max(micro_batches, 2 * stages)
    return _schedule(stages, micro_batches, [_dualpipe_v_order(stage, stages, filled) for stage in range(stages)])


def v_half(stages: int, micro_batches: int) -> Schedule:
    """V-Half of Pipeline Parallelism with Controllable Memory (arXiv 2405.15362): about half of 1F1B's activations.

    Every stage holds at most `stages + 3` of one chunk, where 1F1B's first stage holds `2 stages`.
    """
    return _repeated(stages, micro_batches, down=2, up=1)


def v_min(stages: int, micro_batches: int) -> Schedule:
    """V-Min of Pipeline Parallelism with Controllable Memory (arXiv 2405.15362): about a third of 1F1B's activations.

    Every stage starts right after the previous one, in both directions, and holds at most `2 (stages + 4) / 3` of one
    chunk.
    """
    return _repeated(stages, micro_batches, down=1, up=1)


def v_orders(micro_batches: int, placement: Placement) -> list[Schedule]:
    """Return the schedules of this module for `placement`; none if it is not V-shaped."""
    if placement.stages == 1 or placement != v_shape(placement.stages):
        return []
    return [make(placement.stages, micro_batches) for make in (zb_v, dualpipe_v, v_half, v_min)]


class _Stage:
    """Builder of one stage's order; each kind of each chunk counts its own micro-batches."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.order: list[Action] = []
        self.forwards, self.backwards = [0, 0], [0, 0]
        self.weights: deque[Action] = deque()

    def run(self, kind: Kind, chunk: int) -> None:
        """Append the next F, B or I of `chunk`."""
        counts = self.forwards if kind is F else self.backwards
        action = Action(self.stage, kind, chunk, counts[chunk])
        counts[chunk] += 1
        self.order.append(action)
        if kind is I:
            self.weights.append(action._replace(kind=W))

    def run_weight(self) -> None:
        """Append the oldest W that is due, if any."""
        if self.weights:
            self.order.append(self.weights.popleft())


def _zb_v_order(stage: int, stages: int, micro_batches: int) -> Order:
    done = _Stage(stage)

    def run_split(chunk: int) -> None:
        done.run(I, chunk)
        done.run_weight()

    # Warm-up: until this stage's first gradient comes back up.
    for _ in range(2 * (stages - stage) - 1):
        done.run(F, 0)
    for _ in range(stage):
        done.run(F, 1)
        done.run(F, 0)
    for _ in range(stages - stage):
        done.run(F, 1)
        run_split(1)
    # Steady: one of each.
    while done.forwards[1] < micro_batches:
        if done.forwards[0] < micro_batches:
            done.run(F, 0)
        run_split(0)
        done.run(F, 1)
        run_split(1)
    # Cool-down: W fill what would be bubbles.
    for _ in range(stage):
        done.run(I, 0)
        done.run(I, 1)
    late = [weight for weight in done.weights if weight.chunk == 1]
    done.weights = deque(weight for weight in done.weights if weight.chunk == 0)
    for _ in range(stages - stage):
        run_split(0)
    return (*done.order, *late, *done.weights)


def _dualpipe_v_order(stage: int, stages: int, micro_batches: int) -> Order:
    done, after = _Stage(stage), stages - 1 - stage
    # 1 to 3: warm-up.
    for _ in range(2 * after):
        done.run(F, 0)
    for _ in range(stage + 1):
        done.run(F, 0)
        done.run(F, 1)
    for _ in range(after):
        done.run(I, 1)
        done.run_weight()
        done.run(F, 1)
    # 4: the main part, a forward of each chunk together with a backward of the other.
    for _ in range(micro_batches - 2 * stages + stage + 1):
        done.run(F, 0)
        done.run(B, 1)
        done.run(F, 1)
        done.run(B, 0)
    # 5: no micro-batch is left to start.
    for _ in range(after):
        done.run(B, 1)
        done.run(F, 1)
        done.run(B, 0)
    # 6: the second half of these keeps its W for the bubbles of 7.
    for number in range(2 * (stage + 1)):
        done.run(B if number < stage + 1 else I, 1 - number % 2)
    for _ in range(after):
        done.run_weight()
        done.run(I, 0)
    # 8: what is left.
    return (*done.order, *done.weights)


def _repeated(stages: int, micro_batches: int, *, down: int, up: int) -> Schedule:
    """Repeat one block of six unit times, F, I and W of both chunks, for every micro-batch (arXiv 2405.15362, section
    3).

    Chunk 0 is shifted by `down` units from stage to stage, chunk 1 by `up`. At the turns it waits as little as
    possible, so that no stage has two actions at one unit of the period.
    """
    require_counts(stages=stages, micro_batches=micro_batches)
    # A wait between F and I of the last virtual stage holds up both chunks.
    by_memory = sorted(product(range(_PERIOD), repeat=3), key=lambda waits: (sum(waits) + waits[1], waits))
    for waits in by_memory:
        blocks = [_block(stage, stages, down, up, waits) for stage in range(stages)]
        if all(len({moment % _PERIOD for moment in block.values()}) == len(block) for block in blocks):
            break
    orders: list[Order] = []
    for stage, block in enumerate(blocks):
        taken = {moment % _PERIOD for moment in block.values()}
        for chunk in (1, 0):
            after = block[I, chunk]
            block[W, chunk] = next(t for t in range(after + 1, after + _PERIOD) if t % _PERIOD not in taken)
            taken.add(block[W, chunk] % _PERIOD)
        timed = sorted(
            (_PERIOD * number + moment, Action(stage, kind, chunk, number))
            for (kind, chunk), moment in block.items()
            for number in range(micro_batches)
        )
        orders.append(tuple(action for _moment, action in timed))
    return _schedule(stages, micro_batches, orders)


def _block(stage: int, stages: int, down: int, up: int, waits: tuple[int, ...]) -> dict[tuple[Kind, int], int]:
    """Return the start of F and I of micro-batch 0 on `stage`."""
    deep, below = down * stage, up * (stages - 1 - stage)
    turn_down, turn_up = down * (stages - 1) + 1, up * (stages - 1) + 1
    forward_up = turn_down + waits[0]
    gradient_down = forward_up + turn_up + waits[1]
    gradient_up = gradient_down + turn_down + waits[2]
    return {(F, 0): deep, (F, 1): forward_up + below, (I, 1): gradient_down + deep, (I, 0): gradient_up + below}


def _schedule(stages: int, micro_batches: int, orders: list[Order]) -> Schedule:
    return Schedule(
        stages=stages,
        chunks=2,
        micro_batches=micro_batches,
        orders=tuple(tuple(action for action in order if action.micro_batch < micro_batches) for order in orders),
        custom_placement=v_shape(stages),
    )
