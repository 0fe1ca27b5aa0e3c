# SPDX-License-Identifier: Apache-2.0
"""A script with a parser of its own, which passes over words that it does not know.

Says whether the schedule that runs its iterations has been replaced.
"""

from __future__ import annotations

import argparse
import sys

from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--enables", action="store_true")
    arguments, _unknown = parser.parse_known_args()
    if arguments.enables:
        from adaptra_megatron.patches import enable

        from adaptra_megatron.config import AdaptraConfig

        enable(AdaptraConfig())
    parallel_state.set_pipeline_model_parallel_world_size(2)
    for _iteration in range(2):
        schedule = get_forward_backward_func()
    sys.stdout.write(f"replaced: {hasattr(schedule, 'adaptra_applied')}\n")


if __name__ == "__main__":
    main()
