# SPDX-License-Identifier: Apache-2.0
"""Find replicas that come last to gradient synchronisation, how often, and what that costs. Needs no common clock.

All replicas leave a synchronisation at about the same time. So the replica with the shortest wait came last, and the
difference to the others' waits is its lag.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from adaptra_megatron.common.layout import Cell

WINDOW = 20
"""Number of latest iterations judged together."""
LEAST = 15
"""Minimum number of iterations before anything is found."""
UNUSUAL = 5
"""First iterations of a process, which are not judged: they set things up."""
OFTEN, SELDOM = 0.8, 0.25
"""A replica is found late if it is late in this share of the iterations; it is healthy again at the second share."""
WORTH, LEAST_S = 0.05, 0.001
"""A replica is late if its lag is at least this share of an iteration and these seconds. It is found only if its lag
costs half that share."""
_DUE_TO_COMPUTE = 0.5
"""A cell explains its replica's lag if it computes longer than others by this share of the lag."""

Floats = npt.NDArray[np.float64]


class Row(NamedTuple):
    """Measurements of a cell in one training iteration, in seconds."""

    iteration: int
    """Number as in traces, where evaluations count, too."""
    seconds: float
    """Seconds from the iteration's beginning until gradients are synchronised."""
    wait_s: float
    """Seconds in gradient synchronisation, which ends when all replicas have come and the sums are made."""
    computed_s: float
    """Seconds in forwards and backwards, without waiting."""
    data_s: float = 0.0
    """Seconds of waiting for the training data's next micro-batch."""


@dataclass(frozen=True, kw_only=True)
class HostFigures:
    """Recent figures of a rank's host; None if unknown. Shares are 0..1, of the rank's CPUs or of the time."""

    others_cpu: float | None = None
    """Share of the CPUs' time used by processes outside this job."""
    own_cpu: float | None = None
    """Share of the CPUs' time used by this job's processes."""
    stolen: float | None = None
    """Share of the CPUs' time that the hypervisor gave to other machines."""
    throttled: float | None = None
    """Share of the time in which the container's CPU limit stopped threads."""
    queued: float | None = None
    """Share of the time in which threads waited for a CPU (pressure stall information)."""
    load: float | None = None
    """Runnable threads per CPU of the host."""
    network: float | None = None
    """Used share of the speed of the busiest network interface, in its busier direction."""
    network_errors_s: float | None = None
    """Errors and dropped packets of all interfaces and RDMA ports, per second."""
    memory_bytes_s: float | None = None
    """Traffic of the host's memory, bytes per second, if the kernel counts it (resctrl)."""
    gpu_clock: float | None = None
    """Clock of the slowest GPU, as a share of its maximum."""
    gpu_slowed: str = ""
    """Which GPU is throttled, and why, as text; empty if none is."""


class Late(NamedTuple):
    """A replica that comes last, and the stage that explains it, as far as known."""

    replica: int
    stage: int
    lag_s: float
    """Seconds that it comes after the others: the median over the iterations in which it is late."""
    last: int
    """Number of the latest `of` iterations in which it came last."""
    of: int
    since: int
    """Iteration from which on it is nearly always late."""
    share: float
    """Share of an iteration that would be saved if it came with those that are not late."""
    computes_s: float
    """Seconds that the stage computes longer than in other replicas."""
    data_s: float
    """Seconds that the stage waits longer for data than in other replicas."""


def beyond_others(values: Floats) -> Floats:
    """Return how much each value exceeds the lower median of the others in its row. `values`: [iterations,
    replicas]."""
    ranked = np.sort(values, axis=1)
    middle = (values.shape[1] - 2) // 2
    below, above = ranked[:, middle, None], ranked[:, middle + 1, None]
    return values - np.where(values <= below, above, below)


