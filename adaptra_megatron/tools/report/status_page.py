# SPDX-License-Identifier: Apache-2.0
"""Describe a running job in a few lines: its progress, what is slow or dead, and what to do."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import median
from typing import Any, TypeVar

from adaptra_megatron.telemetry.event_wording import age_text, place_of_stage
from adaptra_megatron.telemetry.events import (
    Fault,
    IterationsTimed,
    LinkDetection,
    MemoryWanted,
    PathChanged,
    PlanSwitched,
    PolicyChanged,
    RanksLost,
    RanksReturned,
    RoutesChosen,
    RunEnded,
    RunStarted,
    StageDetection,
    Stamp,
    StampedEvent,
    StragglerDetection,
    short_reason,
)
from adaptra_megatron.telemetry.log_lines import (
    RECENT,
    cable_of,
    cost_since,
    duration,
    ends_of,
    finding_text,
    links_in_words,
    listed,
    numbers_in_words,
    touched_in_words,
)
from adaptra_megatron.tools.recordings.run_files import renumbered
from adaptra_megatron.tools.recordings.run_record import began_at, replicas_of


@dataclass(frozen=True, kw_only=True)
class StatusFinding:
    """One problem of a run. Fields are None or empty if unknown, or if they belong to other kinds."""

    kind: str
    """"link", "stage", "replica" or "path"."""
    state: str
    """"slow", "dead" or "late"; for a failed-over link, the path that it takes."""
    since_iteration: int
    reason: str
    remedy: str
    """What to do."""
    reported_by_rank: int
    text: str
    """All of it but the remedy, as text."""
    stale: bool = False
    """Whether it was found before ranks last failed or rejoined, and may be out of date."""
    pipeline: int | None = None
    """First global rank of the pipeline."""
    source: int | None = None
    """Of a link: the direction that was found first; the others are in `links`."""
    target: int | None = None
    path: str | None = None
    latency_s: float | None = None
    bandwidth_bytes_s: float | None = None
    links: Sequence[str] = ()
    """All directed links on the same cable, such as "0→1"."""
    hosts: Sequence[str] = ()
    ranks: Sequence[int] = ()
    rnics: Sequence[str] = ()
    """With their hosts, such as "node7 mlx5_0"."""
    replicas: Sequence[int] = ()
    lanes: Sequence[int] = ()
    stage: int | None = None
    slow_down: float | None = None
    replica: int | None = None
    host: str | None = None
    lag_s: float | None = None
    before_s: float | None = None
    """Median seconds of an iteration before it began."""
    now_s: float | None = None
    """Median seconds of the latest iterations."""
    cost_s: float | None = None
    """Seconds that it costs in each iteration."""
    share: float | None = None
    """Share of an iteration that it costs, 0..1."""
    plan: int | None = None
    """Number of the latest plan since then."""
    plan_since_iteration: int | None = None
    helps: Mapping[str, float] | None = None
    """Seconds of an iteration by --adaptra-max-in-flight, if more memory would help."""


def status_findings(events: Sequence[StampedEvent], seconds: Mapping[int, float], changed: int) -> list[StatusFinding]:
    """Return the cables, stages and replicas that the detector last found unhealthy, and failed-over paths.

    `seconds`: of iterations, in ascending order. `changed`: iteration in which ranks last failed or rejoined; since
    then the detector measures healthy levels anew.
    """
    latest: dict[object, StampedEvent] = {}
    name: object
    for found in events:
        event = found.event
        if isinstance(event, LinkDetection | StageDetection):
            place = (event.source, event.target, event.path) if isinstance(event, LinkDetection) else event.stage
            name = type(event), event.pipeline, place
            latest[name] = _since_its_state_began(latest.get(name), found, event)
        elif isinstance(event, StragglerDetection):
            latest["replica", event.replica] = found
        elif isinstance(event, PathChanged):
            latest["path", found.stamp.rank, event.source, event.target] = found
    cables: dict[object, list[StampedEvent]] = {}
    for name, found in latest.items():
        if isinstance(found.event, LinkDetection):
            if found.event.after != "healthy":
                cables.setdefault(cable_of(found.event), []).append(found)
        elif _unhealthy(found.event):
            cables[name] = [found]
    return [
        _cable_finding(alike, events, seconds, changed)
        if isinstance(alike[0].event, LinkDetection)
        else _finding(alike[0], changed)
        for alike in cables.values()
    ]


def _since_its_state_began(
    before: StampedEvent | None, found: StampedEvent, event: LinkDetection | StageDetection
) -> StampedEvent:
    """Return an event with the iteration in which the state began, which its reason takes as known.

    An event on a level alone names that of the level, and a stage's is of one kind of actions, which may even be one
    that is no longer slow. `before`: the last event of the same link or stage, if any.
    """
    if before is None or event.before != event.after:
        return found
    return replace(found, event=replace(event, since_iteration=began_at(before)))


def _unhealthy(event: object) -> bool:
    if isinstance(event, PathChanged):
        return event.failover
    return isinstance(event, StageDetection | StragglerDetection) and event.after != "healthy"


def _finding(found: StampedEvent, changed: int) -> StatusFinding:
    """Return the finding of an event on anything but a link."""
    event = found.event
    assert isinstance(event, (StageDetection, StragglerDetection, PathChanged))
    wanted = {each.name for each in fields(StatusFinding)}
    known: dict[str, Any] = {each.name: getattr(event, each.name) for each in fields(event) if each.name in wanted}
    since, rank = began_at(found), found.stamp.rank
    where_found: dict[str, Any] = {"since_iteration": since, "reported_by_rank": rank}
    if isinstance(event, PathChanged):
        remedy = "look at the RNICs, cables and switches of the links that failed over"
        text = f"link {event.source}→{event.target} of rank {rank} takes the {event.after} path since iteration {since}"
        text += f": {event.cause}"
        more = {"kind": "path", "state": event.after, "reason": event.cause, "remedy": remedy, "text": text}
        return StatusFinding(**{**known, **where_found, **more})
    if isinstance(event, StageDetection):
        where = f", {place}" if (place := place_of_stage(event)) else ""
        kind, name = "stage", f"stage {event.stage}"
        remedy = f"look at the GPUs of stage {event.stage}{where} (clocks, temperature, other work)"
        known["host"] = event.host or None
        name += where or (f" of the pipeline of rank {event.pipeline}" if event.pipeline else "")
        name += "," if where else ""
    else:
        kind, name = "replica", f"replica {event.replica}"
        remedy = f"replica {event.replica}, stage {event.stage} on {event.host}: "
        remedy += event.remedy or "see what slows it down"
    text = finding_text(name, event.after, since, event.reason)
    more = {"kind": kind, "state": event.after, "remedy": remedy, "text": text}
    return StatusFinding(**{**known, **where_found, **more}, stale=found.stamp.iteration < changed)


def _cable_finding(
    alike: Sequence[StampedEvent], events: Sequence[StampedEvent], seconds: Mapping[int, float], changed: int
) -> StatusFinding:
    """Return one finding for all directions, paths, lanes and replicas of a cable."""
    first = min(alike, key=began_at)
    since, rank = began_at(first), first.stamp.rank
    links = [found.event for found in alike if isinstance(found.event, LinkDetection)]
    event = first.event
    assert isinstance(event, LinkDetection)
    state = "dead" if any(link.after == "dead" for link in links) else "slow"
    cost, wanted = cost_since(seconds, since), _memory_wanted(events, links, since)
    number, runs_since = _plan_since(events, rank, since)
    text = finding_text(_links_and_pipelines(links), state, since, short_reason(event), touched_in_words(links), cost)
    if number is not None:
        text += f"; plan {number} runs since iteration {runs_since}"
    hosts = sorted({host for link in links for host in (link.source_host, link.target_host) if host})
    return StatusFinding(
        kind="link",
        state=state,
        since_iteration=since,
        reason=event.reason,
        remedy=_remedy(links, hosts, wanted),
        reported_by_rank=rank,
        text=text,
        stale=max(found.stamp.iteration for found in alike) < changed,
        pipeline=event.pipeline,
        source=event.source,
        target=event.target,
        path=event.path,
        latency_s=event.latency_s,
        bandwidth_bytes_s=event.bandwidth_bytes_s,
        links=sorted({f"{link.source}→{link.target}" for link in links}),
        hosts=hosts,
        ranks=sorted({each for link in links for each in (link.source_rank, link.target_rank) if each is not None}),
        rnics=sorted(
            {f"{link.source_host} {rnic}" for link in links for rnic in link.source_rnics}
            | {f"{link.target_host} {rnic}" for link in links for rnic in link.target_rnics}
        ),
        replicas=sorted({link.replica for link in links if link.replica is not None}),
        lanes=sorted({link.lane for link in links if link.lane is not None}),
        before_s=None if cost is None else cost.before_s,
        now_s=None if cost is None else cost.now_s,
        cost_s=None if cost is None else cost.seconds,
        share=None if cost is None else cost.share,
        plan=number,
        plan_since_iteration=runs_since,
        helps=None if wanted is None else wanted.caps,
    )


def _links_and_pipelines(links: Sequence[LinkDetection]) -> str:
    """Name the links, and their pipelines if neither hosts nor ranks are known."""
    pipelines = sorted({link.pipeline or 0 for link in links})
    where = ""
    if any(pipelines) and not touched_in_words(links):
        where = f" of the {numbers_in_words('pipeline', pipelines)} of these ranks"
        if len(pipelines) == 1:
            where = f" of the pipeline of rank {pipelines[0]}"
    return f"{_links(links)}{where}"


def _links(links: Sequence[LinkDetection]) -> str:
    return links_in_words(links, "↔", "→")


def _remedy(links: Sequence[LinkDetection], hosts: Sequence[str], wanted: MemoryWanted | None) -> str:
    name = _links(links).removesuffix(", host path,")
    between = f"between {' and '.join(hosts)}" if len(hosts) == 2 else f"of {name}"
    remedy = f"look at the network {between}; meanwhile orders and paths go around it"
    if wanted is not None:
        caps = ", ".join(f"{cap}: {duration(each_s)}" for cap, each_s in wanted.caps.items())
        remedy += f"; --adaptra-max-in-flight above {wanted.held:g} would make iterations shorter ({caps})"
    return remedy


def _plan_since(events: Iterable[StampedEvent], rank: int, since: int) -> tuple[int | None, int | None]:
    """Return number and iteration of the latest switch of plans by `rank` since iteration `since`; None twice if there
    is none."""
    found: tuple[int | None, int | None] = None, None
    for each in events:
        if isinstance(each.event, PlanSwitched) and each.stamp.rank == rank and each.stamp.iteration >= since:
            found = each.event.number, each.stamp.iteration
    return found


def _memory_wanted(events: Iterable[StampedEvent], links: Sequence[LinkDetection], since: int) -> MemoryWanted | None:
    """Return the latest event on more memory since iteration `since` of which one of `links` is the cause."""
    ends = {ends_of(link) for link in links}
    later = [found.event for found in events if found.stamp.iteration >= since]
    wanted = [each for each in later if isinstance(each, MemoryWanted) and (each.source, each.target) in ends]
    return wanted[-1] if wanted else None


Kind = TypeVar("Kind")

SILENT_S, SILENT_ITERATIONS = 120.0, 10
"""A run counts as silent if it has written nothing for both of these; it writes times of iterations about every 20
s."""
MOST_LINES = 8
"""Maximum number of lines of one kind."""
_NORMAL_END = "the program ended"


@dataclass(frozen=True, kw_only=True)
class Status:
    """State of a run, from its log. Field names are an interface of `adaptra status --json`: add, never rename."""

    state: str
    """"runs", "silent", "ended" or "failed"."""
    run: str
    speed: str
    iteration: int
    """The latest iteration, by Megatron's number if the log has it; -1 before the first."""
    iteration_s: float | None
    """Median seconds of the latest iterations; None before one has ended."""
    wrote_s: float
    """Time of the run's last record, in seconds since the epoch."""
    findings: Sequence[StatusFinding]
    """The contents of `slow` and `paths`, for programs."""
    slow: Sequence[str]
    paths: Sequence[str]
    dead: Sequence[str]
    routes: Sequence[str]
    faults: Sequence[str]
    to_do: Sequence[str]

    @property
    def over(self) -> bool:
        """Whether the run no longer continues."""
        return self.state != "runs"

    def to_json(self) -> dict[str, Any]:
        """Return the document of `adaptra status --json`."""
        document = asdict(self)
        for finding in document["findings"]:
            finding["told_by_rank"] = finding.pop("reported_by_rank")  # the key that programs know
        return {**document, "to_do": self.to_do or ["nothing"]}

    @property
    def healthy(self) -> bool:
        """Whether there is no problem."""
        return not (self.slow or self.to_do)

    def lines(self) -> list[str]:
        """Return all of it as lines of text."""
        return [
            f"run:    {self.run}",
            f"speed:  {self.speed}",
            *_kind("slow:   ", self.slow),
            *_kind("paths:  ", self.paths),
            *_kind("dead:   ", self.dead),
            *_kind("routes: ", self.routes),
            *_kind("faults: ", self.faults),
            *_kind("to do:  ", self.to_do or ["nothing"]),
        ]


