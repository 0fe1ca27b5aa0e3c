# SPDX-License-Identifier: Apache-2.0
"""Cases that planner tests and the planner benchmark share. Random ones depend on their number alone."""

from __future__ import annotations

import random

from adaptra_megatron.schedule.costs import Costs, LinkCost, uniform_costs


def roomy_case(number: int) -> Costs:
    """No cap, or one of at least twice the stages: 2..64 stages, up to 4 micro-batches per stage, 1..3 slow links."""
    rng = random.Random(number)
    stages = rng.randint(2, 64)
    micro_batches = rng.randint(1, 4 * stages)
    cap = None if rng.random() < 0.5 else float(rng.randint(2 * stages, 4 * stages))
    return _case(rng, stages, micro_batches, (cap,) * stages)


def capped_case(number: int) -> Costs:
    """A cap of 1.0 to 2.0 activations per stage of the pipeline: 2..16 stages, 1..4 micro-batches per stage.

    Stages are alike, or differ by up to a tenth: then no single one hides what links and the cap cost. One or two
    links are slow both ways, by up to six forwards.
    """
    rng = random.Random(number)
    stages = rng.randint(2, 16)
    spread = rng.choice([0.0, 0.1])

    def table(seconds: float) -> tuple[tuple[float, ...], ...]:
        return tuple((seconds * (1.0 + rng.uniform(-spread, spread)),) for _ in range(stages))

    forward_s, backward_input_s, backward_weight_s = 0.02, 0.02 * rng.uniform(0.9, 1.3), 0.02 * rng.uniform(0.5, 1.0)
    slow = rng.sample(range(stages - 1), min(rng.randint(1, 2), stages - 1))
    costs = {stage: LinkCost(rng.uniform(0.0, 0.12), rng.uniform(0.0, 0.01)) for stage in slow}
    return Costs(
        stages=stages,
        chunks=1,
        micro_batches=rng.randint(stages, 4 * stages),
        forward_s=table(forward_s),
        backward_input_s=table(backward_input_s),
        backward_weight_s=table(backward_weight_s),
        links={ends: cost for stage, cost in costs.items() for ends in ((stage, stage + 1), (stage + 1, stage))},
        max_in_flight=(float(rng.randint(stages, 2 * stages)),) * stages,
        released_at_backward_input=(rng.choice([0.0, 0.5]),) * stages,
    )


def tight_case(number: int) -> Costs:
    """Caps of 1.0 to 1.5 activations per stage of the pipeline, small enough for CP-SAT: 2..5 stages, up to 12
    micro-batches. Seconds are whole milliseconds, so that integer programming is exact."""
    rng = random.Random(number)
    stages = rng.randint(2, 5)
    micro_batches = rng.randint(stages, 12)
    caps = tuple(float(rng.randint(2 * stages, 3 * stages)) / 2 for _ in range(stages))
    return _case(rng, stages, micro_batches, caps)


def emulated_case(times_ms: tuple[int, int, int], latency_ms: int, released: float) -> Costs:
    """8 stages, 24 micro-batches, 1.5 activations per stage of the pipeline, the middle link slow both ways."""
    forward_s, backward_input_s, backward_weight_s = (milliseconds / 1000 for milliseconds in times_ms)
    slow = LinkCost(latency_ms / 1000)
    return uniform_costs(
        8,
        24,
        forward_s=forward_s,
        backward_input_s=backward_input_s,
        backward_weight_s=backward_weight_s,
        links={(3, 4): slow, (4, 3): slow},
        max_in_flight=12.0,
        released_at_backward_input=released,
    )


def combined_case(stages: int, chunks: int, micro_batches: int, latency_s: float, cap: float) -> Costs:
    """F and I of 20 ms and W of 15 ms per stage, the middle link slow both ways; combined actions save a fifth."""
    slow, middle = LinkCost(latency_s), stages // 2
    return uniform_costs(
        stages,
        micro_batches,
        chunks=chunks,
        forward_s=0.02 / chunks,
        backward_input_s=0.02 / chunks,
        backward_weight_s=0.015 / chunks,
        links={(middle - 1, middle): slow, (middle, middle - 1): slow},
        max_in_flight=cap,
        combined_saving=0.2,
    )


def interleaved_case(latency_ms: int, cap: float) -> Costs:
    """4 stages of 2 chunks, 16 micro-batches, 10 ms each, the middle link slow both ways."""
    slow = LinkCost(latency_ms / 1000)
    return uniform_costs(
        4,
        16,
        chunks=2,
        forward_s=0.01,
        backward_input_s=0.01,
        backward_weight_s=0.01,
        links={(1, 2): slow, (2, 1): slow},
        max_in_flight=cap,
        released_at_backward_input=0.5,
    )


def _case(rng: random.Random, stages: int, micro_batches: int, caps: tuple[float | None, ...]) -> Costs:
    def table() -> tuple[tuple[float, ...], ...]:
        return tuple((rng.randint(5, 40) / 1000,) for _ in range(stages))

    directed = [(stage, stage + 1) for stage in range(stages - 1)] + [(stage + 1, stage) for stage in range(stages - 1)]
    slow = rng.sample(directed, min(rng.randint(1, 3), len(directed)))
    return Costs(
        stages=stages,
        chunks=1,
        micro_batches=micro_batches,
        forward_s=table(),
        backward_input_s=table(),
        backward_weight_s=table(),
        links={ends: LinkCost(rng.randint(0, 100) / 1000, rng.randint(0, 40) / 1000) for ends in slow},
        max_in_flight=caps,
        released_at_backward_input=(rng.choice([0.0, 0.25, 0.5, 0.75, 1.0]),) * stages,
    )
