# SPDX-License-Identifier: Apache-2.0
"""Patches of Megatron: one table, applied together by `enable` and removed by `AppliedPatches.undo`.

1. Importing this package changes nothing. `enable(config)` applies all patches that the settings need, or none.
2. A patch replaces one attribute, in the megatron-core versions that its row names, and only if the original has the
   parameters that the replacement relies on. Otherwise PatchError names target, versions and remedy.
3. A replacement that has nothing to do calls the original with its arguments unchanged.
4. Modules that imported a function by name get the replacement, too.
5. `undo` restores every original, last first. It leaves attributes that another package has replaced since, and reports
   them.
6. Enabling twice with the same settings is a no-op; with others it raises PatchError.
7. Package and patches come from one checkout: a mixture is an ImportError that names both places.

Attributes are replaced, sources are not copied. So a release of Megatron is either known to fit, or refused.
"""

import adaptra_megatron
from adaptra_megatron.common.environment import check_one_checkout

check_one_checkout(adaptra_megatron.__file__, __file__)

from adaptra_megatron.patches.always import PATCHES, TRAINING_PATCHES, WATCHING_PATCHES  # noqa: E402
from adaptra_megatron.patches.application import AppliedPatches, check_versions, enable, in_force  # noqa: E402
from adaptra_megatron.patches.cuda_graphs import CAPTURE_PATCHES  # noqa: E402
from adaptra_megatron.patches.table import Patch, PatchError  # noqa: E402

__all__ = [
    "CAPTURE_PATCHES",
    "PATCHES",
    "TRAINING_PATCHES",
    "WATCHING_PATCHES",
    "AppliedPatches",
    "Patch",
    "PatchError",
]
__all__ += ["check_versions", "enable", "in_force"]
