# SPDX-License-Identifier: Apache-2.0
"""Check the environment: variables that turn the package on and off, torch's release, and a single checkout."""

from __future__ import annotations

import os
from pathlib import Path

OFF_VARIABLE = "ADAPTRA_DISABLE"
"""Environment variable that turns the package off, unless empty or 0: flags are read, but Megatron is not patched."""
ON_VARIABLE = "ADAPTRA"
"""Environment variable that acts as --adaptra, unless empty or 0, in every process that inherits it."""
FLAGS_VARIABLE = "ADAPTRA_ARGS"
"""Environment variable with further --adaptra flags, unless ADAPTRA is 0; those of the command line come after them."""
START_VARIABLE = "ADAPTRA_STARTED_AGAIN"
"""Number of times that the launcher has restarted this rank; unset in its first process."""


def is_set(variable: str, default: str = "0") -> bool:
    """Return whether an environment variable is neither empty nor 0."""
    return os.environ.get(variable, default) not in ("", "0")


def is_turned_off() -> bool:
    """Return whether the environment turns this package off."""
    return is_set(OFF_VARIABLE)


NEEDED = "2.8.0a0"
"""First supported torch: it has Store.clone(). NVIDIA's builds are numbered so."""


def remedy(version: str) -> str:
    """Return the remedy for a torch `version` that is too old.

    NVIDIA's builds (such as 2.7.0a0+79aa17489c.nv25.4) belong to their container images, whose other libraries are
    built for them and would not load with a torch from pip.
    """
    from packaging.version import Version

    if ".nv" in f".{Version(version).local or ''}":
        return "take a newer image of NVIDIA's, 25.08 or later; pip would replace the torch that the image is built for"
    return f"pip install 'torch>={NEEDED}'"


def what_is_too_old() -> str | None:
    """Return why training cannot run with the installed torch, and the remedy; None if it can. Imports torch."""
    import torch
    import torch.distributed as dist
    from packaging.version import Version

    version = str(torch.__version__)
    if Version(version) >= Version(NEEDED) and hasattr(getattr(dist, "Store", None), "clone"):
        return None
    return (
        f"--adaptra needs torch 2.8 or later, whose Store has clone(), and {version} is installed: {remedy(version)}, "
        "or drop --adaptra. Nothing has been changed"
    )


def check_one_checkout(package: str | None, patches: str | None) -> None:
    """Raise ImportError, naming both files, unless the `__init__.py` files of package and patches belong together.

    In a checkout the two folders are siblings; in a wheel the patches are within the package. If another checkout comes
    first in `sys.path`, Python would import the package from one version and the patches from another.
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
