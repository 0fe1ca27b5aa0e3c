# SPDX-License-Identifier: Apache-2.0
"""Calls functions when modules have been imported, without importing them (what wrapt calls post-import hooks)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Hook = Callable[[ModuleType], None]


class PostImportFinder:
    """A finder for `sys.meta_path` that leaves finding to the others, and runs a hook after a module has executed.

    The hook runs before the importer goes on, so `from module import name` binds what it has put there. An error of the
    hook is an error of the import.
    """

    def __init__(self, hooks: Mapping[str, Hook]) -> None:
        """`hooks`: by full name of the module."""
        self._hooks = dict(hooks)

    def install(self) -> None:
        """Put this finder first; run the hooks of modules that are there already."""
        sys.meta_path.insert(0, self)
        for name, hook in self._hooks.items():
            module = sys.modules.get(name)
            if module is not None:
                hook(module)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the other finders find, its loader wrapped; None for modules without a hook."""
        hook = self._hooks.get(name)
        if hook is None:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: ModuleSpec | None = find(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _LoaderWithHook(spec.loader, hook)  # type: ignore[assignment]
                return spec
        return None


class _LoaderWithHook:
    """A loader that runs a hook once the module has executed; for all else it is the one it wraps."""

    def __init__(self, loader: Any, hook: Hook) -> None:
        self._loader = loader
        self._hook = hook

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module shall not see us: inspect, pickle and reload look at its loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._hook(module)
