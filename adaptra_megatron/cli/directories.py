# SPDX-License-Identifier: Apache-2.0
"""Directories that the user names to write into."""

from __future__ import annotations

from pathlib import Path

from adaptra_megatron.cli.planning.inputs import InputError


def make_directory(directory: Path, option: str) -> None:
    """Make the directory that `option` names. Raises InputError where that is not possible."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make {directory}: {error.strerror or error}; name another {option}") from error
