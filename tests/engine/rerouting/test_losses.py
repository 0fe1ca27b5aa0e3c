# SPDX-License-Identifier: Apache-2.0
"""Losses of routed micro-batches come home in order, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptra_megatron.engine.routed_inputs import Home, Reports, brought_home, form_of, reports_like

REPLICAS, MICRO_BATCHES = 3, 4


def reports(home: Home) -> Reports:
    loss = torch.tensor([home.share + home.number / 7, 10.0 + home.number])
    return {"lm loss": loss, "balance": torch.tensor(home.number, dtype=torch.int64)}


@given(st.lists(st.integers(0, REPLICAS - 1), min_size=REPLICAS * MICRO_BATCHES, max_size=REPLICAS * MICRO_BATCHES))
def test_every_replica_gets_its_own(hosts: list[int]) -> None:
    homes = [Home(replica, number) for replica in range(REPLICAS) for number in range(MICRO_BATCHES)]
    computed = [
        {home: reports(home) for home, host in zip(homes, hosts, strict=True) if host == cell}
        for cell in range(REPLICAS)
    ]
    parts: list[torch.Tensor] = []
    form = form_of(reports(homes[0]))
    assert form is not None
    like = reports_like(form, torch.device("cpu"))
    for cell in range(REPLICAS):
        brought_home(computed[cell], [cell], REPLICAS, MICRO_BATCHES, like, parts.append)
    whole = torch.stack(parts).sum(dim=0)
    for replica in range(REPLICAS):
        found = brought_home(
            computed[replica], [replica], REPLICAS, MICRO_BATCHES, like, lambda mine: mine.copy_(whole)
        )
        for number, entry in enumerate(found):
            expected = reports(Home(replica, number))
            assert entry.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(entry[name], value)
                assert entry[name].dtype == value.dtype


@pytest.mark.parametrize("reports", [{"lm loss": 1.5}, torch.tensor(1.5), None])
def test_what_could_not_be_brought_home_has_no_form(reports: Any) -> None:
    assert form_of(reports) is None