def status_of(events: Sequence[StampedEvent], now_s: float) -> Status:
    """Return the state of a run from its log (not empty). `now_s`: present time, in seconds since the epoch."""
    events = renumbered(events)
    seconds = _seconds_by_iteration(events)
    failures = _of(events, RanksLost)
    findings = status_findings(events, seconds, _changed_at(events))
    slow = [found for found in findings if found.kind != "path"]
    moved = [found for found in findings if found.kind == "path"]
    dead, dead_do = _deaths(events, failures, seconds)
    wrote_s = max(found.stamp.wall_s for found in events)
    state, text, state_do = _state(events, now_s - wrote_s, seconds)
    recent_s = _recent(events, seconds)
    stale = ["(findings from before ranks last failed or came back may be out of date)"]
    return Status(
        state=state,
        run=f"{_layout(events)}; {text}",
        speed=_speed(events, seconds),
        iteration=max([*(found.stamp.iteration for found in events), *seconds]),
        iteration_s=median(recent_s) if recent_s else None,
        wrote_s=wrote_s,
        findings=findings,
        slow=[*(found.text for found in slow), *stale * any(found.stale for found in slow)],
        paths=[found.text for found in moved],
        dead=dead,
        routes=_routes(events, failures),
        faults=[f"{fault.what}: {fault.detail}" for _, fault in _of(events, Fault)],
        to_do=[*state_do, *dead_do, *dict.fromkeys(found.remedy for found in (*slow, *moved))],
    )


