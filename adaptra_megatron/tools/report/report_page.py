# SPDX-License-Identifier: Apache-2.0
"""Write a run's report as one HTML page that needs no network and no other file.

To add a figure: find it in `report_findings` or here, give it to the templates in `report_page`, and show it as a tile
(templates/tiles.html) or in the template of a section, which page.html includes; the test is
tests/tools/report/test_report.py. Only timelines are drawn in Python: bars of one colour are one long path.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from adaptra_megatron.schedule.jobs.job_simulation import Progress
from adaptra_megatron.telemetry.event_wording import link_name
from adaptra_megatron.telemetry.events import (
    ArrivalsSeen,
    LinkDetection,
    PlanMade,
    PlanSwitched,
    RanksLost,
    RoutesChosen,
    RunEnded,
    RunStarted,
    StampedEvent,
    StragglerDetection,
    SwitchMeasured,
)
from adaptra_megatron.telemetry.log_lines import duration, percent
from adaptra_megatron.tools.recordings.run_record import RunIteration, RunRecord, began_at, replicas_of
from adaptra_megatron.tools.report.iteration_chart import IterationChart, event_rows, worth_a_row
from adaptra_megatron.tools.report.report_findings import (
    REPORT_SLOW_SHARE,
    PartFinding,
    Use,
    distinct,
    find,
    saved_seconds,
)
from adaptra_megatron.tools.report.report_wording import USE_NAMES, headline, mattering_pairs, span, summary
from adaptra_megatron.tools.report.status_page import status_findings
from adaptra_megatron.tools.report.timelines import (
    MOST_COLUMNS,
    Drawn,
    Timeline,
    idle_causes,
    part_bar,
    simulated_iteration,
    slowest_links,
    slowest_parts,
    stage_bars,
    use_class,
)

MOST_GRIDS = 4
MOST_REPLICAS = 24
"""Maximum number of rows of a grid; replicas that straggle or are rerouted come first."""

_Cell = tuple[int, int]
"""Replica and stage."""


class GridCell(NamedTuple):
    """One stage of one replica."""

    speed: float | None
    """Speed relative to the fastest of its stage; None in logs without it."""
    slow: bool
    flows: Sequence[str]
    """Texts: numbers of micro-batches, and the replicas that they go to or come from."""
    dead: bool = False


class Routes(NamedTuple):
    """One decision on routes, its reason and its effect."""

    number: int | None
    """Number of the plan; None for routes around dead cells, which belong to no plan."""
    reason: str
    since: int | None
    """First iteration with these routes; None if none ran."""
    micro_batches: int | None
    """Micro-batches of each replica in an iteration; None in logs without it."""
    predicted_s: tuple[float | None, float | None]
    """Seconds of an iteration before and after; None if unknown, as in the two fields below."""
    lower_bound_s: float | None
    measured_s: tuple[float | None, float | None]
    rows: Sequence[tuple[int, Sequence[GridCell]]]
    """By replica, its cells by stage; empty if every micro-batch stays in its replica."""
    left_out: int
    """Number of replicas without a row."""


def routes_of(events: Sequence[StampedEvent]) -> list[Routes]:
    """Return all decisions on routes, in order. If their plan never ran, they took effect with the next one that
    did."""
    return [
        _routes(found.event, found.stamp.rank, events)
        if isinstance(found.event, RoutesChosen)
        else _routes_of_failure(found.event, found.stamp.iteration, events)
        for found in events
        if isinstance(found.event, (RoutesChosen, RanksLost))
    ]


def _routes(chosen: RoutesChosen, rank: int, events: Sequence[StampedEvent]) -> Routes:
    by_leader = [found for found in events if found.stamp.rank == rank]
    ran = next(
        (
            (found.event, found.stamp.iteration)
            for found in by_leader
            if isinstance(found.event, PlanSwitched) and found.event.before < chosen.number <= found.event.number
        ),
        None,
    )
    number = None if ran is None else ran[0].number
    gained = next(
        (
            found.event
            for found in by_leader
            if isinstance(found.event, SwitchMeasured) and found.event.number == number
        ),
        None,
    )
    before_s = None if ran is None else ran[0].before_measured_s
    rows, left_out = _grid(chosen)
    return Routes(
        number=chosen.number,
        reason=chosen.reason,
        since=None if ran is None else ran[1],
        micro_batches=chosen.micro_batches,
        predicted_s=(chosen.current_predicted_s, chosen.predicted_s),
        lower_bound_s=chosen.lower_bound_s,
        measured_s=(before_s, None) if gained is None else (gained.before_measured_s, gained.after_measured_s),
        rows=rows,
        left_out=left_out,
    )


def _routes_of_failure(failed: RanksLost, iteration: int, events: Sequence[StampedEvent]) -> Routes:
    """Return the routes after a failure, with as many cells of the job as fit: the dead ones stand out."""
    starts = [found.event.layout for found in events if isinstance(found.event, RunStarted)]
    stages = range(max((start.get("stages", 0) for start in starts), default=0))
    dead, flows = set(map(_cell, failed.dead_cells)), _flows(failed.moved)
    touched = {replica for replica, _stage in {*flows, *dead}}
    replicas = sorted({*touched, *replicas_of(events).values()}, key=lambda replica: (replica not in touched, replica))
    rows = [
        (replica, [GridCell(None, False, flows.get((replica, s), ()), (replica, s) in dead) for s in stages])
        for replica in sorted(replicas[:MOST_REPLICAS])
    ]
    return Routes(
        number=None,
        reason=f"lost {', '.join(failed.ranks)}: live cells of the same stage compute the work of dead cells",
        since=iteration,
        micro_batches=None,
        predicted_s=(None, None),
        lower_bound_s=None,
        measured_s=(None, None),
        rows=rows,
        left_out=len(replicas) - len(rows),
    )


def _flows(moved: Sequence[Sequence[int]]) -> dict[_Cell, list[str]]:
    """Return texts by cell: numbers of micro-batches, and the replicas that they go to or come from."""
    flows: dict[_Cell, list[str]] = {}
    for stage, source, target, count in moved:
        flows.setdefault((source, stage), []).append(f"{count} → replica {target}")
        flows.setdefault((target, stage), []).append(f"{count} ← replica {source}")
    return flows


def _grid(chosen: RoutesChosen) -> tuple[Sequence[tuple[int, Sequence[GridCell]]], int]:
    """Return the rows of the grid, and the number of replicas without one."""
    if not chosen.moved:
        return (), 0
    flows = _flows(chosen.moved)
    speeds = {_cell(name): speed for name, speed in chosen.speeds.items()}
    slow = set(map(_cell, chosen.slow))
    known = {*flows, *speeds, *slow}
    touched = {replica for replica, _stage in {*flows, *slow}}
    replicas = sorted({replica for replica, _stage in known}, key=lambda replica: (replica not in touched, replica))
    stages = range(1 + max(stage for _replica, stage in known))
    rows = [
        (replica, [GridCell(speeds.get(cell), cell in slow, flows.get(cell, ())) for cell in places])
        for replica in sorted(replicas[:MOST_REPLICAS])
        for places in [[(replica, stage) for stage in stages]]
    ]
    return rows, len(replicas) - len(rows)


def _cell(name: str) -> _Cell:
    replica, stage = map(int, name.split("."))
    return replica, stage


MOST_MAPS = 4


class HeatCell(NamedTuple):
    """Arrivals of one stage of one replica."""

    lag_s: float
    heat: float
    """Its lag relative to the longest on the page, 0..1; 0 for those that came first."""
    last: int
    """Number of the map's iterations in which it came last."""


