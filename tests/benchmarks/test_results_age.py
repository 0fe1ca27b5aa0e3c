# SPDX-License-Identifier: Apache-2.0
"""The check that names results older than what they measure."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from support.processes import REPOSITORY

SEARCH = 'int search() {\n    prepare_what_is_searched();\n    return "a b"; // first\n}\n'


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_results", REPOSITORY / "scripts" / "check_results.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_says_what_it_measures(script: ModuleType) -> None:
    pages = {page.name for page in (REPOSITORY / "benchmarks" / "results").glob("*.md")}
    assert set(script.SOURCES) == pages
    sources = {source for measured in script.SOURCES.values() for source in measured}
    assert not [source for source in sources if not (REPOSITORY / source).exists()]


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("x = 1  # one", "x = 1", True),
        ("x: int = 1", "x = 1", False),  # a field of a dataclass, perhaps
        ("x: int = 1", "x: float = 1", True),
        ("import a\nf()", "from b import f\nf()", True),
        ("def _f(x: int) -> int: return x", "def f(x): return x", True),
        ('class A:\n    """A."""', 'class A:\n    """B."""', True),
        ('raise ValueError(f"{x} is bad")', 'raise ValueError("bad")', True),
        ('raise ValueError("bad")', 'raise KeyError("bad")', False),
        ('logger.info("up")', 'logger.debug("it is up")', True),
        ('send("up")', 'send("down")', False),
        ("x = 1", "x = 2", False),
    ],
)
def test_what_a_program_does_and_what_it_only_says(script: ModuleType, before: str, after: str, same: bool) -> None:
    assert (script.behaviour(before, ".py") == script.behaviour(after, ".py")) is same


def test_a_page_is_old_once_what_it_measures_has_changed(script: ModuleType, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    (repository / script.RESULTS).mkdir(parents=True)
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    who = {f"GIT_{role}_{what}": "someone" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}

    def git(*arguments: str) -> None:
        command = ["git", "-C", str(repository), *arguments]
        subprocess.run(command, env={**environment, **who}, check=True, capture_output=True, timeout=60)

    def commit(path: str, text: str) -> None:
        (repository / path).parent.mkdir(exist_ok=True)
        (repository / path).write_text(text)
        git("add", path)
        git("commit", "-m", path)

    git("init")
    sources = {"fast.md": ("planner.py", "native")}
    commit("planner.py", "def plan():\n    return 1\n")
    commit("search.cpp", SEARCH)
    commit("other.py", "pass\n")
    commit(f"{script.RESULTS}/fast.md", "1 s")
    assert list(script.out_of_date(repository, sources)) == []
    commit("planner.py", 'def plan():\n    """One."""\n    return 1\n')
    (repository / "native").mkdir()
    git("mv", "search.cpp", "native/found.cpp")
    commit("native/found.cpp", SEARCH.replace("first", "still\n"))
    commit("other.py", "import sys\nsys.exit()\n")
    assert list(script.out_of_date(repository, sources)) == []
    commit("native/found.cpp", SEARCH.replace("a b", "ab"))
    assert list(script.out_of_date(repository, sources)) == [("fast.md", ("native/found.cpp",))]
    commit("planner.py", "def plan():\n    return 2\n")
    commit(f"{script.RESULTS}/fast.md", "2 s")
    assert list(script.out_of_date(repository, sources)) == []
    commit("native/more.cpp", "int more;")
    assert list(script.out_of_date(repository, sources)) == [("fast.md", ("native/more.cpp",))]
    head = (repository / ".git" / "HEAD").read_text().removeprefix("ref: ").strip()
    (repository / ".git" / "shallow").write_text((repository / ".git" / head).read_text())
    assert list(script.out_of_date(repository, sources)) == [], "commits are not known in a shallow clone"
