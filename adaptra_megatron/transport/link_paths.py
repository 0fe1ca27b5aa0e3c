# SPDX-License-Identifier: Apache-2.0
"""Define the two paths of a directed link, and when messages change from one to the other."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

PROBE_NBYTES = 1 << 16
"""Bytes of a probe of a new device session. Probes that measure a path are as large as messages."""


class Path(str, enum.Enum):
    """Path that messages take from one stage to another."""

    DEVICE = "device"
    """torch.distributed between the two training processes (NCCL; gloo on CPU)."""
    HOST = "host"
    """Host memory and a delegate process."""

    @property
    def other(self) -> Path:
        """The other of the two paths."""
        return Path.HOST if self is Path.DEVICE else Path.DEVICE


@dataclass(frozen=True, kw_only=True)
class PathSettings:
    """Settings of every directed link that has both paths; the same in all stages of a pipeline."""

    preferred: Path = Path.DEVICE
    """Path used while it is healthy."""
    standby: bool = True
    """True: keep the device path ready, by probes, while the host path is used. False: create it once the host path is
    down.
    """
    suspicion_s: float = 0.25
    """Wait for a message of the device path after which the receiver asks whether it was sent."""
    stall_s: float = 0.75
    """Further time for a message that was sent, however small, before the device path counts as failed."""
    slow_nbytes_per_s: float = 100e6
    """Rate of a device path that counts as slow, not failed: a message of n bytes gets n/rate seconds beyond
    `stall_s`."""
    longest_transfer_s: float = 10.0
    """Longest time for any message beyond `stall_s`: a slower path is unusable."""
    host_patience_s: float = 0.5
    """How long the host path may be down before messages take the device path instead."""
    probes: int = 8
    """Number of small messages that must arrive over a new device session before it carries others."""
    probe_pause_s: float = 0.05
    """Pause between two probes, once the device path has failed before."""
    probe_limit_s: float = 5.0
    """Longest time for a device session to come up and pass its probes, and for one small probe later on."""
    measuring_probes: int = 3
    """Number of probes in a burst that measures the unused path."""
    first_rest_s: float = 0.5
    """Pause after the first failure of the device path; it doubles with each failure."""
    longest_rest_s: float = 60.0
    """Longest of these pauses."""
    forgiven_after_s: float = 60.0
    """Healthy time of a device session after which earlier failures are forgotten."""


def why_down(died: str | None, latest: str) -> str:
    """Return why a device path is down: the end of its last healthy session and, if different, of the latest
    attempt.
    """
    return latest if died in (None, latest) else f"{died}; since then: {latest}"


class TransferTimes:
    """Time that a message may take on the device path before the path counts as failed, from the latest
    message's time.
    """

    def __init__(self, settings: PathSettings) -> None:
        self._settings = settings
        self._s_per_byte = 0.0

    def took(self, nbytes: int, seconds: float) -> None:
        """Record a lower bound of the latest message's time; 0 if it had arrived before the wait for it.

        Messages of at most PROBE_NBYTES are ignored.
        """
        if nbytes > PROBE_NBYTES:
            self._s_per_byte = seconds / nbytes

    def allowed_s(self, nbytes: int) -> float:
        """Return the seconds beyond `stall_s` for a message of `nbytes`, at most `longest_transfer_s`.

        They are its time at `slow_nbytes_per_s`, or at half the latest message's rate if that is slower.
        """
        s_per_byte = max(1.0 / self._settings.slow_nbytes_per_s, 2.0 * self._s_per_byte)
        return min(self._settings.longest_transfer_s, nbytes * s_per_byte)


@dataclass(frozen=True)
class PathCounters:
    """Counters of one rank for one link."""

    path: Path
    """Path of the next sent message."""
    sent_by_device: int
    sent_by_host: int
    switches: int
    """Number of path changes of sent messages."""
    sessions_lost: int
    """Number of device sessions, of either direction, that failed after they had been made."""
    device_down: str | None = None
    """Why sent messages cannot take the device path; None while they can, and before it first came up."""
    host_down: str | None = None
    """Why sent messages cannot take the host path, once waits for it have failed."""


@dataclass(frozen=True)
class LinkCounters:
    """Counters of one link with a host path."""

    transport: str
    sessions: int
    """Number of sessions of the host path so far."""
    doubles: int
    """Number of duplicates that were dropped."""
    stale: int
    """Number of messages of ended attempts that were dropped."""
    unacknowledged: int
    paths: PathCounters | None
    """None for a link with the host path only."""


class ProbeTimes(NamedTuple):
    """Times of one probe of a burst, all of whose probes arrived."""

    peer: int
    path: Path
    nbytes: int
    sent_s: float
    """Sender's monotonic clock."""
    arrived_s: float
    """Receiver's monotonic clock."""
