# SPDX-License-Identifier: Apache-2.0
"""Find the device on which this rank computes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from adaptra_megatron.transport.gpu.hardware_queues import ENOUGH_QUEUES, hardware_queues


def current_device() -> torch.device:
    """Return the device on which Megatron allocates tensors."""
    # Emulation on CPU makes torch.cuda.current_device() a torch.device; CUDA's own returns an index.
    current = torch.cuda.current_device()
    return current if isinstance(current, torch.device) else torch.device("cuda", current)


def shares_queues(device: torch.device) -> bool:
    """Return whether streams of links probably share hardware queues with computation."""
    return device.type == "cuda" and hardware_queues() < ENOUGH_QUEUES


def has_one_queue(device: torch.device) -> bool:
    """Return whether a GPU has one hardware queue, as Megatron requires for some layouts."""
    return device.type == "cuda" and hardware_queues() == 1


def synchronizer_of(device: torch.device) -> Callable[[], None] | None:
    """Return a function that waits for all work of a GPU; None where computation blocks its thread."""
    return functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else None


def current_stream() -> torch.cuda.Stream | None:
    """Return the calling thread's current stream; None without a GPU."""
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


def pci_bus_id(device: torch.device) -> str | None:
    """Return the PCI address of a GPU as the kernel writes it; None for a CPU, or if torch does not provide it."""
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    if not hasattr(properties, "pci_bus_id"):  # an older torch
        return None
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
