# SPDX-License-Identifier: Apache-2.0
"""Add our flags to a program's parser, and apply the patches once the command line has been parsed."""

from __future__ import annotations

import argparse
import functools
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from adaptra_megatron.common.environment import FLAGS_VARIABLE, OFF_VARIABLE, ON_VARIABLE, is_turned_off
from adaptra_megatron.common.log import is_first_of_host, is_first_rank, logger_of
from adaptra_megatron.config import ConfigError, add_adaptra_arguments, config_from_arguments

logger = logger_of(__name__)

WAIT_S = 5.0
"""How long other ranks leave it to the job's first rank to print a refusal, since its launcher ends them when it ends.
After that the first rank of each host prints it, as only its host may refuse, and after the same time again all others.
"""
_MOST_CHARACTERS = 2000
"""Maximum length of a refusal, which may quote a damaged file."""


class Enabling:
    """Decides, once per process, whether and how Megatron is patched."""

    def __init__(self, *, requested: bool, flags: str = "") -> None:
        """`requested`: whether --adaptra counts as given. `flags`: further flags from the environment, as one
        string.
        """
        self._requested = requested
        self._flags = flags
        self._decided = False

    def extend(self, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add our flags to `parser`, and decide whenever it has parsed a command line. Returns `parser`.

        Invalid settings end the process with one line on one rank, and exit status 2.
        """
        add_adaptra_arguments(parser)
        parser.set_defaults(adaptra=self._requested)
        parse, stock_error = parser.parse_known_args, parser.error

        @functools.wraps(parse)
        def parse_known_args(
            args: Sequence[str] | None = None, namespace: Any = None
        ) -> tuple[argparse.Namespace, list[str]]:
            words = [*self._words_of_environment(), *(sys.argv[1:] if args is None else args)]
            arguments, unknown = parse(words, namespace)
            self.decide(parser, arguments)
            return arguments, unknown

        @functools.wraps(stock_error)
        def error(message: str) -> NoReturn:
            from adaptra_megatron.common.foreign_errors import is_about_our_flags

            if is_about_our_flags(message):
                refuse(parser.prog, message)
            stock_error(message)

        # On the object: every call of parse_args goes through here as well.
        parser.parse_known_args = parse_known_args  # type: ignore[method-assign, assignment]
        parser.error = error  # type: ignore[method-assign]
        return parser

    def _words_of_environment(self) -> list[str]:
        """Return the flags from the environment, after checking that they are ours."""
        try:
            words = shlex.split(self._flags)
        except ValueError as error:
            refuse(FLAGS_VARIABLE, f"{error} in {self._flags!r}")
        _own_parser(FLAGS_VARIABLE).parse_args(words)
        return words

    def decide_without_parser(self, command_line: Sequence[str] | None = None, job: Any = None) -> None:
        """Decide by the --adaptra flags on `command_line` (default: the process's own), among other flags.

        `job`: the job's settings, as nested configurations, if they are known already. Does nothing after the first
        decision, or if the program has patched Megatron itself. Warns about --adaptra flags that have no effect because
        nothing has turned the package on.
        """
        if self._decided:
            return
        patches = sys.modules.get("adaptra_megatron.patches")
        if patches is not None and (not self._requested or patches.in_force() is not None):
            self._decided = True
            return
        command_line = sys.argv[1:] if command_line is None else command_line
        if not self._requested:
            self._decided = True
            if ("--adaptra" in command_line or self._flags) and is_first_rank() and not is_turned_off():
                logger.warning(
                    "%s, but Megatron's own parser has not read it, and nothing has been patched: stock Megatron runs. "
                    "Set %s=1 in the environment of every rank (and flags in %s), start the script with "
                    "`-m adaptra_megatron`, or have it `import adaptra_megatron.auto`",
                    f"{FLAGS_VARIABLE} is in the environment" if self._flags else "--adaptra is on the command line",
                    ON_VARIABLE,
                    FLAGS_VARIABLE,
                )
            return
        parser = _own_parser()
        parser.set_defaults(adaptra=self._requested)
        arguments, _others = parser.parse_known_args([*self._words_of_environment(), *command_line])
        if job is not None:
            from adaptra_megatron.megatron.job_settings import settings_of_objects

            arguments = argparse.Namespace(**{**vars(settings_of_objects(job)), **vars(arguments)})
        self.decide(parser, arguments)

    def decide(self, parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
        """Patch Megatron or not, as `arguments` ask. Parsing the same arguments again changes nothing."""
        first, self._decided = not self._decided, True
        try:
            if not arguments.adaptra:
                _refuse_flags_without_effect(parser, arguments)
                return
            config = config_from_arguments(arguments)
        except ConfigError as error:
            refuse(parser.prog, str(error))
        if is_turned_off():
            if first and is_first_rank():
                logger.warning("turned off by %s; Megatron is left as it is", OFF_VARIABLE)
            return
        if config.policy == "off":
            return
        from adaptra_megatron.common.environment import what_is_too_old

        too_old = what_is_too_old()
        if too_old is not None:
            refuse(parser.prog, too_old)
        from adaptra_megatron.config import validate_files
        from adaptra_megatron.megatron import refusals
        from adaptra_megatron.patches import PatchError, enable

        refuse_all: Callable[[Any], None] = refusals.refuse_settings
        if config.has_features:
            from adaptra_megatron.megatron.feature_refusals import refuse_arguments as refuse_all
        try:
            validate_files(config, refusals.pipeline_stages(arguments))
            refuse_all(arguments)
            enable(config)
        except (ConfigError, PatchError, refusals.UnsupportedFeatureError) as error:
            refuse(parser.prog, str(error))


def _own_parser(program: str | None = None) -> argparse.ArgumentParser:
    """Return a parser of the --adaptra flags alone. `program`: name in its errors (default: the script)."""
    parser = add_adaptra_arguments(argparse.ArgumentParser(program, allow_abbrev=False, add_help=False))
    parser.error = functools.partial(refuse, parser.prog)  # type: ignore[method-assign]
    return parser


def refuse(program: str, message: str) -> NoReturn:
    """End this process with exit status 2 and one line, printed by one rank of the job."""
    if not is_first_rank():
        time.sleep(WAIT_S if is_first_of_host() else 2 * WAIT_S)
    sys.stderr.write(f"{program}: error: {' '.join(message.split())[:_MOST_CHARACTERS]}\n")
    raise SystemExit(2)


def _refuse_flags_without_effect(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    given = [
        name
        for name, value in vars(arguments).items()
        if name.startswith("adaptra_") and value != parser.get_default(name)
    ]
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"{flags} has no effect without --adaptra: add it, or set {ON_VARIABLE}=1")