class HeatMap(NamedTuple):
    """Arrivals in some iterations."""

    first: int
    until: int
    iterations: int
    rows: Sequence[tuple[int, Sequence[HeatCell]]]
    """By replica, its cells by stage."""
    left_out: int
    """Number of replicas without a row."""


class LateReplica(NamedTuple):
    """A replica that came last, and until when."""

    replica: int
    place: str
    since: int
    until: int | None
    """Iteration in which it was found healthy again; None: never."""
    reason: str
    remedy: str


class ArrivalsSection(NamedTuple):
    """Arrivals of replicas at gradient synchronisation, for the page."""

    late: Sequence[LateReplica]
    maps: Sequence[HeatMap]


def arrivals_of(events: Sequence[StampedEvent]) -> ArrivalsSection | None:
    """Return the arrivals of a run; None if it did not watch for stragglers."""
    seen = [found.event for found in events if isinstance(found.event, ArrivalsSeen) and found.event.lags_s]
    late: list[LateReplica] = []
    for found in events:
        if isinstance(event := found.event, StragglerDetection):
            same = [each for each in late if each.replica == event.replica and each.until is None]
            for each in same:
                late.remove(each)
            if event.after == "healthy":
                late += [each._replace(until=found.stamp.iteration) for each in same]
            else:
                place = f"{event.stage}, rank {event.first_rank} on {event.host}"
                since = same[0].since if same else began_at(found)
                late.append(LateReplica(event.replica, place, since, None, event.reason, event.remedy))
    if not seen:
        return None
    # A map for each late replica would be too many: the latest maps, and that with the longest lag.
    worst = max(seen, key=_longest_s)
    shown = [each for each in seen if each is worst or each in seen[-MOST_MAPS + 1 :]]
    return ArrivalsSection(late, [_map(each, max(1e-9, _longest_s(worst))) for each in shown])


