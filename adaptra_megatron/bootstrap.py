# SPDX-License-Identifier: Apache-2.0
"""Turns --adaptra on in a program that knows nothing of it: hooks that wait for Megatron to be imported.

Three ways lead here: the flag alone (the line of adaptra_megatron.pth, which Python runs at its start, calls
`on_flag`), `python -m adaptra_megatron SCRIPT` and `import adaptra_megatron.auto` (both call `on_request`). Nothing is
patched before Megatron's own parser has read our flags. This module imports little, and only of the standard library.
"""

from __future__ import annotations

import functools
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from adaptra_megatron.post_import import PostImportFinder

if TYPE_CHECKING:
    from adaptra_megatron.enabling import Enabling

OFF_VARIABLE = "ADAPTRA_DISABLE"
"""Environment variable that turns us off, unless it is empty or 0: flags are read, and Megatron is left as it is."""

ARGUMENTS = "megatron.training.arguments"
BRIDGE = "megatron.bridge.training.config"
SCHEDULES = "megatron.core.pipeline_parallel.schedules"

HOOKS = {
    f"{ARGUMENTS}:add_megatron_arguments": "adds the --adaptra flags to Megatron's parser and applies the patches "
    "below once it has parsed them",
    f"{SCHEDULES}:get_forward_backward_func": "in scripts that do not use Megatron's parser, the first call applies "
    "the patches below under `-m adaptra_megatron` and `import adaptra_megatron.auto`, and otherwise warns that the "
    "flag has no effect",
    f"{BRIDGE}:ConfigContainer.validate": "the same once Megatron-Bridge has put a job's settings together: "
    "what is refused is refused before any GPU is touched",
}
"""What is replaced to get in, and why; by target."""


class BootstrapError(RuntimeError):
    """Megatron cannot be hooked as intended; the message says why and what to do."""


def on_flag() -> None:
    """Have Megatron's parser know our flags; they decide. For processes with --adaptra on their command line."""
    _finder()


def on_request() -> None:
    """As `on_flag`, but --adaptra is taken as given, also in a script that does not use Megatron's parser.

    Raises BootstrapError if Megatron has been imported already: names bound by then could not be replaced.
    """
    if SCHEDULES in sys.modules and not any(finder.requested for finder in _finders()):
        raise BootstrapError(
            f"{SCHEDULES} was imported before, and modules that imported it keep its unpatched functions: "
            "import adaptra_megatron.auto before anything of megatron"
        )
    _finder().requested = True


def is_turned_off() -> bool:
    """Return whether the environment turns us off."""
    return os.environ.get(OFF_VARIABLE, "0") not in ("", "0")


class MegatronHooks(PostImportFinder):
    """The finder of this process; there is one at most."""

    def __init__(self) -> None:
        super().__init__({ARGUMENTS: self._hook_arguments, SCHEDULES: self._hook_schedules, BRIDGE: self._hook_bridge})
        self.requested = False
        self._enabling: Enabling | None = None

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
            self._decider().decide_without_parser()
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
            from adaptra_megatron.enabling import Enabling

            self._enabling = Enabling(requested=self.requested)
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
