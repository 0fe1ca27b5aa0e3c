# SPDX-License-Identifier: Apache-2.0
"""The environment variables that turn us on and off, and the one of ranks that are started again."""

from __future__ import annotations

import os

OFF_VARIABLE = "ADAPTRA_DISABLE"
"""Environment variable that turns us off, unless it is empty or 0: flags are read, and Megatron is left as it is."""
ON_VARIABLE = "ADAPTRA"
"""Environment variable that is --adaptra, unless it is empty or 0, for every process that inherits it."""
FLAGS_VARIABLE = "ADAPTRA_ARGS"
"""Environment variable with further --adaptra flags, unless ADAPTRA is 0; the command line's come after them."""
START_VARIABLE = "ADAPTRA_STARTED_AGAIN"
"""How often the launcher has started this rank again; unset in the first process of a rank."""


def is_set(variable: str, default: str = "0") -> bool:
    """Return whether a variable of the environment is neither empty nor 0."""
    return os.environ.get(variable, default) not in ("", "0")


def is_turned_off() -> bool:
    """Return whether the environment turns us off."""
    return is_set(OFF_VARIABLE)
