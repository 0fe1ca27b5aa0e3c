# SPDX-License-Identifier: Apache-2.0
"""From a command line to patches in force: our flags in a program's parser, and what is done once they are read."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from typing import Any

from adaptra_megatron.bootstrap import OFF_VARIABLE, is_turned_off
from adaptra_megatron.config import ConfigError, add_adaptra_arguments, config_from_arguments
from adaptra_megatron.job_settings import settings_of_objects
from adaptra_megatron.log import is_first_rank, logger_of

logger = logger_of(__name__)


class Enabling:
    """Decides once per process whether Megatron is patched, and how."""

    def __init__(self, *, requested: bool) -> None:
        """`requested`: --adaptra is taken as given."""
        self._requested = requested
        self._decided = False

    def extend(self, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add our flags to `parser`, and decide whenever it has parsed a command line.

        What cannot be is an error of the parser: usage, one line, exit status 2.
        """
        add_adaptra_arguments(parser)
        parser.set_defaults(adaptra=self._requested)
        parse = parser.parse_known_args

        @functools.wraps(parse)
        def parse_known_args(*given: Any, **keywords: Any) -> tuple[argparse.Namespace, list[str]]:
            arguments, unknown = parse(*given, **keywords)
            self.decide(parser, arguments)
            return arguments, unknown

        # On the object: every call of parse_args goes through here as well.
        parser.parse_known_args = parse_known_args  # type: ignore[method-assign, assignment]
        return parser

    def decide_without_parser(self, command_line: Sequence[str] | None = None, job: Any = None) -> None:
        """Decide by the --adaptra flags among others on `command_line` (default: the process's own).

        `job`: the job's settings, as configurations within configurations, where they are known already.

        Does nothing once it is decided, or when the program has patched Megatron by itself. Where --adaptra was not
        taken as given, a program that has none of our modules has read it, or ignored it: warns that it has no effect.
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
            if "--adaptra" in command_line and is_first_rank() and not is_turned_off():
                logger.warning(
                    "--adaptra is on the command line, but Megatron's own parser has not read it, and nothing "
                    "has been patched: stock Megatron runs. Start the script with `-m adaptra_megatron`, or make "
                    "`import adaptra_megatron.auto` its first import"
                )
            return
        parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
        add_adaptra_arguments(parser)
        parser.set_defaults(adaptra=self._requested)
        arguments, _others = parser.parse_known_args(command_line)
        if job is not None:
            arguments = argparse.Namespace(**{**vars(settings_of_objects(job)), **vars(arguments)})
        self.decide(parser, arguments)

    def decide(self, parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
        """Patch Megatron as `arguments` say, or leave it; parsing the same again changes nothing."""
        first, self._decided = not self._decided, True
        try:
            if not arguments.adaptra:
                _refuse_flags_without_effect(parser, arguments)
                return
            config = config_from_arguments(arguments)
        except ConfigError as error:
            parser.error(str(error))
        if is_turned_off():
            if first and is_first_rank():
                logger.warning("turned off by %s; Megatron is left as it is", OFF_VARIABLE)
            return
        if config.policy == "off":
            return
        from adaptra_megatron.given import check_given
        from adaptra_megatron.patches import PatchError, enable
        from adaptra_megatron.runtime.megatron.refusals import (
            UnsupportedFeatureError,
            pipeline_stages,
            refuse_arguments,
            refuse_for_staggering,
        )

        try:
            check_given(config, pipeline_stages(arguments))
            refuse_arguments(arguments)
            if config.staggered_optimizer:
                refuse_for_staggering(arguments)
            enable(config)
        except (ConfigError, PatchError, UnsupportedFeatureError) as error:
            parser.error(str(error))


def _refuse_flags_without_effect(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    given = [
        name
        for name, value in vars(arguments).items()
        if name.startswith("adaptra_") and value != parser.get_default(name)
    ]
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"{flags} has no effect without --adaptra: add --adaptra")
