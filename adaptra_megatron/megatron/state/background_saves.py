# SPDX-License-Identifier: Apache-2.0
"""Write checkpoints in the background (--async-save) while ranks fail and rejoin.

A process of each rank writes that rank's part. Once all parts are on disk, all ranks finalize the checkpoint: metadata,
then the file that names the newest one. The part of a failed rank is missing, and a rank that rejoins has no part. So a
checkpoint is finalized in the generation in which it was scheduled, or given up on all ranks: its writers are killed,
the checkpoint before it stays the newest, and the script writes the next one early (`is_due`).

Scheduling and finalizing are calls of the protocol. Between two calls, all live ranks have the same saves under way.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable
from typing import Any

from adaptra_megatron.common.child_process import kill_descendants
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.elastic.generation import FIRST, Generation
from adaptra_megatron.elastic.process_group_manager import FaultTolerantGroups
from adaptra_megatron.elastic.recovery import RecoveryManager
from adaptra_megatron.megatron.refusals import UnsupportedFeatureError

logger = logger_of(__name__)

_LOOKS_S = 0.05
_OF_LIVE_RANKS = ("save_strategy", "load_strategy", "local_checkpoint_cache")
"""What Megatron's checkpointing context keeps from one save to the next: plans by rank, with
--ckpt-assume-constant-structure."""
_STORAGE_WRITERS = tuple(
    f"{package}.filesystem_async"
    for package in (
        "megatron.core.dist_checkpointing.strategies",
        "nvidia_resiliency_ext.checkpointing.async_ckpt",
    )
)
"""Modules whose `_results_queue` has what this rank's writers have written: each save takes the oldest entry."""


