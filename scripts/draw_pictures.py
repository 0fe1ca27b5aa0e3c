#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws docs/pictures/ and writes the tables of docs/how_it_works.md and docs/tuning.md, all of it simulated.

scripts/draw_pictures.py           writes them
scripts/draw_pictures.py --check   exit status 1, and the names of those that are out of date
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import picture_diagrams
import simulated_tables
from markdown_table import markdown_table

from adaptra_megatron.schedule.bounds import lower_bound
from adaptra_megatron.schedule.classic import one_f_one_b, zb_h1
from adaptra_megatron.schedule.costs import Costs, LinkCost, uniform_costs
from adaptra_megatron.schedule.ir import Kind
from adaptra_megatron.schedule.planner import plan
from adaptra_megatron.schedule.simulator import Simulation, simulate, simulate_online
from adaptra_megatron.telemetry.action_records import ActionRecord, ArrivalRecord
from adaptra_megatron.tools.recordings.run_record import RunIteration
from adaptra_megatron.tools.report.timelines import WIDTH, Timeline

sys.path.insert(0, str(Path(__file__).parents[1]))

from campaigns.published.stream_order import simulate_in_stream_order  # noqa: E402

DOCS = Path(__file__).resolve().parent.parent / "docs"
PICTURES = DOCS / "pictures"
BEGIN, END = "<!-- {name}: made by scripts/draw_pictures.py -->\n", "<!-- until here -->\n"

STAGES, MICRO_BATCHES, ACTION_S, DELAY_S = 4, 8, 0.010, 0.030
LINK = (1, 2)
CAPS = (4, 5, 6, 7)
"""Activations per stage; with the last one the delay is paid once."""

_LEGEND = {
    "use-forward": "F: forward",
    "use-backward": "B: backward, both gradients",
    "use-backward-input": "I: input gradient",
    "use-backward-weight": "W: weight gradient",
    "use-drain": "idle",
    "flight f": "a message",
    "flight slow": f"a message that takes {1e3 * DELAY_S:.0f} ms",
}
"""Meanings of the CSS classes of the report's timelines; what a picture does not have is left out."""
_TITLE_HEIGHT, _LEGEND_HEIGHT, _MARGIN = 30, 34, 8
_SWATCH, _SWATCH_TO_TEXT, _LETTER_WIDTH, _LABEL_DISTANCE = 15, 22, 7.3, 17


class Run(NamedTuple):
    """One simulated iteration."""

    title: str
    simulation: Simulation
    costs: Costs


def costs(delay_s: float, cap: float | None = None) -> Costs:
    """The pipeline of all pictures, with `delay_s` on one link, both ways."""
    slow = LinkCost(latency_s=delay_s)
    return uniform_costs(
        STAGES,
        MICRO_BATCHES,
        forward_s=ACTION_S,
        backward_input_s=ACTION_S,
        backward_weight_s=ACTION_S,
        links={LINK: slow, LINK[::-1]: slow},
        max_in_flight=cap,
    )


def stock(delay_s: float) -> Simulation:
    """Megatron's 1F1B, whose sends and receives block."""
    return simulate(one_f_one_b(STAGES, MICRO_BATCHES), costs(delay_s), blocking=True)


def planned(delay_s: float, cap: float | None) -> Simulation:
    """The planned order at `cap` activations per stage."""
    return simulate(plan(costs(delay_s, cap)).schedule, costs(delay_s))


