# SPDX-License-Identifier: Apache-2.0
"""The package and its patches come from one checkout, or from one wheel."""

from __future__ import annotations

from pathlib import Path


def check_one_checkout(package: str | None, patches: str | None) -> None:
    """Raise ImportError, naming both, unless the files `__init__.py` of package and patches belong together.

    In a checkout they stand side by side, in a wheel patches are within the package. Where a path of another checkout
    comes first in `sys.path`, Python would take the package from one version and the patches from another.
    """
    if package is None or patches is None:  # frozen into a program, which has one of each
        return
    home, other = Path(package).resolve().parent, Path(patches).resolve().parent
    if other not in (home / "patches", home.parent / "patches"):
        raise ImportError(
            f"adaptra_megatron is imported from {home}, but its patches from {other}, another checkout or version: "
            f"install one of them (pip install -e {home.parent}), or take the other out of PYTHONPATH",
            name="adaptra_megatron.patches",
            path=str(other),
        )
