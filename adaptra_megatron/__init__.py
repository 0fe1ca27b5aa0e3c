# SPDX-License-Identifier: Apache-2.0
"""Adaptive pipeline schedules for Megatron-core.

Importing this package has no effect on Megatron and imports neither torch nor Megatron. `adaptra_megatron.patches`
changes Megatron, and only if a run asks for it. The names in `__all__` are imported when they are first used (PEP 562).
"""

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing itself would take longer to import than all of this
    from adaptra_megatron.config import AdaptraConfig
    from adaptra_megatron.patches import enable
    from adaptra_megatron.tools.api import analyze, plan, read_costs, simulate, sweep
    from adaptra_megatron.tools.recordings.run_record import read_run

__version__ = "0.1.0"

__all__ = ["AdaptraConfig", "analyze", "enable", "plan", "read_costs", "read_run", "simulate", "sweep"]

_HOMES = {
    "AdaptraConfig": "config",
    "analyze": "tools.api",
    "enable": "patches",
    "plan": "tools.api",
    "read_costs": "tools.api",
    "read_run": "tools.recordings.run_record",
    "simulate": "tools.api",
    "sweep": "tools.api",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
