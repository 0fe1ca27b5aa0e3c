# SPDX-License-Identifier: Apache-2.0
"""Emulated deaths of the device path, on a real pair of gloo groups within one process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.gathering import epoch_group
from adaptra_megatron.transport.device_session.pair_group import PairEnds, PairGroup
from testing.faults.network.path_faults import Mode, PathFaults

LINK = (0, 1)


@pytest.fixture
def pair() -> Iterator[tuple[PairGroup, PairGroup]]:
    """Source's and target's end of link 0->1."""
    control, ends = ControlStore(dist.HashStore(), b"", "job"), PairEnds(0, 1)
    with ThreadPoolExecutor(2) as pool:
        groups = [pool.submit(epoch_group, control, "pair", ends, rank, 10.0) for rank in ends]
    source, target = (
        PairGroup(group.result(), ends, sends=sends) for group, sends in zip(groups, (True, False), strict=True)
    )
    yield source, target
    source.abort()
    target.abort()


def passes(source: PairGroup, target: PairGroup, tag: int) -> bool:
    """Return whether a message gets through. One that does not ends the groups."""
    buffer = torch.zeros(3)
    work = target.receive(buffer, tag)
    sent = source.send(torch.full((3,), float(tag)), tag)
    try:
        target.wait(work, 10.0)
        source.wait(sent, 10.0)
    except RuntimeError:
        return False
    return bool((buffer == tag).all())


def test_a_silent_path_swallows_messages_and_ends_with_its_group(pair: tuple[PairGroup, PairGroup]) -> None:
    source, target = pair
    with PathFaults() as faults:
        assert passes(source, target, 1)
        faults.arm(LINK, Mode.SILENT, 30.0)
        assert faults.armed == 1
        sent = source.send(torch.ones(3), 2)
        assert (faults.armed, len(faults.begun), faults.struck[Mode.SILENT]) == (0, 1, 1)
        work = target.receive(torch.zeros(3), 2)
        with pytest.raises(RuntimeError):
            target.wait(work, 0.2)
        with pytest.raises(RuntimeError):  # the target has given the group up: no need to wait for the timeout
            source.wait(sent, 10.0)


def test_an_error_is_raised_at_the_end_where_it_is_installed(pair: tuple[PairGroup, PairGroup]) -> None:
    source, target = pair
    with PathFaults() as faults:
        faults.arm(LINK, Mode.ERROR, 30.0)
        for call in (source.send, target.receive):
            with pytest.raises(RuntimeError, match="emulated"):
                call(torch.ones(3), 1)
        assert (len(faults.begun), faults.struck[Mode.ERROR]) == (1, 2)
    assert passes(source, target, 2), "the decorators are still there"


def test_a_fault_heals_by_itself(pair: tuple[PairGroup, PairGroup]) -> None:
    source, target = pair
    with PathFaults() as faults:
        faults.arm(LINK, Mode.ERROR, 0.05)
        with pytest.raises(RuntimeError, match="emulated"):
            source.send(torch.ones(3), 1)
        time.sleep(0.06)
        assert passes(source, target, 2)
        assert faults.struck[Mode.ERROR] == 1


def test_other_links_are_not_struck(pair: tuple[PairGroup, PairGroup]) -> None:
    source, target = pair
    with PathFaults() as faults:
        faults.arm((1, 0), Mode.SILENT, 30.0)
        faults.arm((1, 2), Mode.ERROR, 30.0)
        assert passes(source, target, 1)
        assert faults.armed == 2
    with PathFaults(stage_of_rank=lambda rank: rank + 4) as faults:
        faults.arm((4, 5), Mode.ERROR, 30.0)
        with pytest.raises(RuntimeError, match="emulated"):
            source.send(torch.ones(3), 1)
