# SPDX-License-Identifier: Apache-2.0
"""The releases of torch that training runs with, and what to do about others."""

from __future__ import annotations

NEEDED = "2.8.0a0"
"""The first: Store.clone() comes with it. NVIDIA numbers its builds so."""


def remedy(version: str) -> str:
    """Return what to do where torch's `version` is too old. A build of NVIDIA's (2.7.0a0+79aa17489c.nv25.4) is part of
    its image, whose other libraries are built for it: pip would replace it by one they do not load with."""
    from packaging.version import Version

    if ".nv" in f".{Version(version).local or ''}":
        return "take a newer image of NVIDIA's, 25.08 or later; pip would replace the torch that the image is built for"
    return f"pip install 'torch>={NEEDED}'"


def what_is_too_old() -> str | None:
    """Return why training cannot run with the torch that is installed, and what to do; None if it can. Imports
    torch."""
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
