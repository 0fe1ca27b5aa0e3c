# SPDX-License-Identifier: Apache-2.0
"""Check a path before it is opened."""

from __future__ import annotations

from pathlib import Path


def is_no_file(path: Path) -> bool:
    """Return whether something is there that is no regular file, such as a FIFO, which would be waited for for ever.
    What is not there is for `open` to say."""
    return path.exists() and not path.is_file()
