# SPDX-License-Identifier: Apache-2.0
"""Ranks of `testing.jobs.variants` with a change of captured layers: `changed_capture_ranks.py CHANGE REQUEST REPORT`.

CHANGE: `stale`, layers are not captured anew for another order; `lent`, what is kept for longer is not copied; or a
number, the seconds that a capture counts.
"""

from __future__ import annotations

import sys
from typing import Any

from testing.jobs import variants
from testing.megatron.megatron_on_cpu import install
from testing.replacing import Replaced, Replacement


def _stale(layers: Any, order: tuple[int, ...]) -> bool:
    layers._order = order
    return False


def change(name: str) -> Replacement:
    from adaptra_megatron.megatron.captured_layers import CapturedLayers
    from adaptra_megatron.megatron.gradients.linear_wgrad import WeightGradientQueue

    if name == "stale":
        return Replacement(CapturedLayers, "follow", _stale, "graphs keep their order")
    if name == "lent":
        return Replacement(WeightGradientQueue, "owned", lambda queue, tensor: tensor, "it stays in graphs' memory")
    seconds = property(lambda layers: float(name), lambda layers, value: None)
    return Replacement(CapturedLayers, "seconds", seconds, "machines differ", may_be_absent=True)


if __name__ == "__main__":
    install()
    with Replaced([change(sys.argv[1])]):
        variants._main(sys.argv[2:])
