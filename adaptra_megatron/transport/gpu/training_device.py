# SPDX-License-Identifier: Apache-2.0
"""Find the device on which this rank computes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from adaptra_megatron.transport.gpu.hardware_queues import ENOUGH_QUEUES, hardware_queues


def current_device() -> torch.device:
    """The device Megatron puts tensors on."""
    # Emulation on CPU makes torch.cuda.current_device() a torch.device; CUDA's own returns an index.
    current = torch.cuda.current_device()
    return current if isinstance(current, torch.device) else torch.device("cuda", current)


def shares_queues(device: torch.device) -> bool:
    """Return whether streams of links are likely to share hardware queues with computation's."""
    return device.type == "cuda" and hardware_queues() < ENOUGH_QUEUES


def has_one_queue(device: torch.device) -> bool:
    """Return whether all that a GPU is given stands in one hardware queue, as Megatron demands for some layouts."""
    return device.type == "cuda" and hardware_queues() == 1


def synchronizer_of(device: torch.device) -> Callable[[], None] | None:
    """Return what waits until a GPU has done all that it was given; None where computation blocks the thread that
    calls it."""
    return functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else None


def current_stream() -> torch.cuda.Stream | None:
    """Return what this thread puts work on; None where there is no GPU."""
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


def pci_bus_id(device: torch.device) -> str | None:
    """PCI address of a GPU as the kernel spells it; None for a CPU, or where torch does not tell."""
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    if not hasattr(properties, "pci_bus_id"):  # an older torch
        return None
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
