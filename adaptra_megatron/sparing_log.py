# SPDX-License-Identifier: Apache-2.0
"""Warnings that may come again and again, for as long as a job lasts."""

from __future__ import annotations

import time

from adaptra_megatron.log import PackageLogger

MOST_IN_A_ROW = 5
LONG_S = 60.0


class SparingLog:
    """Warnings of one kind: the first few, and from then on one a minute, which says how many were left out."""

    def __init__(self, logger: PackageLogger) -> None:
        self._logger = logger
        self._allowed = float(MOST_IN_A_ROW)
        self._left_out = 0
        self._latest_s = time.monotonic()

    def warning(self, text: str, *arguments: object) -> None:
        """As `PackageLogger.warning`, or nothing."""
        now_s = time.monotonic()
        self._allowed = min(float(MOST_IN_A_ROW), self._allowed + (now_s - self._latest_s) / LONG_S)
        self._latest_s = now_s
        if self._allowed < 1.0:
            self._left_out += 1
            return
        self._allowed -= 1.0
        if self._left_out:
            text, arguments = f"{text} (%d more like this were not logged)", (*arguments, self._left_out)
        self._left_out = 0
        self._logger.warning(text, *arguments)
