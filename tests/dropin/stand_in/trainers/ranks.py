# SPDX-License-Identifier: Apache-2.0
"""A trainer's command that starts its ranks by torchrun, with its own environment and no words of ours."""

from __future__ import annotations

import subprocess
import sys

RANKS = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "own_parser.py", "--tuner_type", "full"]

if __name__ == "__main__":
    raise SystemExit(subprocess.run(RANKS, check=False).returncode)