def _longest_s(seen: ArrivalsSeen) -> float:
    return max(max(lags_s) for lags_s in seen.lags_s)


def _map(seen: ArrivalsSeen, longest_s: float) -> HeatMap:
    by_replica = list(zip(*seen.lags_s, strict=True))
    shown = sorted(sorted(range(len(by_replica)), key=lambda replica: -max(by_replica[replica]))[:MOST_REPLICAS])
    rows = [
        (
            replica,
            [
                HeatCell(lag_s, max(0.0, lag_s) / longest_s, seen.last[stage][replica])
                for stage, lag_s in enumerate(by_replica[replica])
            ],
        )
        for replica in shown
    ]
    first = seen.until - seen.iterations + 1
    return HeatMap(first, seen.until, seen.iterations, rows, len(by_replica) - len(shown))


MOST_EVENTS = 300
MOST_LINKS = 24
MOST_PARTS = 40
"""Maximum number of parts of the run in bars and tables."""
MOST_TIMELINES = 8
MOST_MISSING = 12
"""Maximum number of sentences on missing data."""


class MissingIterationError(ValueError):
    """An iteration that is not in the trace. Names those that are."""


def report_page(
    run: RunRecord,
    *,
    iterations: Sequence[int] | None = None,
    title: str = "",
    progress: Progress | None = None,
) -> str:
    """Return the page. `iterations`: the timelines to draw; None: a typical one of each part of the run.

    Raises MissingIterationError if one of `iterations` is not in the trace.
    """
    findings = find(run, progress)
    matters = mattering_pairs(findings, run.events)
    slow_pairs = [{(min(link), max(link)) for link in _slow_links(run, finding)} & matters for finding in findings]
    slow_links = [len(pairs) for pairs in slow_pairs]
    slow = [(found.part.first, found.part.last) for found, count in zip(findings, slow_links, strict=True) if count]
    rows = event_rows(run, findings)
    shown = slowest_parts(distinct([finding for finding in findings if finding.traced]), MOST_PARTS)
    columns = slowest_parts(shown, MOST_COLUMNS)
    panels = _panels(run, shown, iterations)
    kinds = {record.kind for panel in panels for record in panel.iteration.records}
    return (
        page_environment()
        .get_template("page.html")
        .render(
            run=run,
            name=title or run.directory.resolve().name,
            headline=headline(findings),
            summary=[*summary(run, findings), *_slow_cables(run)],
            last=findings[-1] if findings else None,
            slow_links=slow_links[-1] if findings else 0,
            saved_s=saved_seconds(findings),
            switches=sum(isinstance(found.event, PlanSwitched) for found in run.own_events),
            chart=IterationChart(run, slow, [row.mark for row in rows if row.mark is not None]) if findings else None,
            planned=any(isinstance(found.event, PlanMade) for found in run.events),
            rows=rows,
            routes=routes_of(run.events),
            arrivals=arrivals_of(run.events),
            plans_kept=sum(isinstance(found.event, PlanMade) and not worth_a_row(found) for found in run.events),
            shown=shown,
            used=[use for use in Use if any(finding.share(use) > 0.0005 for finding in shown)],
            worst=max(shown, key=lambda finding: finding.idle_share, default=None),
            columns=columns,
            causes=idle_causes(columns),
            links=slowest_links(columns),
            panels=panels,
            first_panel=max(range(len(panels)), key=lambda index: panels[index].iteration.seconds, default=0),
            drawn_uses=[use for use in Use if use.idle or use.value in kinds],
            facts=_facts(run),
        )
    )


