# SPDX-License-Identifier: Apache-2.0
"""Values in the job's store have a limit of size, and larger ones come in parts."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed import HashStore

from adaptra_megatron.common.sealed_store import _IN_PARTS, MOST_NBYTES, SealedStore, TamperedError

SEAL_NBYTES = 32


@pytest.fixture
def raw() -> Any:
    return HashStore()


@pytest.fixture
def store(raw: Any) -> SealedStore:
    return SealedStore(raw, b"0" * 32, "here")


def test_a_value_that_is_too_large_is_refused_by_its_key_and_size(store: SealedStore) -> None:
    store.set("largest", bytes(MOST_NBYTES - SEAL_NBYTES))
    for put in (store.set, store.put_once):
        with pytest.raises(ValueError, match="'key' would have 1048577 bytes in the job's store, of 1048576 at most"):
            put("key", bytes(MOST_NBYTES - SEAL_NBYTES + 1))
    assert store.peek("key") is None


@pytest.mark.parametrize(
    "value", [b"", b"small", bytes(MOST_NBYTES), bytes(range(256)) * (12 << 10) + b"end", _IN_PARTS + b"3"]
)
def test_a_value_in_parts_is_read_as_a_whole_and_deleted_with_them(value: bytes, store: SealedStore, raw: Any) -> None:
    store.set_parts("key", value)
    assert store.get("key") == store.peek("key") == value
    assert store.delete_key("key")
    assert raw.num_keys() == 0


def test_a_part_that_no_rank_has_put_there_is_refused(store: SealedStore, raw: Any) -> None:
    store.set_parts("key", bytes(MOST_NBYTES))
    raw.set("key/1", raw.get("key/0"))
    with pytest.raises(TamperedError, match="'key/1'"):
        store.peek("key")
