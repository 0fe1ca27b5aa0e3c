# SPDX-License-Identifier: Apache-2.0
"""Ranks of `testing.jobs.variants` with a change of captured layers: `changed_capture_ranks.py CHANGE REQUEST REPORT`.

CHANGE: `stale`, layers are not captured anew for another order; `lent`, what is kept for longer is not copied, and in
both cases a switch counts nothing; or a number, the seconds that a capture counts.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from testing.jobs import variants
from testing.megatron.megatron_on_cpu import install
from testing.replacing import Replaced, Replacement

if TYPE_CHECKING:
    from adaptra_megatron.megatron.captured_layers import Order


def _stale(layers: Any, order: Order, *, warm: bool) -> bool:
    layers._order = order
    return False


def changes(name: str) -> list[Replacement]:
    from adaptra_megatron.megatron.captured_layers import CapturedLayers
    from adaptra_megatron.megatron.gradients.linear_wgrad import WeightGradientQueue

    parts = {
        "stale": Replacement(CapturedLayers, "follow", _stale, "graphs keep their order"),
        "lent": Replacement(WeightGradientQueue, "owned", lambda queue, tensor: tensor, "it stays in graphs' memory"),
    }
    counted_s = 0.0 if name in parts else float(name)
    seconds = property(lambda layers: counted_s, lambda layers, value: None)
    return [
        *(part for key, part in parts.items() if key == name),
        Replacement(CapturedLayers, "seconds", seconds, "machines differ", may_be_absent=True),
    ]


if __name__ == "__main__":
    install(with_fused_weight_gradient=True)
    with Replaced(changes(sys.argv[1])):
        variants._main(sys.argv[2:])