def page_environment() -> Environment:
    """Return the Jinja environment with the templates of this page and of others that share them."""
    environment = Environment(
        loader=PackageLoader("adaptra_megatron.tools.report"),
        autoescape=True,
        finalize=lambda value: f"{value:.1f}" if isinstance(value, float) else value,  # a position in a drawing
        keep_trailing_newline=True,
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    filters = (duration, link_name, part_bar, percent, span, stage_bars, use_class)
    environment.filters.update({each.__name__: each for each in filters})
    environment.globals.update(
        MOST_EVENTS=MOST_EVENTS, MOST_MISSING=MOST_MISSING, MOST_GRIDS=MOST_GRIDS, MOST_LINKS=MOST_LINKS
    )
    environment.globals.update(REPORT_SLOW_SHARE=REPORT_SLOW_SHARE, USE_NAMES=USE_NAMES, Use=Use)
    return environment


def _slow_links(run: RunRecord, finding: PartFinding) -> list[tuple[int, int]]:
    """Return the slow links of a part: from its trace, or else from the log at its end."""
    if finding.traced:
        return finding.slow_links
    states = {}
    for found in run.events:
        if isinstance(found.event, LinkDetection) and began_at(found) <= finding.part.last:
            states[found.event.source, found.event.target] = found.event.after
    return [link for link, state in states.items() if state != "healthy"]


def _slow_cables(run: RunRecord) -> list[str]:
    """Return sentences on links that are slow at the end, as in `adaptra status`."""
    seconds = {iteration.number: iteration.seconds for iteration in run.iterations}
    found = [each for each in status_findings(run.events, seconds, -1) if each.kind == "link"]
    return [f"{each.text[0].upper()}{each.text[1:]}. To do: {each.remedy}." for each in found]


class Panel(NamedTuple):
    """One timeline."""

    iteration: RunIteration
    note: str
    drawing: str
    data: dict[str, Any] | None
    """Texts that the page's script shows under the pointer."""
    title: str = ""
    """Empty: the number of the iteration."""

    @property
    def label(self) -> str:
        """Name of the timeline on the page."""
        return self.title or f"iteration {self.iteration.number}"


def _panels(run: RunRecord, shown: Sequence[PartFinding], iterations: Sequence[int] | None) -> list[Panel]:
    traced = {iteration.number: iteration for iteration in run.traced}
    notes = dict.fromkeys(iterations or (), "")
    if iterations is None:
        ranked = sorted(shown, key=lambda finding: -len(finding.part.iterations) * finding.seconds)[:MOST_TIMELINES]
        for part in sorted((finding.part for finding in ranked), key=lambda part: part.first):
            notes[part.typical.number] = f"typical of iterations {span(part)}" if len(part.iterations) > 1 else ""
    for number in notes:
        if number not in traced:
            held = (
                f"whose training iterations lie between {min(traced)} and {max(traced)}" if traced else "which is empty"
            )
            raise MissingIterationError(f"iteration {number} is not in the trace, {held}")
    actions_s = [record.compute_s for number in notes for record in traced[number].records]
    slow_s = REPORT_SLOW_SHARE * sum(actions_s) / max(1, len(actions_s))
    panels = []
    for number, note in notes.items():
        timeline = Timeline(traced[number], slow_s)
        panels.append(Panel(traced[number], note, timeline.svg(), timeline.data()))
    return panels


def _facts(run: RunRecord) -> list[tuple[str, str]]:
    """Return other facts of the run: names and values."""
    start = next((found.event for found in run.events if isinstance(found.event, RunStarted)), None)
    facts: list[tuple[str, str]] = [("traces", str(run.directory)), ("ranks shown", ", ".join(map(str, run.ranks)))]
    if start is not None:
        facts += [(name, str(value)) for name, value in start.layout.items()]
        facts += [(name, str(value)) for name, value in start.versions.items()]
        facts += [(f"setting {name}", _setting(value)) for name, value in start.config.items()]
    ended = next((found.event.reason for found in run.events if isinstance(found.event, RunEnded)), None)
    counted = "as Megatron does" if run.megatron_numbers else "from the start of the processes, evaluations included"
    facts.append(("iterations are counted", counted))
    if run.events:
        facts.append(("end", ended if ended is not None else "none in the log: it runs on, or was killed"))
    return facts


def _setting(value: object) -> str:
    """Format the value of a setting."""
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return "on" if value else "off"
    return value if isinstance(value, str) else json.dumps(value)


def plan_page(
    name: str, headline: str, drawn: Sequence[Drawn], *, rows: Sequence[Sequence[str]] = (), note: str = ""
) -> str:
    """Return a page with `drawn` on one time axis. `rows`: cells of a table above; `note`: a line below it.

    Their placement must be Megatron's: timelines support no other.
    """
    axis_s = max(each.simulation.makespan_s for each in drawn)
    panels = []
    for each in drawn:
        iteration = simulated_iteration(each.simulation, each.costs)
        action_s = statistics.fmean(record.compute_s for record in iteration.records)
        timeline = Timeline(iteration, REPORT_SLOW_SHARE * action_s, axis_s=axis_s)
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
