#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/recipes.md: what `adaptra check` says of published recipes.

    scripts/write_recipes.py RECIPES.json

RECIPES.json: a list of {"id", "source"} with "settings" (names of Megatron's configs) or "argv" (Megatron-LM's flags).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markdown_table import markdown_table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "recipes.md"
BEGIN, END = "<!-- made by scripts/write_recipes.py -->\n", "<!-- until here -->\n"
FAMILIES = (
    *("deepseek", "kimi", "qwen3_next", "qwen35_vl", "qwen3_vl", "qwen", "llama", "glm", "gpt_oss", "nemotron"),
    *("mixtral", "minimax", "grok", "aquila", "apertus", "moonlight", "gpt"),
)
"""Parts of names, the more special first."""


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", type=Path)
    recipes = parser.parse_args().recipes
    command = [sys.executable, "-m", "adaptra_megatron.tools.cli", "check", "--settings", str(recipes), "--json"]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout)
    sources = [str(entry["source"]) for entry in json.loads(recipes.read_text())]
    rows = list(zip(sources, found, strict=True))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{_tables(rows)}\n\n{END}{after}")


def _tables(rows: Sequence[tuple[str, Any]]) -> str:
    groups: dict[tuple[str, str], list[Any]] = {}
    for source, entry in rows:
        groups.setdefault((source, _family(entry["id"])), []).append(entry)
    lines = [(source, family, *_counted(entries)) for (source, family), entries in sorted(groups.items())]
    lines.append(("all", "", *_counted([entry for _, entry in rows])))
    names: Counter[str] = Counter()
    for _, entry in rows:
        names.update({feature["name"] for feature in entry["features"] if feature["effect"] == "refused"})
    heads = ("source", "family", "recipes", "start", "split all", "split some", "whole", "refused")
    refused = markdown_table(("refused for", "recipes"), [(name, str(count)) for name, count in names.most_common()])
    return f"{markdown_table(heads, lines)}\n\n{refused}".strip()


def _counted(entries: Sequence[Any]) -> tuple[str, ...]:
    start = [entry for entry in entries if entry["verdict"] != "refused"]
    split = Counter(entry["split"] for entry in start)
    return tuple(
        str(number)
        for number in (len(entries), len(start), split["all"], split["some"], split["none"], len(entries) - len(start))
    )


def _family(name: str) -> str:
    plain = re.sub(r"[^a-z0-9]+", "_", name.lower())
    return next((family for family in FAMILIES if family in plain), "others")


if __name__ == "__main__":
    main()
