# SPDX-License-Identifier: Apache-2.0
"""Apply the table of patches, all or none, and remove it. The rules are in `patches/__init__.py`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from adaptra_megatron.patches.always import PATCHES, TRAINING_PATCHES, WATCHING_PATCHES
from adaptra_megatron.patches.cuda_graphs import CAPTURE_PATCHES
from adaptra_megatron.patches.table import Patch, PatchError

from adaptra_megatron import __version__
from adaptra_megatron.common.environment import what_is_too_old
from adaptra_megatron.common.log import is_first_rank, logger_of
from adaptra_megatron.config import AdaptraConfig

if TYPE_CHECKING:
    from adaptra_megatron.elastic.process_group_manager import FaultTolerantGroups
    from adaptra_megatron.engine.features import Decorate, MakeHooks
    from adaptra_megatron.engine.runtime import AdaptraRuntime

logger = logger_of(__name__)

_MARK = "adaptra_applied"


class AppliedPatches:
    """Active patches, with the originals to restore."""

    def __init__(
        self,
        config: AdaptraConfig,
        runtime: AdaptraRuntime | None,
        decorate: Decorate | None = None,
        hooks: Sequence[MakeHooks] = (),
    ) -> None:
        self.config, self.decorate, self.hooks = config, decorate, tuple(hooks)
        self.runtime = runtime
        """None under policy off, which changes nothing."""
        self._replaced: list[tuple[Patch, Any, str, Any, Any]] = []

    @property
    def identities(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(patch.identity for patch, *_rest in self._replaced))

    def replace(self, patch: Patch) -> None:
        """Apply one patch. Raises PatchError and changes nothing if the target is not as expected."""
        owner, attribute = patch.owner()
        # vars(), not getattr: a staticmethod must be put back as one.
        before = vars(owner)[attribute]
        original = getattr(owner, attribute)
        check_parameters(patch, original)
        assert self.runtime is not None
        replacement = patch.replace(original, self.runtime)
        # By this mark `in_force` finds the patches of a process: this package keeps no global state.
        setattr(replacement, _MARK, self)
        after = staticmethod(replacement) if isinstance(before, staticmethod) else replacement
        # `from schedules import f` has bound the original in another module: replacing the owner's attribute does not
        # reach it.
        for holder in (owner, *_importers(owner, attribute, before)):
            setattr(holder, attribute, after)
            self._replaced.append((patch, holder, attribute, before, after))

    def undo(self) -> None:
        """Restore all originals, last first, and close the runtime. Further calls do nothing.

        Raises PatchError, after restoring the rest, if another package has replaced one of our replacements since.
        """
        overlaid = []
        while self._replaced:
            patch, owner, attribute, before, after = self._replaced.pop()
            # Another package may wrap our replacement. To restore the original would silently remove its wrapper.
            if vars(owner)[attribute] is after:
                setattr(owner, attribute, before)
            else:
                overlaid.append(patch.target)
        if self.runtime is not None:
            self.runtime.close()
        if overlaid:
            raise PatchError(
                f"{', '.join(overlaid)} was replaced by other code after --adaptra and is left as it is; "
                "undo that replacement first"
            )


def _importers(owner: Any, name: str, value: Any) -> list[ModuleType]:
    """Return the modules that imported the function `name` from `owner`, as Megatron-Bridge's `train` imports
    schedules.
    """
    if not isinstance(owner, ModuleType) or value.__module__ != owner.__name__:
        return []
    modules = [each for each in list(sys.modules.values()) if isinstance(each, ModuleType) and each is not owner]
    return [each for each in modules if vars(each).get(name) is value]


def enable(
    config: AdaptraConfig,
    *,
    decorate: Decorate | None = None,
    groups: FaultTolerantGroups | None = None,
    hooks: Sequence[MakeHooks] = (),
) -> AppliedPatches:
    """Patch Megatron for `config`; the result's `undo()` restores it.

    All patches are applied or none, except for those of Megatron-LM modules that a script does not use. Enabling again
    with the same settings returns the active patches; with other settings it raises PatchError. `decorate`, `groups`
    and `hooks` are passed to `AdaptraRuntime`. Raises PatchError if torch is too old, or if megatron-core is outside
    the versions of the table or has other functions than expected.
    """
    if config.policy == "off":
        return AppliedPatches(config, None)
    optional = _of_features(config)
    # All versions before the first replacement: a release that is refused stays as it was.
    check_versions((*PATCHES, *optional))
    before = in_force()
    if before is not None:
        if (before.config, before.decorate, before.hooks) != (config, decorate, tuple(hooks)):
            raise PatchError("--adaptra is in force already with other settings; undo() those patches first")
        return before

    # Not above: to import this package must not import Megatron (rule 1).
    from megatron.core.tensor_parallel import layers

    from adaptra_megatron.engine.runtime import AdaptraRuntime
    from adaptra_megatron.megatron.compat import captures_again
    from adaptra_megatron.megatron.gradients.linear_wgrad import WeightGradientQueue

    if captures_again():
        optional += CAPTURE_PATCHES
    runtime = AdaptraRuntime(config, WeightGradientQueue(layers), decorate, groups=groups, hooks=hooks)
    applied = AppliedPatches(config, runtime, decorate, hooks)
    try:
        for patch in (*PATCHES, *TRAINING_PATCHES, *optional):
            if patch.has_target:
                applied.replace(patch)
    except Exception:
        # All or none: with half of the patches, schedules and optimizer would follow different rules.
        applied.undo()
        raise
    if is_first_rank():
        logger.info("%s is asked for, policy %s", __version__, config.policy)
    logger.debug("patched %s", ", ".join(applied.identities))
    return applied


def _of_features(config: AdaptraConfig) -> list[Patch]:
    """Return the patches of the features that `config` asks for. Those of other features are not imported."""
    found: list[Patch] = []
    if config.is_fault_tolerant:
        from adaptra_megatron.patches.rank_failure_patches import FAULT_TOLERANCE_PATCHES

        found += FAULT_TOLERANCE_PATCHES
    if config.gradient_sync != "stock" or config.sync_mode != "ssgd" or config.staggered_optimizer:
        from adaptra_megatron.patches import update_patches

        found += update_patches.GRADIENT_PATCHES if config.gradient_sync != "stock" else ()
        found += update_patches.UPDATE_PATCHES if config.sync_mode != "ssgd" else ()
        found += update_patches.STAGGERING_PATCHES if config.staggered_optimizer else ()
    return [*found, *(WATCHING_PATCHES if config.watches_stragglers else ())]


def check_versions(patches: Sequence[Patch]) -> None:
    """Raise PatchError if torch is too old, or the installed megatron-core is outside the versions of any patch."""
    try:
        from megatron.core import __version__ as version
    except ImportError as error:
        raise PatchError(
            "--adaptra needs megatron-core, which cannot be imported: pip install megatron-core"
        ) from error
    too_old = what_is_too_old()
    if too_old is not None:
        raise PatchError(too_old)
    from packaging.specifiers import SpecifierSet

    for patch in patches:
        if not SpecifierSet(patch.versions, prereleases=True).contains(version):
            raise PatchError(
                f"patch {patch.identity} is written for megatron-core {patch.versions}, but {version} is installed; "
                f"install a megatron-core in that window, or drop --adaptra. Nothing has been changed"
            )


def in_force() -> AppliedPatches | None:
    """Return the active patches of this process, or None. Imports Megatron."""
    for patch in PATCHES:
        owner, attribute = patch.owner()
        applied = getattr(getattr(owner, attribute), _MARK, None)
        if isinstance(applied, AppliedPatches):
            return applied
    return None


def check_parameters(patch: Patch, original: Callable[..., Any]) -> None:
    """Raise PatchError unless `original` has the parameters that the patch's replacement relies on."""
    present = inspect.signature(original).parameters
    missing = [name for name in patch.parameters if name not in present]
    if missing:
        raise PatchError(
            f"patch {patch.identity}: {patch.target} has no parameter {', '.join(missing)}; another package has "
            f"replaced it, or this megatron-core is not {patch.versions}. Nothing has been changed"
        )
