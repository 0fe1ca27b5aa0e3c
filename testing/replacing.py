# SPDX-License-Identifier: Apache-2.0
"""Replace names in other packages' modules and classes, all together, and restore them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

_ABSENT = object()


@dataclass(frozen=True)
class Replacement:
    """Replacement of `owner.name` by `value`; `reason`: for people, and for tools that list them.

    A name that `owner` lacks is refused, unless `may_be_absent`: it may have moved, and the real one would stay in
    place.
    """

    owner: Any
    name: str
    value: Any
    reason: str
    may_be_absent: bool = False

    def __str__(self) -> str:
        return f"{getattr(self.owner, '__name__', self.owner)}.{self.name}: {self.reason}"


class Replaced:
    """Active replacements. Also a context manager that undoes them."""

    def __init__(self, replacements: Iterable[Replacement]) -> None:
        """Apply replacements in order. If one fails, the earlier ones are undone and the error is re-raised.

        Raises AttributeError for a name that its owner lacks, unless `may_be_absent`.
        """
        self.replacements: tuple[Replacement, ...] = tuple(replacements)
        self._previous: list[tuple[Any, str, Any]] = []
        try:
            for replacement in self.replacements:
                owner, name = replacement.owner, replacement.name
                if not replacement.may_be_absent:
                    getattr(owner, name)
                # vars(), not getattr(): an inherited name must be deleted again, and a staticmethod must stay one.
                previous = vars(owner).get(name, _ABSENT)
                setattr(owner, name, replacement.value)
                self._previous.append((owner, name, previous))
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Restore every name, last first. A second call does nothing."""
        while self._previous:
            owner, name, previous = self._previous.pop()
            if previous is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, previous)

    def __enter__(self) -> Replaced:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()
