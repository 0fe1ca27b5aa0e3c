# SPDX-License-Identifier: Apache-2.0
"""Which of its two paths each link takes: pure decisions, from what the detector knows of both.

The preferred path is taken while it is healthy, and not worse than the other one by far. Where it is not, the path wins
that costs an iteration less; it must win by enough to be worth a change, and a change back needs the preferred path to
be healthy again, which the detector says only after it has seen it for a while. With the same estimates nothing changes
twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from adaptra_megatron.control.decisions import LinkName
from adaptra_megatron.detector.findings import Estimates, LinkEstimate, State
from adaptra_megatron.detector.samples import LinkId
from adaptra_megatron.reasons import Reason, joined, reason_text
from adaptra_megatron.transport.paths import Path

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
        """Why, in words."""
        return reason_text(self.why)

    def describe(self) -> Reason:
        """What changes, with why behind it."""
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
    """What is known of the paths of `link`."""
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
