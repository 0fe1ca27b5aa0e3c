# SPDX-License-Identifier: Apache-2.0
"""Read trainers' recipes: files that inherit from others, references within them, words that set one setting each, and
several roles (actor, critic, teacher) in one file."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from adaptra_megatron.tools.cli.planning.inputs import InputError

OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
"""A word that sets one setting, as Hydra's: `actor.megatron.pipeline_model_parallel_size=4`."""
_ROLE = re.compile(r"(actor|critic|ref|reference|policy|value|teachers?|student|reward|rm)(_model|_policy|_trainer)?")
"""Names of sections that are jobs of their own in recipes of several jobs."""
_FORWARDS_ALONE = re.compile(r"(ref|reference|teachers?)(_model|_policy|_trainer)?")
_ELSEWHERE = ("rollout", "generation", "trt_llm")
"""Sections of inference engines, whose sizes have the same names."""
_REFERENCE = re.compile(r"\$\{([^${}]+)\}")
_FROM_ENVIRONMENT = re.compile(r"[A-Z_][A-Z0-9_]*(:.*)?")
"""References to the environment, as in Primus; `job_settings` resolves them."""
_DEEPEST = 12
"""Largest depth of inheritance, and of references to references."""

_Place = tuple[str, ...]


def read_document(path: Path) -> tuple[Any, list[str]]:
    """Read a JSON file, or a YAML file (by its name); return its content, and the inherited files that were not found.

    The content includes what the file inherits (`defaults:`, as in Hydra and NeMo-RL). Raises InputError if the file
    cannot be read.
    """
    missing: list[str] = []
    return _with_inherited(path, missing, _DEEPEST), missing


