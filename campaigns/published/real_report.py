# SPDX-License-Identifier: Apache-2.0
"""Published cases that ran in real processes, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from campaigns.published.real import STRETCH_PER_STAGE, TIMED_ITERATIONS, RealCase, RealSystem

_EXPLANATION = f"""\
Milliseconds per iteration of real processes (medians of {TIMED_ITERATIONS}): Megatron-core 0.16 trains, each F, B and W
takes the published time of its stage, messages over the slow links come late on both paths. Compute and delays are
{4 * STRETCH_PER_STAGE:g} times as long as published with 4 stages, {8 * STRETCH_PER_STAGE:g} times with 8, and all
measured times are divided by that. All systems of a row trained one after the other on the same processes; weights and
optimizer states are bitwise stock's. The first column has no delay; the lower bounds are of the compute and the delays
alone, without the optimizer or anything that a message costs. Overruns are operations that took longer than they were
to take because the machine was busy.
"""
_HEALTHY = RealSystem.HEALTHY


def markdown(real: Sequence[RealCase]) -> str:
    """A GitHub table, with what was done before it."""
    headings = [
        "case",
        *(system.value for system in RealSystem),
        "bound, 2 PP",
        "bound, 3 PP",
        "1F1B / full",
        "full / host path only",
        "full / no delay: 2 PP, 3 PP",
        "bound / bound without delay: 2 PP, 3 PP",
        "most in flight: 2 PP, 3 PP",
        "overruns",
    ]
    lines = [_EXPLANATION, _row(headings), "|---|" + "---:|" * (len(headings) - 1)]
    lines += [_row(_cells(each)) for each in real]
    return "\n".join(lines) + "\n"


def _cells(each: RealCase) -> list[str]:
    most = each.most_in_flight
    return [
        each.case,
        *(f"{1e3 * each.seconds[system.value]:.0f}" for system in RealSystem),
        f"{1e3 * each.bound_s:.0f}",
        f"{1e3 * each.larger_bound_s:.0f}",
        f"{each.ratio(RealSystem.STOCK, RealSystem.FULL):.2f}",
        f"{each.ratio(RealSystem.FULL, RealSystem.HOST_PATH):.2f}",
        f"{each.ratio(RealSystem.FULL, _HEALTHY):.3f}, {each.ratio(RealSystem.FULL_LARGER, _HEALTHY):.3f}",
        f"{each.bound_s / each.healthy_bound_s:.3f}, {each.larger_bound_s / each.healthy_bound_s:.3f}",
        f"{most[RealSystem.FULL.value]:g}, {most[RealSystem.FULL_LARGER.value]:g}",
        f"{each.overruns:.1%}",
    ]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
