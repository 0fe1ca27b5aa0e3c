# SPDX-License-Identifier: Apache-2.0
"""Checks that the patches are written for the installed Megatron, and names what --adaptra refuses in it."""

from __future__ import annotations

from collections.abc import Sequence

from adaptra_megatron.patches import PATCHES, Patch, PatchError, check_versions
from adaptra_megatron.patches.application import check_parameters
from adaptra_megatron.tools.host_checks.host_findings import HostFinding, HostLevel
from adaptra_megatron.tools.host_checks.software import import_quietly


def check_patches(patches: Sequence[Patch] = PATCHES) -> list[HostFinding]:
    """One finding per patch: whether its place is there, with the parameters that are used. Nothing is patched."""
    try:
        import_quietly("megatron.core")
    except Exception as cause:
        text = f"megatron-core cannot be imported ({cause}): none of the {len(patches)} patches can be looked at"
        return [_problem("megatron-core", text, "pip install megatron-core")]
    return [_patch(patch) for patch in patches]


def check_refusals() -> list[HostFinding]:
    """The features that stop a run with --adaptra at its start, where the installed Megatron has them."""
    try:
        refusals = import_quietly("adaptra_megatron.megatron.refusals").REFUSALS
    except Exception as cause:
        return [_problem("refusals", f"the executor cannot be imported: {cause}", "look at the versions above")]
    features = {refusal.feature: refusal.reason for refusal in refusals}
    text = f"a run that uses one of these stops at its start and says why: {'; '.join(features)}"
    return [HostFinding(subject="refused features", level=HostLevel.OK, text=text, details=features)]


def _patch(patch: Patch) -> HostFinding:
    module = patch.target.partition(":")[0]
    try:
        check_versions([patch])
        import_quietly(module)
        owner, attribute = patch.owner()
        check_parameters(patch, getattr(owner, attribute))
    except PatchError as cause:
        return _problem(patch.identity, str(cause), f"pip install 'megatron-core{patch.versions}'")
    except Exception as cause:
        return _problem(patch.identity, f"{module} cannot be imported: {cause}", "see that Megatron itself starts")
    text = f"{patch.target.rpartition('.')[2].rpartition(':')[2]} is as expected; {patch.reason}"
    return HostFinding(subject=patch.identity, level=HostLevel.OK, text=text, details={"target": patch.target})


def _problem(subject: str, text: str, remedy: str) -> HostFinding:
    return HostFinding(subject=subject, level=HostLevel.PROBLEM, text=" ".join(text.split()), remedy=remedy, fatal=True)
