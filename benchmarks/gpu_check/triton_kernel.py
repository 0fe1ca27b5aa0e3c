# SPDX-License-Identifier: Apache-2.0
"""A kernel that is compiled at its first use. Importable where Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_one(values):  # noqa: ANN001, ANN201 - Triton's types are not Python's
    """Add one to one element."""
    tl.store(values, tl.load(values) + 1)
