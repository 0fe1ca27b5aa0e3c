# SPDX-License-Identifier: Apache-2.0
"""Hooks that run when a module has been imported, and change nothing else about importing it."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from adaptra_megatron.engine.bootstrap import PostImportFinder

Install = Callable[[Mapping[str, Any]], PostImportFinder]


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on the path; what is imported from it is forgotten again."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))

    def install_hooks(hooks: Mapping[str, Any]) -> PostImportFinder:
        finder = PostImportFinder(hooks)
        finder.install()
        return finder

    return install_hooks


def say_more(module: ModuleType) -> None:
    stock = module.word
    module.word = lambda: f"{stock()} and more"  # type: ignore[attr-defined]


def test_what_a_hook_replaces_is_what_others_bind_by_name(modules: Path, install: Install) -> None:
    (modules / "hooked.py").write_text("def word(): return 'stock'\n")
    (modules / "user.py").write_text("from hooked import word\nreceived = word()\n")
    install({"hooked": say_more})
    assert "hooked" not in sys.modules, "a hook does not import its module"
    assert importlib.import_module("user").received == "stock and more"


def test_a_module_that_is_there_already_is_hooked_at_once(modules: Path, install: Install) -> None:
    (modules / "hooked.py").write_text("def word(): return 'stock'\n")
    module = importlib.import_module("hooked")
    install({"hooked": say_more})
    assert module.word() == "stock and more"


def test_the_module_looks_as_without_a_hook(modules: Path, install: Install) -> None:
    (modules / "package").mkdir()
    (modules / "package" / "__init__.py").write_text("")
    (modules / "package" / "hooked.py").write_text("loader = __spec__.loader\ndef word(): return 'stock'\n")
    install({"package.hooked": lambda module: None})
    module = importlib.import_module("package.hooked")
    assert type(module.__loader__) is importlib.machinery.SourceFileLoader
    assert module.__loader__ is module.__spec__.loader is module.loader
    assert inspect.getsource(module.word) == "def word(): return 'stock'\n"
    assert module.__file__ == str(modules / "package" / "hooked.py")


def test_a_module_that_is_loaded_again_is_hooked_again(modules: Path, install: Install) -> None:
    (modules / "hooked.py").write_text("def word(): return 'stock'\n")
    install({"hooked": say_more})
    module = importlib.import_module("hooked")
    importlib.reload(module)
    assert module.word() == "stock and more"


def test_a_module_that_fails_is_not_hooked_and_fails_as_before(modules: Path, install: Install) -> None:
    (modules / "hooked.py").write_text("1 / 0\n")
    seen: list[ModuleType] = []
    install({"hooked": seen.append})
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("hooked")
    assert not seen
    (modules / "hooked.py").write_text("value = 1  # repaired\n")
    importlib.invalidate_caches()
    assert importlib.import_module("hooked").value == 1
    assert len(seen) == 1


def test_an_error_of_the_hook_is_an_error_of_the_import(modules: Path, install: Install) -> None:
    (modules / "hooked.py").write_text("value = 1\n")

    def fail(module: ModuleType) -> None:
        raise LookupError("not what was expected")

    install({"hooked": fail})
    with pytest.raises(LookupError, match="not what was expected"):
        importlib.import_module("hooked")
    assert "hooked" not in sys.modules


def test_a_module_that_is_nowhere_stays_so(modules: Path, install: Install) -> None:
    finder = install({"nowhere": say_more})
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        importlib.import_module("nowhere")
    assert finder.find_spec("json") is None, "modules without a hook are left to the others"
