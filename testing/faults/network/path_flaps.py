# SPDX-License-Identifier: Apache-2.0
"""Make links change paths often: a decorator around sends prefers now one path, now the other."""

from __future__ import annotations

import functools
import random
from types import TracebackType
from typing import Any

import torch

from adaptra_megatron.transport.dual_path.dual_link import DualLink
from adaptra_megatron.transport.link_paths import Path
from adaptra_megatron.transport.message_keys import MessageKey
from testing.replacing import Replaced, Replacement


class PathFlaps:
    """Makes sent messages of each link change path every few messages. A context manager.

    The peer is not involved, unlike in a planner's decision.
    """

    def __init__(self, seed: str, most_messages: int = 5) -> None:
        """`most_messages`: upper limit of messages between two changes of a link, which is random."""
        self.flaps = 0
        """Number of changes requested so far."""
        self._random = random.Random(seed)
        self._most_messages = most_messages
        self._left: dict[DualLink, int] = {}
        self._wanted: dict[DualLink, Path] = {}
        self._replaced: Replaced | None = None

    def install(self) -> PathFlaps:
        """Decorate `DualLink.post_send`."""
        post_send = DualLink.post_send

        @functools.wraps(post_send)
        def flapping(link: DualLink, key: MessageKey, tensor: torch.Tensor) -> Any:
            self._count(link)
            return post_send(link, key, tensor)

        reason = "emulated change of the preferred path"
        self._replaced = Replaced([Replacement(DualLink, "post_send", flapping, reason)])
        return self

    def close(self) -> None:
        """Remove the decorator."""
        if self._replaced is not None:
            self._replaced.undo()
        self._left.clear()
        self._wanted.clear()

    def _count(self, link: DualLink) -> None:
        left = self._left.get(link, 0) - 1
        if left < 0:
            wanted = Path.HOST if self._wanted.get(link) is Path.DEVICE else Path.DEVICE
            self._wanted[link] = wanted
            link.prefer(wanted)
            self.flaps += 1
            left = self._random.randrange(self._most_messages)
        self._left[link] = left

    def __enter__(self) -> PathFlaps:
        return self.install()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
