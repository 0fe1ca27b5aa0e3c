# SPDX-License-Identifier: Apache-2.0
"""Says of a job that has come to a standstill who waits for whom."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from support.device_model.calls import AwaitSignal, Collective, Compute, DeviceWait, HostWait, Rank, Signal, Transfers
from support.device_model.model import Job
from support.device_model.state import Thread, Work


def explain(job: Job) -> str | None:
    """A chain of waits that ends where it began, one per line; None if everything has ended."""
    stuck = job.stuck()
    if not stuck:
        return None
    waiting: Thread | Work | None = stuck[0]
    chain: list[Thread | Work] = []
    lines = []
    while waiting is not None and waiting not in chain:
        chain.append(waiting)
        why, waiting = _why(job, chain[-1])
        lines.append(f"{_name(chain[-1])} {why}" + (f" {_name(waiting)}" if waiting is not None else ""))
    first = 0 if waiting is None else chain.index(waiting)
    return "\n".join(lines[first:])


def _why(job: Job, waiting: Thread | Work) -> tuple[str, Thread | Work | None]:
    """In words, and what is waited for."""
    return _why_host(job, waiting) if isinstance(waiting, Thread) else _why_work(job, waiting)


def _why_host(job: Job, thread: Thread) -> tuple[str, Thread | Work | None]:
    call, device = thread.program[thread.position], thread.device
    if device.locked_by not in (None, thread):
        return "may not launch before", device.locked_by
    if isinstance(call, DeviceWait):
        return "waits for its device, for example for", next(iter(device.unfinished))
    if isinstance(call, HostWait):
        return "waits for", next(thread.works[index] for index in call.after if not thread.works[index].ended)
    if isinstance(call, AwaitSignal):
        for work, signals in job.signals.items():
            if any(signal.name == call.name for signal in signals):
                return f"listens for {call.name}, which comes after", work
        senders = (each for state in job.devices.values() for each in state.threads if not each.ended)
        found = (each for each in senders if any(_signals(other, call.name) for other in each.program[each.position :]))
        return f"listens for {call.name} of", next(found, None)
    if thread in device.kept:
        return "finds its queue full behind", device.queues[device.queue_of[call.stream]][0]  # type: ignore[union-attr]
    assert isinstance(call, (Transfers, Collective))
    for other in job.devices.values():
        if other.rank != device.rank and not _has_come(job, call, device.rank, other.rank):
            return f"is in its call of {_what(call)}, to connect with", other.threads[0]
    raise AssertionError(f"nothing holds {thread.name} of {device.rank} at {call}")


def _has_come(job: Job, call: Transfers | Collective, rank: Rank, peer: Rank) -> bool:
    """Return whether `peer` is not awaited by `rank` for any connection of `call`."""
    key = call.communicator.key(rank)
    if isinstance(call, Collective):
        return peer in job.connecting[key, "all"] or call.communicator.key(peer) != key
    mine = [each for each in call.transfers if peer.stage in (each.source, each.target)]
    awaited = call.communicator.key(peer) == key and mine
    return not awaited or all(peer in job.connecting[key, each.source, each.target] for each in mine)


def _why_work(job: Job, work: Work) -> tuple[str, Thread | Work | None]:
    if work.started:
        return _why_resident(job, work)
    for before in (*work.after, work.previous):
        if before is not None and not before.ended:
            return "comes after", before
    if work.missing:
        return "is launched after", work.ordered
    first = work.device.queues[work.queue][0]
    if first is not work:
        return "stands in its queue behind", first
    running = work.device.running[work.queue]
    if running is not None and not running.ended:
        return "comes, on a serial device, after", running
    return "has no room next to", next((each for each in work.device.resident if each.blocks), None)


def _why_resident(job: Job, work: Work) -> tuple[str, Thread | Work | None]:
    if isinstance(work.call, Compute):
        return "has no room to end next to", next((each for each in work.device.resident if each.blocks), None)
    for rank, end in _other_ends(job, work):
        other = job.works.get((*end, rank))
        if other is None:
            return "is on its device; its other end waits for", job.devices[rank].threads[0]
        if not other.started:
            return "is on its device; its other end,", other
    return "is aborted at its other end", None


def _other_ends(job: Job, work: Work) -> Iterator[tuple[Rank, Any]]:
    """Members of what `work` takes part in, and the name of it."""
    rank = work.device.rank
    if isinstance(work.call, Collective):
        key = work.call.communicator.key(rank)
        yield from ((other, work.ends[0]) for other in job.devices if work.call.communicator.key(other) == key)
        return
    for transfer, end in zip(work.call.transfers, work.ends, strict=True):
        yield Rank(rank.replica, transfer.target if rank.stage == transfer.source else transfer.source), end


def _signals(call: Any, name: Hashable) -> bool:
    return isinstance(call, Signal) and call.name == name


def _name(waiting: Thread | Work) -> str:
    rank = waiting.device.rank
    if isinstance(waiting, Thread):
        return f"[{rank}: {waiting.name}]"
    return f"[{rank}: {_what(waiting.call, rank)}]"


def _what(call: Any, rank: Rank | None = None) -> str:
    if isinstance(call, Transfers):
        return " and ".join(
            f"{'transfer' if rank is None else 'send' if each.source == rank.stage else 'receive'} of {each.message} "
            f"{each.source}>{each.target}"
            for each in call.transfers
        )
    label = getattr(call, "label", None)
    if isinstance(label, tuple):
        iteration, action = label
        return f"{action} of iteration {iteration}"
    return str(label or f"{type(call).__name__} on {call.stream}")
