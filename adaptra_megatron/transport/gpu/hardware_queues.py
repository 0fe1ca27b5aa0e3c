# SPDX-License-Identifier: Apache-2.0
"""Count a GPU's hardware queues for the streams of a process, and describe what plans assume about them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
DEFAULT_QUEUES, MOST_QUEUES = 8, 32
ENOUGH_QUEUES = 16
"""Number of hardware queues below which streams of NCCL and links probably share computation's."""
QUEUE_MODELS = ("serial", "shared")
"""Models of one hardware queue in plans: `Costs.serial_queue`, or `Costs.shared_queue` alone."""


NO_PLAN_FASTER = (
    "by NCCL alone (--adaptra-path device, --adaptra-host-transport off) no plan is faster than stock in one hardware "
    "queue that is taken for a serial one"
)


def hardware_queues(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of hardware queues that CUDA_DEVICE_MAX_CONNECTIONS sets, 1 to 32."""
    digits = re.match(r"\s*\+?(\d+)", environment.get(CONNECTIONS, ""))
    asked = int(digits[1]) if digits else 0
    return min(asked, MOST_QUEUES) if asked > 0 else DEFAULT_QUEUES


def queues_in_words(environment: Mapping[str, str] = os.environ, model: str = QUEUE_MODELS[0]) -> str | None:
    """Describe what plans assume about hardware queues, and the remedy; None where each stream probably has its own."""
    queues = hardware_queues(environment)
    if queues >= ENOUGH_QUEUES:
        return None
    if queues > 1:
        return (
            f"{CONNECTIONS} gives each GPU {queues} hardware queues: streams of NCCL, of links and of computation "
            "share some, and work that waits in one may delay the others, which plans ignore. "
            f"Set {CONNECTIONS}={MOST_QUEUES}"
        )
    if model == "shared":
        return (
            f"{CONNECTIONS}=1 gives each GPU one hardware queue: plans assume that transfers delay nothing once they "
            "have started (--adaptra-queue-model shared)"
        )
    return (
        f"{CONNECTIONS}=1 gives each GPU one hardware queue: plans assume that nothing in it starts before the end "
        "of what is in front, and links take the host path if there is one. If T1 of scripts/gpu_check.sh shows that "
        "NCCL's trailing waits delay nothing, --adaptra-queue-model shared lets them take the device path; "
        f"{NO_PLAN_FASTER}, so stock's own schedule runs there"
    )
