# SPDX-License-Identifier: Apache-2.0
"""Loggers of the package: one hierarchy, and one prefix for all lines."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class PackageLogger(_Adapter):
    """A module's logger, whose lines begin with `adaptra:` among those of Megatron."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Prefix the message. The arguments are formatted into it later."""
        return f"adaptra: {msg}", kwargs


def logger_of(module: str) -> PackageLogger:
    """Return the logger of the module `module` (its `__name__`), below the package's logger."""
    return PackageLogger(logging.getLogger(module))


def is_first_rank() -> bool:
    """Return whether this process is rank 0, from the launcher's environment: torch.distributed is not
    initialised yet.
    """
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def is_first_of_host() -> bool:
    """Return whether this process is the first of its host, from the launcher's environment."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"


# Lines of a log that may come again and again, for as long as a job lasts.

MOST_IN_A_ROW = 5
LONG_S = 60.0


class RateLimitedLog:
    """Logs the first few lines of a kind, and from then on one a minute, with the number of lines left out."""

    def __init__(self, logger: PackageLogger, most_in_a_row: int = MOST_IN_A_ROW) -> None:
        """`most_in_a_row`: number of first lines that are logged without a limit."""
        self._logger = logger
        self._most = self._allowed = float(most_in_a_row)
        self._left_out = 0
        self._latest_s = time.monotonic()

    def warning(self, text: str, *arguments: object) -> None:
        """Log as `PackageLogger.warning`, unless the limit is reached."""
        self.log(logging.WARNING, text, *arguments)

    def log(self, level: int, text: str, *arguments: object) -> None:
        """Log as `PackageLogger.log`, unless the limit is reached."""
        if not self._logger.isEnabledFor(level):
            return
        now_s = time.monotonic()
        self._allowed = min(self._most, self._allowed + (now_s - self._latest_s) / LONG_S)
        self._latest_s = now_s
        if self._allowed < 1.0:
            self._left_out += 1
            return
        self._allowed -= 1.0
        if self._left_out:
            text, arguments = f"{text} (%d more like this were not logged)", (*arguments, self._left_out)
        self._left_out = 0
        self._logger.log(level, text, *arguments)
