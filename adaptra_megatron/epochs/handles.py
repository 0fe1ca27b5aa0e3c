# SPDX-License-Identifier: Apache-2.0
"""Handles of operations of process groups that survive failures of their members."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import Work

if TYPE_CHECKING:
    from adaptra_megatron.epochs.live_groups import FaultTolerantGroups


class Done(Work):
    """A handle of an operation that has been carried out."""

    def wait(self, timeout: Any = None) -> bool:
        """Return True at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def is_success(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Do nothing: results can be used on any stream."""


class Pending(Work):
    """A handle of an operation under way inside a call; waiting for it ends with the epoch."""

    def __init__(self, groups: FaultTolerantGroups, work: Any) -> None:
        super().__init__()
        self._groups, self._work = groups, work

    def wait(self, timeout: Any = None) -> bool:
        """Wait as torch's does. Raises EpochEndedError once the set of live ranks has changed."""
        self._groups.wait_for(self._work)
        return True

    def is_completed(self) -> bool:
        """Return whether `wait` would return without waiting."""
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Return whether it has ended well."""
        return bool(self._work.is_success())

    def synchronize(self) -> None:
        """Wait."""
        self.wait()


class CallbackWork:
    """Torch's handle of an operation, and what is to be done once it has been carried out."""

    def __init__(self, work: Any, act: Callable[[], object]) -> None:
        self._work, self._act = work, act
        self._acted = False

    def wait(self, *timeout: timedelta) -> None:
        self._work.wait(*timeout)
        if not self._acted:  # who waits again finds what has become of it since
            self._acted = True
            self._act()

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        return bool(self._work.is_success())


class CoalescedWork:
    """Torch's handles of operations that were launched together."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self, *timeout: timedelta) -> None:
        for work in self._works:
            work.wait(*timeout)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)
