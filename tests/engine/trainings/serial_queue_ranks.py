# SPDX-License-Identifier: Apache-2.0
"""Ranks of `testing.jobs.variants` whose device has one hardware queue that is taken for a serial one, and of which the
last gets no host path: `serial_queue_ranks.py VARIANTS.json REPORT.json`."""

from __future__ import annotations

import os
import sys
from typing import Any

from adaptra_megatron.transport.setup.rnic_affinity import RnicError
from testing.jobs import variants
from testing.megatron.megatron_on_cpu import install


def no_rnics(*_: Any) -> tuple[str, ...]:
    raise RnicError("this host has no /sys")


def main() -> None:
    install()
    from adaptra_megatron.engine import pipeline
    from adaptra_megatron.engine import rank_transports as transports

    transports.has_one_queue = pipeline.has_one_queue = lambda device: True
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        transports.rank_rnics = no_rnics
    variants._main(sys.argv[1:])


if __name__ == "__main__":
    main()
