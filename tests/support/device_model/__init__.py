# SPDX-License-Identifier: Apache-2.0
"""A model of GPUs, their streams and NCCL, on which the calls of all ranks of a job are played."""

from __future__ import annotations

import gc
from collections.abc import Mapping

from support.device_model.calls import Rank
from support.device_model.model import Job, Threads
from support.device_model.report import explain
from support.device_model.state import Device, Outcome


def play(programs: Mapping[Rank, Threads], device: Device, seed: int = 0) -> Outcome:
    """Run a job until it ends or nothing goes on. Deterministic. Raises AssertionError where messages cross."""
    # Full collections look at all of torch and Megatron each time: they would take most of the time.
    collected = gc.isenabled()
    gc.disable()
    try:
        job = Job(programs, device, seed)
        outcome = job.run()
        outcome.deadlock = explain(job)
    finally:
        if collected:
            gc.enable()
    return outcome


__all__ = ["Device", "Outcome", "Rank", "Threads", "play"]
