# SPDX-License-Identifier: Apache-2.0
"""Define `Patch`, one row of the table: the attribute, its versions, the reason, and the replacement."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adaptra_megatron.engine.runtime import AdaptraRuntime


SUPPORTED = ">=0.14,<0.21"
"""Releases of megatron-core (PEP 440) with which this package is tested: docs/versions.md."""
GRADIENT_SYNC_SUPPORTED = ">=0.16,<0.21"
"""For --adaptra-gradient-sync: the replaced start of reductions has been compared with these releases."""
SYNC_MODE_SUPPORTED = ">=0.16,<0.18"
"""For --adaptra-sync-mode. From 0.18 on replicas also meet for statistics of packed sequences, and from 0.19 on losses
are summed over groups that are looked up once."""
CAPTURE_SUPPORTED = ">=0.16,<0.21"
"""For CUDA graphs of Transformer Engine: earlier releases capture once and cannot drop what they captured."""
STAGGERED_OPTIMIZER_SUPPORTED = ">=0.14,<0.17"
"""For --adaptra-staggered-optimizer: later releases have other steps in ChainedOptimizer.step and clipping."""


class PatchError(RuntimeError):
    """Megatron cannot be patched as intended; names the target, what was found, and the remedy. Nothing is changed."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One replaced attribute."""

    identity: str
    target: str
    """`module:attribute` or `module:Class.attribute`."""
    versions: str
    """Version specifier (PEP 440) of megatron-core."""
    parameters: tuple[str, ...]
    """Parameters that the original must have; otherwise it is not the function that this patch was written for."""
    reason: str
    replace: Callable[[Callable[..., Any], AdaptraRuntime], Callable[..., Any]]
    """Makes the replacement from the original and the runtime."""

    @property
    def has_target(self) -> bool:
        """Return whether the module with the attribute is in use. A script need not use Megatron-LM's own training
        loop, nor NVIDIA's resiliency extension.
        """
        module = self.target.partition(":")[0]
        return module in sys.modules or not module.startswith(("megatron.training", "nvidia_resiliency_ext"))

    def owner(self) -> tuple[Any, str]:
        """Return the object that holds the attribute, and the attribute's name. Raises PatchError if there is none."""
        module_name, _, path = self.target.partition(":")
        *containers, attribute = path.split(".")
        try:
            # By name, not by reference: a module of Megatron is imported only if one of its patches is applied.
            holder: Any = importlib.import_module(module_name)
            for name in containers:
                holder = getattr(holder, name)
            getattr(holder, attribute)
        except (ImportError, AttributeError) as error:
            raise PatchError(
                f"patch {self.identity}: there is no {self.target} here ({error}); this megatron-core differs from "
                f"the release it claims to be. Install megatron-core {self.versions}"
            ) from error
        return holder, attribute
