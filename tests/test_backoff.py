# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from adaptra_megatron.common.backoff import Backoff


def test_pauses_grow_to_a_limit_until_an_attempt_succeeds() -> None:
    backoff = Backoff(0.5, 2.0, 1.5)
    assert [backoff.next_s() for _ in range(5)] == [0.5, 0.75, 1.125, 1.6875, 2.0]
    assert (backoff.pause_s, backoff.failures) == (2.0, 5)
    backoff.reset()
    assert (backoff.pause_s, backoff.failures) == (0.5, 0)
