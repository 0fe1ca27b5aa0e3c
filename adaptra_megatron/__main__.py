# SPDX-License-Identifier: Apache-2.0
"""Run a script as `python SCRIPT ARGUMENTS... --adaptra` would: `python -m adaptra_megatron SCRIPT ARGUMENTS...`.

`python -m adaptra_megatron -m MODULE ARGUMENTS...` runs a module.
"""

from __future__ import annotations

import os
import runpy
import sys

from adaptra_megatron.engine.bootstrap import on_request

USAGE = """usage: python -m adaptra_megatron SCRIPT ARGUMENTS...
       python -m adaptra_megatron -m MODULE ARGUMENTS...

Runs SCRIPT, for example Megatron-LM's pretrain_gpt.py, or MODULE, with --adaptra. With --help among the arguments of
a script that has Megatron's parser, the other --adaptra flags are listed.
"""


def main() -> None:
    """Run the script or module as the main program, in the place of this one in `sys.argv` and `sys.path`."""
    if len(sys.argv) > 2 and sys.argv[1] == "-m":
        del sys.argv[:2]
        on_request()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        asked = len(sys.argv) == 2 and sys.argv[1] in ("-h", "--help")
        (sys.stdout if asked else sys.stderr).write(USAGE)
        raise SystemExit(0 if asked else 2)
    del sys.argv[0]
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11 on: -P
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    on_request()
    runpy.run_path(sys.argv[0], run_name="__main__")


# Processes that multiprocessing spawns may import this file again.
if __name__ == "__main__":
    main()
