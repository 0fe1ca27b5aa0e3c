# SPDX-License-Identifier: Apache-2.0
"""What is changed in Megatron: a table of patches, applied together by `enable` and taken back by its result.

Stands beside the package in a checkout and within it in a wheel. Importing it beside the package of another checkout or
version is an ImportError that names both places.
"""

import adaptra_megatron
from adaptra_megatron.common.one_checkout import check_one_checkout

check_one_checkout(adaptra_megatron.__file__, __file__)

from adaptra_megatron.patches.application import (  # noqa: E402
    FAULT_TOLERANCE_PATCHES,
    GRADIENT_PATCHES,
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
from adaptra_megatron.patches.table import Patch, PatchError  # noqa: E402

__all__ = [
    "GRADIENT_PATCHES",
    "FAULT_TOLERANCE_PATCHES",
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
