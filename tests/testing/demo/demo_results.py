# SPDX-License-Identifier: Apache-2.0
"""Results that a demonstration could have had, without training."""

from __future__ import annotations

from pathlib import Path

from adaptra_megatron.telemetry.action_records import ActionRecord
from adaptra_megatron.telemetry.trace import TraceWriter
from testing.demo.demo_report import DemoReport
from testing.demo.demo_setup import ADAPTRA, STOCK, DemoSetup
from testing.jobs.variants import VariantReport

LOSSES = [6.0, 5.5, 5.0, 4.5, 4.0, 3.5]


def demo_report() -> DemoReport:
    """Six iterations, three of them slow; medians 1 and 3 s for stock, 0.75 and 0.875 s for adaptra."""
    struck = {"1>2": 12, "2>1": 12}
    return DemoReport(
        setup=DemoSetup(iterations=6, micro_batches=4),
        stock=VariantReport(
            STOCK, None, losses=list(LOSSES), iteration_seconds=[1.5, 1.0, 0.9, 2.5, 3.0, 3.5], links_struck=struck
        ),
        adaptra=VariantReport(
            ADAPTRA,
            STOCK,
            elements_compared=1000,
            losses=list(LOSSES),
            iteration_seconds=[0.9, 0.75, 0.75, 1.5, 0.85, 0.875],
            links_struck=struck,
        ),
    )


def write_traces(setup: DemoSetup, directory: Path) -> None:
    """Trace files of both runs: each stage one second of F and one of B per iteration."""
    for run in (STOCK, ADAPTRA):
        for stage in range(setup.stages):
            writer = TraceWriter(directory / run, rank=stage, stage=stage)
            for iteration in range(setup.iterations):
                start_s = 10.0 * iteration + stage
                forward = ActionRecord(iteration, stage, "F", 0, 0, start_s, start_s, start_s + 1)
                writer.write(iteration, [forward, forward._replace(kind="B", start_s=start_s + 1, end_s=start_s + 2)])
            writer.close()
