# SPDX-License-Identifier: Apache-2.0
"""A trainer's driver that parses Megatron's flags, and starts actors as Ray does.

Each has a command line of Ray's and the environment of its runtime_env: slime's is `--train-env-vars`, verl's
`ray_kwargs.ray_init.runtime_env.env_vars`.
"""

from __future__ import annotations

import os
import subprocess
import sys

TRAIN_ENV_VARS = {"ADAPTRA": "1", "ADAPTRA_ARGS": "--adaptra-policy observe"}

if __name__ == "__main__":
    for actor in range(2):
        command = [sys.executable, "own_parser.py", "--node-ip-address=10.0.0.7", f"--worker-id={actor}"]
        subprocess.run(command, env={**os.environ, "NCCL_CUMEM_ENABLE": "0", **TRAIN_ENV_VARS}, check=True)