def drawn(run: Run, axis_s: float) -> Timeline:
    """The report's drawing of what would have been recorded of `run`."""
    records: list[ActionRecord] = []
    ends_s: dict[tuple[int, bool, int], float] = {}
    schedule = run.simulation.schedule
    for order, starts, ends in zip(schedule.orders, run.simulation.start_s, run.simulation.end_s, strict=True):
        free_s = 0.0
        for (stage, kind, chunk, micro_batch, _), start_s, end_s in zip(order, starts, ends, strict=True):
            records.append(ActionRecord(0, stage, str(kind), chunk, micro_batch, free_s, start_s, end_s))
            free_s = end_s
            if kind is not Kind.BACKWARD_WEIGHT:
                ends_s[schedule.placement.virtual_stage(stage, chunk), kind is Kind.FORWARD, micro_batch] = end_s
    arrivals = []
    for stage, kind, chunk, micro_batch, _ in (action for order in schedule.orders for action in order):
        forward = kind is Kind.FORWARD
        source = schedule.placement.virtual_stage(stage, chunk) + (-1 if forward else 1)
        if kind is Kind.BACKWARD_WEIGHT or not 0 <= source < schedule.virtual_stages:
            continue
        sender = schedule.placement.stage_of[source]
        arrived_s = ends_s[source, forward, micro_batch] + run.costs.link(sender, stage).latency_s
        arrivals.append(ArrivalRecord(0, sender, stage, "F" if forward else "B", chunk, micro_batch, arrived_s))
    iteration = RunIteration(
        number=0, start_s=0.0, seconds=run.simulation.makespan_s, records=tuple(records), arrivals=tuple(arrivals)
    )
    return Timeline(iteration, 0.5 * DELAY_S, axis_s=axis_s)


def timelines(runs: list[Run], axis_s: float) -> str:
    """An SVG of `runs` below each other, on one time axis."""
    parts: list[str] = []
    top = _MARGIN + _LEGEND_HEIGHT
    for run in runs:
        parts.append(f'<text class="title" x="8" y="{top + 18}">{escape(run.title)}</text>')
        top += _TITLE_HEIGHT
        timeline = drawn(run, axis_s)
        place = f'<svg class="timeline" y="{top}" width="{WIDTH}" height="{timeline.height}"'
        parts.append(timeline.svg().replace('<svg class="timeline"', place, 1))
        top += timeline.height + _MARGIN
    text = "".join(parts)
    return _page(top, _legend(text) + text)


def _legend(content: str) -> str:
    """What the colours and lines of `content` are, in one row."""
    x, middle, parts = 8.0, _MARGIN + _LEGEND_HEIGHT / 2 - 4, []
    for name, label in _LEGEND.items():
        if f'class="{name}"' not in content:
            continue
        if name.startswith("flight"):
            parts.append(f'<path class="{name}" d="M{x} {middle + 7}L{x + _SWATCH} {middle - 7}"/>')
        else:
            parts.append(f'<rect class="{name}" x="{x}" y="{middle - 7}" width="{_SWATCH}" height="14"/>')
        parts.append(f'<text x="{x + _SWATCH_TO_TEXT}" y="{middle + 5}">{label}</text>')
        x += _SWATCH_TO_TEXT + _LETTER_WIDTH * len(label) + 18
    return f'<g class="timeline">{"".join(parts)}</g>'


def _page(height: float, content: str) -> str:
    uses = re.findall(r"--(use-(?:forward|backward)[a-z-]*): (#\w+);", _report_style())
    colours = "".join(f".{name}{{fill:{colour}}}" for name, colour in uses)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" font-family="sans-serif">'
        f"<style>{colours}{_STYLE}</style>"
        f'<rect width="{WIDTH}" height="{height:g}" fill="#fff"/>{content}</svg>\n'
    )


def _report_style() -> str:
    """The light colours of `adaptra report`, so that its pages and these pictures look alike."""
    style = files("adaptra_megatron.tools.report").joinpath("templates", "report.css").read_text(encoding="utf-8")
    return style.partition("@media")[0]


