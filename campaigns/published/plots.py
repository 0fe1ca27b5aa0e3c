# SPDX-License-Identifier: Apache-2.0
"""Pictures of the published cases: a panel per case, a pair of bars per system."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from campaigns.published.real import RealCase, RealSystem
from campaigns.published.simulated import SimulatedCase, System, published_ms

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 4
_SHOWN = {
    System.ONE_F_ONE_B: "1F1B",
    System.ZB_H2: "ZB",
    System.HOST_PATH_H2: "host\npath",
    System.FULL: "full",
}
_OURS, _THEIRS, _BOUND = "tab:blue", "lightgray", "black"


def draw(simulated: Sequence[SimulatedCase], path: Path) -> None:
    """Simulated and published milliseconds of each case. Raises ImportError if matplotlib is missing."""
    figure = _figure(len(simulated))
    panels = _panels(figure, len(simulated))
    for axes, each in zip(panels, simulated, strict=True):
        _draw_case(axes, each)
    _finish(figure, panels, path)


def draw_real(real: Sequence[RealCase], path: Path) -> None:
    """Measured milliseconds of each case, with the time without delay and the bound as lines. Raises as `draw`."""
    figure = _figure(len(real))
    panels = _panels(figure, len(real))
    shown = {
        RealSystem.STOCK: "1F1B",
        RealSystem.ZB_H1: "ZB-H1",
        RealSystem.HOST_PATH: "host\npath",
        RealSystem.FULL: "full\n2 PP",
        RealSystem.FULL_LARGER: "full\n3 PP",
    }
    for axes, each in zip(panels, real, strict=True):
        measured = [1e3 * each.seconds[system.value] for system in shown]
        axes.bar(range(len(shown)), measured, color=_OURS, label="measured")
        healthy_ms = 1e3 * each.seconds[RealSystem.HEALTHY.value]
        axes.axhline(healthy_ms, color="tab:green", linewidth=0.8, label="measured without delay")
        axes.axhline(1e3 * each.bound_s, color=_BOUND, linewidth=0.8, linestyle=":", label="lower bound, 2 PP")
        _label(axes, list(shown.values()), each.case)
    _finish(figure, panels, path)


def _draw_case(axes: Axes, each: SimulatedCase) -> None:
    positions = range(len(_SHOWN))
    theirs = [published_ms(system, each.case) for system in _SHOWN]
    ours = [1e3 * each.slow_s[system] for system in _SHOWN]
    axes.bar(
        [position - 0.2 for position in positions],
        [0.0 if value is None else value for value in theirs],
        width=0.4,
        color=_THEIRS,
        label="published",
    )
    axes.bar([position + 0.2 for position in positions], ours, width=0.4, color=_OURS, label="simulated")
    axes.axhline(1e3 * each.bound_s, color=_BOUND, linewidth=0.8, linestyle=":", label="lower bound, 2 PP")
    _label(axes, list(_SHOWN.values()), each.case.name)


def _label(axes: Axes, bars: Sequence[str], title: str) -> None:
    axes.set_xticks(range(len(bars)), bars, fontsize="x-small")
    axes.tick_params(axis="y", labelsize="x-small")
    axes.set_title(title, fontsize="small")


def _finish(figure: Figure, panels: Sequence[Axes], path: Path) -> None:
    figure.supylabel("milliseconds per iteration")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=3, fontsize="small")
    figure.savefig(path)


def _figure(panels: int) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the plot needs matplotlib: pip install 'adaptra-megatron[plot]'") from error
    rows = math.ceil(panels / COLUMNS)
    figure = Figure(figsize=(2.8 * min(panels, COLUMNS), 0.5 + 1.9 * rows), dpi=80, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _panels(figure: Figure, panels: int) -> list[Axes]:
    columns = min(panels, COLUMNS)
    grid: Any = figure.subplots(math.ceil(panels / columns), columns, squeeze=False)
    flat = list(grid.flat)
    for unused in flat[panels:]:
        unused.axis("off")
    return flat[:panels]
