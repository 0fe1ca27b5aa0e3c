# SPDX-License-Identifier: Apache-2.0
"""Where this rank computes."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch


def current_device() -> torch.device:
    """The device Megatron puts tensors on."""
    # Emulation on CPU makes torch.cuda.current_device() a torch.device; CUDA's own returns an index.
    current = torch.cuda.current_device()
    return current if isinstance(current, torch.device) else torch.device("cuda", current)


CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
DEFAULT_QUEUES, MOST_QUEUES = 8, 32
ENOUGH_QUEUES = 16
"""With fewer, streams of NCCL and of links are likely to share computation's."""


def hardware_queues(environment: Mapping[str, str] = os.environ) -> int:
    """How many queues a GPU has for the streams of a process: a number as C reads it, between 1 and 32."""
    digits = re.match(r"\s*\+?(\d+)", environment.get(CONNECTIONS, ""))
    asked = int(digits[1]) if digits else 0
    return min(asked, MOST_QUEUES) if asked > 0 else DEFAULT_QUEUES


def has_one_queue(device: torch.device) -> bool:
    """Return whether all that a GPU is given stands in one hardware queue, as Megatron demands for some layouts."""
    return device.type == "cuda" and hardware_queues() == 1


def shares_queues(device: torch.device) -> str | None:
    """In words, that streams have too few queues and what to do; None where they have enough, or one by intent."""
    queues = hardware_queues()
    if device.type != "cuda" or not 1 < queues < ENOUGH_QUEUES:
        return None
    return (
        f"{CONNECTIONS} gives each GPU {queues} hardware queues: streams of NCCL, of links and of computation share "
        "some, and what waits in one may hold up the others, which plans do not reckon with. "
        f"Set {CONNECTIONS}={MOST_QUEUES}"
    )


def synchronizer_of(device: torch.device) -> Callable[[], None] | None:
    """What waits until a GPU has done all that it was given; None where computation blocks the thread that calls it."""
    return functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else None


def current_stream() -> torch.cuda.Stream | None:
    """What this thread puts work on; None where there is no GPU."""
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


def pci_bus_id(device: torch.device) -> str | None:
    """PCI address of a GPU as the kernel spells it; None for a CPU, or where torch does not tell."""
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    if not hasattr(properties, "pci_bus_id"):  # an older torch
        return None
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
