# SPDX-License-Identifier: Apache-2.0
"""Pages of docs/ for looking things up: commands from their parsers, messages and variables from scripts/reference/."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from markdown_table import markdown_table

from adaptra_megatron.elastic.launch.launch_arguments import launch_parser
from adaptra_megatron.megatron.feature_refusals import RECOVERY, REROUTING, STAGGERING, SYNC_MODES
from adaptra_megatron.megatron.refusals import REFUSALS, SEEN_IN_ARGUMENTS
from adaptra_megatron.tools.cli.main import command_parser

TABLES = Path(__file__).resolve().parent / "reference"


def cli_page() -> str:
    """docs/cli.md."""
    parts = [
        "# Commands\n\nMade from the parsers by `scripts/write_docs.py`. `adaptra COMMAND --help` prints the same. "
        'Exit status 2, and one line on stderr, for bad input; with `--json`, `{"error": ...}` on stdout.'
    ]
    for name, parser in _commands(command_parser(), "adaptra"):
        parts += _described(name, launch_parser() if name == "adaptra launch" else parser)
    return "\n\n".join(parts) + "\n"


def _commands(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield all commands below `parser` that have none below them, by their full names."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield name, parser
    for action in below:
        for word, command in action.choices.items():
            yield from _commands(command, f"{name} {word}")


def _described(name: str, parser: argparse.ArgumentParser) -> list[str]:
    parts = [f"## `{name}`"]
    parts += [_indented(text) for text in (parser.description, parser.epilog) if text and text != argparse.SUPPRESS]
    rows = [
        (_spelled(action), "" if _says_nothing(action.default) else f"`{action.default}`", _meaning(action, parser))
        for action in parser._actions
        if action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction)
    ]
    return [*parts, markdown_table(("argument", "default", "meaning"), rows)] if rows else parts


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.strip().splitlines())


def _says_nothing(default: object) -> bool:
    return default in (None, False, (), [], argparse.SUPPRESS)


def _meaning(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    words = (action.help or "").replace("%(default)s", str(action.default)).replace("%(prog)s", parser.prog)
    return " ".join(words.replace("%%", "%").split())


def _spelled(action: argparse.Action) -> str:
    metavar = action.metavar if isinstance(action.metavar, str) else " ".join(action.metavar or ())
    value = f"{{{','.join(map(str, action.choices))}}}" if action.choices else metavar or action.dest.upper()
    if not action.option_strings:
        return f"`{value}`"
    return f"`{', '.join(action.option_strings)}{'' if action.nargs == 0 else f' {value}'}`"


def messages_page() -> str:
    """docs/messages.md, from scripts/reference/messages.json."""
    parts = [
        "# Messages\n\nErrors and warnings, by when they come; made by `scripts/write_docs.py` from "
        "`scripts/reference/messages.json`. In a job that ended, start with the first error in time, of any rank: "
        "the others often only report that this one ended. Words in capitals, and dots, stand for what varies; "
        "*(log)* is a warning, after which training goes on. By symptom: [troubleshooting.md](troubleshooting.md)."
    ]
    for heading, rows in json.loads((TABLES / "messages.json").read_text()).items():
        table = markdown_table(("message (part of it)", "meaning", "what to do"), rows)
        parts += [f"## {heading}", table]
    return "\n\n".join(parts) + "\n"


def environment_page() -> str:
    """docs/environment.md, from scripts/reference/environment.json."""
    tables = json.loads((TABLES / "environment.json").read_text())
    return f"""# Environment variables

Of every rank, unless it says otherwise; made by `scripts/write_docs.py` from `scripts/reference/environment.json`.
*Launcher* means torchrun, `adaptra launch` or your script.

## Read or set by this package

{markdown_table(("variable", "set by", "effect"), tables["read"])}

## Read by others, and worth knowing

{markdown_table(("variable", "effect"), tables["others"])}
"""


def refusals_page() -> str:
    """docs/refusals.md."""
    always = [
        (one.feature, "runs stock's schedule function" if one.by_order else "refused", one.reason)
        for one in (*REFUSALS, *SEEN_IN_ARGUMENTS)
    ]
    rerouting, recovery, staggering, sync_modes = (
        markdown_table(("feature", "why, and what to do"), [(one.feature, one.reason) for one in table])
        for table in (REROUTING, RECOVERY, STAGGERING, SYNC_MODES)
    )
    return f"""# Refused features

Refused at start, with exit status 2 where Megatron's arguments show it; made from
`adaptra_megatron.megatron.refusals` and `feature_refusals` by `scripts/write_docs.py`, which `adaptra check` applies,
too. What is not here, and was tried: [versions.md](versions.md#features).

## With `--adaptra`

{markdown_table(("feature", "with policy `observe`", "why"), always)}

## With any `--adaptra-reroute`

{rerouting}

## With `--adaptra-reroute failures` or `all`

{recovery}

## With `--adaptra-staggered-optimizer`

{staggering}

## With `--adaptra-sync-mode` other than `ssgd`

{sync_modes}
"""
