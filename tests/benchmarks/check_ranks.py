# SPDX-License-Identifier: Apache-2.0
"""gpu_check.child, for ranks that are forked: they look for modules where the server did."""

from __future__ import annotations

import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("benchmarks", "tests")]

from gpu_check.child import main  # noqa: E402

main(*sys.argv[1:])
