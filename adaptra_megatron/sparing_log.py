# SPDX-License-Identifier: Apache-2.0
"""Lines of a log that may come again and again, for as long as a job lasts."""

from __future__ import annotations

import logging
import time

from adaptra_megatron.log import PackageLogger

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
