# SPDX-License-Identifier: Apache-2.0
"""A simulated iteration on one HTML page: the timelines of the report, of orders of actions that may never have run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from adaptra_megatron.tools.report.report_findings import SLOW_SHARE, Use
from adaptra_megatron.tools.report.report_page import Panel, page_environment
from adaptra_megatron.tools.report.simulated import Drawn, simulated_iteration
from adaptra_megatron.tools.report.timelines import Timeline


def plan_page(
    name: str, headline: str, drawn: Sequence[Drawn], *, rows: Sequence[Sequence[str]] = (), note: str = ""
) -> str:
    """The page, with `drawn` on one time axis. `rows`: cells of a table above them; `note`: a line below that.

    Their placement must be Megatron's: timelines know no other.
    """
    axis_s = max(each.simulation.makespan_s for each in drawn)
    panels = []
    for each in drawn:
        iteration = simulated_iteration(each.simulation, each.costs)
        action_s = statistics.fmean(record.compute_s for record in iteration.records)
        timeline = Timeline(iteration, SLOW_SHARE * action_s, axis_s=axis_s)
        panels.append(Panel(iteration, "", timeline.svg(), timeline.data(), each.title))
    kinds = {record.kind for panel in panels for record in panel.iteration.records}
    return (
        page_environment()
        .get_template("plan.html")
        .render(
            name=name,
            headline=headline,
            rows=rows,
            note=note,
            panels=panels,
            first_panel=len(panels) - 1,
            drawn_uses=[use for use in Use if use.idle or use.value in kinds],
        )
    )
