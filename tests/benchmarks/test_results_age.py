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


def test_a_page_is_old_once_what_it_measures_has_changed(script: ModuleType, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    (repository / script.RESULTS).mkdir(parents=True)
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    who = {f"GIT_{role}_{what}": "someone" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}

    def git(*arguments: str, at_s: int = 0) -> None:
        when = {"GIT_COMMITTER_DATE": f"{at_s} +0000", "GIT_AUTHOR_DATE": f"{at_s} +0000"}
        command = ["git", "-C", str(repository), *arguments]
        subprocess.run(command, env={**environment, **who, **when}, check=True, capture_output=True, timeout=60)

    def commit(path: str, text: str, at_s: int) -> None:
        (repository / path).write_text(text)
        git("add", path)
        git("commit", "-m", text, at_s=at_s)

    git("init")
    sources = {"fast.md": ("planner.py", "search.cpp")}
    commit("planner.py", "first", 1_700_000_000)
    commit("search.cpp", "first", 1_700_000_100)
    commit(f"{script.RESULTS}/fast.md", "1 s", 1_700_000_200)
    assert list(script.out_of_date(repository, sources)) == []
    commit("search.cpp", "faster", 1_700_000_300)
    assert list(script.out_of_date(repository, sources)) == [("fast.md", "search.cpp")]
    head = (repository / ".git" / "HEAD").read_text().removeprefix("ref: ").strip()
    (repository / ".git" / "shallow").write_text((repository / ".git" / head).read_text())
    assert list(script.out_of_date(repository, sources)) == [], "commit times are not known in a shallow clone"
