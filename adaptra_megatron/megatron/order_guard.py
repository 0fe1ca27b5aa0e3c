# SPDX-License-Identifier: Apache-2.0
"""Find collectives inside forwards and backwards over ranks that do not run their actions in this rank's order.

Once plans differ, such ranks would reach the collectives in different orders and wait for each other for ever. The
guard checks all calls of torch's process groups from Python in the first training iteration, in which all replicas
still run the same order.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch.distributed as dist

from adaptra_megatron.megatron.computation import StageComputation, SurroundedComputation
from adaptra_megatron.megatron.refusals import UnsupportedFeatureError

COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "gather", "scatter"),
    *("allgather", "allgather_coalesced", "_allgather_base", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced", "reduce_scatter", "_reduce_scatter_base"),
    *("reduce_scatter_tensor_coalesced", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single"),
)
"""Methods of torch's ProcessGroup, of all supported releases."""
_DATA_PARALLEL = ("megatron.core.distributed.", "megatron.core.optimizer.")
"""Modules whose hooks reduce gradients and gather parameters inside actions: GradientSync and ParameterSync order
these.
"""
_NOT_OF_SCRIPT = ("torch.", "adaptra_megatron.", "testing.", "typing_extensions", "contextlib")
_KINDS = {"F": "a forward", "B": "a backward", "I": "a backward", "W": "a weight gradient"}


class OrderGuard:
    """Guard of one rank, for its first training iteration."""

    def __init__(self, follows: Sequence[int], micro_batches: int) -> None:
        """`follows`: global ranks that run their actions in one order. `micro_batches`: number in the iteration.

        A collective in only one of several micro-batches is part of a set-up, and allowed.
        """
        self._follows = frozenset(follows)
        self._several = micro_batches > 1
        self._first: dict[tuple[str, int, str, tuple[int, ...]], int] = {}
        """First micro-batch in which each collective was seen."""

    def decorate(self, computation: StageComputation) -> StageComputation:
        """Wrap `computation`: actions raise UnsupportedFeatureError instead of launching such a collective."""
        return SurroundedComputation(computation, self._watched)

    @contextmanager
    def _watched(self, kind: str, chunk: int, micro_batch: int) -> Iterator[None]:
        groups: list[type] = [dist.ProcessGroup, *dist.ProcessGroup.__subclasses__()]
        replaced: list[tuple[type, str, Any]] = []
        try:
            for owner in groups:
                for name in set(COLLECTIVES) & vars(owner).keys():
                    method = vars(owner)[name]
                    replaced.append((owner, name, method))
                    setattr(owner, name, self._checked(name, method, (kind, chunk, micro_batch)))
            yield
        finally:
            for owner, name, method in replaced:
                setattr(owner, name, method)

    def _checked(self, name: str, method: Callable[..., Any], action: tuple[str, int, int]) -> Callable[..., Any]:
        @functools.wraps(method)
        def launch(group: Any, *given: Any, **keywords: Any) -> Any:
            self._check(group, name, *action)
            return method(group, *given, **keywords)

        return launch

    def _check(self, group: Any, name: str, kind: str, chunk: int, micro_batch: int) -> None:
        try:
            ranks = tuple(dist.get_process_group_ranks(group))
        except (KeyError, ValueError):  # no group of torch's, but one within
            return
        frames = list(_frames_of_action())
        if self._follows.issuperset(ranks) or any(map(_synchronizes, frames)):
            return
        if self._several and self._first.setdefault((kind, chunk, name, ranks), micro_batch) == micro_batch:
            return
        place = next((frame for frame in frames if not _is_within(frame, _NOT_OF_SCRIPT)), None)
        raise UnsupportedFeatureError(_message(name, kind, ranks, place))


def _frames_of_action() -> Iterator[FrameType]:
    """Iterate over stack frames from the collective's caller up to the action, innermost first."""
    # Above this generator are `_check`, the replacement of the method, and then its caller.
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_globals.get("__name__") != SurroundedComputation.__module__:
        yield frame
        frame = frame.f_back


def _synchronizes(frame: FrameType) -> bool:
    """Return whether a frame belongs to Megatron's data parallelism, except the wrapper around the model's own
    forward.
    """
    return _is_within(frame, _DATA_PARALLEL) and frame.f_code.co_name != "forward"


def _is_within(frame: FrameType, packages: tuple[str, ...]) -> bool:
    return str(frame.f_globals.get("__name__")).startswith(packages)


def _message(name: str, kind: str, ranks: Sequence[int], place: FrameType | None) -> str:
    where = ""
    if place is not None:
        where = f" ({place.f_code.co_name} in {place.f_code.co_filename}, line {place.f_lineno})"
    return (
        f"--adaptra: {_KINDS[kind]} calls {name.strip('_')} over ranks {', '.join(map(str, ranks))}{where}, some of "
        "which run their actions in an order of their own: they would come to it in different orders and wait for "
        "ever. Move it to after the iteration, as a sum of what loss functions return, or give --adaptra-policy observe"
    )
