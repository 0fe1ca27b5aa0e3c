# SPDX-License-Identifier: Apache-2.0
"""Records of who lives, as ranks read them."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from adaptra_megatron.common.layout import Cell, JobLayout, Worker
from adaptra_megatron.common.membership import (
    Arrival,
    Departure,
    Membership,
    MembershipRecords,
    Readiness,
    launch_store,
)
from adaptra_megatron.common.sealed_store import MOST_NBYTES, SealedStore, TamperedError
from adaptra_megatron.common.typed_messages import packed

EPOCHS = [
    Membership(0, 4, 1000.0, ()),
    Membership(1, 4, 1001.0, (Departure(2, 1, "b", "was killed by SIGKILL", 1000.9),)),
    Membership(2, 4, 1002.0, (Departure(2, 1, "b", "was killed", 1000.9), Departure(0, 2, "a", "ended", 1001.9))),
]


@pytest.fixture
def store() -> Any:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))


@pytest.fixture
def environment(store: Any) -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_RUN_ID": "a job"}


def test_ranks_read_what_the_coordinator_writes(store: Any, environment: dict[str, str]) -> None:
    writer, reader = MembershipRecords(launch_store(store, "a job")), MembershipRecords.of_rank(10.0, environment)
    assert reader.newest() is None
    assert reader.wait_beyond(0, 0.1) is None
    for membership in EPOCHS:
        writer.publish(membership)
        assert writer.newest() == membership  # once it is there: what is set is not answered
        assert reader.newest() == membership
    assert [each.live for each in EPOCHS] == [(0, 1, 2, 3), (0, 1, 3), (1, 3)]


def test_a_rank_that_waits_skips_epochs_that_have_passed(store: Any, environment: dict[str, str]) -> None:
    writer, reader = MembershipRecords(launch_store(store, "a job")), MembershipRecords.of_rank(10.0, environment)
    for membership in EPOCHS:
        writer.publish(membership)
    assert writer.newest() == EPOCHS[2]
    assert reader.wait_beyond(0, 0.1) == EPOCHS[2]
    assert reader.wait_beyond(2, 0.1) is None


def test_old_records_are_deleted_and_a_rank_that_is_far_behind_sees_the_newest(
    store: Any, environment: dict[str, str]
) -> None:
    writer, reader = MembershipRecords(launch_store(store, "a job")), MembershipRecords.of_rank(10.0, environment)
    keys = store.num_keys()
    for epoch in range(1000):
        writer.publish(replace(EPOCHS[0], epoch=epoch))
    assert writer.newest() == replace(EPOCHS[0], epoch=999)
    assert store.num_keys() - keys < 300
    assert reader.wait_beyond(0, 0.1) == replace(EPOCHS[0], epoch=999)
    assert reader.of_epoch(800) == replace(EPOCHS[0], epoch=800)


def test_ranks_say_who_was_admitted(store: Any, environment: dict[str, str]) -> None:
    writer, reader = MembershipRecords(launch_store(store, "a job")), MembershipRecords.of_rank(10.0, environment)
    assert reader.admitted() == {}
    writer.say_admitted({1: 2, 3: 7})
    assert writer.admitted() == {1: 2, 3: 7}
    assert reader.admitted() == {1: 2, 3: 7}


def test_another_jobs_record_is_none_of_ours(store: Any, environment: dict[str, str]) -> None:
    MembershipRecords(launch_store(store, "another")).publish(EPOCHS[0])
    assert MembershipRecords.of_rank(10.0, environment).newest() is None


def test_a_record_that_the_coordinator_did_not_write_is_refused(store: Any, environment: dict[str, str]) -> None:
    records = MembershipRecords(launch_store(store, "a job"))
    records.publish(EPOCHS[0])
    assert records.newest() == EPOCHS[0]
    store.set("adaptra/launch/a job/membership/newest", "1")
    assert store.get("adaptra/launch/a job/membership/newest") == b"1"
    with pytest.raises(TamperedError, match="membership/newest"):
        MembershipRecords.of_rank(10.0, environment).newest()


def test_records_of_131072_ranks_are_in_parts_that_the_store_takes(store: Any, environment: dict[str, str]) -> None:
    """All ranks have left, and half of them have come back."""
    count, host, identity = 1 << 17, "node-16384.a-cluster", f"{'0' * 36}/4026531840"
    worker = Worker(Cell(1023, 15), 7, host, identity, "mlx5_0")
    layout = packed(JobLayout(0, dict.fromkeys(range(count), worker)).record())
    left = tuple(Departure(rank, 1, host, f"host {host} has been silent for 15.2 s", 0.5) for rank in range(count))
    back = tuple(Arrival(rank, 2, Readiness(1, 1, host, identity)) for rank in range(count // 2))
    membership = Membership(1, count, 1000.0, left, back)
    writer, reader = MembershipRecords(launch_store(store, "a job")), MembershipRecords.of_rank(10.0, environment)
    writer.publish_layout(layout)
    writer.publish(membership)
    assert writer.newest() == membership
    assert reader.layout() == layout
    assert reader.newest() == membership
    sizes = [len(store.get(key)) for key in store.list_keys()]
    assert sum(sizes) > len(layout) + len(packed(membership)) > 30 << 20
    assert max(sizes) <= MOST_NBYTES


def test_a_record_is_read_once_however_often_it_is_polled_for(
    store: Any, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = MembershipRecords(launch_store(store, "a job")), MembershipRecords.of_rank(10.0, environment)
    writer.publish(EPOCHS[0])
    assert writer.newest() == reader.newest() == EPOCHS[0]
    monkeypatch.delattr(SealedStore, "get")
    assert reader.newest() == EPOCHS[0]
    monkeypatch.undo()
    writer.publish(EPOCHS[1])
    assert writer.newest() == reader.newest() == EPOCHS[1]
