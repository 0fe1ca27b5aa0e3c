# SPDX-License-Identifier: Apache-2.0
"""Encode the header that precedes a message of unknown shape."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from adaptra_megatron.transport.message_keys import TransportError

_DIMENSIONS = 8
HEADER_NUMBERS = 1 + _DIMENSIONS


def encode_shape(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return a header, int64 [9]: number of dimensions, dimensions, zeros. Raises TransportError for more than 8."""
    if len(shape) > _DIMENSIONS:
        raise TransportError(f"a message of shape {tuple(shape)} has more than {_DIMENSIONS} dimensions")
    padded = [len(shape), *shape, *[0] * (_DIMENSIONS - len(shape))]
    return torch.tensor(padded, dtype=torch.int64, device=device)


def decode_shape(header: torch.Tensor) -> tuple[int, ...]:
    """Return the shape in a header of `encode_shape`. Raises TransportError for an impossible header."""
    dimensions, *sizes = header.tolist()
    if not 0 <= dimensions <= _DIMENSIONS or any(size < 0 for size in sizes):
        raise TransportError(f"received an impossible shape header {header.tolist()}")
    return tuple(sizes[:dimensions])
