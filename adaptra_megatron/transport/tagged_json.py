# SPDX-License-Identifier: Apache-2.0
"""Small messages between processes as JSON objects: a frozen dataclass with a `name`, which "is" says, and its fields.

What may be believed of a message that has come differs by who can send it: reading is for the modules that know.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, get_args


def kinds_of(union: Any) -> dict[str, type[Any]]:
    """The members of a union of message kinds, by name."""
    return {kind.name: kind for kind in get_args(union)}


def packed(message: Any) -> bytes:
    """A message as it travels."""
    return json.dumps({"is": message.name, **asdict(message)}).encode()
