# SPDX-License-Identifier: Apache-2.0
"""Access what an optimizer keeps for a parameter as it is stored, so that it can be copied without a conversion.

Transformer Engine's FusedAdam (--use-precision-aware-optimizer; pytorch/optimizers/fused_adam.py, releases 2.0 to 2.18)
stores moments and main parameters in 32, 16 or 8 bits. Each of 16 or 8 bits has a scale, in `_scales` rather than in
`state`, without which a step fails or computes other numbers. In 8 bits it is a Float8Tensor: bytes, the factor that
they are multiplied by, and the one that they were rounded with. Of main parameters there may be no more than the 16
bits that bfloat16 parameters lack.

FusedAdam's own access (`state_dict`, `get_unscaled_state`, `set_scaled_state`) converts to 32 bits, and rounds anew,
which changes the last bit of some FP8 scales.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def stored_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    """Return the state of a parameter by name: plain values, and tensors in the optimizer's own memory."""
    found: dict[str, Any] = {}
    for name, value in optimizer.state.get(parameter, {}).items():
        if hasattr(value, "_quantizer"):
            parts = {"data": value._data, "scale_inv": value._scale_inv, "quantizer": value._quantizer.scale}
            found |= {f"{name}.{part}": each for part, each in parts.items()}
        else:
            found[name] = value
    scales = getattr(optimizer, "_scales", {}).get(parameter, {})
    return found | {f"{name}.scale": scale for name, scale in scales.items()}


def allocates(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `allocate` can be called: of Transformer Engine's FusedAdam."""
    return hasattr(optimizer, "set_scaled_state")


def allocate(optimizer: Any, parameter: torch.Tensor, names: Iterable[str]) -> None:
    """Have FusedAdam create the state of a parameter whose `stored_state` has these `names`, with any contents."""
    for name in dict.fromkeys(each.partition(".")[0] for each in names):
        lacks = getattr(optimizer, "store_param_remainders", False) and parameter.dtype == torch.bfloat16
        dtype = torch.int16 if lacks and name == "master_param" else torch.float32
        optimizer.set_scaled_state(parameter, name, torch.zeros_like(parameter, dtype=dtype))


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, sharing its memory if it is contiguous."""
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
