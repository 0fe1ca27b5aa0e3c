# SPDX-License-Identifier: Apache-2.0
"""Make device paths fail: a decorator around `PairGroup` swallows messages of a directed link, or raises.

A fault is armed first, and begins with the next message of the link, so that every fault has an effect. It heals by
itself. The host path is not affected.
"""

from __future__ import annotations

import enum
import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

import torch

from adaptra_megatron.transport.device_session.pair_group import PairGroup, PairWork
from testing.replacing import Replaced, Replacement

_UNANSWERED_TAG = (1 << 31) - 2
"""Tag of no message: receiving it never completes, as for a lost message, and ends with its group alone."""

Link = tuple[int, int]
"""(source stage, target stage)."""


class Mode(str, enum.Enum):
    """Kind of a device-path failure."""

    SILENT = "silent"
    """Messages never arrive and sends never complete. Installed at the source."""
    ERROR = "error"
    """Sends and receives raise RuntimeError, as in gloo and NCCL. Affects the end where it is installed."""


class Strike(NamedTuple):
    """First message that a fault affected."""

    link: Link
    mode: Mode
    at_s: float
    """Moment on `time.monotonic()`."""


@dataclass
class _Fault:
    mode: Mode
    duration_s: float
    until_s: float | None = None
    """End of the fault; None until it has affected a message."""


class PathFaults:
    """Faults of the device path in this process, from `install()` to `close()`. Also a context manager."""

    def __init__(self, stage_of_rank: Callable[[int], int] = lambda rank: rank) -> None:
        """`stage_of_rank`: pipeline stage of a global rank; the identity to name ranks instead of stages."""
        self.begun: list[Strike] = []
        """Faults that have affected a message."""
        self.struck: dict[Mode, int] = dict.fromkeys(Mode, 0)
        """Messages swallowed and calls that raised, by mode."""
        self._stage_of_rank = stage_of_rank
        self._faults: dict[Link, _Fault] = {}
        self._lock = threading.Lock()
        self._replaced: Replaced | None = None

    def arm(self, link: Link, mode: Mode, duration_s: float) -> None:
        """Fail the device path of `link` from the next message on, for `duration_s`. Replaces a pending fault."""
        with self._lock:
            self._faults[link] = _Fault(mode, duration_s)

    @property
    def armed(self) -> int:
        """Number of faults that have affected no message yet."""
        with self._lock:
            return sum(fault.until_s is None for fault in self._faults.values())

    def install(self) -> PathFaults:
        """Decorate `PairGroup.send` and `PairGroup.receive`."""
        if self._replaced is None:
            reason = "emulated death of the device path"
            self._replaced = Replaced(
                [
                    Replacement(PairGroup, "send", self._decorate_send(PairGroup.send, PairGroup.receive), reason),
                    Replacement(PairGroup, "receive", self._decorate_receive(PairGroup.receive), reason),
                ]
            )
        return self

    def close(self) -> None:
        """Remove the decorators: every link is healthy again."""
        if self._replaced is not None:
            self._replaced.undo()
            self._replaced = None

    def _decorate_send(
        self, send: Callable[..., PairWork], receive: Callable[..., PairWork]
    ) -> Callable[..., PairWork]:
        @functools.wraps(send)
        def faulty(pair: PairGroup, tensor: torch.Tensor, tag: int) -> PairWork:
            mode = self._strikes(pair, (Mode.SILENT, Mode.ERROR))
            if mode is Mode.ERROR:
                raise RuntimeError(f"emulated: sending {tensor.nbytes} bytes failed: connection reset by peer")
            if mode is Mode.SILENT:
                return receive(pair, torch.empty(1, dtype=torch.uint8), _UNANSWERED_TAG)
            return send(pair, tensor, tag)

        return faulty

    def _decorate_receive(self, receive: Callable[..., PairWork]) -> Callable[..., PairWork]:
        @functools.wraps(receive)
        def faulty(pair: PairGroup, buffer: torch.Tensor, tag: int) -> PairWork:
            if self._strikes(pair, (Mode.ERROR,)) is not None:
                raise RuntimeError(f"emulated: receiving {buffer.nbytes} bytes failed: connection reset by peer")
            return receive(pair, buffer, tag)

        return faulty

    def _strikes(self, pair: PairGroup, modes: tuple[Mode, ...]) -> Mode | None:
        """Return how the next call fails, or None; count it."""
        link = (self._stage_of_rank(pair.ends.source), self._stage_of_rank(pair.ends.target))
        now_s = time.monotonic()
        with self._lock:
            fault = self._faults.get(link)
            if fault is None or fault.mode not in modes:
                return None
            if fault.until_s is None:
                fault.until_s = now_s + fault.duration_s
                self.begun.append(Strike(link, fault.mode, now_s))
            elif now_s >= fault.until_s:
                del self._faults[link]
                return None
            self.struck[fault.mode] += 1
            return fault.mode

    def __enter__(self) -> PathFaults:
        return self.install()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
