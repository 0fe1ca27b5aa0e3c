# SPDX-License-Identifier: Apache-2.0
"""A pipeline of four stages and what it costs, for tests of plans."""

from __future__ import annotations

import dataclasses

from adaptra_megatron.control.deciders.plan_state import Layout
from adaptra_megatron.schedule.costs import Costs, LinkCost, uniform_costs

FOUR = Layout(stages=4, chunks=1, group_size=None)
WHOLE_FIRST = dataclasses.replace(FOUR, whole_first=True)
"""Of layers that are recomputed on a device whose memory is measured."""


def costs(micro_batches: int = 12, *, slow_s: float = 0.0, cap: float | None = 4.0, forward_s: float = 1.0) -> Costs:
    """Input and weight gradients take 1 s each; the middle link, both ways, `slow_s`; each stage may hold `cap`."""
    links = {(1, 2): LinkCost(slow_s), (2, 1): LinkCost(slow_s)}
    return uniform_costs(
        4,
        micro_batches,
        forward_s=forward_s,
        backward_input_s=1.0,
        backward_weight_s=1.0,
        links=links,
        max_in_flight=cap,
    )
