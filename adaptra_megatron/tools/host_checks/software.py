# SPDX-License-Identifier: Apache-2.0
"""Check the installed versions, whether they can be imported, and whether the patches fit this Megatron."""

from __future__ import annotations

import ctypes
import importlib
import platform
import re
import warnings
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType

from adaptra_megatron import __version__
from adaptra_megatron.common import environment
from adaptra_megatron.patches import PATCHES, Patch, PatchError
from adaptra_megatron.patches import check_versions as check_patch_versions
from adaptra_megatron.patches.application import check_parameters
from adaptra_megatron.tools.host_checks.host_findings import HostFinding, HostLevel, Roots, read_text

DISTRIBUTION = "adaptra-megatron"
NATIVE_MODULES = (
    "adaptra_megatron.schedule._native",
    "adaptra_megatron.transport._device",
    "adaptra_megatron.transport._ring",
)
_OPTIONAL = {
    "transformer-engine": "layers of Transformer Engine",
    "rich": "tables and colours (pip install 'adaptra-megatron[cli]')",
    "matplotlib": "pictures of timelines (pip install 'adaptra-megatron[plot]')",
    "prometheus-client": "metrics (pip install 'adaptra-megatron[metrics]')",
    "opentelemetry-sdk": "--adaptra-otel (pip install 'adaptra-megatron[otel]')",
    "perfetto": "traces in Perfetto's own format (pip install 'adaptra-megatron[perfetto]')",
}
_IMPORTED = {"megatron-core": "megatron.core", "opentelemetry-sdk": "opentelemetry.sdk"}
"""Name to import, if it is not that of the distribution."""

Import = Callable[[str], ModuleType]


