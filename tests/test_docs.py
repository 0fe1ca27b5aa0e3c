# SPDX-License-Identifier: Apache-2.0
"""Pages that are made from the code are those of this code, and what pages link to or name is there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from build_site import menu
from support.processes import REPOSITORY
from write_docs import FILES

DOCS = REPOSITORY / "docs"
PAGES = [*sorted(REPOSITORY.glob("*.md")), *sorted(DOCS.glob("*.md"))]
OTHERS = [*DOCS.glob("upstream/*.md"), *(REPOSITORY / "benchmarks" / "results").glob("*.md")]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))


@pytest.mark.parametrize("script", ["write_docs.py", "draw_pictures.py"])
def test_what_is_made_from_the_code_is_up_to_date(script: str) -> None:
    command = [sys.executable, str(REPOSITORY / "scripts" / script), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Files that a page links to, pictures among them, with the heading behind "#"."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        name, _, heading = target.partition("#")
        if "://" not in target:
            yield ((page.parent / name).resolve() if name else page), heading


def anchors(page: Path) -> set[str]:
    """Headings, spelled as GitHub does in links."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    found = list(links(page))
    assert not [path for path, _ in found if not path.exists()]
    assert not [f"{path.name}#{heading}" for path, heading in found if heading and heading not in anchors(path)]


def test_the_index_has_every_page_and_readme_has_the_index() -> None:
    listed = {path for path, _ in links(DOCS / "README.md")}
    assert listed >= {page for page in PAGES if page != DOCS / "README.md"}
    assert DOCS / "README.md" in {path for path, _ in links(REPOSITORY / "README.md")}


def test_the_menu_of_the_site_has_every_page_of_the_index() -> None:
    found = menu((DOCS / "README.md").read_text())
    listed = {REPOSITORY / name for name in re.findall(r"- (\S+\.md)$", found, re.MULTILINE)}
    assert listed >= set(PAGES) - {DOCS / "README.md"}
    assert [line.strip() for line in found.splitlines() if line.endswith(":")] == [
        "- To begin:", "- To operate it:", "- To look up:", "- To change it:", "- Measurements:",
    ]  # fmt: skip


def test_every_picture_is_on_a_page() -> None:
    shown = {path for page in PAGES for path, _ in links(page)}
    assert {picture for picture in DOCS.rglob("*") if picture.suffix in (".png", ".svg")} <= shown


def words_of_code(page: Path) -> list[str]:
    """What stands between backticks within a line."""
    return re.findall(r"`([^`\n]+)`", page.read_text())


@each_page
def test_files_that_are_named_are_there(page: Path) -> None:
    folders = "adaptra_megatron|csrc|patches|scripts|tests|benchmarks|requirements|examples|extras"
    named = [name for word in words_of_code(page) for name in re.findall(rf"(?<![\w/.])(?:{folders})/[\w./-]*", word)]
    assert not [name for name in named if not (REPOSITORY / name).exists()]


@each_page
def test_modules_and_names_in_them_are_there(page: Path) -> None:
    named = [re.match(r"(?:-m )?(adaptra_megatron(?:\.\w+)+)", word) for word in words_of_code(page)]
    assert not [found[1] for found in named if found is not None and not is_there(found[1])]


def test_names_that_are_not_there_are_told() -> None:
    assert is_there("adaptra_megatron.schedule.ir.Action.kind")
    assert is_there("adaptra_megatron.transport._ring.Ring.claim_slot")
    assert is_there("adaptra_megatron.patches.enable")
    assert not is_there("adaptra_megatron.schedule.ir.Reaction")
    assert not is_there("adaptra_megatron.schedule.ir.Action.colour")
    assert not is_there("adaptra_megatron.nothing")


def is_there(dotted: str) -> bool:
    """Return whether the source has a module of this name, or one with such a name in it, or in one of its classes."""
    if (REPOSITORY / dotted).is_file():  # adaptra_megatron.pth
        return True
    parts = dotted.split(".")
    folder, rest = REPOSITORY / parts[0], parts[1:]
    if rest[0] == "patches":
        folder, rest = REPOSITORY / "patches", rest[1:]
    while rest and (folder / rest[0]).is_dir():
        folder, rest = folder / rest[0], rest[1:]
    module = next(
        (path for suffix in ("py", "pyi") if rest and (path := folder / f"{rest[0]}.{suffix}").is_file()), None
    )
    if module is not None:
        rest = rest[1:]
    names: list[ast.stmt] = ast.parse((module or folder / "__init__.py").read_text()).body
    for name in rest:
        node = next((node for node in names if name in names_bound_by(node)), None)
        if node is None:
            return False
        names = node.body if isinstance(node, ast.ClassDef) else []
    return True


def names_bound_by(node: ast.stmt) -> set[str]:
    """Names that a statement of a module or a class defines or imports."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def test_times_in_the_text_are_those_of_the_pictures() -> None:
    """how_it_works.md tells of simulations, and what it says is to be found in a picture or in the table."""
    made = re.compile(r"<!-- \w+: made by .*?<!-- until here -->", re.DOTALL)
    page = (DOCS / "how_it_works.md").read_text()
    shown = "".join(made.findall(page)) + "".join(picture.read_text() for picture in DOCS.glob("pictures/*.svg"))
    stated = set(re.findall(r"\b\d+ ms", made.sub("", page)))
    inputs = {"10 ms", "20 ms"}
    assert len(stated) > 6
    assert stated - inputs <= set(re.findall(r"\b\d+ ms", shown))


NOT_WRITTEN = re.compile(r"<!-- (?:\w+: )?made by .*?<!-- until here -->|```mermaid\n.*?```", re.DOTALL)
"""What scripts make in a page, and diagrams."""
GENERATED = {
    "cli",
    "environment",
    "events",
    "flags",
    "hooks",
    "messages",
    "metrics",
    "patches",
    "refusals",
    "schedules",
}
"""Pages that scripts/write_docs.py makes."""
MOST_WORDS = 22_000


def words_of(page: Path) -> int:
    return sum(any(map(str.isalnum, word)) for word in NOT_WRITTEN.sub("", page.read_text()).split())


def test_hand_written_pages_stay_short() -> None:
    """Words of README, CONTRIBUTING, SECURITY and docs/, without what scripts make, diagrams and the changelog."""
    pages = [page for page in PAGES if page.stem not in {*GENERATED, "CHANGELOG"}]
    words = {str(page.relative_to(REPOSITORY)): words_of(page) for page in pages}
    assert len(words) > 25
    assert sum(words.values()) <= MOST_WORDS, sorted(words.items(), key=lambda each: -each[1])


def test_generated_pages_are_those_that_the_script_makes() -> None:
    assert {f"docs/{name}.md" for name in GENERATED} == {name for name in FILES if name.endswith(".md")}


def test_hand_written_pages_use_the_words_of_the_field() -> None:
    """The glossary has the field's words for these."""
    words = "told|heard|bury|buries|buried|outlives?|outlived|heirs?|beside|of no use|whoever|strangers?"
    private = re.compile(rf"\b({words})\b")
    pages = [page for page in PAGES if page.stem not in {*GENERATED, "CHANGELOG"}]
    assert not [(page.name, word) for page in pages for word in private.findall(NOT_WRITTEN.sub("", page.read_text()))]
