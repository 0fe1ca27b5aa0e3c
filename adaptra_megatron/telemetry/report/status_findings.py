# SPDX-License-Identifier: Apache-2.0
"""What `adaptra status` has found: links, stages and replicas that are not as they should be, each once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from adaptra_megatron.telemetry.events.cables import (
    MEASURABLE,
    cable_of,
    cost_since,
    ends_of,
    links_in_words,
    numbers_in_words,
    touched_in_words,
)
from adaptra_megatron.telemetry.events.events import (
    LinkDetection,
    MemoryWanted,
    PathChanged,
    PlanSwitched,
    StageDetection,
    StampedEvent,
    StragglerDetection,
    short_reason,
)
from adaptra_megatron.telemetry.report.wording import duration, percent
from adaptra_megatron.telemetry.run_record import began_at


@dataclass(frozen=True, kw_only=True)
class StatusFinding:
    """One thing that is not as it should be. What is None or empty is not known, or of another kind of finding."""

    kind: str
    """"link", "stage", "replica" or "path"."""
    state: str
    """"slow", "dead" or "late"; the path that is taken where a link failed over."""
    since_iteration: int
    reason: str
    remedy: str
    """What to do."""
    told_by_rank: int
    text: str
    """All of it but the remedy, in words."""
    stale: bool = False
    """Whether it was found before ranks died or came back last, and may not be so any more."""
    pipeline: int | None = None
    """By its first global rank."""
    source: int | None = None
    """Of a link, of which this is the direction that was found first; the others are in `links`."""
    target: int | None = None
    path: str | None = None
    latency_s: float | None = None
    bandwidth_bytes_s: float | None = None
    links: Sequence[str] = ()
    """All directed links that share the way, such as "0→1"."""
    hosts: Sequence[str] = ()
    ranks: Sequence[int] = ()
    rnics: Sequence[str] = ()
    """By host, such as "node7 mlx5_0"."""
    replicas: Sequence[int] = ()
    lanes: Sequence[int] = ()
    stage: int | None = None
    slow_down: float | None = None
    replica: int | None = None
    host: str | None = None
    lag_s: float | None = None
    before_s: float | None = None
    """Median of iterations before it began."""
    now_s: float | None = None
    """The same of the latest."""
    cost_s: float | None = None
    """What is lost in each iteration."""
    share: float | None = None
    """Part of an iteration that it costs, 0..1."""
    plan: int | None = None
    """Number of the plan that was switched to since then."""
    plan_since_iteration: int | None = None
    helps: Mapping[str, float] | None = None
    """Seconds of an iteration by --adaptra-max-in-flight, where more than there is would help."""


def status_findings(events: Sequence[StampedEvent], seconds: Mapping[int, float], changed: int) -> list[StatusFinding]:
    """Cables, stages and replicas that are not healthy, as the detector saw them last, and failed-over paths.

    `seconds`: of iterations, in ascending order. `changed`: the iteration in which ranks died or came back last, since
    when what is usual is learnt anew.
    """
    latest: dict[object, StampedEvent] = {}
    for found in events:
        event = found.event
        if isinstance(event, LinkDetection):
            latest["link", event.pipeline, event.source, event.target, event.path] = found
        elif isinstance(event, StageDetection):
            latest["stage", event.pipeline, event.stage] = found
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


def _unhealthy(event: object) -> bool:
    if isinstance(event, PathChanged):
        return event.failover
    return isinstance(event, StageDetection | StragglerDetection) and event.after != "healthy"


def _finding(found: StampedEvent, changed: int) -> StatusFinding:
    """Of anything but a link."""
    event = found.event
    assert isinstance(event, (StageDetection, StragglerDetection, PathChanged))
    wanted = {each.name for each in fields(StatusFinding)}
    known: dict[str, Any] = {each.name: getattr(event, each.name) for each in fields(event) if each.name in wanted}
    since, rank = began_at(found), found.stamp.rank
    told: dict[str, Any] = {"since_iteration": since, "told_by_rank": rank}
    if isinstance(event, PathChanged):
        remedy = "look at the RNICs, cables and switches of the links that failed over"
        text = f"link {event.source}→{event.target} of rank {rank} takes the {event.after} path since iteration {since}"
        text += f": {event.cause}"
        more = {"kind": "path", "state": event.after, "reason": event.cause, "remedy": remedy, "text": text}
        return StatusFinding(**{**known, **told, **more})
    if isinstance(event, StageDetection):
        where = "" if event.stage_rank is None else f", rank {event.stage_rank} on {event.host}"
        kind, name = "stage", f"stage {event.stage}"
        remedy = f"look at the GPUs of stage {event.stage}{where} (clocks, temperature, other work)"
        known["host"] = event.host or None
        name += where or (f" of the pipeline of rank {event.pipeline}" if event.pipeline else "")
        name += "," if where else ""
    else:
        kind, name = "replica", f"replica {event.replica}"
        remedy = f"replica {event.replica}, stage {event.stage} on {event.host}: "
        remedy += event.remedy or "see what slows it down"
    text = f"{name} is {event.after} since iteration {since}: {event.reason}"
    more = {"kind": kind, "state": event.after, "remedy": remedy, "text": text}
    return StatusFinding(**{**known, **told, **more}, stale=found.stamp.iteration < changed)


def _cable_finding(
    alike: Sequence[StampedEvent], events: Sequence[StampedEvent], seconds: Mapping[int, float], changed: int
) -> StatusFinding:
    """One finding of all directions, paths, lanes and replicas that share a way."""
    first = min(alike, key=began_at)
    since, rank = began_at(first), first.stamp.rank
    links = [found.event for found in alike if isinstance(found.event, LinkDetection)]
    event = first.event
    assert isinstance(event, LinkDetection)
    state = "dead" if any(link.after == "dead" for link in links) else "slow"
    cost, wanted = cost_since(seconds, since), _memory_wanted(events, links, since)
    number, runs_since = _plan_since(events, rank, since)
    text = f"{_links_and_state(links, state)} since iteration {since}: {short_reason(event)}"
    text += f"; {touched}" if (touched := touched_in_words(links)) else ""
    if cost is not None and cost.share >= MEASURABLE:
        text += f"; it costs {duration(cost.seconds)} of each iteration ({percent(cost.share)})"
    if number is not None:
        text += f"; plan {number} runs since iteration {runs_since}"
    hosts = sorted({host for link in links for host in (link.source_host, link.target_host) if host})
    return StatusFinding(
        kind="link",
        state=state,
        since_iteration=since,
        reason=event.reason,
        remedy=_remedy(links, hosts, wanted),
        told_by_rank=rank,
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


def _links_and_state(links: Sequence[LinkDetection], state: str) -> str:
    """With the pipelines, where neither hosts nor ranks are known."""
    pipelines = sorted({link.pipeline or 0 for link in links})
    where = ""
    if any(pipelines) and not touched_in_words(links):
        where = f" of the {numbers_in_words('pipeline', pipelines)} of these ranks"
        if len(pipelines) == 1:
            where = f" of the pipeline of rank {pipelines[0]}"
    return f"{_links(links)}{where} is {state}"


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
    """Number of the plan that `rank` has switched to last since then, and the iteration."""
    found: tuple[int | None, int | None] = None, None
    for each in events:
        if isinstance(each.event, PlanSwitched) and each.stamp.rank == rank and each.stamp.iteration >= since:
            found = each.event.number, each.stamp.iteration
    return found


def _memory_wanted(events: Iterable[StampedEvent], links: Sequence[LinkDetection], since: int) -> MemoryWanted | None:
    """What more memory would buy since one of `links` cannot be hidden."""
    ends = {ends_of(link) for link in links}
    told = [found.event for found in events if found.stamp.iteration >= since]
    wanted = [each for each in told if isinstance(each, MemoryWanted) and (each.source, each.target) in ends]
    return wanted[-1] if wanted else None
