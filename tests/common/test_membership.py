# SPDX-License-Identifier: Apache-2.0
"""Records of who lives, as ranks read them."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from adaptra_megatron.common.membership import Departure, Membership, MembershipRecords, launch_store
from adaptra_megatron.common.sealed_store import TamperedError

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
    with pytest.raises(TamperedError, match="membership/newest"):
        MembershipRecords.of_rank(10.0, environment).newest()
