# SPDX-License-Identifier: Apache-2.0
"""Published cases in real processes: Megatron-core trains a tiny model whose stages take the published times.

One job per case: all systems train one after the other on the same processes, over the same emulated links. A slow
link is slow on both paths, as a slow cable is. Between processes of one host gloo and shared memory carry messages;
nothing here is an RNIC or a GPU, so what is compared is orders and waiting, not transports.
"""

from __future__ import annotations

import enum
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adaptra_megatron.schedule.bounds import lower_bound
from adaptra_megatron.schedule.classic import zb_h1, zb_h2
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from campaigns.published.cases import Case
from campaigns.published.simulated import CAP_PER_STAGE, LARGER_CAP_PER_STAGE
from testing.jobs.fork_server import ForkServer
from testing.jobs.variants import Variant, VariantReport, check_equal, run_variants

STRETCH_PER_STAGE = 0.5
"""All times are longer than the published ones by this factor for each stage, and divided by it afterwards: the ranks
of a case share few cores, and what Megatron itself computes must fit into the emulated times."""
TIMED_ITERATIONS = 3
_FIXED_ITERATIONS = 1 + TIMED_ITERATIONS
_PLANNED_ITERATIONS = 5 + TIMED_ITERATIONS
"""What is measured first, and planned from it, takes effect in the fourth iteration."""
TIMEOUT_S = 480.0
"""Longest time that one case may take."""


class RealSystem(str, enum.Enum):
    """What trains. The text is what tables say."""

    HEALTHY = "no delay, planned, 2 PP"
    """What everything is compared with: the links are healthy, plans from measured times, twice 1F1B's memory."""
    STOCK = "1F1B"
    """Stock Megatron."""
    ZB_H1 = "ZB-H1"
    """In our executor, by the device path of gloo, where nothing waits behind anything but on its link."""
    HOST_PATH = "host path only"
    """The order of ZB-H2, all messages by the host path."""
    FULL = "full, 2 PP"
    """Planned from measured times and delays, all messages by the host path."""
    FULL_LARGER = "full, 3 PP"


@dataclass(frozen=True, kw_only=True)
class RealCase:
    """What one case measured, in seconds per iteration (divided by its stretch): medians of the last three."""

    case: str
    seconds: dict[str, float]
    """By system."""
    pipeline_s: dict[str, float]
    """Seconds of these in the forward_backward function alone."""
    most_in_flight: dict[str, float]
    """On the fullest stage; of our executor only."""
    bound_s: float
    larger_bound_s: float
    """No order takes less than these, in twice and three times 1F1B's memory."""
    healthy_bound_s: float
    """As bound_s, without any delay."""
    delayed_messages: int
    """Over all systems and ranks."""
    elements_compared: int
    """Elements of losses, weights and optimizer states that are bitwise those of stock."""
    overruns: float
    """The largest fraction, of all systems, of operations that took longer than they were to take."""

    def ratio(self, system: RealSystem, other: RealSystem) -> float:
        """Iteration time of `system` over that of `other`."""
        return self.seconds[system.value] / self.seconds[other.value]

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> RealCase:
        """The counterpart of `to_json`."""
        return cls(**document)


def run_case(case: Case, server: ForkServer, *, timeout_s: float = TIMEOUT_S) -> RealCase:
    """Run one case in as many processes as it has stages: about a minute for 4, three for 8.

    Raises LaunchError if a rank fails or time runs out, ResultsDifferError if any number differs from stock's,
    AssertionError if no message was delayed.
    """
    with tempfile.TemporaryDirectory(prefix="adaptra-published-") as name:
        directory = Path(name)
        orders = {}
        for order, make in (("zb-h1", zb_h1), ("zb-h2", zb_h2)):
            orders[order] = directory / f"{order}.csv"
            orders[order].write_text(schedule_to_csv(make(case.stages, case.micro_batches)))
        reports = run_variants(
            case.stages,
            _variants(case, orders),
            timeout_s=timeout_s,
            server=server,
            directory=directory / "run",
        )
    check_equal(reports)
    return _summarise(case, {report.name: report for report in reports})


