# SPDX-License-Identifier: Apache-2.0
"""Define `adaptra launch`: torchrun's flags, for a job that may recover from failures of some ranks."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from collections.abc import Sequence

from adaptra_megatron.tools.cli.planning.inputs import InputError


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `launch` to the commands of `adaptra`."""
    parser = commands.add_parser(
        "launch",
        help="start the ranks of a job, with torchrun's flags",
        add_help=False,
        prefix_chars="\0",  # all that follows is for torchrun's parser, which takes seconds to import
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.set_defaults(run=lambda options: launch(options.arguments))


def launch(arguments: Sequence[str]) -> int:
    """Run this host's part of a job. Return the exit status; print on stderr how a failed job ended."""
    from adaptra_megatron.elastic.launch.launch_arguments import LaunchArgumentError, SlurmError, read_arguments
    from adaptra_megatron.elastic.launch.launcher import Launcher

    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        settings = read_arguments(arguments, os.environ)
    except (LaunchArgumentError, SlurmError) as error:
        raise InputError(f"launch: {error}") from error
    verdict = Launcher(settings).run()
    if verdict.text:
        print(f"adaptra launch: {settings.name}: {verdict.text}", file=sys.stderr)
    if threading.active_count() > 1:
        # A thread is waiting for a store that does not answer. If it did so while Python ends, C++ would abort the
        # process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(verdict.exit_code)
    return verdict.exit_code
