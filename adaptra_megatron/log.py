# SPDX-License-Identifier: Apache-2.0
"""Loggers of the package: one hierarchy, and one word at the beginning of each line."""

from __future__ import annotations

import logging
import os
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
