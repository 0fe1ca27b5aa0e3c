# SPDX-License-Identifier: Apache-2.0
"""Represent a reason as parts, so that no code has to parse a sentence: iterations are numbers, and evidence is
separate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

Reason = Sequence[Any]
"""Parts of a reason: text, iterations as integers, and the evidence as a nested Reason. Text is one, too.
"""


def reason_text(reason: Reason, depth: int | None = None) -> str:
    """Return the reason as a sentence, with its evidence down to `depth` levels; None: all of it."""
    if isinstance(reason, str):
        return reason
    below = None if depth is None else depth - 1
    return "".join(
        str(part) if isinstance(part, str | int) else "" if depth == 0 else reason_text(part, below) for part in reason
    )


def reason_fields(reason: Reason) -> dict[str, Any]:
    """Return a reason as fields of an event: the sentence, and its parts if it has several."""
    return {"reason": reason_text(reason), "reason_parts": () if isinstance(reason, str) else reason}


def joined(reasons: Iterable[Reason]) -> Reason:
    """Combine several reasons into one."""
    found: list[Any] = []
    for reason in reasons:
        found += ["; "] if found else []
        found += [reason] if isinstance(reason, str) else reason
    return "".join(found) if all(isinstance(part, str) for part in found) else tuple(found)


def with_numbers(reason: Reason, number_of: Callable[[int], int]) -> Reason:
    """Return the reason with its iterations renumbered by `number_of`."""
    if isinstance(reason, str):
        return reason
    return tuple(number_of(part) if isinstance(part, int) else with_numbers(part, number_of) for part in reason)


def is_reason(value: Any) -> bool:
    """Return whether `value`, read from a file, is a reason in parts."""
    return isinstance(value, list) and all(
        isinstance(part, str) or (isinstance(part, int) and not isinstance(part, bool)) or is_reason(part)
        for part in value
    )
