# SPDX-License-Identifier: Apache-2.0
"""Decide which of its two paths each link takes, and which idle paths are probed.

A link takes the preferred path while that is healthy and not far worse than the other one. Otherwise it takes the path
that costs an iteration less, if the gain is worth a change. It returns once the preferred path is healthy again, which
the detector reports only after some time. With the same estimates nothing changes twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from adaptra_megatron.common.log import logger_of
from adaptra_megatron.common.reasons import Reason, joined, reason_fields, reason_text
from adaptra_megatron.control.deciders.decider import Context, DecisionTelemetry, InUse
from adaptra_megatron.control.decisions import LinkName, Paths
from adaptra_megatron.control.detector.observations import Estimates, IterationSample, LinkEstimate, LinkId, State
from adaptra_megatron.control.measurements import StageMeasurement, iteration_s
from adaptra_megatron.control.sidecar.planner_client import PathPolicy
from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.telemetry.events import PathChosen
from adaptra_megatron.transport.link_paths import Path, PathSettings

FAR_WORSE = 4.0
"""A healthy preferred path is left only if it costs this many times as much as the other one,"""
FAR_PER_ACTION = 0.5
LEAST_FAR_S = 5e-3
"""and if it is worse by this share of the mean action and by these seconds. Smaller differences are left to the user.
"""
NO_LONGER_FAR = 0.5
"""Share of both limits below which the link returns to the preferred path."""
GAIN_SHARE = 0.2
"""Minimum gain that is worth a change, as a share of the message's cost."""
GAIN_PER_ACTION = 0.25
"""Minimum gain that is worth a change, in mean actions: smaller ones hardly change any schedule."""
LEAST_GAIN_S = 2e-3
"""Minimum gain that is worth a change, in seconds: on a busy host, links vary by as much."""
_NEVER = math.inf
"""Cost of a message on a dead path."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Properties of the training that the cost of a path depends on."""

    preferred: Path
    micro_batches: int
    action_s: float
    """Mean seconds of an action."""
    period_s: float
    """Seconds of computation per micro-batch at the slowest stage: a link busy for longer delays all stages."""
    device_blocks: bool = False
    """Whether messages of the device path can block computation in the device's queues. Receives are posted one action
    ahead: a message that takes longer blocks computation for the rest."""
    rendezvous: bool = False
    """Whether the device path carries one message at a time, as over NCCL: the next waits until the last has arrived.
    """


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A change of one link's path."""

    link: LinkName
    before: Path
    path: Path
    message_s: Mapping[Path, float]
    """Predicted seconds that a message costs on each path, its wait for earlier messages included; infinite on a dead
    path, missing on an unknown one."""
    why: Reason

    @property
    def reason(self) -> str:
        """Return why, in words."""
        return reason_text(self.why)

    def describe(self) -> Reason:
        """Return the change, then why."""
        return f"{self.link} takes the {self.path.value} path", (": ", self.why)

    @property
    def gain_s(self) -> float | None:
        """Predicted seconds saved per message; None if either path is unknown or dead."""
        if len(self.message_s) < 2 or max(self.message_s.values()) == _NEVER:
            return None
        return self.message_s[self.before] - self.message_s[self.path]


def message_cost_s(estimate: LinkEstimate, path: Path, setting: Setting) -> float:
    """Return the seconds that a message costs the pipeline: its own time, its wait, and its share of the link's
    backlog."""
    if estimate.state is State.DEAD:
        return _NEVER
    busy_s, queued_s = estimate.occupancy_s(estimate.nbytes), 0.0
    if setting.rendezvous:  # before the pipeline is full, a message is sent with each action: it waits for the last one
        busy_s = max(busy_s, estimate.transfer_s) if path is Path.DEVICE else busy_s
        queued_s = max(0.0, busy_s - setting.action_s)
    behind_s = max(0.0, busy_s - setting.period_s)
    if path is Path.DEVICE and setting.device_blocks:
        behind_s = max(behind_s, estimate.transfer_s - setting.action_s)
    return estimate.transfer_s + queued_s + setting.micro_batches * behind_s


def choose(link: LinkName, before: Path, estimates: Mapping[Path, LinkEstimate], setting: Setting) -> Choice | None:
    """Return the change of path that `link` needs, now on path `before`; None if it stays."""
    costs_s = {path: message_cost_s(estimate, path, setting) for path, estimate in estimates.items()}
    preferred, other = setting.preferred, setting.preferred.other
    if preferred not in costs_s:
        return None  # nothing is known of it, and only taking it can tell
    why: Reason
    dead = estimates[preferred].state is State.DEAD
    if other not in costs_s or costs_s[other] == _NEVER:
        path, why = before if dead else preferred, f"the {other.value} path is dead"
        if other not in costs_s and not dead:
            why = f"nothing is known of the {other.value} path"
    elif _good_enough(before, estimates, costs_s, setting):
        path, why = preferred, _in_words(preferred, estimates[preferred])
    else:
        path = _cheaper(before, costs_s, setting)
        why = _in_words(preferred, estimates[preferred])
    if path is before:
        return None
    return Choice(link=link, before=before, path=path, message_s=costs_s, why=joined([why, _compared(costs_s)]))


def estimates_of(link: LinkName, estimates: Estimates) -> dict[Path, LinkEstimate]:
    """Return the estimates of both paths of `link`; unknown ones are missing."""
    found = {path: estimates.links.get(LinkId(*link, path.value)) for path in Path}
    return {path: estimate for path, estimate in found.items() if estimate is not None}