def _of(events: Iterable[StampedEvent], kind: type[Kind]) -> list[tuple[Stamp, Kind]]:
    return [(found.stamp, found.event) for found in events if isinstance(found.event, kind)]


def _kind(name: str, texts: Sequence[str]) -> list[str]:
    """Return the lines of one kind, the latest last; if there are too many, the first ones are left out."""
    left_out = len(texts) - MOST_LINES
    head = [f"{name}{left_out} more are in the log; the latest:"] if left_out > 0 else []
    return [*head, *(f"{name}{text}" for text in texts[-MOST_LINES:])]


def _seconds_by_iteration(events: Iterable[StampedEvent]) -> dict[int, float]:
    found: dict[int, float] = {}
    for _, each in _of(events, IterationsTimed):
        found |= dict(enumerate(each.seconds, each.first))
    return dict(sorted(found.items()))


def _grid(events: Sequence[StampedEvent]) -> tuple[int, int]:
    """Return the numbers of replicas and stages."""
    stages = max(start.layout.get("stages", 1) for _, start in _of(events, RunStarted))
    return 1 + max(replicas_of(events).values()), stages


def _layout(events: Sequence[StampedEvent]) -> str:
    replicas, stages = _grid(events)
    _, first = _of(events, RunStarted)[0]
    world = f", {first.layout['world_size']} ranks" if "world_size" in first.layout else ""
    return f"{replicas} replica{'s' * (replicas > 1)} of {stages} stages{world}"


