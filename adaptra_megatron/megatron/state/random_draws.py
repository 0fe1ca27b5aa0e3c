# SPDX-License-Identifier: Apache-2.0
"""List where Megatron draws random numbers inside F and B, and when another order of actions draws other numbers.

All chunks of a rank share their random streams: torch's default generator, the states of Megatron's
CudaRNGStatesTracker, and before 0.16 RandomSTE's generator. The state before an action depends on the draws of all
actions before it. F, B and W of one chunk each keep stock's order. So numbers differ only if several chunks draw, or if
F and B both draw.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NO_STOCHASTIC_ROUNDING = "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING"
"""Environment variable of Transformer Engine (common/recipe, NVFP4BlockScaling)."""


@dataclass(frozen=True)
class Draw:
    """One reason to draw: the flag that turns it on, and the test of Megatron's configuration."""

    flag: str
    is_on: Callable[[Any], bool]
    in_backward: bool = False


def _above_zero(name: str) -> Callable[[Any], bool]:
    return lambda config: getattr(config, name, None) is not None and getattr(config, name) > 0


DRAWS = (
    Draw("--hidden-dropout", _above_zero("hidden_dropout")),
    Draw("--attention-dropout", _above_zero("attention_dropout")),
    Draw("--moe-input-jitter-eps", _above_zero("moe_input_jitter_eps")),
    Draw("--moe-router-force-load-balancing", lambda config: getattr(config, "moe_router_force_load_balancing", False)),
    # Negative ones are drawn at the first forward of each layer, which comes in the order of layers whatever the plan.
    Draw("--moe-router-force-biased", _above_zero("moe_router_force_biased")),
    Draw(
        "--fp4-format",  # gradients are rounded stochastically
        lambda config: bool(getattr(config, "fp4", None)) and os.environ.get(NO_STOCHASTIC_ROUNDING, "0") != "1",
        in_backward=True,
    ),
)
"""What the transformer layers of megatron-core 0.14 to 0.20 draw; hidden state mixing (0.20) has its own stream."""


def shares_amax_history(config: Any, chunks: int) -> bool:
    """Return whether FP8 scales depend on how a stage's chunks alternate.

    Transformer Engine's delayed scaling advances the histories of all layers of all chunks whenever any forward or
    backward ends (quantization.py, `reduce_and_update_fp8_tensors`). A layer that did not run repeats its most recent
    value. So the more other layers ran, the fewer distinct values of a layer its maximum over a window covers.
    """
    delayed = bool(getattr(config, "fp8", None)) and getattr(config, "fp8_recipe", None) == "delayed"
    by_maximum = getattr(config, "fp8_amax_compute_algo", None) == "max"
    return chunks > 1 and delayed and by_maximum and getattr(config, "fp8_amax_history_len", 1) > 1


def flags_drawn_in_other_order(config: Any, chunks: int) -> tuple[str, ...]:
    """Return the flags whose random numbers depend on the order in which a stage of `chunks` chunks runs its actions.

    `config`: Megatron's TransformerConfig.
    """
    on = [draw for draw in DRAWS if draw.is_on(config)]
    if chunks > 1 or {draw.in_backward for draw in on} == {False, True}:
        return tuple(draw.flag for draw in on)
    return ()
