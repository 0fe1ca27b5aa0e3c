# SPDX-License-Identifier: Apache-2.0
"""Draw timelines of iterations as SVG, recorded or simulated, and compute the page's bars and tables: use of time by
part, stage, cause, link."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.ir import Kind
from adaptra_megatron.schedule.simulator import Simulation, sent_s
from adaptra_megatron.telemetry.action_records import ActionRecord, ArrivalRecord
from adaptra_megatron.telemetry.log_lines import duration, percent
from adaptra_megatron.telemetry.trace import RankTrace
from adaptra_megatron.tools.recordings.run_record import RunIteration
from adaptra_megatron.tools.report.iteration_chart import round_step
from adaptra_megatron.tools.report.report_findings import Link, PartFinding, Use, use_of
from adaptra_megatron.tools.report.report_wording import WORTH_SAYING, cause_name, span
from adaptra_megatron.tools.report.waiting import Cause, Flight, IdlePeriod, IterationAnalysis, WaitingPhase

MOST_CAUSES = 12
MOST_STAGES = 64
MOST_COLUMNS = 8


def use_class(use: Use) -> str:
    """Return the CSS class of the colour of `use`."""
    return f"use-{use.name.lower().replace('_', '-')}"


class Bar(NamedTuple):
    """One bar, stacked of uses of time."""

    name: str
    use_s: Mapping[Use, float]
    text: str
    """Label to the right of the bar."""
    mark_s: float | None = None
    """Position of a mark on the bar, in seconds from its start."""
    mark_text: str = ""

    @property
    def seconds(self) -> float:
        """Length of the bar in seconds."""
        return sum(self.use_s.values())


def part_bar(finding: PartFinding) -> Bar:
    """Return the bar of one part of the run. A mark shows the length of an iteration without the worst link's delay."""
    alike = f" and {finding.alike} like them" if finding.alike else ""
    name = f"iterations {span(finding.part)}{alike}"
    text = f"{duration(finding.seconds)}, idle {percent(finding.idle_share)}"
    pair = min(finding.without, key=lambda pair: finding.without[pair], default=None)
    if pair is None or finding.without[pair] >= (1.0 - WORTH_SAYING) * finding.seconds:
        return Bar(name, finding.use_s, text)
    mark_s = finding.without[pair]
    mark_text = f"without the delay of links {pair[0]}↔{pair[1]}: {duration(mark_s)}"
    return Bar(name, finding.use_s, text, mark_s, mark_text)


def stage_bars(finding: PartFinding) -> list[Bar]:
    """Return a bar per stage for one part of the run."""
    bars = []
    for stage, use_s in enumerate(finding.stage_use_s[:MOST_STAGES]):
        idle_s = sum(seconds for use, seconds in use_s.items() if use.idle)
        bars.append(Bar(f"stage {stage}", use_s, f"idle {percent(idle_s / sum(use_s.values()))}"))
    return bars


def idle_causes(columns: Sequence[PartFinding]) -> list[tuple[str, list[float]]]:
    """Return the names of causes, the largest first, each with its share of all stages' time in each part of
    `columns`."""
    largest: dict[Cause, float] = {}
    for finding in columns:
        for cause, share in finding.causes.items():
            largest[cause] = max(share, largest.get(cause, 0.0))
    causes = sorted(largest, key=lambda cause: -largest[cause])
    rows = [
        (cause_name(cause), [finding.causes.get(cause, 0.0) for finding in columns]) for cause in causes[:MOST_CAUSES]
    ]
    if rest := causes[MOST_CAUSES:]:
        sums = [sum(finding.causes.get(cause, 0.0) for cause in rest) for finding in columns]
        rows.append((f"{len(rest)} more", sums))
    return rows


def slowest_links(columns: Sequence[PartFinding]) -> list[Link]:
    """Return all links with messages, by their largest median message time in any part, the slowest first."""
    worst: dict[Link, float] = {}
    for finding in columns:
        for link, found in finding.links.items():
            worst[link] = max(found.median_s, worst.get(link, 0.0))
    return sorted(worst, key=lambda link: (-worst[link], link))


