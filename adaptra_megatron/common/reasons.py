# SPDX-License-Identifier: Apache-2.0
"""State a reason in parts: iterations stay numbers and evidence stays apart, so that nobody has to
find either in a sentence again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

Reason = Sequence[Any]
"""Text; iterations, as integers; and what stands behind the text, as a Reason of its own. A plain text is one, too."""


def reason_text(reason: Reason, depth: int | None = None) -> str:
    """The sentence, with what stands behind it down to `depth` levels; None: all of it."""
    if isinstance(reason, str):
        return reason
    below = None if depth is None else depth - 1
    return "".join(
        str(part) if isinstance(part, str | int) else "" if depth == 0 else reason_text(part, below) for part in reason
    )


def reason_fields(reason: Reason) -> dict[str, Any]:
    """A reason as fields of an event: in words, and in parts where it has several."""
    return {"reason": reason_text(reason), "reason_parts": () if isinstance(reason, str) else reason}


def joined(reasons: Iterable[Reason]) -> Reason:
    """Several as one."""
    found: list[Any] = []
    for reason in reasons:
        found += ["; "] if found else []
        found += [reason] if isinstance(reason, str) else reason
    return "".join(found) if all(isinstance(part, str) for part in found) else tuple(found)


def with_numbers(reason: Reason, number_of: Callable[[int], int]) -> Reason:
    """The same with other numbers of iterations."""
    if isinstance(reason, str):
        return reason
    return tuple(number_of(part) if isinstance(part, int) else with_numbers(part, number_of) for part in reason)


def is_reason(value: Any) -> bool:
    """Return whether `value`, which was read from a file, is one in parts."""
    return isinstance(value, list) and all(
        isinstance(part, str) or (isinstance(part, int) and not isinstance(part, bool)) or is_reason(part)
        for part in value
    )
