# SPDX-License-Identifier: Apache-2.0
"""Turns --adaptra on in a program that knows nothing of it: hooks that wait for Megatron to be imported.

Four ways lead here: the flag alone and ADAPTRA=1 in the environment (the line of adaptra_megatron.pth, which Python
runs at its start, calls `on_flag`), `python -m adaptra_megatron SCRIPT` and `import adaptra_megatron.auto` (both call
`on_request`). Nothing is patched before Megatron's own parser has read our flags, or a process without it gets to its
first iteration. This module imports little, and only of the standard library.
"""

from __future__ import annotations

import functools
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from adaptra_megatron.post_import import PostImportFinder
from adaptra_megatron.variables import FLAGS_VARIABLE, OFF_VARIABLE, ON_VARIABLE

if TYPE_CHECKING:
    from adaptra_megatron.enabling import Enabling

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
"""What is replaced to get in, and why; by target."""


class BootstrapError(RuntimeError):
    """Megatron cannot be hooked as intended; the message says why and what to do."""


def on_flag() -> None:
    """Have Megatron's parser know our flags. They decide, unless the environment asks for --adaptra."""
    finder = _finder()
    finder.requested = finder.requested or _is_set(ON_VARIABLE)


def on_request() -> None:
    """Take --adaptra as given, also in a script that does not use Megatron's parser.

    Where Megatron's schedules have been imported already, its functions are patched at once: who has bound
    `get_forward_backward_func` by then would not come by our hook.
    """
    late = SCHEDULES in sys.modules and not any(finder.requested for finder in _finders())
    finder = _finder()
    finder.requested = True
    if late:
        finder.decide()


def is_turned_off() -> bool:
    """Return whether the environment turns us off."""
    return _is_set(OFF_VARIABLE)


def _is_set(variable: str, default: str = "0") -> bool:
    return os.environ.get(variable, default) not in ("", "0")


class MegatronHooks(PostImportFinder):
    """The finder of this process; there is one at most."""

    def __init__(self) -> None:
        super().__init__({ARGUMENTS: self._hook_arguments, SCHEDULES: self._hook_schedules, BRIDGE: self._hook_bridge})
        self.requested = False
        self._flags = os.environ.get(FLAGS_VARIABLE, "") if _is_set(ON_VARIABLE, default="1") else ""
        self._enabling: Enabling | None = None

    def decide(self) -> None:
        """Decide by the command line and the environment whether Megatron is patched."""
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
            from adaptra_megatron.enabling import Enabling

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
