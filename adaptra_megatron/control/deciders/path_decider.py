# SPDX-License-Identifier: Apache-2.0
"""Decide which of its two paths each link takes, and which are probed.

Which of its two paths each link takes: pure decisions, from what the detector knows of both.
The preferred path is taken while it is healthy, and not worse than the other one by far. Where it is not, the path
wins that costs an iteration less; it must win by enough to be worth a change, and a change back needs the
preferred path to be healthy again, which the detector says only after it has seen it for a while. With the same
estimates nothing changes twice.
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
from adaptra_megatron.telemetry.events.events import PathChosen
from adaptra_megatron.transport.link_paths import Path, PathSettings

FAR_WORSE = 4.0
"""A path that costs so many times what the other one does is left though nothing says that it was ever better."""
FAR_PER_ACTION = 0.5
LEAST_FAR_S = 5e-3
"""If it is worse by so much of the mean action, and by this, too: what is quick anyhow is left to the user."""
NO_LONGER_FAR = 0.5
"""Share of both, below which such a path is taken again."""
GAIN_SHARE = 0.2
"""Least gain that is worth a change, as a share of a message's cost."""
GAIN_PER_ACTION = 0.25
"""Least gain that is worth a change, in mean actions: hardly any schedule notices less."""
LEAST_GAIN_S = 2e-3
"""Nor than this, by which the links of a busy host come and go."""
_NEVER = math.inf
"""Cost of a message on a dead path."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Training that paths are judged for."""

    preferred: Path
    micro_batches: int
    action_s: float
    """Mean over the actions."""
    period_s: float
    """What the slowest stage computes per micro-batch: a link that is busy for longer holds all stages up."""
    device_blocks: bool = False
    """Set if messages of the device path may stand in front of computation in the device's queues: then one that takes
    longer than an action, which its receive is posted ahead by, keeps computation for the rest."""
    rendezvous: bool = False
    """Set if the device path carries one message at a time, as over NCCL: the next waits until the last is there."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The path of one link, where it changes."""

    link: LinkName
    before: Path
    path: Path
    message_s: Mapping[Path, float]
    """Predicted seconds that a message costs on either path, waiting for its predecessors included; infinite on a dead
    one. What nothing is known of is missing."""
    why: Reason

    @property
    def reason(self) -> str:
        """Return why, in words."""
        return reason_text(self.why)

    def describe(self) -> Reason:
        """Return what changes, with why behind it."""
        return f"{self.link} takes the {self.path.value} path", (": ", self.why)

    @property
    def gain_s(self) -> float | None:
        """Predicted, per message; None where one of the two is not known, or is dead."""
        if len(self.message_s) < 2 or max(self.message_s.values()) == _NEVER:
            return None
        return self.message_s[self.before] - self.message_s[self.path]


def message_cost_s(estimate: LinkEstimate, path: Path, setting: Setting) -> float:
    """Seconds that a message costs the pipeline: its way, and its share of what the link is behind at the end."""
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
    """The path that `link`, whose messages take `before`, is to take; None where it is that one."""
    costs_s = {path: message_cost_s(estimate, path, setting) for path, estimate in estimates.items()}
    preferred, other = setting.preferred, setting.preferred.other
    if preferred not in costs_s:
        return None  # nothing is known of it, and that can be learnt by taking it only
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
    """Return what is known of the paths of `link`."""
    found = {path: estimates.links.get(LinkId(*link, path.value)) for path in Path}
    return {path: estimate for path, estimate in found.items() if estimate is not None}


def _good_enough(
    before: Path, estimates: Mapping[Path, LinkEstimate], costs_s: Mapping[Path, float], setting: Setting
) -> bool:
    """Return whether there is no reason to leave the preferred path. Both are known, and the other is alive."""
    preferred = setting.preferred
    if estimates[preferred].state is not State.HEALTHY:
        return False
    scale = 1.0 if before is preferred else NO_LONGER_FAR
    least_s = max(LEAST_FAR_S, FAR_PER_ACTION * setting.action_s)
    cost_s, other_s = costs_s[preferred], costs_s[preferred.other]
    return cost_s < scale * FAR_WORSE * other_s or cost_s - other_s < scale * least_s


def _cheaper(before: Path, costs_s: Mapping[Path, float], setting: Setting) -> Path:
    """The path that costs less, if by enough."""
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
    told = [f"{1e3 * cost_s:.3g} ms on the {path.value} path" for path, cost_s in costs_s.items() if cost_s < _NEVER]
    return f"a message costs {', '.join(told)}" if told else "neither carries anything"


logger = logger_of(__name__)


class PathDecider:
    """Follows all links of the job. Comes before the order is decided on, which is planned for the paths to come."""

    def __init__(self, policy: PathPolicy, telemetry: DecisionTelemetry, running: Paths | None = None) -> None:
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
