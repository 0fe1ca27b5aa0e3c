# SPDX-License-Identifier: Apache-2.0
"""Describe faults of links, parse them from a command line, and compute arrival times of messages."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from adaptra_megatron.transport.link_paths import Path


class LinkFaultError(ValueError):
    """A link fault is invalid; the message names the valid settings."""


@dataclass(frozen=True, kw_only=True)
class LinkFault:
    """A slow link from stage `source` to stage `target`, in this direction only.

    Messages leave in order. Each occupies the link (`occupancy_s`, or nbytes / `bandwidth_bytes_per_s`). It then takes
    `latency_s` plus a uniformly random part of `jitter_s` plus an exponentially distributed time of mean
    `exponential_s`, and never overtakes the previous one. The fault is active in iterations `from_iteration` <= k <
    `until_iteration` (None: for ever), counted from 0. Raises LinkFaultError at construction.

    `paths`: affected paths. A slow cable slows both paths of a link (each as if it were alone on the cable). A fault
    between the GPU and the network slows the device path alone; that is the default.
    """

    source: int
    target: int
    latency_s: float = 0.0
    bandwidth_bytes_per_s: float | None = None
    occupancy_s: float = 0.0
    jitter_s: float = 0.0
    exponential_s: float = 0.0
    from_iteration: int = 0
    until_iteration: int | None = None
    seed: int = 0
    paths: frozenset[Path] = frozenset({Path.DEVICE})
    share: float = 1.0
    """Fraction of messages, chosen at random, that `latency_s`, `jitter_s` and `exponential_s` apply to."""
    pipeline: int | None = None
    """First global rank of the affected pipeline; None: all pipelines. A rank installs only faults of its own
    pipeline."""

    def __post_init__(self) -> None:
        link = f"link {self.source}>{self.target}"
        if min(self.source, self.target) < 0 or self.source == self.target:
            raise LinkFaultError(f"{link}: a link joins two different stages, numbered from 0")
        for name in ("latency_s", "occupancy_s", "jitter_s", "exponential_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise LinkFaultError(f"{link}: {name} is {value}; it must be 0 or more")
        if not 0.0 < self.share <= 1.0:
            raise LinkFaultError(f"{link}: share is {self.share}; it must be above 0, and at most 1")
        bandwidth = self.bandwidth_bytes_per_s
        if bandwidth is not None and not (math.isfinite(bandwidth) and bandwidth > 0):
            raise LinkFaultError(f"{link}: bandwidth_bytes_per_s is {bandwidth}; it must be above 0")
        if bandwidth is not None and self.occupancy_s:
            raise LinkFaultError(f"{link}: give bandwidth or occupancy, not both")
        if self.until_iteration is not None and self.until_iteration <= self.from_iteration:
            raise LinkFaultError(
                f"{link}: from iteration {self.from_iteration} until {self.until_iteration} is no iteration at all"
            )
        if not self.paths:
            raise LinkFaultError(f"{link}: a fault strikes the device path, the host path, or both")

    def strikes(self, iteration: int) -> bool:
        """Return whether the fault is active in `iteration`."""
        return self.from_iteration <= iteration and (self.until_iteration is None or iteration < self.until_iteration)

    def of_acknowledgements(self) -> LinkFault:
        """Return the fault for acknowledgements: the same latency, without occupancy or random draws."""
        return replace(self, occupancy_s=0.0, bandwidth_bytes_per_s=None, jitter_s=0.0, exponential_s=0.0, share=1.0)

    def message_occupancy_s(self, nbytes: int) -> float:
        """Return for how many seconds a message of `nbytes` occupies the link."""
        return nbytes / self.bandwidth_bytes_per_s if self.bandwidth_bytes_per_s is not None else self.occupancy_s


class LinkClock:
    """Arrival times of messages of one directed pair of ranks. No clock: times are arguments."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._free_s = -math.inf
        self._last_arrival_s = -math.inf
        self.late = 0
        """Number of delayed messages so far."""

    def arrival_s(self, now_s: float, nbytes: int, fault: LinkFault | None) -> float:
        """Return the arrival time of a message sent at `now_s`. It overtakes no earlier message, with or without a
        fault.
        """
        if fault is None:
            self._last_arrival_s = max(self._last_arrival_s, now_s)
            return self._last_arrival_s
        self._free_s = max(self._free_s, now_s) + fault.message_occupancy_s(nbytes)
        delay_s = self._delay_s(fault) if fault.share == 1.0 or self._random.random() < fault.share else 0.0
        self._last_arrival_s = max(self._last_arrival_s, self._free_s + delay_s)
        return self._last_arrival_s

    def _delay_s(self, fault: LinkFault) -> float:
        delay_s = fault.latency_s
        if fault.jitter_s:
            delay_s += self._random.uniform(0.0, fault.jitter_s)
        if fault.exponential_s:
            delay_s += self._random.expovariate(1.0 / fault.exponential_s)
        self.late += delay_s > 0.0
        return delay_s


_FORM = re.compile(r"(?P<source>\d+)(?P<ways>[->])(?P<target>\d+):(?P<settings>.+)")
_PATHS = {"device": frozenset({Path.DEVICE}), "host": frozenset({Path.HOST}), "both": frozenset(Path)}


def _scaled(scale: float) -> Callable[[str], float]:
    return lambda text: float(text) * scale


_SETTINGS: dict[str, tuple[str, Callable[[str], object], str]] = {
    "latency_ms": ("latency_s", _scaled(1e-3), "a number"),
    "jitter_ms": ("jitter_s", _scaled(1e-3), "a number"),
    "exponential_ms": ("exponential_s", _scaled(1e-3), "a number"),
    "occupancy_ms": ("occupancy_s", _scaled(1e-3), "a number"),
    "bandwidth_mbps": ("bandwidth_bytes_per_s", _scaled(1e6 / 8), "a number"),
    "from": ("from_iteration", int, "a number"),
    "until": ("until_iteration", int, "a number"),
    "seed": ("seed", int, "a number"),
    "share": ("share", float, "a number"),
    "pipeline": ("pipeline", int, "a number"),
    "path": ("paths", _PATHS.__getitem__, "one of device, host, both"),
}
"""Settings by name: the field, how its text is read, and what that must be."""


def parse_link_fault(text: str) -> tuple[LinkFault, ...]:
    """Parse faults such as "1-2:latency_ms=60,from=10,until=20" (both directions, two faults) or "1>2:..." (one).

    Settings: latency_ms, jitter_ms (uniform), exponential_ms (mean), occupancy_ms, bandwidth_mbps (megabits per
    second), from, until, seed, share (of messages that take longer), path (device, host or both), pipeline (one of
    several, by its first global rank). Raises LinkFaultError for anything else.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise LinkFaultError(f"slow link {text!r} is not written as 1-2:latency_ms=60 or 1>2:latency_ms=60")
    values: dict[str, object] = {}
    for setting in match["settings"].split(","):
        name, _, value = setting.partition("=")
        if name not in _SETTINGS:
            raise LinkFaultError(f"slow link {text!r}: {name!r} is none of {', '.join(_SETTINGS)}")
        field, read, expected = _SETTINGS[name]
        try:
            values[field] = read(value)
        except (ValueError, KeyError):
            raise LinkFaultError(f"slow link {text!r}: {value!r} is not {expected} for {name}") from None
    source, target = int(match["source"]), int(match["target"])
    directions = [(source, target)] if match["ways"] == ">" else [(source, target), (target, source)]
    return tuple(LinkFault(source=a, target=b, **values) for a, b in directions)  # type: ignore[arg-type]