class BackgroundSaves:
    """Checkpoints of one rank. For the training thread."""

    def __init__(self, groups: FaultTolerantGroups) -> None:
        self._groups = groups
        self.is_due = False
        """Whether a checkpoint was given up, and none has been scheduled since. Equal on all live ranks."""
        self._queue: Any = None
        """Megatron's AsyncCallsQueue; None before the first save in the background."""
        self._under_way = 0
        """Number of saves that all live ranks have scheduled, and not finalized. Equal on all live ranks."""
        self._scheduled_in = FIRST
        """Generation of these saves."""
        self._attempted_in = FIRST
        """Generation of the last attempt at a call: all writers belong to it."""
        self._plans_of = FIRST
        """Generation to which Megatron's plans belong."""
        self._saves_now = False
        self._again: Callable[[], Any] | None = None
        """Repeats the last save, while it is under way and parameters are those that it saves."""

    @property
    def will_be_due(self) -> bool:
        """Return what `is_due` will be once ranks are admitted, for these."""
        return self.is_due or self._under_way > 0

    def save(self, manager: RecoveryManager, write: Callable[[], Any], context: dict[str, Any]) -> Any:
        """Write a checkpoint, or schedule its writing, by `write`, which is called again if a rank fails meanwhile.

        `write` sees only live ranks, numbered from 0. `context`: Megatron's checkpointing context. Raises the errors of
        `RecoveryManager.carry_out`.
        """

        def attempt(generation: Generation, number: int) -> Any:
            self._groups.gather_missed()
            self._begin(generation)
            if generation.id != self._plans_of:
                self._plans_of = generation.id
                for name in _OF_LIVE_RANKS:
                    context.pop(name, None)
            self._saves_now = True
            try:
                with self._groups.numbered_alive():
                    return write()
            finally:
                self._saves_now = False

        result = manager.carry_out(attempt)
        if self._under_way and self._attempted_in != self._scheduled_in:
            self._give_up(manager)
        self._scheduled_in, self.is_due = self._attempted_in, False
        self._under_way = self._unfinalized()
        self._again = (lambda: self.save(manager, write, context)) if self._under_way else None
        return result

    def schedule(self, stock: Callable[..., int], queue: Any, request: Any) -> int:
        """Schedule a request by `stock`, AsyncCallsQueue.schedule_async_request.

        Raises UnsupportedFeatureError outside of `save`: a rank that fails meanwhile would be waited for.
        """
        if not self._saves_now:
            raise UnsupportedFeatureError(
                "--adaptra-reroute failures: a checkpoint is scheduled outside of Megatron-LM's save_checkpoint and of "
                "AdaptraRuntime.save: it could not be given up if a rank fails. Save by one of these, or drop the flag"
            )
        self._queue = queue
        return stock(queue, request)

    def finalize(
        self, manager: RecoveryManager, stock: Callable[..., list[int]], queue: Any, *, blocking: bool, no_dist: bool
    ) -> list[int]:
        """Finalize checkpoints by `stock`, AsyncCallsQueue.maybe_finalize_async_calls, or give them up.

        `blocking`: wait for all; the last one is then written again if it has been given up and parameters have not
        changed since. Raises the errors of `RecoveryManager.carry_out`.
        """
        if queue is not self._queue or not self._under_way:
            return stock(queue, blocking, no_dist)

        def attempt(generation: Generation, number: int) -> list[int] | None:
            self._begin(generation)
            if generation.id != self._scheduled_in:
                return None
            with self._groups.numbered_alive():
                finalized = stock(queue, False, no_dist)
                while blocking and self._unfinalized():
                    manager.check()  # a writer takes as long as the disk
                    time.sleep(_LOOKS_S)
                    finalized += stock(queue, False, no_dist)
            return finalized

        finalized = manager.carry_out(attempt)
        self._under_way = self._unfinalized()
        if finalized is not None:
            return finalized
        again = self._again
        self._give_up(manager)
        if not blocking or again is None:
            return []
        again()
        return self.finalize(manager, stock, queue, blocking=True, no_dist=no_dist)

    def trained(self) -> None:
        """Note that parameters have changed."""
        self._again = None

    def admitted(self, manager: RecoveryManager) -> None:
        """Give up what is under way, as ranks have been admitted that have no part of it."""
        if self._under_way:
            self._abandon()
            self._give_up(manager)

    def _begin(self, generation: Generation) -> None:
        """Begin an attempt. In another generation, drop what writers and repeated attempts have left from the one
        before.
        """
        if generation.id != self._attempted_in:
            self._attempted_in = generation.id
            self._abandon()

    def _give_up(self, manager: RecoveryManager) -> None:
        self._under_way, self._again, self.is_due = 0, None, True
        if self._groups.rank == min(manager.generation.live):
            logger.warning(
                "a checkpoint was still being written in the background as ranks failed or rejoined: it is given up, "
                "the one before it stays the newest, and the next one is written early"
            )

    def _unfinalized(self) -> int:
        return 0 if self._queue is None else int(self._queue.get_num_unfinalized_calls())

    def _abandon(self) -> None:
        """End all writers, and make the queue as a rejoining process has it."""
        queue = self._queue
        if queue is not None:
            callers = {id(each.async_caller): each.async_caller for each in queue.async_calls}
            # From 0.17 on the persistent writer belongs to the class.
            for holder, name in ((queue, "persistent_caller"), (type(queue), "_persistent_caller")):
                if (caller := getattr(holder, name, None)) is not None:
                    callers[id(caller)] = caller
                    setattr(holder, name, None)
            for caller in callers.values():
                _end(caller)
            queue.async_calls.clear()
            queue.call_idx = -1  # all ranks compare it
        modules: list[Any] = [sys.modules[each] for each in _STORAGE_WRITERS if each in sys.modules]
        for module in modules:
            if getattr(module, "_results_queue", None) is not None:
                # Emptying it is not enough: what a writer put just before it was killed may arrive later, and the next
                # save would finalize a checkpoint with the wrong results. The next save creates another queue.
                module._results_queue = None


def _end(caller: Any) -> None:
    """Kill the processes of one of Megatron's AsyncCallers, without waiting for what they were to write."""
    if caller.process is None:
        return
    # Its own processes, which write, would survive it.
    kill_descendants(caller.process)
    if "abort" in inspect.signature(caller.close).parameters:  # from 0.15 on
        caller.close(abort=True)
    caller.process = None