def import_quietly(name: str) -> ModuleType:
    """Import a module without the warnings of its imports. Raises whatever the module raises, mostly ImportError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def check_versions(roots: Roots, import_module: Import = import_quietly) -> list[HostFinding]:
    """Return findings on Python, required packages, CUDA and NCCL as in torch, libibverbs, and optional packages."""
    python = f"{platform.python_implementation()} {platform.python_version()}, adaptra-megatron {__version__}"
    found = [HostFinding(subject="python", level=HostLevel.OK, text=python, details={"adaptra": __version__})]
    found += [_requirement(*requirement, import_module) for requirement in _requirements()]
    if (cuda := _cuda(roots, import_module)) is not None:
        found.append(cuda)
    return [*found, _libibverbs(), *_optional()]


def check_native_modules(import_module: Import = import_quietly) -> list[HostFinding]:
    """Return whether each compiled module loads."""
    found = []
    for name in NATIVE_MODULES:
        subject = name.removeprefix("adaptra_megatron.")
        try:
            module = import_module(name)
        except Exception as cause:
            found.append(
                HostFinding(
                    subject=subject,
                    level=HostLevel.PROBLEM,
                    text=f"does not load: {_first_line(cause)}",
                    remedy=f"build it for this Python: pip install --force-reinstall --no-deps {DISTRIBUTION} (or `.`)",
                    fatal=True,
                )
            )
            continue
        found.append(HostFinding(subject=subject, level=HostLevel.OK, text=f"loads from {module.__file__}"))
    return found


def _requirements() -> list[tuple[str, str]]:
    """Return names and specifiers of the packages for training, from this package's metadata with its extra
    `megatron`."""
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # run from its source tree
        lines = ["torch", "megatron-core", "numpy", "packaging"]
    needed = [text for text, _, extra in (line.partition(";") for line in lines) if not extra or "megatron" in extra]
    return [(found[0], found[1]) for line in needed if (found := re.findall(r"^([\w.-]+)\s*(.*)$", line)[0])]


def _requirement(name: str, specifier: str, import_module: Import) -> HostFinding:
    """Check that a package is installed, in the right version, and can be imported: one built for another machine
    cannot."""
    remedy = f"pip install '{name}{specifier}'"
    try:
        module = import_module(_IMPORTED.get(name, name))
        # A checkout on PYTHONPATH hides what is installed.
        imported = getattr(module, "__version__", None) if name in _IMPORTED else None
        version = imported or metadata.version(name)
        fits = _fits(version, specifier)
    except metadata.PackageNotFoundError:
        version, fits = "unknown", True  # on PYTHONPATH, and it does not say
    except Exception as cause:
        text = f"cannot be imported: {_first_line(cause)}"
        return HostFinding(subject=name, level=HostLevel.PROBLEM, text=text, remedy=remedy, fatal=True)
    details = {"version": version, "required": specifier}
    if not fits:
        text = f"{version} is installed, {specifier} is needed"
        remedy = environment.remedy(version) if name == "torch" else remedy
        return HostFinding(subject=name, level=HostLevel.PROBLEM, text=text, remedy=remedy, fatal=True, details=details)
    return HostFinding(subject=name, level=HostLevel.OK, text=version, details=details)


def _fits(version: str, specifier: str) -> bool:
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:  # a finding of its own
        return True
    return SpecifierSet(specifier, prereleases=True).contains(version)


def _cuda(roots: Roots, import_module: Import) -> HostFinding | None:
    """Return a finding on CUDA; None without torch, which has a finding of its own."""
    try:
        torch = import_module("torch")
    except Exception:
        return None
    driver = re.search(r"(\d+\.\d+(?:\.\d+)?)", read_text(roots.proc / "driver" / "nvidia" / "version"))
    built, gpus = torch.version.cuda, torch.cuda.device_count() if torch.cuda.is_available() else 0
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None
    details = {"cuda": built, "nccl": nccl, "driver": driver[1] if driver else None, "gpus": gpus}
    said = [f"torch built for CUDA {built}" if built else "torch built without CUDA"]
    said.append(f"NCCL {nccl}" if nccl else "without NCCL")
    said.append(f"NVIDIA driver {driver[1]}" if driver else "no NVIDIA driver")
    said.append(f"{gpus} GPUs usable")
    level, remedy = HostLevel.OK, ""
    if driver and not gpus:
        level = HostLevel.PROBLEM
        remedy = (
            "install a torch built for CUDA" if not built else "look at nvidia-smi; CUDA_VISIBLE_DEVICES may hide all"
        )
    return HostFinding(subject="CUDA", level=level, text=", ".join(said), remedy=remedy, details=details)


def _libibverbs() -> HostFinding:
    """Check libibverbs. rdma-core's release is the last part of the library's file name."""
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        text = "not installed; only verbs needs it"
        return HostFinding(subject="libibverbs", level=HostLevel.OK, text=text, details={"rdma_core": None})
    mapped = re.search(r"\S*/libibverbs\.so\S*", Path("/proc/self/maps").read_text())
    release = Path(mapped[0]).resolve().name.removeprefix("libibverbs.so.1.").partition(".")[2] if mapped else ""
    text = f"rdma-core {release}" if release else "installed, release unknown"
    return HostFinding(subject="libibverbs", level=HostLevel.OK, text=text, details={"rdma_core": release or None})


def _optional() -> list[HostFinding]:
    found = []
    for name, use in _OPTIONAL.items():
        try:
            version: str | None = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = None
        text = version or f"not installed; for {use}"
        found.append(HostFinding(subject=name, level=HostLevel.OK, text=text, details={"version": version}))
    return found


def _first_line(cause: Exception) -> str:
    return f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}"


def check_patches(patches: Sequence[Patch] = PATCHES) -> list[HostFinding]:
    """Return one finding per patch: whether its target exists, with the parameters that it uses. Nothing is patched."""
    try:
        import_quietly("megatron.core")
    except Exception as cause:
        text = f"megatron-core cannot be imported ({cause}): none of the {len(patches)} patches can be looked at"
        return [_problem("megatron-core", text, "pip install megatron-core")]
    return [_patch(patch) for patch in patches]


def check_refusals() -> list[HostFinding]:
    """Return the features that a run with --adaptra refuses at its start, in the installed Megatron."""
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
        check_patch_versions([patch])
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
