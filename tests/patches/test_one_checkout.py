# SPDX-License-Identifier: Apache-2.0
"""Patches of another checkout than the package are refused, with both places named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import REPOSITORY

from adaptra_megatron.common.environment import check_one_checkout


def test_patches_of_another_checkout_are_refused(tmp_path: Path) -> None:
    patches = tmp_path / "other" / "patches"
    patches.mkdir(parents=True)
    for source in (REPOSITORY / "patches").glob("*.py"):
        (patches / source.name).write_text(source.read_text())
    script = (
        f"import adaptra_megatron; adaptra_megatron.__path__ = [{str(patches.parent)!r}, *adaptra_megatron.__path__]"
    )
    script += "; import adaptra_megatron.patches"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    refused = f"adaptra_megatron is imported from {REPOSITORY / 'adaptra_megatron'}, but its patches from {patches}"
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: {refused}")


@pytest.mark.parametrize("patches", ["adaptra_megatron/patches", "patches"])
def test_both_layouts_of_one_checkout_are_taken(patches: str, tmp_path: Path) -> None:
    check_one_checkout(str(tmp_path / "adaptra_megatron" / "__init__.py"), str(tmp_path / patches / "__init__.py"))