def nested(assignments: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return the document of settings that are given by dotted names, with their values."""
    document: dict[str, Any] = {}
    for name, value in assignments:
        *sections, last = name.split(".")
        document = merged(document, _under(sections, {last: value}))
    return document


def merged(below: Any, above: Any) -> Any:
    """Return both documents merged by section; of a setting in both, that of `above`."""
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return above
    in_both = {name: merged(below[name], above[name]) for name in below if name in above}
    return {**below, **above, **in_both}


def jobs_of(document: Any) -> dict[str, Any]:
    """Return the documents of all jobs in one, by role; under "" if it holds a single job.

    References are resolved as far as possible. Inference engines are left out, and the teacher within a job of one
    other role (Megatron-Bridge's distillation).
    """
    document = _without(_resolved(document, (), document), set(_places(document, lambda at: at[-1] in _ELSEWHERE)))
    sized = set(_places(document, lambda at: at[-1].endswith("_parallel_size")))
    roles = list(dict.fromkeys(role for at in sorted(sized) if (role := _role(at))))
    if len(roles) < 2:
        within = any(_role(at) is None for at in sized)
        return {"": _without(document, {role for role in roles if within and _is_of_forwards(role)})}
    jobs = {}
    for role in roles:
        job = _without(document, set(roles) - {role})
        forwards = {"forward_only": True} if _is_of_forwards(role) else {}
        jobs[".".join(role)] = {**job, **forwards}
    return jobs


def _with_inherited(path: Path, missing: list[str], deepest: int) -> Any:
    document = _read(path)
    defaults = document.get("defaults") if isinstance(document, Mapping) else None
    if not isinstance(defaults, (str, list)) or not deepest:
        return document
    own = {name: value for name, value in document.items() if name != "defaults"}
    entries = [defaults] if isinstance(defaults, str) else defaults
    inherited: Any = {}
    for entry in [*entries, *([] if "_self_" in entries else ["_self_"])]:
        if entry == "_self_":
            inherited = merged(inherited, own)
            continue
        name, sections, optional = _default(entry)
        found = next((each for end in ("", ".yaml") if (each := path.parent / f"{name}{end}").is_file()), None)
        if found is not None:
            inherited = merged(inherited, _under(sections, _with_inherited(found, missing, deepest - 1)))
        elif not optional:
            missing.append(name)
    return inherited


def _default(entry: Any) -> tuple[str, list[str], bool]:
    """Parse an entry of Hydra's defaults; return the file's name, the section for its content, and whether it is
    optional.

    An entry is `group@section: name`, `group: name`, or a name alone.
    """
    if not isinstance(entry, Mapping):
        return str(entry).partition("@")[0], [], False
    ((key, name),) = list(entry.items())[:1] or [("", None)]
    words = str(key).split()
    group, at, section = words[-1].partition("@") if words else ("", "", "")
    place = section if at else group.strip("./")
    sections = [] if place.strip(":") in ("_global_", "_here_") else re.split(r"[./]", place.strip(":"))
    return f"{group}/{name}", sections, "optional" in words or name is None


def _read(path: Path) -> Any:
    is_yaml = path.suffix in (".yaml", ".yml")
    try:
        text = path.read_text(encoding="utf-8-sig")
        if not is_yaml:
            return json.loads(text)
        yaml = importlib.import_module("yaml")
    except ImportError as error:
        raise InputError(f"--settings {path} needs PyYAML: pip install pyyaml, or give the settings as JSON") from error
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"--settings {path} cannot be read as {'YAML' if is_yaml else 'JSON'}: {error}") from error
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"--settings {path} cannot be read as YAML: {' '.join(str(error).split())}") from error


def _under(sections: Sequence[str], value: Any) -> Any:
    for section in reversed(sections):
        value = {section: value}
    return value


def _resolved(node: Any, at: _Place, root: Any, deepest: int = _DEEPEST) -> Any:
    """Return `node`, which stands at `at` in `root`, with its references resolved; unknown ones stay."""
    if isinstance(node, Mapping):
        return {name: _resolved(value, (*at, str(name)), root, deepest) for name, value in node.items()}
    if isinstance(node, list):
        return [_resolved(value, (*at, str(index)), root, deepest) for index, value in enumerate(node)]
    if not isinstance(node, str) or not deepest or (reference := _REFERENCE.fullmatch(node)) is None:
        return node
    if _FROM_ENVIRONMENT.fullmatch(reference[1]):
        return node
    function, colon, rest = reference[1].partition(":")
    name, _, default = (rest if colon else function).partition(",")
    if function == "oc.env":
        return os.environ.get(name.strip(), default.strip())
    if colon and function != "oc.select":
        return node
    place = _place(name.strip(), at)
    found, known = _found(place, root)
    if not known:  # Hydra may put a whole file under a section that it does not name itself
        place = place[1:]
        found, known = _found(place, root)
    if known:
        return _resolved(found, place, root, deepest - 1)
    return default.strip() if default else node


def _place(name: str, at: _Place) -> _Place:
    """Return the place that a reference at `at` names: `a.b`, or relative to its section (`.b`) or to one above."""
    above = len(name) - len(name.lstrip("."))
    return (*(at[:-above] if above else ()), *name.lstrip(".").split("."))


def _found(place: _Place, root: Any) -> tuple[Any, bool]:
    for step in place:
        if isinstance(root, Mapping) and step in root:
            root = root[step]
        else:
            return None, False
    return root, bool(place)


def _entries(node: Any, at: _Place) -> Iterator[tuple[Any, _Place, Any]]:
    """Yield the entries of a section or list at `at`: key, place, value. Places name settings as flags do."""
    items = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for name, value in items:
        yield name, (*at, str(name).lstrip("-").replace("-", "_")), value


def _places(node: Any, wanted: Any, at: _Place = ()) -> Iterator[_Place]:
    for _, place, value in _entries(node, at):
        if wanted(place):
            yield place
        yield from _places(value, wanted, place)


def _role(at: _Place) -> _Place | None:
    """Return the place of the role's section that a setting is in; None if it is in none."""
    for depth, name in enumerate(at[:-1], 1):
        if _ROLE.fullmatch(name):
            return at[: depth + 1] if depth < len(at) - 1 and at[depth].isdigit() else at[:depth]
    return None


def _is_of_forwards(role: _Place) -> bool:
    return any(map(_FORWARDS_ALONE.fullmatch, role))


def _without(node: Any, places: set[_Place], at: _Place = ()) -> Any:
    """Return `node` without the places in `places`."""
    if not isinstance(node, (Mapping, list)):
        return node
    kept = {name: _without(value, places, place) for name, place, value in _entries(node, at) if place not in places}
    return kept if isinstance(node, Mapping) else list(kept.values())