def _state(events: Sequence[StampedEvent], silent_s: float, seconds: dict[int, float]) -> tuple[str, str, list[str]]:
    """Return the run's state, as one word and as text, and what to do if it has stopped."""
    ends = [end.reason for _, end in _of(events, RunEnded)]
    if ends:
        wrong = [reason for reason in ends if reason != _NORMAL_END]
        state = "failed" if wrong else "ended"
        return (
            state,
            f"ended {age_text(silent_s)} ago: {(wrong or ends)[0]}",
            ["the job ended with an error: see the log of the rank, and docs/troubleshooting.md"] * bool(wrong),
        )
    recent_s = max(list(seconds.values())[-RECENT:], default=0.0)
    if silent_s > max(SILENT_S, SILENT_ITERATIONS * recent_s):
        return (
            "silent",
            f"silent for {age_text(silent_s)}: it hangs, or was killed",
            ["look at the first rank whose log stops; a killed job continues from its last checkpoint"],
        )
    return "runs", f"runs, wrote {age_text(max(silent_s, 0.0))} ago", []


def _speed(events: Sequence[StampedEvent], seconds: dict[int, float]) -> str:
    last = max(found.stamp.iteration for found in events)
    if not seconds:
        return f"iteration {last}, no times yet" if last >= 0 else "no iteration has ended yet"
    recent_s = _recent(events, seconds)
    switches = _of(events, PlanSwitched)[-1:]
    plan = "".join(f", plan {event.number} since iteration {at.iteration}" for at, event in switches)
    policies = _of(events, PolicyChanged)[-1:]
    plan += "".join(f", policy {event.after} since about iteration {at.iteration}" for at, event in policies)
    text = f"iteration {max(last, *seconds)}, {duration(median(recent_s))} each (median of the last {len(recent_s)})"
    return text + plan