def _variants(case: Case, orders: dict[str, Path]) -> list[Variant]:
    device, both = _slow_links(case, "device"), _slow_links(case, "both")
    fixed, planned = _training(case, _FIXED_ITERATIONS), _training(case, _PLANNED_ITERATIONS)
    host_path = ("--adaptra", "--adaptra-host-transport", "shm", "--adaptra-path", "host")

    def capped(per_stage: int) -> tuple[str, ...]:
        return (*planned, *both, *host_path, "--adaptra-max-in-flight", str(per_stage * case.stages))

    healthy = (*planned, *host_path, "--adaptra-max-in-flight", str(CAP_PER_STAGE * case.stages))
    by_csv = "--adaptra-plan-csv"
    stock = RealSystem.STOCK.value
    return [
        Variant(stock, (*fixed, *device)),
        Variant(RealSystem.HEALTHY.value, healthy),
        Variant(RealSystem.ZB_H1.value, (*fixed, *device, "--adaptra", by_csv, str(orders["zb-h1"])), like=stock),
        Variant(RealSystem.HOST_PATH.value, (*fixed, *both, *host_path, by_csv, str(orders["zb-h2"])), like=stock),
        Variant(RealSystem.FULL.value, capped(CAP_PER_STAGE)),
        Variant(RealSystem.FULL_LARGER.value, capped(LARGER_CAP_PER_STAGE), like=RealSystem.FULL.value),
    ]


def _slow_links(case: Case, path: str) -> tuple[str, ...]:
    words = []
    for source, target in case.links:
        latency_ms = _stretch(case) * case.delay_ms
        words += ["--emulate-slow-link", f"{source}-{target}:latency_ms={latency_ms:g},path={path}"]
    return tuple(words)


def _training(case: Case, iterations: int) -> tuple[str, ...]:
    triples = [
        ",".join(
            f"{_stretch(case) * milliseconds:g}"
            for milliseconds in (stage.forward_ms, stage.backward_input_ms, stage.backward_weight_ms)
        )
        for stage in case.model.stages
    ]
    words = (
        f"--pipeline-model-parallel-size {case.stages} --num-layers {case.stages} --global-batch-size "
        f"{case.micro_batches} --train-iters {iterations} --mock-data --no-gradient-accumulation-fusion "
        f"--hidden-size 32 --seq-length 16"
    )
    return (*words.split(), "--emulate-compute-ms", ";".join(triples))


def _summarise(case: Case, reports: dict[str, VariantReport]) -> RealCase:
    stock, full = reports[RealSystem.STOCK.value], reports[RealSystem.FULL.value]
    assert full.losses[: len(stock.losses)] == stock.losses, "losses differ from stock's"
    for system in RealSystem:
        struck = reports[system.value].links_struck
        assert bool(struck) == (system is not RealSystem.HEALTHY), f"{system.value}: delayed messages are {struck}"
    return RealCase(
        case=case.name,
        seconds={name: _median_s(case, report.iteration_seconds) for name, report in reports.items()},
        pipeline_s={name: _median_s(case, report.pipeline_seconds) for name, report in reports.items()},
        most_in_flight={
            name: max(rank["peak_in_flight"] for rank in report.adaptra)
            for name, report in reports.items()
            if report.adaptra
        },
        bound_s=_bound_s(case, CAP_PER_STAGE),
        larger_bound_s=_bound_s(case, LARGER_CAP_PER_STAGE),
        healthy_bound_s=_bound_s(case, CAP_PER_STAGE, slow=False),
        delayed_messages=sum(sum(report.links_struck.values()) for report in reports.values()),
        elements_compared=sum(report.elements_compared for report in reports.values()),
        overruns=max(report.overruns for report in reports.values()),
    )


def _bound_s(case: Case, cap_per_stage: int, *, slow: bool = True) -> float:
    return lower_bound(case.costs(cap=cap_per_stage * case.stages, slow=slow)).seconds


def _stretch(case: Case) -> float:
    return STRETCH_PER_STAGE * case.stages


def _median_s(case: Case, seconds: list[float]) -> float:
    return statistics.median(seconds[-TIMED_ITERATIONS:]) / _stretch(case)
