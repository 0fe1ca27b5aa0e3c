# SPDX-License-Identifier: Apache-2.0
"""Ranks of `testing.jobs.variants` whose second replica has a micro-batch less than the first in each iteration:
`uneven_ranks.py VARIANTS.json REPORT.json`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from testing.jobs import variants
from testing.megatron.megatron_on_cpu import install


def uneven(find: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """What `get_forward_backward_func` finds, called with fewer micro-batches in the second replica."""
    from megatron.core import parallel_state

    stock, replica = find(), parallel_state.get_data_parallel_rank()
    return lambda **given: stock(**{**given, "num_microbatches": given["num_microbatches"] - replica})


def main() -> None:
    install(with_fused_weight_gradient=True)
    from testing.training import train as training

    find = training.get_forward_backward_func
    training.get_forward_backward_func = lambda: uneven(find)
    variants._main(sys.argv[1:])


if __name__ == "__main__":
    main()
