# SPDX-License-Identifier: Apache-2.0
"""Ranks of `testing.jobs.variants` whose devices are cold at first: `cold_devices.py VARIANTS.json REPORT.json WAITS`.

Computing on the CPU loads no kernels; all that is made up is that it does. WAITS is a directory, in which each rank
writes a line whenever it waits for its device: which of its iterations is under way, evaluations counted too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testing.jobs import variants
from testing.megatron.megatron_on_cpu import install


def main(request: str, report: str, waits: Path) -> None:
    install(with_fused_weight_gradient=True)
    import torch.distributed as dist

    from adaptra_megatron.engine import pipeline
    from adaptra_megatron.engine.pipeline import Pipeline

    running: list[Pipeline] = []
    begin = Pipeline.begin

    def begin_noted(self: Pipeline, call: Any) -> Any:
        running[:] = [self]
        return begin(self, call)

    def synchronizer_of(device: Any) -> Callable[[], None]:
        def synchronize() -> None:
            with (waits / f"rank_{dist.get_rank()}").open("a") as file:
                file.write(f"{running[0].iterations}\n")

        return synchronize

    Pipeline.begin = begin_noted  # type: ignore[method-assign]
    pipeline.synchronizer_of = synchronizer_of
    variants._main([request, report])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
