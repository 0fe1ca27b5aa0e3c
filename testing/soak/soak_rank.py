# SPDX-License-Identifier: Apache-2.0
"""Run a fault campaign inside a rank.

It breaks device paths at the planned points, reports progress to the driver, and records when messages arrived and
which resources the rank holds before and after. It only decorates real objects: `DualLink.post_send`, `DualLink.wait`
and methods of `PathFaults`.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from adaptra_megatron.engine import rank_transports as transports
from adaptra_megatron.transport.dual_path.dual_link import GREETING, DualLink
from adaptra_megatron.transport.link_paths import PathSettings
from adaptra_megatron.transport.message_keys import MessageKey, MessageTimes
from testing.faults.network.path_faults import Mode, PathFaults
from testing.replacing import Replaced, Replacement
from testing.soak.soak_plan import HASTY_PATHS, PLAN_FILE, Fault, Kind, read_plan
from testing.soak.soak_progress import Progress

_MODES = {Kind.SILENT_PATH: Mode.SILENT, Kind.FAILING_SENDS: Mode.ERROR, Kind.FAILING_RECEIVES: Mode.ERROR}


class SoakRank:
    """One rank's part of a campaign. A context manager: around everything that makes and closes the transport."""

    def __init__(self, directory: Path, stage: int, stages: int) -> None:
        """`directory` holds the plan, and gets `rank<stage>.json`."""
        self._directory, self._stage = directory, stage
        self._progress = Progress(directory, stages)
        plan = (fault for fault in read_plan(directory / PLAN_FILE) if fault.kind.inside and fault.stage == stage)
        self._plan = deque(sorted(plan, key=lambda fault: fault.iteration))
        self._iteration, self._sent = -1, 0
        self._faults = PathFaults()
        self._receive_queue: dict[int, list[float]] = defaultdict(list)
        self._keys: set[MessageKey] = set()
        self._paths: dict[int, PathSettings] = {}
        self._replaced: Replaced | None = None
        self._held: dict[str, int] = {}

    def set_iteration(self, iteration: int) -> None:
        """Begin `iteration` (from 0)."""
        self._iteration, self._sent = iteration, 0
        self._progress.set(self._stage, iteration)

    def __enter__(self) -> SoakRank:
        self._held = held()
        self._faults.install()
        reason = "fault campaign"
        hasty = functools.partial(PathSettings, **HASTY_PATHS)
        self._replaced = Replaced(
            [
                Replacement(DualLink, "post_send", self._decorate_send(DualLink.post_send), reason),
                Replacement(DualLink, "wait", self._decorate_wait(DualLink.wait), reason),
                Replacement(transports, "PathSettings", hasty, f"{reason}: the next fault comes soon"),
            ]
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._replaced is not None
        self._replaced.undo()
        self._faults.close()
        self._progress.close()
        record = {
            "arrivals": self._receive_queue,
            "messages": len(self._keys),
            "begun": [strike._asdict() for strike in self._faults.begun],
            "struck": self._faults.struck,
            "waiting": self._faults.armed + len(self._plan),
            "paths": {peer: asdict(settings) for peer, settings in self._paths.items()},
            "held_before": self._held,
            "held_after": held_soon(self._held),
        }
        (self._directory / f"rank{self._stage}.json").write_text(json.dumps(record))

    def _decorate_send(self, post_send: Callable[..., MessageTimes]) -> Callable[..., MessageTimes]:
        @functools.wraps(post_send)
        def counted(link: DualLink, key: MessageKey, tensor: torch.Tensor) -> MessageTimes:
            while self._plan and self._is_due(self._plan[0]):
                fault = self._plan.popleft()
                self._faults.arm(fault.link, _MODES[fault.kind], fault.duration_s)
            self._sent += 1
            times = post_send(link, key, tensor)
            # Those of the link itself, to prove that what replaced them was in time.
            self._paths[times.peer] = link._paths.settings
            return times

        return counted

    def _is_due(self, fault: Fault) -> bool:
        return (self._iteration, self._sent) >= (fault.iteration, fault.messages)

    def _decorate_wait(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wait)
        def recorded(link: DualLink, key: MessageKey, deadline_s: float) -> Any:
            tensor, times = wait(link, key, deadline_s)
            if key != GREETING:
                self._receive_queue[times.peer].append(times.done_s)
                self._keys.add(key)
            return tensor, times

        return recorded


def held_soon(before: Mapping[str, int]) -> dict[str, int]:
    """Return this process's resources once there are no more than `before`, or after 5 s.

    Rank 0 serves the job's store, and releases resources for other ranks' clients only when those have closed.
    """
    until_s = time.monotonic() + 5.0
    while any((now := held())[name] > before[name] for name in before) and time.monotonic() < until_s:
        time.sleep(0.05)
    return now


def held() -> dict[str, int]:
    """Return the resources of this process that a transport might leak."""
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": sum(thread.name.startswith("adaptra-") for thread in threading.enumerate()),
        "rings": Path("/proc/self/maps").read_text().count("memfd:adaptra-ring"),
        "ring descriptors": sum("adaptra-ring" in target for target in _descriptor_targets()),
    }


def _descriptor_targets() -> list[str]:
    targets = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:  # that of the listing itself
            continue
    return targets