def slowest_parts(findings: Sequence[PartFinding], most: int) -> list[PartFinding]:
    """Return at most `most` parts, by time: the slowest ones, and the last."""
    if len(findings) <= most:
        return list(findings)
    slowest = sorted(findings[:-1], key=lambda finding: -finding.seconds)[: most - 1]
    return sorted([*slowest, findings[-1]], key=lambda finding: finding.part.first)


WIDTH = 1200
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 6, 4, 34
_ROW, _QUICK_LANE, _SLOW_LANE = 26, 10, 30
"""Heights of a stage's row, and of the space between rows, for quick and for slow links."""
_NUMBER_SIZE, _LEAST_NUMBER_SIZE, _DIGIT_WIDTH = 10.0, 5.0, 0.6
"""Font sizes of micro-batch numbers, and the width of a digit relative to them; the page can be zoomed."""
_MOST_NUMBERS = 3000
_TICK_ROOM = 28
"""Half the width of a tick's label."""
_STRIPES_APART = 6.0
MOST_IN_WORDS = 16
"""Maximum number of stages that a picture's description lists."""
MOST_LOOKED_UP = 12_000
"""Maximum number of actions and waits of an iteration for which the page has texts under the pointer."""


class Timeline:
    """Drawing of one iteration, and the texts under the pointer."""

    def __init__(self, iteration: RunIteration, slow_s: float, *, axis_s: float | None = None) -> None:
        """Lay out the drawing. `slow_s`: messages that take longer are drawn as slow. `axis_s`: length of the time
        axis; None: of the iteration. Iterations to be compared need the same."""
        self._analysis = IterationAnalysis(iteration.records, iteration.arrivals)
        self._iteration = iteration
        self._flights: dict[int, list[Flight]] = defaultdict(list)
        """By the upper of the two rows. Links between last and first stage are not drawn."""
        for flight in self._analysis.flights():
            if abs(flight.source - flight.target) == 1:
                self._flights[min(flight.source, flight.target)].append(flight)
        self._slow_s = slow_s
        self._axis_s = self._analysis.seconds if axis_s is None else axis_s
        self._idle = self._analysis.idle_periods()
        self._row_tops = self._layout()
        self.height = self._row_tops[-1] + _ROW + _BOTTOM
        """In units of the drawing; its width is WIDTH."""

    def svg(self) -> str:
        """Return an <svg>, which needs the page's style."""
        parts = [
            f'<svg class="timeline" viewBox="0 0 {WIDTH} {self.height}" role="img" '
            f'aria-label="What each stage did in iteration {self._iteration.number}: {self._in_words()}">'
        ]
        for stage, top in enumerate(self._row_tops):
            parts.append(
                f'<text class="tick" x="{_LEFT - 8}" y="{top + _ROW / 2 + 4}" text-anchor="end">stage {stage}</text>'
            )
        parts += self._paths()
        parts += self._messages()
        parts += self._numbers()
        parts += self._time_axis()
        return "".join([*parts, "</svg>"])

    def data(self) -> dict[str, Any] | None:
        """Return the texts under the pointer, with times in microseconds from the start; None if they are too many."""
        if len(self._iteration.records) + len(self._idle) > MOST_LOOKED_UP:
            return None
        rows: list[list[tuple[int, int, int]]] = [[] for _ in self._row_tops]
        texts: dict[str, int] = {}
        several = self._analysis.chunks > 1
        for record in self._iteration.records:
            name = f"{_KIND_NAMES[record.kind]} of micro-batch {record.micro_batch}"
            name += f", chunk {record.chunk}" if several else ""
            number = texts.setdefault(name, len(texts))
            rows[record.stage].append((self._micros(record.start_s), self._micros(record.end_s), number))
        for period in self._idle:
            number = texts.setdefault(_idle_text(period.phase, period.cause), len(texts))
            rows[period.stage].append((self._micros(period.start_s), self._micros(period.end_s), number))
        return {
            "left": _LEFT,
            "scale": self._scale / 1e6,
            "width": WIDTH,
            "height": self.height,
            "row": _ROW,
            "tops": self._row_tops,
            "texts": list(texts),
            "rows": [sorted(row) for row in rows],
        }

    def _in_words(self) -> str:
        """Describe the picture for screen readers."""
        seconds = self._analysis.seconds
        idle_s = [0.0] * self._analysis.stages
        for period in self._idle:
            idle_s[period.stage] += period.seconds
        idle = [f"stage {stage} idle {percent(each / seconds)}" for stage, each in enumerate(idle_s[:MOST_IN_WORDS])]
        return ", ".join([f"{duration(seconds)} long", *idle])

    @property
    def _scale(self) -> float:
        """Units of the drawing per second."""
        return (WIDTH - _LEFT - _RIGHT) / self._axis_s

    def _x(self, moment_s: float) -> float:
        return _LEFT + (moment_s - self._analysis.start_s) * self._scale

    def _micros(self, moment_s: float) -> int:
        return round((moment_s - self._analysis.start_s) * 1e6)

    def _layout(self) -> list[int]:
        tops = [_TOP]
        for stage in range(self._analysis.stages - 1):
            slow = [flight.seconds > self._slow_s for flight in self._flights[stage]]
            tops.append(tops[-1] + _ROW + (_SLOW_LANE if 4 * sum(slow) > len(slow) else _QUICK_LANE))
        return tops

    def _paths(self) -> list[str]:
        shapes: dict[str, list[str]] = defaultdict(list)
        for period in self._idle:
            use = use_of(period.phase, period.cause)
            self._add_bar(shapes[use_class(use)], period)
            if use is Use.LINK:
                shapes["hatch"] += self._stripes(period)
        for record in self._iteration.records:
            name = use_class(Use(record.kind)) + (" later" if record.chunk else "")
            left, right = self._x(record.start_s), self._x(record.end_s)
            # A narrow gap separates neighbours without a border.
            width = right - left - min(0.6, 0.1 * (right - left))
            shapes[name].append(f"M{left:.2f} {self._row_tops[record.stage]}h{width:.2f}v{_ROW}h{-width:.2f}z")
        return [f'<path class="{name}" d="{"".join(bars)}"/>' for name, bars in shapes.items()]

    def _add_bar(self, bars: list[str], period: IdlePeriod) -> None:
        left, width = self._x(period.start_s), period.seconds * self._scale
        if width >= 0.2:
            bars.append(f"M{left:.1f} {self._row_tops[period.stage]}h{width:.1f}v{_ROW}h{-width:.1f}z")

    def _stripes(self, period: IdlePeriod) -> list[str]:
        """Return lines across a bar, which distinguish it without colour."""
        left, right = self._x(period.start_s), self._x(period.end_s)
        count = int((right - left) / _STRIPES_APART)
        top = self._row_tops[period.stage]
        return [f"M{left + _STRIPES_APART * (index + 0.5):.1f} {top}v{_ROW}" for index in range(count)]

    def _messages(self) -> list[str]:
        """Return lines for messages, from the sender's row at the sending to the receiver's row at the arrival."""
        lines: dict[str, list[str]] = defaultdict(list)
        for upper, flights in self._flights.items():
            above, below = self._row_tops[upper] + _ROW, self._row_tops[upper + 1]
            for flight in flights:
                name = "flight slow" if flight.seconds > self._slow_s else f"flight {flight.kind.lower()}"
                start_y, end_y = (above, below) if flight.source == upper else (below, above)
                lines[name].append(f"M{self._x(flight.sent_s):.1f} {start_y}L{self._x(flight.arrived_s):.1f} {end_y}")
        return [f'<path class="{name}" d="{"".join(marks)}"/>' for name, marks in lines.items()]

    def _numbers(self) -> list[str]:
        """Return the micro-batch numbers in the bars, all in the size that fits most; bars that are too short have
        none."""
        records = self._iteration.records
        digits = max(len(str(record.micro_batch)) for record in records)
        usual_width = median(record.compute_s for record in records) * self._scale
        size = min(_NUMBER_SIZE, usual_width / (digits * _DIGIT_WIDTH))
        if size < _LEAST_NUMBER_SIZE or len(records) > _MOST_NUMBERS:
            return []
        texts = []
        for record in records:
            text = str(record.micro_batch)
            if len(text) * _DIGIT_WIDTH * size <= 1.05 * record.compute_s * self._scale:
                middle = self._x((record.start_s + record.end_s) / 2)
                top = self._row_tops[record.stage] + _ROW / 2 + 0.35 * size
                texts.append(f'<text class="on-{record.kind.lower()}" x="{middle:.1f}" y="{top:.1f}">{text}</text>')
        return [f'<g class="numbers" style="--size:{size:.1f}px">', *texts, "</g>"]

    def _time_axis(self) -> list[str]:
        bottom = self._row_tops[-1] + _ROW
        parts = [f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{bottom + 6}" y2="{bottom + 6}"/>']
        step_s = round_step(self._axis_s / 6, (1, 2, 2.5, 5, 10))
        for number in range(int(self._axis_s / step_s + 1e-9) + 1):
            seconds = step_s * number
            x = self._x(self._analysis.start_s + seconds)
            anchor = "start" if number == 0 else "end" if x > WIDTH - _RIGHT - _TICK_ROOM else "middle"
            label = duration(seconds) if number else "0"
            parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 22}" text-anchor="{anchor}">{label}</text>')
        return parts


