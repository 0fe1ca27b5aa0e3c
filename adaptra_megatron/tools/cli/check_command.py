# SPDX-License-Identifier: Apache-2.0
"""Define `adaptra check`: whether a job would start with --adaptra, and what it would use."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from packaging.specifiers import SpecifierSet

from adaptra_megatron.config import ConfigError, add_adaptra_arguments, config_from_arguments, validate_files
from adaptra_megatron.megatron.job_settings import check_numbers, settings_of_command_line, settings_of_objects
from adaptra_megatron.megatron.prospects import REFUSED, Feature, Prospects, counts, prospects_of
from adaptra_megatron.megatron.refusals import pipeline_stages
from adaptra_megatron.tools.cli.planning.inputs import InputError
from adaptra_megatron.tools.cli.recipe_files import OVERRIDE, jobs_of, merged, nested, read_document

CONFIG_FLAGS = ("config", "config_file", "yaml_cfg")
"""Flags of NeMo-RL's, Megatron-Bridge's and Megatron-LM's scripts that name a file of settings."""
RECIPE_FLAGS = ("recipe", "config_name")
"""Flags of Megatron-Bridge's scripts and Hydra's that name a recipe, wherever that is."""
_DESCRIPTION = """\
Say whether a job would start with --adaptra, and what it would get: what is refused, which backwards are split, which
paths messages have. Nothing of the job is started, and no GPU is touched.

  adaptra check -- pretrain_gpt.py ARGUMENTS...       a command line of Megatron-LM
  adaptra check -- main_ppo actor.megatron.NAME=4     settings word by word, as Hydra's trainers take them
  adaptra check --settings FILE.json                  settings by the names of Megatron's configs, JSON or YAML
  adaptra check --recipe module:function              a recipe of Megatron-Bridge or NeMo, which is built

FILE.json holds an object, or a list of them; one may have its settings under "settings", or a command line as a list
under "argv"; words after -- replace settings of FILE. Roles of one job (actor, critic, teacher) are judged one by
one, each by its own section. Exit status 0 if all of them start, 1 if one does not, 2 for input that cannot be read.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `check` to the commands of `adaptra`."""
    parser = commands.add_parser(
        "check",
        help="say whether a job would start with --adaptra, and what it would get",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--settings", type=Path, metavar="FILE", help="settings of one job or of many, JSON or YAML")
    parser.add_argument("--recipe", metavar="MODULE:FUNCTION", help="a function that returns a recipe")
    parser.add_argument("--json", action="store_true", help="print JSON: an object, or a list where FILE holds a list")
    parser.add_argument("line", nargs="*", metavar="-- SCRIPT ARGUMENTS", help="a command line of Megatron-LM")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    more = options.settings is not None and all(map(OVERRIDE.fullmatch, options.line))
    if (options.settings is not None) + (options.recipe is not None) + (bool(options.line) and not more) != 1:
        raise InputError("give one of --settings FILE, --recipe MODULE:FUNCTION, and -- SCRIPT ARGUMENTS")
    if options.settings is not None:
        jobs, many = _jobs_in(options.settings, options.line)
    elif options.recipe is not None:
        jobs, many = {options.recipe: _settings_of_recipe(options.recipe)}, False
    else:
        by_role = _settings_of_line(options.line)
        jobs, many = {role or options.line[0]: settings for role, settings in by_role.items()}, len(by_role) > 1
    found = {name: prospects_of(settings) for name, settings in jobs.items()}
    version = _version()
    if options.settings is None and version["verdict"] == "not supported":
        found = {name: _refused_by_version(each, version) for name, each in found.items()}
    if options.json:
        documents = [{"id": name, **asdict_of(each), "version": version} for name, each in found.items()]
        print(json.dumps(documents if many else documents[0]))
    else:
        print("\n\n".join("\n".join(_lines(name, each)) for name, each in found.items()))
        print(f"\n{_version_line(version)}")
        if many:
            print(_totals(list(found.values())))
    return 1 if any(each.verdict == REFUSED for each in found.values()) else 0


def asdict_of(prospects: Prospects) -> dict[str, Any]:
    """Return the prospects for JSON."""
    return {**asdict(prospects), "features": [feature._asdict() for feature in prospects.features]}


def _jobs_in(path: Path, words: Sequence[str]) -> tuple[dict[str, SimpleNamespace], bool]:
    """Return the settings of each job in a file, by a list's names and by role, and whether there are several.

    `words`: settings that replace the file's.
    """
    document, missing = read_document(path)
    _say_missing(path, missing)
    many = isinstance(document, list)
    jobs: dict[str, SimpleNamespace] = {}
    for number, entry in enumerate(document if many else [document]):
        name = str(entry.get("id", f"job {number}")) if isinstance(entry, Mapping) else ""
        for role, settings in _settings_of_entry(f"--settings {path}: {number}", entry, words).items():
            full = f"{name}: {role}" if many and role else role or name
            jobs[f"{full} ({number})" if full in jobs else full] = settings
    if not jobs:
        raise InputError(f"--settings {path} holds an empty list: give at least one object of settings")
    return jobs, many or len(jobs) > 1


def _document_of_flags(flags: SimpleNamespace) -> Mapping[str, Any]:
    """Return the document that a command line names; one line on stderr says which recipe it cannot be read from."""
    for name in CONFIG_FLAGS:
        path = Path(str(getattr(flags, name, "")))
        if path.suffix in (".yaml", ".yml", ".json") and path.is_file():
            document, missing = read_document(path)
            _say_missing(path, missing)
            return document if isinstance(document, Mapping) else {}
    for name in RECIPE_FLAGS:
        if (named := getattr(flags, name, None)) is not None:
            flag = f"--{name.replace('_', '-')}"
            print(f"{flag} {named} is not read: its settings count as Megatron-LM's defaults", file=sys.stderr)
    return {}


def _say_missing(path: Path, missing: Sequence[str]) -> None:
    if missing:
        print(f"{path} inherits from missing files, and is judged without them: {', '.join(missing)}", file=sys.stderr)


def _settings_of_entry(place: str, entry: Any, words: Sequence[str]) -> dict[str, SimpleNamespace]:
    """Return the settings of an entry, by role (see `jobs_of`)."""
    settings = entry.get("settings", entry) if isinstance(entry, Mapping) else None
    line = entry.get("argv") if isinstance(entry, Mapping) else None
    try:
        if isinstance(line, list) and all(isinstance(word, str) for word in line):
            return _settings_of_line([*line, *words])
        if line is None and isinstance(settings, Mapping):
            return _settings_of_document(merged(settings, nested(_assignments(words))))
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{place}: {error}") from error
    raise InputError(f'{place} is neither an object of settings nor one with a list of words under "argv"')


def _settings_of_document(document: Mapping[str, Any]) -> dict[str, SimpleNamespace]:
    jobs = {role: settings_of_objects(each) for role, each in jobs_of(document).items()}
    for settings in jobs.values():
        check_numbers(settings)
        _with_our_flags(settings, _our_words(settings))
    return jobs


def _assignments(words: Sequence[str]) -> list[tuple[str, str]]:
    """Return the words that set one setting each, as Hydra's do: its dotted name, and its value."""
    return [(found[1], found[2]) for word in words if (found := OVERRIDE.fullmatch(word))]


def _settings_of_line(words: Sequence[str]) -> dict[str, SimpleNamespace]:
    """Return the settings of a command line, by role (see `jobs_of`).

    Raises InputError for invalid flags of --adaptra, as Megatron's parser would.
    """
    assigned, flags = _assignments(words), [word for word in words if not OVERRIDE.fullmatch(word)]
    named = settings_of_command_line(flags)
    jobs = {"": named}
    try:
        document = merged(_document_of_flags(named), nested(assigned))
        if document:
            found = _settings_of_document(document)
            jobs = {role: SimpleNamespace(**{**vars(named), **vars(each)}) for role, each in found.items()}
        for settings in jobs.values():
            check_numbers(settings)
    except ValueError as error:
        raise InputError(str(error)) from error
    return {role: _with_our_flags(each, [word for word in flags if word != "--"]) for role, each in jobs.items()}


def _our_words(settings: SimpleNamespace) -> list[str]:
    """Return the --adaptra settings of a document as flags of a command line."""
    words: list[str] = []
    for name, value in vars(settings).items():
        if name.startswith("adaptra_") and value not in (None, False):
            values = [] if value is True else value if isinstance(value, list) else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return words


def _with_our_flags(settings: SimpleNamespace, words: Sequence[str]) -> SimpleNamespace:
    """Add the flags of --adaptra among `words` to `settings`. Raises InputError for invalid flags."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    add_adaptra_arguments(parser)
    try:
        ours, _others = parser.parse_known_args(words)
        validate_files(config_from_arguments(ours), pipeline_stages(settings))
    except (ConfigError, argparse.ArgumentError) as error:
        raise InputError(str(error)) from error
    vars(settings).update(vars(ours))
    return settings


def _settings_of_recipe(name: str) -> SimpleNamespace:
    recipe = _recipe(name)
    settings = settings_of_objects(recipe)
    try:
        check_numbers(settings)
    except ValueError as error:
        raise InputError(f"--recipe {name}: {error}") from error
    if len(vars(settings)) < 2:
        raise InputError(f"--recipe {name} returns no configuration with settings, but {type(recipe).__name__}")
    return settings


def _recipe(name: str) -> Any:
    module, colon, function = name.partition(":")
    if not colon:
        raise InputError(f"--recipe {name} must be of the form module:function")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), function)()
    except Exception as error:  # whatever a recipe raises
        raise InputError(f"--recipe {name} cannot be built: {type(error).__name__}: {error}") from error


def _version() -> dict[str, Any]:
    """Return the installed version of megatron-core, and whether the patches support it."""
    from adaptra_megatron.patches.table import SUPPORTED

    try:
        installed = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return {"megatron_core": None, "supported": SUPPORTED, "verdict": "unknown"}
    fits = SpecifierSet(SUPPORTED, prereleases=True).contains(installed)
    return {"megatron_core": installed, "supported": SUPPORTED, "verdict": "supported" if fits else "not supported"}


def _refused_by_version(found: Prospects, version: Mapping[str, Any]) -> Prospects:
    remedy = f"pip install 'megatron-core{version['supported']}'"
    feature = Feature(
        f"megatron-core {version['megatron_core']}", REFUSED, "the patches are not written for it", remedy
    )
    return replace(found, verdict=REFUSED, split="none", split_layers=0, features=[feature, *found.features])


def _version_line(version: Mapping[str, Any]) -> str:
    if version["megatron_core"] is None:
        return f"megatron-core is not installed here; --adaptra runs with {version['supported']}"
    return f"megatron-core {version['megatron_core']} is {version['verdict']} ({version['supported']})"


def _lines(name: str, found: Prospects) -> list[str]:
    lines = [f"{name}: {found.verdict}"]
    if found.verdict != REFUSED:
        lines.append(
            f"  split backward: {found.split} ({found.split_layers} of {found.layers} linear layers"
            f"{'' if found.per == 'model' else ', counted once for all layers'})"
        )
        lines.append(f"  messages: {found.paths}; model of the GPU: {found.device}")
    for feature in found.features:
        remedy = "" if feature.remedy == "none" else f". {feature.remedy[0].upper()}{feature.remedy[1:]}"
        lines.append(f"  {feature.effect:8}{feature.name}: {feature.reason}{remedy}")
    return lines


def _totals(found: Sequence[Prospects]) -> str:
    verdicts, splits = counts(found)
    start = sum(splits.values())
    split = splits["all"] + splits["some"]
    return (
        f"{start} of {len(found)} start ({start / len(found):.0%}), {verdicts[REFUSED]} are refused; "
        f"{split} of those that start split backwards"
    )
