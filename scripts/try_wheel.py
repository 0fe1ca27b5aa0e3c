#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tries an installed wheel where neither torch nor Megatron is: its native code loads, plans, and makes a ring."""

from __future__ import annotations

from importlib import metadata

from adaptra_megatron.schedule.costs import uniform_costs
from adaptra_megatron.schedule.planner import plan
from adaptra_megatron.transport._ring import Ring


def main() -> None:
    found = plan(uniform_costs(4, 8, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0))
    if found.makespan_s < found.lower_bound.seconds or Ring.create(2, 4096).slots != 2:
        raise SystemExit(f"this wheel is broken: {found}")
    print(f"adaptra-megatron {metadata.version('adaptra-megatron')} plans, and makes rings")


if __name__ == "__main__":
    main()
