# SPDX-License-Identifier: Apache-2.0
"""Turn --adaptra on in a program that does not mention it, by hooks that run when Megatron is imported.

There are four ways to turn it on. The flag alone and ADAPTRA=1 in the environment call `on_flag`, through the line in
adaptra_megatron.pth that Python runs at its start. `python -m adaptra_megatron SCRIPT` and `import
adaptra_megatron.auto` call `on_request`. Nothing is patched before Megatron's own parser has read our flags, or a
process without that parser reaches its first iteration. This module imports little, and only from the standard library.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from adaptra_megatron.common.environment import FLAGS_VARIABLE, ON_VARIABLE, is_set

if TYPE_CHECKING:
    from adaptra_megatron.engine.enabling import Enabling


# Calls functions when modules have been imported, without importing them (what wrapt calls post-import hooks).

Hook = Callable[[ModuleType], None]


class PostImportFinder:
    """Finder for `sys.meta_path` that runs a hook after a module has been imported by the other finders.

    The hook runs before the import statement continues, so `from module import name` binds the hook's replacement. An
    error of the hook is an error of the import.
    """

    def __init__(self, hooks: Mapping[str, Hook]) -> None:
        """`hooks`: by full module name."""
        self._hooks = dict(hooks)

    def install(self) -> None:
        """Install this finder first, and run the hooks of modules that are already imported."""
        sys.meta_path.insert(0, self)
        for name, hook in self._hooks.items():
            module = sys.modules.get(name)
            if module is not None:
                hook(module)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the other finders with its loader wrapped; None for modules without a hook."""
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
    """Loader that runs a hook once the module has executed; otherwise it behaves as the wrapped loader."""

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


ARGUMENTS = "megatron.training.arguments"
BRIDGE = "megatron.bridge.training.config"
SCHEDULES = "megatron.core.pipeline_parallel.schedules"

HOOKS = {
    f"{ARGUMENTS}:add_megatron_arguments": "adds the --adaptra flags to Megatron's parser and applies the patches "
    "below once it has parsed them",
    f"{SCHEDULES}:get_forward_backward_func": "in scripts that do not use Megatron's parser, the first call applies "
    "the patches below under `ADAPTRA=1`, `-m adaptra_megatron` and `import adaptra_megatron.auto`, and otherwise "
    "warns that the flag has no effect",
    f"{BRIDGE}:ConfigContainer.validate": "the same once Megatron-Bridge has put a job's settings together: "
    "what is refused is refused before any GPU is touched",
}
"""Attributes of Megatron that are replaced as a way in, with the reason, by target."""


class BootstrapError(RuntimeError):
    """Megatron cannot be hooked as intended; states the reason and the remedy."""


def on_flag() -> None:
    """Add our flags to Megatron's parser. They turn the package on, unless the environment does."""
    finder = _finder()
    finder.requested = finder.requested or is_set(ON_VARIABLE)


def on_request() -> None:
    """Turn the package on as if --adaptra had been given, also in a script without Megatron's parser.

    If Megatron's schedules have been imported already, its functions are patched at once: a script that has bound
    `get_forward_backward_func` by then would bypass the hook.
    """
    late = SCHEDULES in sys.modules and not any(finder.requested for finder in _finders())
    finder = _finder()
    finder.requested = True
    if late:
        finder.decide()


class MegatronHooks(PostImportFinder):
    """Finder of this process, of which there is at most one."""

    def __init__(self) -> None:
        super().__init__({ARGUMENTS: self._hook_arguments, SCHEDULES: self._hook_schedules, BRIDGE: self._hook_bridge})
        self.requested = False
        self._flags = os.environ.get(FLAGS_VARIABLE, "") if is_set(ON_VARIABLE, default="1") else ""
        self._enabling: Enabling | None = None

    def decide(self) -> None:
        """Decide from command line and environment whether Megatron is patched."""
        self._decider().decide_without_parser()

    def _hook_arguments(self, arguments: ModuleType) -> None:
        stock = _expected(arguments, "add_megatron_arguments")

        @functools.wraps(stock)
        def add_megatron_arguments(parser: Any) -> Any:
            return self._decider().extend(stock(parser))

        arguments.add_megatron_arguments = add_megatron_arguments  # type: ignore[attr-defined]

    def _hook_schedules(self, schedules: ModuleType) -> None:
        stock = _expected(schedules, "get_forward_backward_func")

        @functools.wraps(stock)
        def get_forward_backward_func(*arguments: Any, **keywords: Any) -> Any:
            self.decide()
            return stock(*arguments, **keywords)

        schedules.get_forward_backward_func = get_forward_backward_func  # type: ignore[attr-defined]

    def _hook_bridge(self, config: ModuleType) -> None:
        container = _expected(config, "ConfigContainer")
        stock = container.validate

        @functools.wraps(stock)
        def validate(settings: Any, *arguments: Any, **keywords: Any) -> Any:
            result = stock(settings, *arguments, **keywords)
            self._decider().decide_without_parser(job=settings)
            return result

        container.validate = validate

    def _decider(self) -> Enabling:
        if self._enabling is None:
            from adaptra_megatron.engine.enabling import Enabling

            self._enabling = Enabling(requested=self.requested, flags=self._flags)
        return self._enabling


def _finders() -> list[MegatronHooks]:
    return [finder for finder in sys.meta_path if isinstance(finder, MegatronHooks)]


def _finder() -> MegatronHooks:
    for finder in _finders():
        return finder
    finder = MegatronHooks()
    finder.install()
    return finder


def _expected(module: ModuleType, name: str) -> Any:
    if not hasattr(module, name):
        raise BootstrapError(
            f"this Megatron has no {module.__name__}.{name}, which --adaptra hooks into; see docs/versions.md for the "
            f"releases it is written for, or drop --adaptra. Nothing has been changed"
        )
    return getattr(module, name)
