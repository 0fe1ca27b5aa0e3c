# SPDX-License-Identifier: Apache-2.0
"""Where the stages of a pipeline meet: what a stage that comes too late is met with."""

from __future__ import annotations

import time

import pytest
from support.made_up.job import rendezvous
from torch.distributed import HashStore

from adaptra_megatron.transport.message_keys import TransportError


def test_a_stage_that_comes_after_another_gave_up_raises_the_same_at_once() -> None:
    store = HashStore()
    early, late = (rendezvous(store, [4, 5], stage, timeout_s) for stage, timeout_s in ((0, 0.2), (1, 60.0)))
    with pytest.raises(TransportError, match="of at most 0.2 s .* in vain for rank 5") as given_up:
        early.gather("connecting", None)
    since_s = time.monotonic()
    with pytest.raises(TransportError) as met:
        late.gather("connecting", None)
    assert str(met.value) == str(given_up.value)
    assert time.monotonic() - since_s < 30.0, "it waited for a stage that has left"
