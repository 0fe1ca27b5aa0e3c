# SPDX-License-Identifier: Apache-2.0
"""The leading rank's decisions on the links' paths: which each takes, and which are to be measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from adaptra_megatron.control.deciders import Context, Telemetry
from adaptra_megatron.control.decisions import LinkName, Paths
from adaptra_megatron.control.measurements import StageMeasurement, iteration_s
from adaptra_megatron.control.order.cost_estimates import InUse
from adaptra_megatron.control.paths.path_choice import Choice, Setting, choose, estimates_of
from adaptra_megatron.detector.findings import Estimates, LinkEstimate, State
from adaptra_megatron.detector.samples import IterationSample, LinkId
from adaptra_megatron.log import logger_of
from adaptra_megatron.reasons import reason_fields, reason_text
from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.telemetry.events.events import PathChosen
from adaptra_megatron.transport.paths import Path, PathSettings

logger = logger_of(__name__)


@dataclass(frozen=True, kw_only=True)
class PathPolicy:
    """Settings of the choice between the two paths of each link."""

    preferred: Path
    device_blocks: bool = False
    rendezvous: bool = False
    """See `path_choice.Setting` for both."""


class PathDecider:
    """Follows all links of the job. Comes before the order is decided on, which is planned for the paths to come."""

    def __init__(self, policy: PathPolicy, telemetry: Telemetry, running: Paths | None = None) -> None:
        """`running`: what was decided before; None: nothing."""
        self._policy, self._telemetry = policy, telemetry
        diverted = () if running is None else running.diverted
        self._taken: dict[LinkName, Path] = dict.fromkeys(diverted, policy.preferred.other)
        self._unproven: dict[LinkName, int] = {}
        """Links that took another path because theirs was not healthy any more, and since when it was not: what slows
        one path may well slow the other, of which nothing newer may be known."""
        self._probes = ProbeSchedule(burst=PathSettings.measuring_probes)

    def observe(self, measurements: Sequence[StageMeasurement], sample: IterationSample) -> None:
        """Learn which links there are."""
        for link in sample.links:
            self._taken.setdefault(LinkName(link.pipeline, link.source, link.target), self._policy.preferred)

    def decide(self, context: Context) -> Paths:
        """The path of every link, and what to measure."""
        estimates = context.estimates
        context.expect(self.in_use(context.carried, estimates))
        choices = [] if context.costs is None else self.choices(estimates, context.costs)
        if choices:
            context.change([choice.describe() for choice in choices])
            self.take(choices, estimates)
            context.expect(self.in_use(context.carried, estimates))
            self._tell(choices, context.number + 1)
        return Paths(self.diverted, self.probed(estimates, context.micro_batches, iteration_s(context.latest)))

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

    def _tell(self, choices: Iterable[Choice], number: int) -> None:
        """Links are to take other paths from plan `number` on."""
        for choice in choices:
            logger.debug("%s", reason_text(choice.describe()))
            self._telemetry.log(
                PathChosen(
                    number=number,
                    pipeline=choice.link.pipeline,
                    source=choice.link.source,
                    target=choice.link.target,
                    before=choice.before.value,
                    after=choice.path.value,
                    **reason_fields(choice.why),
                    message_s={path.value: cost_s for path, cost_s in choice.message_s.items()},
                    gain_s=choice.gain_s,
                )
            )

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
    """Rates of measuring the path that a link's messages do not take. A burst is a few probes in a row."""

    share: float = 0.005
    """Share of the messages that may be probes while all is well."""
    share_in_trouble: float = 0.05
    """Same share while the path that is taken is slow, and may be worth leaving."""
    least_s: float = 1.0
    """Least seconds between two bursts while all is well."""
    first_bursts: int = 4
    """Bursts in the first iterations, one each: the path is to be measured before it is needed."""
    attempts: int = 8
    """Bursts in the first iterations while none is answered."""


class ProbeSchedule:
    """Decides, once per iteration, which links have the path measured that their messages do not take."""

    def __init__(self, settings: ProbeSettings | None = None, *, burst: int) -> None:
        """`burst`: probes at a time."""
        self._settings, self._burst = settings if settings is not None else ProbeSettings(), burst
        self._iteration = 0
        self._asked: dict[LinkName, int] = {}
        """The iteration of the latest burst."""
        self._bursts: dict[LinkName, int] = {}
        """Number of bursts so far."""

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
        rendezvous=policy.rendezvous,
    )