class Stragglers:
    """Finds the late replicas of a job. Not thread-safe.

    A replica is found late if at some stage its lag was `WORTH` of an iteration in `OFTEN` of the latest iterations,
    and costs time. It is healthy again once it is late in at most `SELDOM` of them at every stage.
    """

    def __init__(self, replicas: int, stages: int) -> None:
        """`replicas`: at least two."""
        assert replicas > 1, "one replica waits for no other"
        self._replicas, self._stages = replicas, stages
        self._rows: deque[npt.NDArray[np.float64]] = deque(maxlen=WINDOW)
        """Measurements of each iteration, [stages, replicas, fields of Row]."""
        self._since: dict[int, int] = {}
        """By late replica: the iteration from which on it is late."""
        self._unusual = UNUSUAL

    def observe(self, rows: Mapping[Cell, Row]) -> None:
        """Take in one iteration of all cells. Call in ascending order of iterations."""
        if self._unusual:
            self._unusual -= 1
            return
        self._rows.append(
            np.array([[rows[Cell(replica, stage)] for replica in range(self._replicas)] for stage in self._all_stages])
        )

    @property
    def _all_stages(self) -> range:
        return range(self._stages)

    def judge(self) -> tuple[list[Late], list[int]]:
        """Return the replicas that are late from now on, and those that no longer are."""
        if len(self._rows) < LEAST:
            return [], []
        behind_s, is_late = self._lags()
        shares = is_late.mean(axis=1)  # [stages, replicas]
        often = {int(replica) for replica in np.flatnonzero((shares >= OFTEN).any(axis=0))}
        over = [each for each in self._since if (shares[:, each] <= SELDOM).all()]
        for replica in over:
            del self._since[replica]
        new = []
        for replica in sorted(often - self._since.keys()):
            since = self._began(np.any(is_late[:, :, replica], axis=0).tolist())
            late = self._describe(replica, since, behind_s, is_late, often)
            if late.share >= WORTH / 2:
                new.append(late)
        self._since.update({late.replica: late.since for late in new})
        return new, over

    def late(self) -> list[Late]:
        """Return all late replicas, with their present figures."""
        if not self._since:
            return []
        behind_s, is_late = self._lags()
        return [self._describe(*each, behind_s, is_late, self._since) for each in sorted(self._since.items())]

    def lags_s(self) -> list[list[float]]:
        """Return the median lag in seconds, by stage and replica; negative for those that come before most."""
        if not self._rows:
            return []
        lags: list[list[float]] = np.median(self._lags()[0], axis=1).tolist()
        return lags

    def last(self) -> list[list[int]]:
        """Return by stage and replica the number of latest iterations in which it came last."""
        return [
            np.bincount(waits_s.argmin(axis=1), minlength=self._replicas).tolist() for waits_s in self._field("wait_s")
        ]

    @property
    def count(self) -> int:
        """Number of the latest iterations, at most `WINDOW`."""
        return len(self._rows)

    def _field(self, name: str) -> Floats:
        """Return a field of `Row` as [stages, iterations, replicas]."""
        return np.stack(self._rows, axis=1)[..., Row._fields.index(name)]

    def _lags(self) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """Return the lag of each cell after most others, and whether that is late, both [stages, iterations,
        replicas]."""
        # The lower median: of three replicas, one is late if it comes after both others.
        behind_s = np.stack([-beyond_others(waits_s) for waits_s in self._field("wait_s")])
        seconds = np.median(self._field("seconds"), axis=2, keepdims=True)
        return behind_s, behind_s > np.maximum(LEAST_S, WORTH * seconds)

    def _began(self, late: Sequence[bool]) -> int:
        """Return the first iteration from which on a replica was late in most. `late`: [iterations]."""
        numbers = self._field("iteration")[0, :, 0]
        starts = [at for at, each in enumerate(late) if each and sum(late[at:]) >= OFTEN * len(late[at:])]
        return int(numbers[starts[0] if starts else -1])

    def _describe(
        self, replica: int, since: int, behind_s: Floats, is_late: npt.NDArray[np.bool_], all_late: Collection[int]
    ) -> Late:
        computes_s, data_s = (
            np.median(np.stack([beyond_others(each) for each in self._field(name)]), axis=1)[:, replica]
            for name in ("computed_s", "data_s")
        )
        lags_s = np.median(behind_s[:, :, replica], axis=1)
        stage = int(np.argmax(lags_s))
        # The stage that comes last may only have waited for another stage of its replica, which computes longer.
        if (slowest := int(np.argmax(computes_s))) != stage and computes_s[slowest] > _DUE_TO_COMPUTE * lags_s[stage]:
            stage = slowest
        late, waits_s = is_late[stage, :, replica], self._field("wait_s")[stage]
        return Late(
            replica=replica,
            stage=stage,
            lag_s=float(np.median(behind_s[stage, late, replica] if late.any() else behind_s[stage, :, replica])),
            last=self.last()[stage][replica],
            of=len(waits_s),
            since=since,
            share=self._share(waits_s, replica, {*all_late, *self._since}),
            computes_s=float(computes_s[stage]),
            data_s=float(data_s[stage]),
        )

    def _share(self, waits_s: Floats, replica: int, late: Collection[int]) -> float:
        others = [each for each in range(self._replicas) if each not in late]
        if not others:  # all are late, at different stages
            others = [each for each in range(self._replicas) if each != replica]
        # All others would still wait for the last of them, which has the shortest wait.
        saved_s = np.maximum(0.0, waits_s[:, others].min(axis=1) - waits_s[:, replica])
        return float(saved_s.sum() / np.median(self._field("seconds"), axis=(0, 2)).sum())
