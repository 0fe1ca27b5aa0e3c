# SPDX-License-Identifier: Apache-2.0
"""Runs a script and counts the linear layers whose weight gradients an action of its own computes.

python -m testing.megatron.megatron_lm split_counting.py DIRECTORY SCRIPT ARGUMENTS...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    directory, script = Path(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    from adaptra_megatron.megatron.gradients.linear_wgrad import WeightGradientQueue

    stock, owners = WeightGradientQueue.add, {}

    def add(queue: WeightGradientQueue, gradient: Any) -> None:
        owners[id(gradient.owner)] = gradient.owner  # kept, so that no other gets its id
        stock(queue, gradient)

    WeightGradientQueue.add = add  # type: ignore[method-assign]
    try:
        exec(compile(Path(script).read_bytes(), script, "exec"), vars(sys.modules["__main__"]))
    finally:
        (directory / os.environ["RANK"]).write_text(str(len(owners)))


main()
