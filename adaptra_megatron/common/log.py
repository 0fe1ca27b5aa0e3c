# SPDX-License-Identifier: Apache-2.0
"""Loggers of the package: one hierarchy, and one word at the beginning of each line."""

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
        """Put the word before the message, which arguments are formatted into later."""
        return f"adaptra: {msg}", kwargs


def logger_of(module: str) -> PackageLogger:
    """The logger of the module with this name (`__name__`), below that of the package."""
    return PackageLogger(logging.getLogger(module))


def is_first_rank() -> bool:
    """Return whether this process speaks for the job, as its launcher's environment says: torch.distributed is not up
    yet."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def is_first_of_host() -> bool:
    """Return whether this process speaks for its host, as its launcher's environment says."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"


# Lines of a log that may come again and again, for as long as a job lasts.

MOST_IN_A_ROW = 5
LONG_S = 60.0


class RateLimitedLog:
    """Lines of one kind: the first few, and from then on one a minute, which says how many were left out."""

    def __init__(self, logger: PackageLogger, most_in_a_row: int = MOST_IN_A_ROW) -> None:
        """`most_in_a_row`: how many the first few are."""
        self._logger = logger
        self._most = self._allowed = float(most_in_a_row)
        self._left_out = 0
        self._latest_s = time.monotonic()

    def warning(self, text: str, *arguments: object) -> None:
        """As `PackageLogger.warning`, or nothing."""
        self.log(logging.WARNING, text, *arguments)

    def log(self, level: int, text: str, *arguments: object) -> None:
        """As `PackageLogger.log`, or nothing."""
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
