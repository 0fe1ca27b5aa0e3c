# SPDX-License-Identifier: Apache-2.0
"""What checks of a single process need of a GPU; cuda_gpu.py has it of a real one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Stream = Any
"""Opaque."""


class Point(Protocol):
    """A place in a stream."""

    def query(self) -> bool:
        """Return whether the GPU has come to it."""


class Standing(Protocol):
    """A kernel that stays on the GPU."""

    def release(self) -> None:
        """It ends; a second call does nothing."""


@dataclass(frozen=True)
class HostCall:
    """A call of the host that may have to wait for the GPU."""

    prepare: Callable[[Stream], Callable[[], Any]]
    """Makes what it needs while nothing runs, for a kernel that is to stand on that stream. What it returns is the
    call. Raises RuntimeError or ImportError where this machine cannot make it."""
    may_wait: bool
    """True where the design allows for a wait until all that stands on the GPU has ended."""
    at_once_s: float = 1.0
    """What it takes by itself at most."""


class Gpu(Protocol):
    """The GPU as one process uses it. Streams are never destroyed."""

    compute: Stream
    """What training computes on."""

    def pooled_streams(self) -> list[Stream]:
        """Those that torch deals to everything in the process, once each."""

    def link_streams(self, count: int) -> list[Stream]:
        """As links have them: of their own."""

    def stand(self, stream: Stream) -> Standing:
        """Put a kernel of one thread on a stream that stays until it is released."""

    def take_multiprocessors(self, stream: Stream, blocks: int, cluster: int) -> Standing:
        """Likewise `blocks` of NCCL's size, in clusters."""

    def kernel(self, stream: Stream) -> None:
        """Put a short kernel on a stream."""

    def record(self, stream: Stream) -> Point:
        """The present end of a stream."""

    def make_wait(self, stream: Stream, point: Point) -> None:
        """What is put on `stream` from now on comes after `point`."""

    def product_s(self, rows: int, inner: int, columns: int) -> float:
        """What a matrix product takes on the compute stream, in bf16."""

    def synchronize(self) -> None:
        """Until nothing is left on the GPU."""

    def host_calls(self) -> Mapping[str, HostCall]:
        """By their names."""
