# SPDX-License-Identifier: Apache-2.0
"""Writes the map of the tree into CONTRIBUTING.md: modules and lines of each room, imports, words of pages.

    tree_map.py

No test compares it with the tree, as each line of code would change it: run it before a release.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import test_docs as pages_of  # noqa: E402
import test_structure as structure  # noqa: E402
from markdown_table import markdown_table  # noqa: E402
from support.line_counts import Lines, lines_of  # noqa: E402

BEFORE = "504 files, 60,689 lines (41,893 code, 8,257 docstrings), 31 rooms, 85 names used twice, 48,700 words"
"""In the autumn of 2026, before rooms and names were changed; testing/ was part of the package then."""
_BLOCK = re.compile(r"(<!-- map: made by scripts/tree_map.py -->\n).*?(<!-- until here -->)", re.DOTALL)


def by_room() -> dict[str, Lines]:
    """Return the lines of each room, from the ground up; testing is none of the package."""
    order = [room for rooms in structure.FLOORS for room in sorted(rooms)]
    rooms: dict[str, Lines] = {name: Lines(0, 0, 0, 0) for name in [*order, "testing"]}
    for name, file in structure.FILES.items():
        room = structure.room(name) or name.partition(".")[0]
        if room in rooms:
            rooms[room] = Lines(*map(sum, zip(rooms[room], lines_of(file.read_text()), strict=True)))
    return rooms


def written_words() -> int:
    """Return the number of hand-written words of all pages."""
    pages = [page for page in pages_of.PAGES if page.stem not in {*pages_of.GENERATED, "CHANGELOG"}]
    return sum(pages_of.words_of(page) for page in pages)


def the_map() -> str:
    """Return the block of CONTRIBUTING.md."""
    rooms = by_room()
    package = Lines(*map(sum, zip(*(lines for name, lines in rooms.items() if name != "testing"), strict=True)))
    rows = [[f"`{name}`", *(f"{number:,}" for number in lines)] for name, lines in rooms.items()]
    rows.insert(-1, ["**installed**", *(f"{number:,}" for number in package)])
    native = sum(
        len(file.read_text().splitlines()) for kind in ("cpp", "hpp") for file in (ROOT / "csrc").rglob(f"*.{kind}")
    )
    return (
        markdown_table(["room", "modules", "lines", "code", "docstrings"], rows)
        + f"\n\nC++: {native:,} lines. {len(structure.FLOORS)} floors of imports, none upwards, no circle, no file or "
        f"public class name twice (tests). {written_words():,} hand-written words.\nBefore: {BEFORE}.\n"
    )


def main() -> None:
    """Write the map."""
    page = ROOT / "CONTRIBUTING.md"
    page.write_text(_BLOCK.sub(lambda found: found[1] + the_map() + found[2], page.read_text()))


if __name__ == "__main__":
    main()
