# SPDX-License-Identifier: Apache-2.0
"""Entry point of `adaptra`: run the command, and turn errors of the user into one line and exit status 2."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from adaptra_megatron import __version__
from adaptra_megatron.schedule.costs import CostError
from adaptra_megatron.schedule.ir import ScheduleError
from adaptra_megatron.tools.cli import bench_command, check_command, doctor, launch_command
from adaptra_megatron.tools.cli.planning import simulate_sync
from adaptra_megatron.tools.cli.planning.inputs import InputError
from adaptra_megatron.tools.cli.planning.planning_commands import add_plan_command, add_simulate_command
from adaptra_megatron.tools.cli.run_commands import (
    add_analyze_command,
    add_policy_command,
    add_report_command,
    add_status_command,
    add_trace_command,
)


class _UsageError(Exception):
    """Invalid arguments: the program, and what is wrong."""


class _Parser(argparse.ArgumentParser):
    """Parser that reports an error in one line, for scripts; argparse's own prints the usage first."""

    def error(self, message: str) -> NoReturn:
        raise _UsageError(self.prog, f"{message} (see {self.prog} --help)")


class _PrintCompletion(argparse.Action):
    """Prints the script for a shell's completion of our command line, and ends."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> NoReturn:
        try:
            import shtab
        except ImportError:
            parser.error(f"{option} needs the package shtab: pip install 'adaptra-megatron[completion]'")
        print(shtab.complete(parser, str(values)))
        parser.exit()


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of `adaptra` with all commands; docs/cli.md is generated from it."""
    parser: argparse.ArgumentParser = _Parser(
        prog="adaptra",
        description="Pipeline schedules for Megatron-core: plan, simulate, and check hosts, runs and transports.",
    )
    parser.add_argument("--version", action="version", version=f"adaptra {__version__}")
    parser.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        choices=("bash", "zsh", "tcsh"),
        help="print a script that completes this command line, for the shell's start-up file",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add in (
        *(add_plan_command, add_simulate_command, simulate_sync.add_command, add_analyze_command),
        *(launch_command.add_command, doctor.add_command, check_command.add_command, bench_command.add_command),
        *(add_report_command, add_trace_command, add_status_command, add_policy_command),
    ):
        add(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status, by default 0; 2 for bad input, with one line on stderr.

    With `--json` that line is a JSON object on stdout, {"error": ...}. Without a command: print the help, return 0.
    Return 1 if stdout was closed. Raises SystemExit for invalid arguments, as argparse does.
    """
    parser = command_parser()
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = parser.parse_args(given)
        if "run" not in options:
            parser.print_help()
            return 0
        exit_status: int | None = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`head`, say) has closed the pipe; without this, Python complains again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except _UsageError as error:
        raise SystemExit(_refuse(*error.args, as_json="--json" in given)) from error
    except (InputError, CostError, ScheduleError) as error:
        return _refuse(parser.prog, str(error), as_json="--json" in given)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        why = f"{given[0]} needs torch, which is not installed here"
        return _refuse(parser.prog, why, as_json="--json" in given)
    return exit_status or 0


def _refuse(program: str, message: str, *, as_json: bool) -> int:
    line = " ".join(message.split())
    if as_json:
        print(json.dumps({"error": line}))
    else:
        print(f"{program}: {line}", file=sys.stderr)
    return 2