_STYLE = (
    "text{font-size:14px;fill:#1c2128}.title{font-size:16px;font-weight:600}.tick{font-size:13px;fill:#5b6472}"
    ".use-link,.use-stage,.use-fill,.use-drain,.use-overhead{fill:#e9ebef}.axis,.grid{stroke:#c9ced6}"
    ".flight{fill:none;stroke:#7b8494;stroke-width:1.1}.timeline .slow{stroke:#a3162e;stroke-width:1.8}"
    ".numbers text{font-size:12px;text-anchor:middle;fill:#fff}.numbers .on-i{fill:#08332b}.numbers .on-w{fill:#402c00}"
    ".line{fill:none;stroke:#2f6fb3;stroke-width:2.4}.line.stock{stroke:#a3162e}.line.bound{stroke:#1c2128;"
    "stroke-dasharray:6 5;stroke-width:1.6}"
)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"


def _titled(title: str, simulation: Simulation, of: Costs) -> Run:
    most = max(simulation.peak_in_flight)
    return Run(f"{title}: {_ms(simulation.makespan_s)}, at most {most:g} activations per stage", simulation, of)


def slow_link_picture() -> str:
    """Stock on healthy links, stock over a slow one, and the plan for it."""
    slow = f"link {LINK[0]}-{LINK[1]} takes {_ms(DELAY_S)}"
    runs = [
        _titled("Stock 1F1B, healthy links", stock(0.0), costs(0.0)),
        _titled(f"Stock 1F1B, {slow}", stock(DELAY_S), costs(DELAY_S)),
        _titled(f"Planned, {slow}", planned(DELAY_S, CAPS[-1]), costs(DELAY_S)),
    ]
    return timelines(runs, max(run.simulation.makespan_s for run in runs))


def split_picture() -> str:
    """The same pipeline with whole and with split backwards, on healthy links."""
    split = simulate(zb_h1(STAGES, MICRO_BATCHES), costs(0.0))
    runs = [
        _titled("Whole backwards (1F1B)", stock(0.0), costs(0.0)),
        _titled("Split backwards, W in what were gaps (ZB-H1)", split, costs(0.0)),
    ]
    return timelines(runs, 0.35)


def memory_picture() -> str:
    """Iteration time over the delay: stock's, and planned ones at several caps."""
    left, right, top, bottom, height = 70, 250, 44, 52.0, 500
    delays_s = [0.005 * step for step in range(13)]
    highest_s = 0.9

    def point(delay_s: float, seconds: float) -> str:
        x = left + (WIDTH - left - right) * delay_s / delays_s[-1]
        return f"{x:.1f} {height - bottom - (height - top - bottom) * seconds / highest_s:.1f}"

    def curve(look: str, seconds: list[float]) -> str:
        points = "L".join(point(*pair) for pair in zip(delays_s, seconds, strict=True))
        return f'<path class="line {look}" d="M{points}"/>'

    parts = [
        f'<text class="title" x="8" y="22">Milliseconds of an iteration over the delay of link'
        f" {LINK[0]}-{LINK[1]}</text>",
        f'<text class="tick" x="{left + (WIDTH - left - right) / 2}" y="{height - 8}" text-anchor="middle">'
        "delay of each message, both ways, ms</text>",
    ]
    for hundredth in range(0, 10, 1):
        x, y = point(0.0, 0.1 * hundredth).split()
        parts.append(f'<path class="grid" d="M{x} {y}H{WIDTH - right}"/>')
        parts.append(f'<text class="tick" x="{left - 8}" y="{float(y) + 4}" text-anchor="end">{100 * hundredth}</text>')
    for delay_s in delays_s[::2]:
        x, y = point(delay_s, 0.0).split()
        parts.append(f'<text class="tick" x="{x}" y="{float(y) + 20}" text-anchor="middle">{1e3 * delay_s:.0f}</text>')
    curves = [("stock", "stock 1F1B", [stock(delay_s).makespan_s for delay_s in delays_s])]
    for cap in CAPS:
        curves.append(("", f"planned, {cap} activations", [planned(delay_s, cap).makespan_s for delay_s in delays_s]))
    curves.append(("bound", "lower bound, any memory", [lower_bound(costs(delay_s)).seconds for delay_s in delays_s]))
    parts += [curve(look, seconds) for look, _, seconds in curves]
    lowest = height - bottom
    for _, label, seconds in sorted(curves, key=lambda one: one[2][-1]):
        x, y = map(float, point(delays_s[-1], seconds[-1]).split())
        lowest = min(y + 5, lowest - _LABEL_DISTANCE)
        parts.append(f'<text x="{x + 8:.1f}" y="{lowest:.1f}">{label}</text>')
    return _page(height, "".join(parts))


