# SPDX-License-Identifier: Apache-2.0
"""Where this rank computes."""

from __future__ import annotations

import torch


def current_device() -> torch.device:
    """The device Megatron puts tensors on."""
    # Emulation on CPU makes torch.cuda.current_device() a torch.device; CUDA's own returns an index.
    current = torch.cuda.current_device()
    return current if isinstance(current, torch.device) else torch.device("cuda", current)
