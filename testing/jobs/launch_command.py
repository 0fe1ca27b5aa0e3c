# SPDX-License-Identifier: Apache-2.0
"""Start the processes of a job on this machine, watch them and clean up after them.

    python -m testing.jobs.launch_command --nproc 4 scripts/train_gpt.py ARGUMENTS...

Ranks are forked from a process that has imported torch and Megatron already (`fork_server`), which starts a job in a
fraction of the time; `--no-preload` starts plain Python processes instead, as torchrun would.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from adaptra_megatron.tools.local_ranks.launch_ranks import LaunchError, run_ranks
from testing.jobs.fork_server import ForkServer


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m testing.jobs.launch_command", allow_abbrev=False)
    parser.add_argument("--nproc", type=int, required=True, help="number of ranks")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="time limit of the job (default: 3600)")
    parser.add_argument("--log-dir", default=None, help="directory of the logs, one per rank (default: a new one)")
    parser.add_argument("--no-preload", action="store_false", dest="preload", help="start plain Python processes")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="script.py or -m module, then its arguments")
    args = parser.parse_args(argv)
    if not args.command:
        parser.error("name a script, or -m and a module")
    server = ForkServer() if args.preload else None
    try:
        run_ranks(
            args.nproc,
            args.command,
            timeout_s=args.timeout_s,
            log_directory=args.log_dir,
            server=server,
            echo=lambda line: sys.stdout.write(line + "\n"),
        )
    except LaunchError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    finally:
        if server is not None:
            server.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