def _recent(events: Sequence[StampedEvent], seconds: dict[int, float]) -> list[float]:
    """Return the seconds of the latest iterations since the last change."""
    changes = (*_of(events, PlanSwitched), *_of(events, RanksLost))
    since = max((stamp.iteration for stamp, _ in changes), default=-1)
    return [each for at, each in seconds.items() if at > since][-RECENT:] or list(seconds.values())[-1:]


def _deaths(
    events: Sequence[StampedEvent], failures: Sequence[tuple[Stamp, RanksLost]], seconds: dict[int, float]
) -> tuple[list[str], list[str]]:
    """Return a line per failure of ranks with its effect, and what to do."""
    texts = []
    for number, (stamp, event) in enumerate(failures):
        names = listed([f"{rank} ({why})" for rank, why in event.ranks.items()])
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stamp.wall_s - event.seconds))
        until = failures[number + 1][0].iteration if number + 1 < len(failures) else max(seconds, default=0) + 1
        since = failures[number - 1][0].iteration if number else 0
        before_s = [each for at_, each in seconds.items() if since < at_ < stamp.iteration][-RECENT:]
        after_s = [each for at_, each in seconds.items() if stamp.iteration < at_ < until][-RECENT:]
        text = f"{names} since iteration {stamp.iteration}, {at}: {duration(event.seconds)} until redone"
        if before_s and after_s:
            text += f", then {duration(median(after_s))} an iteration instead of {duration(median(before_s))}"
        texts.append(text)
    if not failures:
        return [], []
    for stamp, returned in _of(events, RanksReturned):
        texts.append(f"{listed(list(returned.ranks))} came back in iteration {stamp.iteration}")
    left = _latest_members(events).dead_cells
    if not left:
        return texts, []
    replicas, _ = _grid(events)
    dead = Counter(int(cell.split(".")[1]) for cell in left)
    lonely = [f"stage {stage}" for stage, count in sorted(dead.items()) if count == replicas - 1]
    to_do = ["nothing at once: restart from the latest checkpoint with failed parts replaced, when it suits"]
    if lonely:
        to_do = [
            f"restart soon, with failed parts replaced: {listed(lonely)} has one cell left, whose failure ends the job"
        ]
    return texts, to_do


def _latest_members(events: Sequence[StampedEvent]) -> RanksLost | RanksReturned:
    """Return the last change of the set of live ranks; there is one."""
    changes: list[tuple[Stamp, RanksLost | RanksReturned]] = [*_of(events, RanksLost), *_of(events, RanksReturned)]
    return max(changes, key=lambda change: (change[1].epoch, change[0].iteration))[1]


def _changed_at(events: Sequence[StampedEvent]) -> int:
    """Return the iteration in which ranks last failed or rejoined; -1 if none did."""
    return max((stamp.iteration for stamp, _ in (*_of(events, RanksLost), *_of(events, RanksReturned))), default=-1)


def _routes(events: Sequence[StampedEvent], failures: Sequence[tuple[Stamp, RanksLost]]) -> list[str]:
    """Return a line for each current route of micro-batches to another replica."""
    if not failures:
        return [chosen.reason for _, chosen in _of(events, RoutesChosen)[-1:] if chosen.moved]
    targets: dict[tuple[int, int], list[str]] = {}
    later = [chosen.moved for stamp, chosen in _of(events, RoutesChosen) if stamp.iteration > _changed_at(events)]
    for stage, source, target, count in later[-1] if later else _latest_members(events).moved:
        targets.setdefault((stage, source), []).append(f"{count} at replica {target}")
    return [
        f"stage {stage} of replica {source}: {listed(texts)}, in each iteration"
        for (stage, source), texts in sorted(targets.items())
    ]