def _good_enough(
    before: Path, estimates: Mapping[Path, LinkEstimate], costs_s: Mapping[Path, float], setting: Setting
) -> bool:
    """Return whether the preferred path is good enough to take. Both paths are known, and the other one is not dead."""
    preferred = setting.preferred
    if estimates[preferred].state is not State.HEALTHY:
        return False
    scale = 1.0 if before is preferred else NO_LONGER_FAR
    least_s = max(LEAST_FAR_S, FAR_PER_ACTION * setting.action_s)
    cost_s, other_s = costs_s[preferred], costs_s[preferred.other]
    return cost_s < scale * FAR_WORSE * other_s or cost_s - other_s < scale * least_s


def _cheaper(before: Path, costs_s: Mapping[Path, float], setting: Setting) -> Path:
    """Return the cheaper path if the gain is worth a change, else the current one."""
    there, here_s = before.other, costs_s[before]
    if here_s == _NEVER:
        return there
    return there if here_s - costs_s[there] >= _worth_s(here_s, setting) else before


def _worth_s(cost_s: float, setting: Setting) -> float:
    return max(LEAST_GAIN_S, GAIN_SHARE * cost_s, GAIN_PER_ACTION * setting.action_s)


def _in_words(path: Path, estimate: LinkEstimate) -> Reason:
    text = f"the {path.value} path is {estimate.state.value}"
    return text if estimate.state is State.HEALTHY else (f"{text} (", estimate.reason, ")")


def _compared(costs_s: Mapping[Path, float]) -> str:
    parts = [f"{1e3 * cost_s:.3g} ms on the {path.value} path" for path, cost_s in costs_s.items() if cost_s < _NEVER]
    return f"a message costs {', '.join(parts)}" if parts else "neither carries anything"


logger = logger_of(__name__)


class PathDecider:
    """Chooses the path of every link. Comes before the order's decider, which plans for these paths."""

    def __init__(self, policy: PathPolicy, telemetry: DecisionTelemetry, running: Paths | None = None) -> None:
        """`running`: the section decided before; None if none."""
        self._policy, self._telemetry = policy, telemetry
        diverted = () if running is None else running.diverted
        self._taken: dict[LinkName, Path] = dict.fromkeys(diverted, policy.preferred.other)
        self._unproven: dict[LinkName, int] = {}
        """Links that left an unhealthy path, and the first iteration in which it was unhealthy. The same cause may have
        slowed the other path, too; older measurements of that do not count."""
        self._probes = ProbeSchedule(burst=PathSettings.measuring_probes)

    def observe(self, measurements: Sequence[StageMeasurement], sample: IterationSample) -> None:
        """Add links that are new in `sample`."""
        for link in sample.links:
            self._taken.setdefault(LinkName(link.pipeline, link.source, link.target), self._policy.preferred)

    def decide(self, context: Context) -> Paths:
        """Return the path of every link, and the links to probe."""
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
        """Return the changes of paths, given the costs with the current paths."""
        setting = _setting(self._policy, costs)
        found = (
            choose(link, path, estimates_of(link, estimates), setting) for link, path in sorted(self._taken.items())
        )
        return [choice for choice in found if choice is not None]

    def take(self, choices: Iterable[Choice], estimates: Estimates) -> None:
        """Apply the changes, from the next decision on."""
        for choice in choices:
            self._taken[choice.link] = choice.path
            self._unproven.pop(choice.link, None)
            if choice.path is not self._policy.preferred:
                self._unproven[choice.link] = estimates_of(choice.link, estimates)[choice.before].since_iteration

    def _tell(self, choices: Iterable[Choice], number: int) -> None:
        """Log the changes, which come with plan `number`."""
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
        """All links that do not take the preferred path."""
        return tuple(sorted(link for link, path in self._taken.items() if path is not self._policy.preferred))

    def in_use(self, carried: InUse, estimates: Estimates) -> InUse:
        """Return the path of each link to plan for: its decided path if that is known to work, else the one it used
        last.

        A link that has just left a slow path still counts as slow until the other path is seen to be better. Costs
        that are too low delay the pipeline; costs that are too high only take memory, for a moment.
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
        """Return the links whose idle path is probed in the next iteration, of about `iteration_s` seconds."""
        return self._probes.due(
            self._taken,
            estimates,
            preferred=self._policy.preferred,
            micro_batches=micro_batches,
            iteration_s=iteration_s,
        )


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """How often idle paths are probed. A burst is a few probes in a row."""

    share: float = 0.005
    """Probes as a share of messages, while both paths are healthy."""
    share_in_trouble: float = 0.05
    """The same while either path is not healthy, so that a change may pay."""
    least_s: float = 1.0
    """Minimum seconds between two bursts while both are healthy."""
    first_bursts: int = 4
    """Bursts in the first iterations, one each, so that the path is known before it is needed."""
    attempts: int = 8
    """Bursts in the first iterations while no probe is answered."""


class ProbeSchedule:
    """Decides, once per iteration, which links probe their idle path."""

    def __init__(self, settings: ProbeSettings | None = None, *, burst: int) -> None:
        """`burst`: probes in a row."""
        self._settings, self._burst = settings if settings is not None else ProbeSettings(), burst
        self._iteration = 0
        self._asked: dict[LinkName, int] = {}
        """Iteration of each link's latest burst."""
        self._bursts: dict[LinkName, int] = {}
        """Number of each link's bursts so far."""

    def due(
        self,
        taken: Mapping[LinkName, Path],
        estimates: Estimates,
        *,
        preferred: Path,
        micro_batches: int,
        iteration_s: float,
    ) -> tuple[LinkName, ...]:
        """Return the links to probe in the next iteration. `taken`: the path that each link takes."""
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
        """Return the iterations between two bursts."""
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
