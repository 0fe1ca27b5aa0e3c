# SPDX-License-Identifier: Apache-2.0
"""As in Megatron-LM, the parser is bound here by name."""

from __future__ import annotations

import argparse

from megatron.training.arguments import parse_args


def initialize_megatron() -> argparse.Namespace:
    for _restart in ("in job", "in process"):  # whether they are wanted is looked up before
        parse_args(ignore_unknown_args=True)
    return parse_args()
