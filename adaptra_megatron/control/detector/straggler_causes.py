# SPDX-License-Identifier: Apache-2.0
"""Find why a replica comes last: figures of its host that other hosts do not show, and their remedy."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from adaptra_megatron.control.detector.straggler_arrivals import HostFigures, Late


class StragglerCauseKind(str, enum.Enum):
    """Kind of a cause."""

    CPU = "cpu"
    CPU_STOLEN = "cpu_stolen"
    CPU_LIMIT = "cpu_limit"
    CPU_QUEUE = "cpu_queue"
    GPU = "gpu"
    DATA = "data"
    NETWORK = "network"
    MEMORY = "memory"
    COMPUTE = "compute"

    @property
    def helped_by_pinning(self) -> bool:
        """Whether it helps to keep a rank's other processes off the CPUs of its training threads."""
        return self in (StragglerCauseKind.CPU, StragglerCauseKind.CPU_QUEUE, StragglerCauseKind.CPU_LIMIT)


class StragglerCause(NamedTuple):
    """Explanation of a lag."""

    kind: StragglerCauseKind
    text: str
    """Completes the sentence "replica 5 arrives last: "."""
    remedy: str


@dataclass(frozen=True)
class _Rule:
    """A figure explains a lag if it is at least `least`, and exceeds the median of the other hosts by `apart`,"""

    kind: StragglerCauseKind
    field: str
    least: float
    apart: float
    text: str
    remedy: str
    times: float = 1.0
    """and by this factor."""


_RULES = (
    _Rule(
        StragglerCauseKind.CPU,
        "others_cpu",
        0.3,
        0.2,
        "its host's CPUs are {:.0%} busy with other processes",
        "end or move these, or give the job CPUs of its own",
    ),
    _Rule(
        StragglerCauseKind.CPU_STOLEN,
        "stolen",
        0.05,
        0.03,
        "the hypervisor takes {:.0%} of its host's CPU time",
        "move to a host that is not overbooked",
    ),
    _Rule(
        StragglerCauseKind.CPU_LIMIT,
        "throttled",
        0.05,
        0.03,
        "its container's CPU limit holds it up {:.0%} of the time",
        "raise the limit",
    ),
    _Rule(
        StragglerCauseKind.CPU_QUEUE,
        "queued",
        0.25,
        0.15,
        "threads wait for its host's CPUs {:.0%} of the time",
        "start fewer data-loader workers or threads (OMP_NUM_THREADS), or give the job more CPUs",
    ),
    _Rule(
        StragglerCauseKind.NETWORK,
        "network",
        0.8,
        0.3,
        "a network interface of its host is {:.0%} busy",
        "see what else uses it, or spread the job's traffic over more of them",
    ),
    _Rule(
        StragglerCauseKind.NETWORK,
        "network_errors_s",
        10.0,
        10.0,
        "its host's network interfaces lose {:.0f} packets a second",
        "look at cables, transceivers and switches",
        times=3.0,
    ),
    _Rule(
        StragglerCauseKind.MEMORY,
        "memory_bytes_s",
        2e10,
        2e10,
        "its host's memory moves {:.3g} bytes a second, at least twice as many as others'",
        "see what else uses that memory",
        times=2.0,
    ),
)
_SLOWER_CLOCK = 0.1
"""Share of its maximum by which a GPU's clock must be below others' to explain a lag."""
_PART = 0.3
"""Share of a lag that waiting for data, or computing, must explain."""


def explain(late: Late, own: HostFigures | None, others: Sequence[HostFigures]) -> list[StragglerCause]:
    """Return all causes of the lag of `late`, the likeliest first. `others`: hosts of the same stage in replicas that
    are not late; a figure that they show, too, explains nothing."""
    found = []
    if late.data_s > _PART * late.lag_s:
        text = f"it waits {1e3 * late.data_s:.0f} ms of an iteration for its data loader"
        found.append(
            StragglerCause(
                StragglerCauseKind.DATA, text, "start more data-loader workers (--num-workers), or faster storage"
            )
        )
    if own is not None:
        found += [cause for rule in _RULES if (cause := _cause(rule, own, others)) is not None]
        found += _gpu(own, others)
    if late.computes_s > _PART * late.lag_s:
        text = f"its stage {late.stage} computes {1e3 * late.computes_s:.0f} ms of an iteration longer than others'"
        remedy = "look at the clocks, the temperature and other work of its GPUs and CPUs" if not found else ""
        found.append(StragglerCause(StragglerCauseKind.COMPUTE, text, remedy))
    return found


def _usual(others: Sequence[HostFigures], value: Callable[[HostFigures], float | None]) -> float | None:
    known = [each for each in map(value, others) if each is not None]
    return median(known) if known else None


def _cause(rule: _Rule, own: HostFigures, others: Sequence[HostFigures]) -> StragglerCause | None:
    value: float | None = getattr(own, rule.field)
    if value is None or value < rule.least:
        return None
    usual = _usual(others, lambda each: getattr(each, rule.field))
    if usual is not None and (value - usual < rule.apart or value < rule.times * usual):
        return None
    return StragglerCause(rule.kind, rule.text.format(value), rule.remedy)


def _gpu(own: HostFigures, others: Sequence[HostFigures]) -> list[StragglerCause]:
    usual = _usual(others, lambda each: each.gpu_clock)
    slower = own.gpu_clock is not None and usual is not None and usual - own.gpu_clock > _SLOWER_CLOCK
    shared = [each for each in others if each.gpu_slowed]
    if own.gpu_slowed and (slower or 2 * len(shared) < len(others)):
        return [StragglerCause(StragglerCauseKind.GPU, own.gpu_slowed, "look at its cooling and power supply")]
    if slower:
        text = f"the clock of a GPU of its host is at {own.gpu_clock:.0%} of its maximum, others' at {usual:.0%}"
        return [
            StragglerCause(
                StragglerCauseKind.GPU, text, "look at its application clocks (nvidia-smi -q -d CLOCK) and its cooling"
            )
        ]
    return []
