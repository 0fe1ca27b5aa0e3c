# SPDX-License-Identifier: Apache-2.0
"""How the links of a pipeline are connected: in rounds, by what its stages alone do, and with errors that all share."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from support.gpu.simulated_pipeline import SimulatedStage, play
from support.made_up.job import rendezvous

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.transport.device_session.nccl_library import NcclError
from adaptra_megatron.transport.device_session.pair_group import PairEnds
from adaptra_megatron.transport.message_keys import TransportError
from adaptra_megatron.transport.setup import link_setup
from adaptra_megatron.transport.setup.link_setup import LinkMaker, rounds
from adaptra_megatron.transport.setup.rendezvous import Rendezvous
from testing.waiting import until


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("stages", range(2, 18))
def test_every_link_has_a_round_in_which_its_stages_have_no_other(stages: int, wrap: bool) -> None:
    ring = [(stage, stage + 1) for stage in range(stages - 1)]
    if wrap and stages > 2:
        ring.append((stages - 1, 0))
    expected = sorted({link for a, b in ring for link in ((a, b), (b, a))})
    found = list(rounds(stages, wrap=wrap))
    assert sorted(link for links in found for link in links) == expected
    assert len(found) <= (6 if wrap and stages % 2 else 4)
    for links in found:
        taken = [stage for link in links for stage in link]
        assert len(taken) == len(set(taken))


@pytest.mark.parametrize(("stages", "wrap"), [(2, True), (4, False), (4, True), (5, True)])
def test_links_of_simulated_gpus_greet_in_both_directions(stages: int, wrap: bool) -> None:
    def program(stage: SimulatedStage, rendezvous: Rendezvous) -> list[str]:
        maker = stage.maker(rendezvous)
        maker.connect(wrap=wrap)
        links = maker.links()
        made = [end.name for end in stage.nccl.fabric.of(stage.device)]
        assert all(transfer.over for end in stage.nccl.fabric.of(stage.device) for transfer in end.launched)
        for group in links.values():
            group.abort()
        return made

    for stage, made in enumerate(play(stages, program)):
        names = [f"adaptra {a}>{b}" for links in rounds(stages, wrap=wrap) for a, b in links if stage in (a, b)]
        assert made == names, "in the order of the rounds"


FAILED = {"same gpu": (1, 2), "no nccl": (0, 1), "broken": (0, 1)}
"""Stages of the link that is not connected. A stage whose peer fails waits to the end of the round: for the last two,
that is the first one."""


@pytest.mark.parametrize("failing", FAILED)
def test_what_keeps_one_link_from_it_is_an_error_of_all_stages(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_setup, "ROUND_S", 5.0)
    source, target = FAILED[failing]

    def program(stage: SimulatedStage, rendezvous: Rendezvous) -> str:
        if failing == "broken" and stage.stage == target:
            _fail_once(stage.nccl, "receive")
        if failing == "no nccl" and stage.stage == target:
            _fail_once(stage.nccl, "init_rank")
        maker = stage.maker(rendezvous, "gpu 1" if failing == "same gpu" and stage.stage in (1, 2) else None)
        maker.connect(wrap=False)
        with pytest.raises(TransportError) as failed:
            maker.links()
        for end in stage.nccl.fabric.of(stage.device):
            until(lambda end=end: end.freed)
        return str(failed.value)

    first, *others = play(4, program)
    assert [*others] == [first] * 3, others
    cause = {"same gpu": "both stages are on one GPU", "no nccl": "NCCL has no memory", "broken": "NCCL has no memory"}
    for part in (
        "the device path does not come up",
        f"link from rank {source} (stage {source} on ",
        f"to rank {target} (stage {target}",
        cause[failing],
    ):
        assert part in first, f"{part!r} is missing in: {first}"


def _fail_once(nccl: Any, name: str) -> None:
    """The first call of this function of NCCL's fails."""
    call = getattr(nccl, name)

    def failing(*_: Any) -> Any:
        setattr(nccl, name, call)
        raise NcclError("NCCL has no memory")

    setattr(nccl, name, failing)


