# SPDX-License-Identifier: Apache-2.0
"""Find which replicas come last to gradient synchronisation, how persistently, and what that costs. No clocks are
compared.

All replicas leave a synchronisation at about the same time, so the one that was in it for the shortest time came last,
and by as much as the others were in it longer.
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
"""Iterations that are looked at together."""
LEAST = 15
"""Iterations after which something may be found."""
UNUSUAL = 5
"""The first iterations of a process, which set things up and are not judged."""
OFTEN, SELDOM = 0.8, 0.25
"""Share of these iterations in which a replica must be late to be found; share at which it is healthy again."""
WORTH, LEAST_S = 0.05, 0.001
"""Share of an iteration, and seconds, by which a replica is late; half of that share must be what it costs."""
_DUE_TO_COMPUTE = 0.5
"""Share of its lag by which a cell must compute longer than others to be what its replica waits for."""

Floats = npt.NDArray[np.float64]


class Row(NamedTuple):
    """Measurements of a cell in one training iteration, in seconds."""

    iteration: int
    """Number in traces: evaluations are counted."""
    seconds: float
    """Seconds of the iteration, from its beginning until gradients were synchronised."""
    wait_s: float
    """In gradient synchronisation, which ends when all replicas have come and the sums are made."""
    computed_s: float
    """In forwards and backwards, without waiting."""
    data_s: float = 0.0
    """Waiting for the training data's next micro-batch."""


@dataclass(frozen=True, kw_only=True)
class HostFigures:
    """Recent figures of a rank's host; None where that cannot be read. Shares are 0..1 of the CPUs that the rank may
    use, or of the time."""

    others_cpu: float | None = None
    """Share of the CPUs' time that processes of others have used."""
    own_cpu: float | None = None
    """The same of this job's processes."""
    stolen: float | None = None
    """Share of the CPUs' time that the hypervisor gave to other machines."""
    throttled: float | None = None
    """Share of the time in which a limit of the container kept threads from running."""
    queued: float | None = None
    """Share of the time in which threads stood in line for a CPU (pressure stall information)."""
    load: float | None = None
    """Runnable threads per CPU of the host."""
    network: float | None = None
    """Share of the speed of the busiest network interface that was used, in its busier direction."""
    network_errors_s: float | None = None
    """Errors and lost packets of all interfaces and RDMA ports, per second."""
    memory_bytes_s: float | None = None
    """Traffic of the host's memory, where the kernel counts it (resctrl)."""
    gpu_clock: float | None = None
    """Clock of the slowest GPU, as a share of the highest that it can have."""
    gpu_slowed: str = ""
    """Which GPU is slowed down, and why, in words."""


class Late(NamedTuple):
    """A replica that comes last. Of several stages that do, the one that the others wait for, as far as can be told."""

    replica: int
    stage: int
    lag_s: float
    """By which it comes after the others, the median of the iterations in which it is late."""
    last: int
    """In how many of the latest `of` iterations it was the last one."""
    of: int
    since: int
    """Iteration since which it is late nearly always."""
    share: float
    """Part of an iteration that would be saved if it came with those that are not late."""
    computes_s: float
    """By which the stage computes longer than in other replicas."""
    data_s: float
    """By which it waits longer for data."""


def beyond_others(values: Floats) -> Floats:
    """By how much each value of a row [iterations, replicas] exceeds the lower median of the row's others."""
    ranked = np.sort(values, axis=1)
    middle = (values.shape[1] - 2) // 2
    below, above = ranked[:, middle, None], ranked[:, middle + 1, None]
    return values - np.where(values <= below, above, below)


class Stragglers:
    """Judges the replicas of a job. For one thread; knows nothing of hosts.

    A replica is found late once it was by `WORTH` of an iteration in `OFTEN` of the latest iterations, at any stage,
    and costs time; that is over once it is late in no more than `SELDOM` of them at each.
    """

    def __init__(self, replicas: int, stages: int) -> None:
        """At least two replicas."""
        assert replicas > 1, "one replica waits for no other"
        self._replicas, self._stages = replicas, stages
        self._rows: deque[npt.NDArray[np.float64]] = deque(maxlen=WINDOW)
        """What each iteration measured, [stages, replicas, fields of Row]."""
        self._since: dict[int, int] = {}
        """The iteration since when a replica is late, of those that are."""
        self._unusual = UNUSUAL

    def observe(self, rows: Mapping[Cell, Row]) -> None:
        """Take one iteration of all cells in, in ascending order."""
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
        """Replicas that are late from now on, with what is known of them, and those that are not any more."""
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
        """All that are late, as they are now."""
        if not self._since:
            return []
        behind_s, is_late = self._lags()
        return [self._describe(*each, behind_s, is_late, self._since) for each in sorted(self._since.items())]

    def lags_s(self) -> list[list[float]]:
        """By stage and replica, the median lag in the latest iterations, negative for those that come before most."""
        if not self._rows:
            return []
        lags: list[list[float]] = np.median(self._lags()[0], axis=1).tolist()
        return lags

    def last(self) -> list[list[int]]:
        """By stage and replica, in how many of the latest iterations it was the last one."""
        return [
            np.bincount(waits_s.argmin(axis=1), minlength=self._replicas).tolist() for waits_s in self._field("wait_s")
        ]

    @property
    def count(self) -> int:
        """Number of the latest iterations, at most `WINDOW`."""
        return len(self._rows)

    def _field(self, name: str) -> Floats:
        """[stages, iterations, replicas]."""
        return np.stack(self._rows, axis=1)[..., Row._fields.index(name)]

    def _lags(self) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """[stages, iterations, replicas]: by how much each came after most others, and whether that is late."""
        # The lower median: of three replicas, one is late if it comes after both others.
        behind_s = np.stack([-beyond_others(waits_s) for waits_s in self._field("wait_s")])
        seconds = np.median(self._field("seconds"), axis=2, keepdims=True)
        return behind_s, behind_s > np.maximum(LEAST_S, WORTH * seconds)

    def _began(self, late: Sequence[bool]) -> int:
        """The first of the iterations from which on a replica was late in most. `late`: [iterations]."""
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
        if not others:  # not at the same stage
            others = [each for each in range(self._replicas) if each != replica]
        saved_s = np.maximum(0.0, waits_s[:, others].min(axis=1) - waits_s[:, replica])
        return float(saved_s.sum() / np.median(self._field("seconds"), axis=(0, 2)).sum())
