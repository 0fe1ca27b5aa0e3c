# SPDX-License-Identifier: Apache-2.0
"""What the leading rank knows of the links' paths: which each takes, and which are to be measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from adaptra_megatron.detector.findings import Estimates, LinkEstimate, State
from adaptra_megatron.detector.samples import IterationSample, LinkId
from adaptra_megatron.runtime.cost_estimates import InUse
from adaptra_megatron.runtime.decisions import LinkName
from adaptra_megatron.runtime.path_choice import Choice, Setting, choose, estimates_of
from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.transport.paths import Path, PathSettings


@dataclass(frozen=True, kw_only=True)
class PathPolicy:
    """Of a job whose links have two paths."""

    preferred: Path
    device_blocks: bool = False
    """As in `path_choice.Setting`."""


class PathLeader:
    """Follows all links of the job. Decisions are made in two steps, as plans are made for the paths to come."""

    def __init__(self, policy: PathPolicy) -> None:
        self._policy = policy
        self._taken: dict[LinkName, Path] = {}
        self._unproven: dict[LinkName, int] = {}
        """Links that took another path because theirs was not healthy any more, and since when it was not: what slows
        one path may well slow the other, of which nothing newer may be known."""
        self._probes = ProbeSchedule(burst=PathSettings.measuring_probes)

    def learn(self, sample: IterationSample) -> None:
        """Which links there are."""
        for link in sample.links:
            self._taken.setdefault(LinkName(link.pipeline, link.source, link.target), self._policy.preferred)

    def choices(self, estimates: Estimates, costs: Costs) -> list[Choice]:
        """The links that are to take another path, given the costs of the paths that they take."""
        setting = _setting(self._policy, costs)
        found = (
            choose(link, path, estimates_of(link, estimates), setting) for link, path in sorted(self._taken.items())
        )
        return [choice for choice in found if choice is not None]

    def take(self, choices: Iterable[Choice], estimates: Estimates) -> None:
        """From the next decision on."""
        for choice in choices:
            self._taken[choice.link] = choice.path
            self._unproven.pop(choice.link, None)
            if choice.path is not self._policy.preferred:
                self._unproven[choice.link] = estimates_of(choice.link, estimates)[choice.before].since_iteration

    @property
    def diverted(self) -> tuple[LinkName, ...]:
        """Links that do not take the preferred path."""
        return tuple(sorted(link for link, path in self._taken.items() if path is not self._policy.preferred))

    def in_use(self, carried: InUse, estimates: Estimates) -> InUse:
        """The paths to plan for: what a link takes, if that is known to work, and else what carried its messages.

        A link that has just left a slow path is planned for as if it still took that, until the other one is seen to be
        better: to expect too much costs time, to expect too little only memory, and that for a moment.
        """
        found = dict(carried)
        for link, path in self._taken.items():
            known = estimates_of(link, estimates)
            estimate = known.get(path)
            if estimate is None or estimate.state is State.DEAD:
                continue
            if estimate.measured_iteration >= self._unproven.get(link, -1):
                self._unproven.pop(link, None)
            left = known.get(path.other)
            as_before = link in self._unproven and left is not None and left.state is State.SLOW
            found[link] = LinkId(*link, (path.other if as_before else path).value)
        return found

    def probed(self, estimates: Estimates, micro_batches: int, iteration_s: float) -> tuple[LinkName, ...]:
        """Links whose other path is to be measured in the next iteration, which takes about `iteration_s`."""
        return self._probes.due(
            self._taken,
            estimates,
            preferred=self._policy.preferred,
            micro_batches=micro_batches,
            iteration_s=iteration_s,
        )


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """How often the path is measured that a link's messages do not take."""

    share: float = 0.005
    """Of the messages, while all is well: so many may be probes."""
    share_in_trouble: float = 0.05
    """While the path that is taken is slow: somebody may want to leave it."""
    least_s: float = 1.0
    """Between two bursts while all is well."""
    first_bursts: int = 4
    """In as many iterations in a row: what the path is like is to be known before it is needed."""
    attempts: int = 8
    """As many as this, where they are not answered."""


class ProbeSchedule:
    """Decides, once per iteration, which links have the path measured that their messages do not take."""

    def __init__(self, settings: ProbeSettings | None = None, *, burst: int) -> None:
        """`burst`: probes at a time."""
        self._settings, self._burst = settings if settings is not None else ProbeSettings(), burst
        self._iteration = 0
        self._asked: dict[LinkName, int] = {}
        """The iteration of the latest burst."""
        self._bursts: dict[LinkName, int] = {}
        """How many there were."""

    def due(
        self,
        taken: Mapping[LinkName, Path],
        estimates: Estimates,
        *,
        preferred: Path,
        micro_batches: int,
        iteration_s: float,
    ) -> tuple[LinkName, ...]:
        """The links to measure in the next iteration."""
        settings = self._settings
        self._iteration += 1
        seldom = max(
            math.ceil(self._burst / (settings.share * micro_batches)), math.ceil(settings.least_s / iteration_s)
        )
        in_trouble = math.ceil(self._burst / (settings.share_in_trouble * micro_batches))
        found = []
        for link, path in taken.items():
            known = estimates_of(link, estimates)
            pause = self._pause(link, known.get(path), known.get(path.other), seldom, in_trouble)
            if path is not preferred:
                pause = 1  # it is to be seen when the preferred one heals
            if self._iteration >= self._asked.get(link, -math.inf) + pause:
                self._asked[link] = self._iteration
                self._bursts[link] = self._bursts.get(link, 0) + 1
                found.append(link)
        return tuple(found)

    def _pause(
        self, link: LinkName, taken: LinkEstimate | None, idle: LinkEstimate | None, seldom: int, in_trouble: int
    ) -> int:
        """Iterations from one burst to the next."""
        first = self._settings.attempts if idle is None else self._settings.first_bursts
        if self._bursts.get(link, 0) < first:
            return 1
        if idle is None:
            return seldom
        if idle.state is not State.HEALTHY or (taken is not None and taken.state is not State.HEALTHY):
            return in_trouble
        return seldom


def _setting(policy: PathPolicy, costs: Costs) -> Setting:
    backward_s = costs.whole_backward_s
    work_s = [sum(forward) + sum(backward) for forward, backward in zip(costs.forward_s, backward_s, strict=True)]
    actions = costs.stages * costs.chunks * (3 if any(map(any, costs.backward_weight_s)) else 2)
    return Setting(
        preferred=policy.preferred,
        micro_batches=costs.micro_batches,
        action_s=sum(work_s) / actions,
        period_s=max(work_s),
        device_blocks=policy.device_blocks,
    )


def reasons(choices: Sequence[Choice]) -> list[str]:
    """In words, for the log and for plans that are made because of them."""
    return [f"{choice.link} takes the {choice.path.value} path: {choice.reason}" for choice in choices]
