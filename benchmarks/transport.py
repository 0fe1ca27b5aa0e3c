# SPDX-License-Identifier: Apache-2.0
"""Throughput and latency of the host path between two processes of this host, each next to its limit.

    python benchmarks/transport.py [OPTIONS of `adaptra bench transport`]

The same as `adaptra bench transport`, which says what the options are; results/transport.md is what it wrote with
`--transports shm,tcp --rounds 5 --output benchmarks/results`.
"""

from __future__ import annotations

import sys

from adaptra_megatron.tools.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["bench", "transport", *sys.argv[1:]]))
