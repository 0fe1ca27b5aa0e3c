# SPDX-License-Identifier: Apache-2.0
"""Run the process of a rank: end with its launcher, show stacks on SIGUSR1, run a script.

python -m adaptra_megatron.tools.local_ranks.rank_process script.py ARGUMENTS...
python -m adaptra_megatron.tools.local_ranks.rank_process -m module ARGUMENTS...
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from adaptra_megatron.elastic.launch.tied_process import die_with_parent

STACKS_SIGNAL = signal.SIGUSR1
PARENT_VARIABLE = "ADAPTRA_LAUNCHER_PID"


def run_script(argv: Sequence[str]) -> None:
    """Run `argv` ("script.py" or "-m", "module", then arguments) as the main program of this process."""
    die_with_parent(int(os.environ.get(PARENT_VARIABLE, os.getppid())))
    # The file descriptor, not sys.stderr: a test runner or the script may replace that.
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True, chain=False)
    faulthandler.enable(file=2)
    if argv[0] == "-m":
        sys.argv = list(argv[1:])
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(argv)
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    run_script(sys.argv[1:])
