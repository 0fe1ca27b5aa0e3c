# SPDX-License-Identifier: Apache-2.0
"""Findings get names, and those of all replicas come to the leader who says them."""

from __future__ import annotations

from support.made_up.job import SECRET
from torch.distributed import HashStore

from adaptra_megatron.common.layout import Cell, JobLayout, Worker
from adaptra_megatron.common.sealed_store import SealedStore
from adaptra_megatron.control.finding_sharing import NamedFindings, SharedFindings
from adaptra_megatron.telemetry.events import Event, Fault, LinkDetection, PlanSwitched, StageDetection

WORKERS = {
    4 * replica + 2 * stage + lane: Worker(
        Cell(replica, stage), lane, f"node{2 * replica + stage}", "boot/net", f"mlx5_{lane}" if stage else ""
    )
    for replica in range(2)
    for stage in range(2)
    for lane in range(2)
}
"""Two replicas of two stages and two lanes, each cell on a host of its own."""
LINK = LinkDetection(source=1, target=0, before="healthy", after="slow", reason="80 ms", pipeline=5)


class Kept:
    """What has been logged."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def log(self, event: Event) -> None:
        self.events.append(event)


def test_a_finding_names_ranks_hosts_and_rnics() -> None:
    kept = Kept()
    named = NamedFindings(JobLayout(0, WORKERS), kept)
    stage = StageDetection(stage=1, before="healthy", after="slow", reason="2 ms", pipeline=4)
    for event in (LINK, stage, Fault(what="x")):
        named.log(event)
    link, slow, fault = kept.events
    assert isinstance(link, LinkDetection)
    assert (link.replica, link.lane, link.source_rank, link.target_rank) == (1, 1, 7, 5)
    assert (link.source_host, link.target_host) == ("node3", "node2")
    assert (link.source_rnics, link.target_rnics) == (("mlx5_1",), ())
    assert isinstance(slow, StageDetection)
    assert (slow.replica, slow.stage_rank, slow.host) == (1, 6, "node3")
    assert fault == Fault(what="x")


def test_the_first_leader_learns_what_others_find_and_the_store_does_not_grow() -> None:
    plain, received = HashStore(), list[tuple[int, Event]]()
    store = SealedStore(plain, SECRET, "findings")
    first = SharedFindings(store, JobLayout(0, WORKERS), lambda replica, event: received.append((replica, event)))
    other = SharedFindings(store, JobLayout(4, WORKERS), None)
    switch = PlanSwitched(number=3, before=2)
    first.exchange()
    other.post(LINK)
    other.post(switch)
    assert received == []
    other.exchange()
    first.exchange()
    assert [replica for replica, _ in received] == [1, 1]
    assert received[1][1] == switch
    assert isinstance(received[0][1], LinkDetection)
    other.post(switch)
    other.exchange()
    first.exchange()
    assert len(received) == 3
    assert plain.num_keys() == 1, "how many there were"