PICTURES_BY_NAME = {
    "slow_link.svg": slow_link_picture,
    "split.svg": split_picture,
    "memory.svg": memory_picture,
    "loop.svg": lambda: picture_diagrams.loop(
        healthy_s=stock(0.0).makespan_s,
        slow_s=stock(DELAY_S).makespan_s,
        planned_s=planned(DELAY_S, CAPS[-1]).makespan_s,
    ),
    "processes.svg": picture_diagrams.processes,
}


def orders_table() -> str:
    """What each order takes without and with the delay."""
    rows = []
    for name, messages, healthy, slow in _compared():
        paid = (slow.makespan_s - healthy.makespan_s) / DELAY_S
        most = max(*healthy.peak_in_flight, *slow.peak_in_flight)
        times = _ms(healthy.makespan_s), _ms(slow.makespan_s)
        rows.append((name, messages, f"{most:g}", *times, f"{paid:.1f}"))
    head = ("order", "messages", "activations", "healthy", "slow link", "delays paid")
    return markdown_table(head, rows)


def _compared() -> Iterator[tuple[str, str, Simulation, Simulation]]:
    own, queue = "wait for nothing but their link", "one queue per stage"
    whole, split = one_f_one_b(STAGES, MICRO_BATCHES), zb_h1(STAGES, MICRO_BATCHES)
    yield "1F1B, stock", "sends block", stock(0.0), stock(DELAY_S)
    yield "1F1B", own, simulate(whole, costs(0.0)), simulate(whole, costs(DELAY_S))
    queued = [simulate_in_stream_order(split, costs(delay_s)) for delay_s in (0.0, DELAY_S)]
    yield "ZB-H1", queue, queued[0], queued[1]
    yield "ZB-H1", own, simulate(split, costs(0.0)), simulate(split, costs(DELAY_S))
    for cap in CAPS:
        yield f"planned, cap {cap}", own, planned(0.0, cap), planned(DELAY_S, cap)
    cap = CAPS[-1]
    healthy, slow = (plan(costs(delay_s, cap)).schedule for delay_s in (0.0, DELAY_S))
    queued = [simulate_in_stream_order(order, costs(at_s)) for order, at_s in ((healthy, 0.0), (slow, DELAY_S))]
    yield f"planned, cap {cap}", queue, queued[0], queued[1]
    yield (
        f"none: dispatched online, cap {cap}",
        own,
        simulate_online(costs(0.0, cap)),
        simulate_online(costs(DELAY_S, cap)),
    )


TABLES = {
    "how_it_works.md": {"orders": orders_table},
    "tuning.md": {
        "memory": simulated_tables.memory_table,
        "micro-batches": simulated_tables.micro_batches_table,
    },
}


def _with_tables(page: str) -> str:
    """The page as it is, but for its tables."""
    text = (DOCS / page).read_text(encoding="utf-8")
    for name, table in TABLES[page].items():
        before, begin, rest = text.partition(BEGIN.format(name=name))
        if not begin:
            raise ValueError(f"docs/{page} has no line {BEGIN.format(name=name)!r} for its table to go behind")
        text = f"{before}{begin}\n{table()}\n\n{END}{rest.partition(END)[2]}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, say what is out of date")
    check = parser.parse_args().check
    wanted = {PICTURES / name: draw() for name, draw in PICTURES_BY_NAME.items()}
    wanted |= {DOCS / page: _with_tables(page) for page in TABLES}
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted[path], encoding="utf-8")
        print(
            f"{path.relative_to(DOCS.parent)} {'is out of date: run scripts/draw_pictures.py' if check else 'written'}"
        )
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
