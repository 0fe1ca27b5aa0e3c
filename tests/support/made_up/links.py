# SPDX-License-Identifier: Apache-2.0
"""Links and stages whose truth is known, as the detector would measure them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from adaptra_megatron.control.detector.observations import (
    IterationSample,
    LinkId,
    LinkSample,
    MessageSample,
    StageId,
    StageSample,
)

MIB = 1 << 20
ACTION_S = 0.01
WARM_UP = 8


@dataclass(frozen=True)
class SyntheticLink:
    """Carries one message at a time, in order."""

    latency_s: float = 0.002
    bandwidth_bytes_per_s: float = math.inf
    jitter_s: float = 0.0
    """Mean of an exponential delay of each message."""
    noise: float = 0.0
    """Standard deviation of each message's latency, relative."""
    outliers: float = 0.0
    """Share of messages that take ten times as long."""

    def carry(
        self, rng: np.random.Generator, sent_s: Sequence[float], nbytes: Sequence[int], pause: tuple[float, float]
    ) -> list[MessageSample]:
        """`pause`: from when to when the receiver notices nothing."""
        left_s = arrived_s = -math.inf
        messages = []
        for moment_s, size in zip(sent_s, nbytes, strict=True):
            left_s = max(moment_s, left_s) + size / self.bandwidth_bytes_per_s
            delay_s = self.latency_s * max(0.0, 1.0 + self.noise * rng.standard_normal())
            delay_s += self.jitter_s * rng.exponential()
            if rng.random() < self.outliers:
                delay_s *= 10.0
            arrived_s = max(arrived_s, left_s + delay_s)
            noticed_s = pause[1] if pause[0] <= arrived_s < pause[1] else arrived_s
            messages.append(MessageSample(size, moment_s, noticed_s))
        return messages


NOISY = SyntheticLink(bandwidth_bytes_per_s=2e9, jitter_s=0.002, noise=0.1, outliers=0.01)


def send_times(rng: np.random.Generator, micro_batches: int, noise: float = 0.0) -> list[float]:
    """As a stage of 1F1B sends: warm-up forwards back to back, then one per forward and backward."""
    gaps_s = np.where(np.arange(micro_batches) < WARM_UP, ACTION_S, 3 * ACTION_S)
    return list(np.cumsum(gaps_s * np.maximum(0.1, 1.0 + noise * rng.standard_normal(micro_batches))))


@dataclass
class SyntheticJob:
    """A pipeline that is measured iteration after iteration; its links and stages may be changed in between."""

    seed: int
    stages: int = 4
    micro_batches: int = 32
    nbytes: int = 4 * MIB
    noise: float = 0.1
    """Relative noise of action times."""
    pause_every: int = 0
    """Every so many iterations a stage notices nothing for `pause_s`, and one of its actions takes as much longer."""
    pause_s: float = 0.5
    usual: SyntheticLink = NOISY
    links: dict[tuple[int, int], SyntheticLink] = field(default_factory=dict)
    """Those that are not as usual."""
    slowdown: dict[int, float] = field(default_factory=dict)
    """Factor on the action times of a stage."""

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.iteration = 0

    def all_links(self) -> list[tuple[int, int]]:
        """Directed."""
        ends = range(self.stages - 1)
        return [(stage, stage + 1) for stage in ends] + [(stage + 1, stage) for stage in ends]

    def set_link(self, source: int, target: int, **changes: float) -> None:
        """Make one link differ from the usual."""
        self.links[source, target] = replace(self.usual, **changes)

    def sample(self, disturbance: str | None = None) -> IterationSample:
        """The next iteration."""
        paused = int(self.rng.integers(self.stages)) if self._pauses() else -1
        begin_s = self.rng.uniform(0.0, 3 * ACTION_S * self.micro_batches)
        links = {}
        for source, target in self.all_links():
            pause = (begin_s, begin_s + self.pause_s) if target == paused else (0.0, 0.0)
            link = self.links.get((source, target), self.usual)
            sent_s = send_times(self.rng, self.micro_batches, self.noise)
            messages = link.carry(self.rng, sent_s, [self.nbytes] * self.micro_batches, pause)
            links[LinkId(0, source, target, "device")] = LinkSample.of(messages)
        stages = {StageId(0, stage): self._stage(stage, stage == paused) for stage in range(self.stages)}
        self.iteration += 1
        return IterationSample(self.iteration - 1, links, stages, disturbance)

    def _pauses(self) -> bool:
        return self.pause_every > 0 and self.iteration % self.pause_every == self.pause_every - 1

    def _stage(self, stage: int, paused: bool) -> StageSample:
        durations_s = {}
        for kind in ("F", "I", "W"):
            factors = np.maximum(0.1, 1.0 + self.noise * self.rng.standard_normal(self.micro_batches))
            factors[self.rng.random(self.micro_batches) < 0.01] *= 10.0
            durations_s[kind, 0] = ACTION_S * self.slowdown.get(stage, 1.0) * factors
        if paused:
            durations_s["F", 0][self.rng.integers(self.micro_batches)] += self.pause_s
        return StageSample({key: list(map(float, values)) for key, values in durations_s.items()})
