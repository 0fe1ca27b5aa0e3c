# SPDX-License-Identifier: Apache-2.0
"""The two paths of a directed link, and when one is left for the other."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

PROBE_NBYTES = 1 << 16
"""Size of probes that prove a new device session. Those that measure a path are as large as the messages."""


class Path(str, enum.Enum):
    """Path that messages take from one stage to another."""

    DEVICE = "device"
    """torch.distributed between the two training processes (NCCL; gloo on CPU)."""
    HOST = "host"
    """Host memory and a delegate process."""

    @property
    def other(self) -> Path:
        """The one of the two that this is not."""
        return Path.HOST if self is Path.DEVICE else Path.DEVICE


@dataclass(frozen=True, kw_only=True)
class PathSettings:
    """Settings of every directed link that has both paths; the same in all stages of a pipeline."""

    preferred: Path = Path.DEVICE
    """Used while it is healthy."""
    standby: bool = True
    """Whether the device path is held ready, by probes, while the host path is used; False: only once that is down."""
    suspicion_s: float = 0.25
    """How long the training waits for a message of the device path before it asks whether that was sent at all."""
    stall_s: float = 0.75
    """How long a message that was sent may then still take before the device path counts as dead, however small."""
    slow_nbytes_per_s: float = 100e6
    """A device path that carries as much is slow, not dead: a message may take as long beyond `stall_s`."""
    longest_transfer_s: float = 10.0
    """The longest that any message may take beyond `stall_s`: a path that is slower than that is unusable."""
    host_patience_s: float = 0.5
    """How long the host path may be down before messages go by the device path instead."""
    probes: int = 8
    """Small messages that must arrive over a new device session before it carries anything else."""
    probe_pause_s: float = 0.05
    """Between two probes, once the device path has failed before."""
    probe_limit_s: float = 5.0
    """How long a device session may take to come up and let the probes through, and one small probe later on."""
    measuring_probes: int = 3
    """In a burst that measures the path that messages do not take, one after the other."""
    first_rest_s: float = 0.5
    longest_rest_s: float = 60.0
    """After a failure the device path rests, each time twice as long as the time before."""
    forgiven_after_s: float = 60.0
    """A device session that was healthy for as long makes earlier failures forgotten."""


def why_down(died: str | None, latest: str) -> str:
    """Return why a device path is down: what the last healthy session died of, and what the latest attempt at
    another."""
    return latest if died in (None, latest) else f"{died}; since then: {latest}"


class TransferTimes:
    """Limit on the time that messages of the device path may take before it counts as dead, by what the latest one has
    taken."""

    def __init__(self, settings: PathSettings) -> None:
        self._settings = settings
        self._s_per_byte = 0.0

    def took(self, nbytes: int, seconds: float) -> None:
        """What the latest message took, at least; 0 if it was here before it was missed. Small ones tell nothing."""
        if nbytes > PROBE_NBYTES:
            self._s_per_byte = seconds / nbytes

    def allowed_s(self, nbytes: int) -> float:
        """Return what a message of this size may take beyond what any may: as on a slow path, or twice as the latest
        took."""
        s_per_byte = max(1.0 / self._settings.slow_nbytes_per_s, 2.0 * self._s_per_byte)
        return min(self._settings.longest_transfer_s, nbytes * s_per_byte)


@dataclass(frozen=True)
class PathCounters:
    """Counters of one rank for one link."""

    path: Path
    """Path of the next message that it sends."""
    sent_by_device: int
    sent_by_host: int
    switches: int
    """How often what it sends began to take the other path."""
    sessions_lost: int
    """Device sessions of either direction that died after they had been made."""
    device_down: str | None = None
    """Why what this stage sends cannot take the device path, once that has been given up; None while it can, or has
    not come up yet for the first time."""
    host_down: str | None = None
    """Why it cannot take the host path, once that has been down for longer than any wait for it lasts."""


@dataclass(frozen=True)
class LinkCounters:
    """Counters of one link with a host path."""

    transport: str
    sessions: int
    """How often it came up."""
    doubles: int
    """Messages that came again and were dropped."""
    stale: int
    """Messages of attempts that had ended, which were dropped."""
    unacknowledged: int
    paths: PathCounters | None
    """None where there is the host path only."""


class ProbeTimes(NamedTuple):
    """A probe that arrived, of a burst of which all did."""

    peer: int
    path: Path
    nbytes: int
    sent_s: float
    """Moment on the sender's monotonic clock."""
    arrived_s: float
    """Moment on the receiver's monotonic clock."""
