# SPDX-License-Identifier: Apache-2.0
"""What is changed in Megatron: a table of patches, applied together by `enable` and taken back by its result."""

from adaptra_megatron.patches.application import (
    GRADIENT_PATCHES,
    OUTLIVING_PATCHES,
    PATCHES,
    STAGGERING_PATCHES,
    TRAINING_PATCHES,
    UPDATE_PATCHES,
    WATCHING_PATCHES,
    AppliedPatches,
    check_versions,
    enable,
    in_force,
)
from adaptra_megatron.patches.table import Patch, PatchError

__all__ = [
    "GRADIENT_PATCHES",
    "OUTLIVING_PATCHES",
    "PATCHES",
    "STAGGERING_PATCHES",
    "TRAINING_PATCHES",
    "UPDATE_PATCHES",
    "WATCHING_PATCHES",
    "AppliedPatches",
    "Patch",
    "PatchError",
    "check_versions",
    "enable",
    "in_force",
]