def test_a_link_that_changes_what_it_carries_is_not_connected() -> None:
    def program(stage: SimulatedStage, rendezvous: Rendezvous) -> str:
        stage.nccl.fabric.spoils = True
        maker = stage.maker(rendezvous)
        maker.connect(wrap=False)
        with pytest.raises(TransportError) as failed:
            maker.links()
        return str(failed.value)

    first, second = play(2, program)
    assert first == second
    assert "the greeting arrived corrupted" in first


class CountingStore:
    """torch.distributed's in-process store, and how often each thread has asked it something."""

    timeout = timedelta(seconds=60)

    def __init__(self, store: Any = None, counts: Counter[tuple[str, str]] | None = None) -> None:
        self._store = store if store is not None else dist.HashStore()
        self.counts: Counter[tuple[str, str]] = Counter() if counts is None else counts
        """By name of the thread, and of what was asked."""
        self.keys: set[str] = set()

    def clone(self) -> CountingStore:
        return self

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            if name != "set_timeout":
                self.counts[threading.current_thread().name, name] += 1
                self.keys.add(arguments[0])
            return call(*arguments)

        return counted


class CountingPrefix:
    """As PrefixStore."""

    def __init__(self, prefix: str, store: Any) -> None:
        self._prefix, self._store = prefix, store

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)
        return lambda key, *rest: call(key if name == "set_timeout" else f"{self._prefix}/{key}", *rest)


def start_up(world: int, stages: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Most operations on the store, and groups made, of any rank of one pipeline in a job of `world` ranks."""
    store, groups = CountingStore(), Counter[str]()
    monkeypatch.setattr("adaptra_megatron.common.control_store.PrefixStore", CountingPrefix)

    def group(control: ControlStore, place: str, ends: PairEnds, rank: int, timeout_s: float) -> Any:
        """What NCCL's ends ask the store for; nothing is connected."""
        own, sends = control.unsealed(place), rank == ends.source
        groups[threading.current_thread().name] += 1
        own.set(f"gpu/{int(not sends)}", "a gpu")
        own.get(f"gpu/{int(sends)}")
        if sends:
            own.set("id", b"an id")
        own.get("id")
        return _Nothing()

    monkeypatch.setattr(link_setup, "epoch_group", group)
    monkeypatch.setattr(link_setup, "PairGroup", lambda made, ends, *, sends: made)
    monkeypatch.setattr(link_setup, "greet", lambda *_: None)
    ranks = range(0, world, world // stages)

    def start(stage: int) -> None:
        threading.current_thread().name = f"stage {stage}"
        maker = LinkMaker(rendezvous(store, ranks, stage, 20.0), None)
        maker.connect(wrap=True)
        maker.links()

    with ThreadPoolExecutor(stages) as threads:
        for result in [threads.submit(start, stage) for stage in range(stages)]:
            result.result()
    operations = Counter[str]()
    for (thread, _what), count in store.counts.items():
        operations[thread] += count
    return max(operations.values()), max(groups.values())


class _Nothing:
    def wait_until_freed(self, deadline_s: float) -> bool:
        return True

    def abort(self, cause: str = "") -> None:
        """There is nothing."""


def test_starting_takes_no_more_of_the_store_in_a_larger_job(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {world: start_up(world, 16, monkeypatch) for world in (16, 256, 4096)}
    operations, groups = counts[16]
    assert counts == dict.fromkeys((16, 256, 4096), (operations, groups))
    assert groups == 4
    assert operations <= 4 * 16 + 40
    assert start_up(4096, 4, monkeypatch)[0] < operations, "it grows with the pipeline alone"


def test_no_session_is_tried_at_a_store_that_is_gone() -> None:
    """torch's own client would try for as long as its timeout lets it, in a thread that the link does not end."""
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = dist.TCPStore("127.0.0.1", served.port, is_master=False, timeout=timedelta(seconds=60))
    control = ControlStore(dist.PrefixStore("job", job), b"secret", "token")
    control.reach(30.0)
    del served
    began_s = time.monotonic()
    with pytest.raises(RuntimeError, match=r"the job's store at 127\.0\.0\.1:\d+ cannot be reached: .*refused"):
        control.reach(30.0)
    assert time.monotonic() - began_s < 20.0