_KIND_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def _idle_text(phase: WaitingPhase, cause: Cause) -> str:
    if phase is WaitingPhase.END:
        return "idle: its work of this iteration was done"
    return f"idle, waiting for {cause_name(cause)}"


class Drawn(NamedTuple):
    """One order of actions to draw."""

    title: str
    simulation: Simulation
    costs: Costs


def simulated_iteration(simulation: Simulation, costs: Costs) -> RunIteration:
    """Return one iteration of one pipeline, each stage a rank. An action waits from the end of the one before.

    A link carries one message after the other. If a link or a queue waits for receives to be posted, messages count as
    arrived when they are used.
    """
    records = tuple(record for trace in simulated_traces(simulation) for record in trace.records)
    free = not (costs.has_rendezvous or costs.shared_queue)
    return RunIteration(
        number=0,
        start_s=0.0,
        seconds=simulation.makespan_s,
        records=records,
        arrivals=tuple(_arrivals(simulation, costs)) if free else (),
    )


def simulated_traces(simulation: Simulation) -> list[RankTrace]:
    """Return the traces that ranks would have written, without arrivals."""
    traces = []
    schedule = simulation.schedule
    for stage, order in enumerate(schedule.orders):
        records = []
        free_s = 0.0
        times = zip(order, simulation.start_s[stage], simulation.end_s[stage], strict=True)
        behind = False  # of a combined action, the backward: that one's time is the forward's
        for (_, kind, chunk, micro_batch, combined), start_s, end_s in times:
            begun_s = end_s if behind else start_s
            records.append(ActionRecord(0, stage, str(kind), chunk, micro_batch, free_s, begun_s, end_s))
            free_s, behind = end_s, combined
        traces.append(RankTrace(rank=stage, stage=stage, records=tuple(records)))
    return traces


def _arrivals(simulation: Simulation, costs: Costs) -> Iterator[ArrivalRecord]:
    """Yield the arrivals of all messages, by link and by the time at which they were sent."""
    placement = simulation.schedule.placement
    sent: dict[tuple[int, int], list[tuple[float, ArrivalRecord]]] = defaultdict(list)
    for order, ends_s in zip(simulation.schedule.orders, sent_s(simulation, costs), strict=True):
        for (stage, kind, chunk, micro_batch, _), end_s in zip(order, ends_s, strict=True):
            if kind is Kind.BACKWARD_WEIGHT:
                continue
            forward = kind is Kind.FORWARD
            place = (placement.next_place if forward else placement.previous_place)(stage, chunk)
            if place is not None and place.stage != stage:
                name = "F" if forward else "B"
                record = ArrivalRecord(0, stage, place.stage, name, place.chunk, micro_batch, end_s)
                sent[stage, place.stage].append((end_s, record))
    for link, messages in sent.items():
        cost, free_s = costs.link(*link), 0.0
        for handed_s, record in sorted(messages, key=lambda message: message[0]):
            free_s = max(free_s, handed_s) + cost.occupancy_s
            yield record._replace(arrived_s=free_s + cost.latency_s)
