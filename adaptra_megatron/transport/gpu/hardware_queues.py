# SPDX-License-Identifier: Apache-2.0
"""The hardware queues that a GPU has for the streams of a process, what plans make of them, and what to do about it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
DEFAULT_QUEUES, MOST_QUEUES = 8, 32
ENOUGH_QUEUES = 16
"""With fewer, streams of NCCL and of links are likely to share computation's."""
QUEUE_MODELS = ("serial", "shared")
"""What plans take one queue for: `Costs.serial_queue`, or `Costs.shared_queue` alone."""


NO_PLAN_FASTER = (
    "by NCCL alone (--adaptra-path device, --adaptra-host-transport off) no plan is faster than stock in one hardware "
    "queue that is taken for a serial one"
)


def hardware_queues(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many there are: a number as C reads it, between 1 and 32."""
    digits = re.match(r"\s*\+?(\d+)", environment.get(CONNECTIONS, ""))
    asked = int(digits[1]) if digits else 0
    return min(asked, MOST_QUEUES) if asked > 0 else DEFAULT_QUEUES


def queues_in_words(environment: Mapping[str, str] = os.environ, model: str = QUEUE_MODELS[0]) -> str | None:
    """Return what plans reckon with, and how to change that; None where each stream is likely to have a queue of its
    own."""
    queues = hardware_queues(environment)
    if queues >= ENOUGH_QUEUES:
        return None
    if queues > 1:
        return (
            f"{CONNECTIONS} gives each GPU {queues} hardware queues: streams of NCCL, of links and of computation "
            "share some, and what waits in one may hold up the others, which plans do not reckon with. "
            f"Set {CONNECTIONS}={MOST_QUEUES}"
        )
    if model == "shared":
        return (
            f"{CONNECTIONS}=1 gives each GPU one hardware queue: plans reckon with transfers that hold up nothing once "
            "they have started (--adaptra-queue-model shared)"
        )
    return (
        f"{CONNECTIONS}=1 gives each GPU one hardware queue: plans reckon with nothing in it starting before what is "
        "in front has ended, and links take the host path where there is one. Where T1 of scripts/gpu_check.sh shows "
        "that NCCL's trailing waits hold up nothing, --adaptra-queue-model shared lets them take the device path; "
        f"{NO_PLAN_FASTER}, so stock's own schedule runs there"
    )
