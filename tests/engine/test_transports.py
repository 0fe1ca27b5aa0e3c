# SPDX-License-Identifier: Apache-2.0
"""Which transport a pipeline of GPUs gets under settings of NCCL that a link with two paths cannot live with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.engine import rank_transports as transports
from adaptra_megatron.engine.rank_transports import BLOCKING_VARIABLES, ORDER_VARIABLE, make_transport
from adaptra_megatron.transport.message_keys import TransportError
from adaptra_megatron.transport.single_path import nccl_transport

GPU = torch.device("cuda", 0)


class Rendezvous:
    """Of one rank, in words that it has said."""

    layout = SimpleNamespace(rank=0, name="rank {}".format)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Which transport was made, of what is there of NCCL."""
    found: list[tuple[str, Any]] = []

    def agree(rendezvous: Any, what: str, failure: Exception | None) -> None:
        if failure is not None:
            raise TransportError(str(failure))

    def two_paths(*given: Any) -> str:
        found.append(("two paths", given[4]))
        return "two paths"

    monkeypatch.setattr(transports, "current_device", lambda: GPU)
    monkeypatch.setattr(transports, "device_of", lambda device: SimpleNamespace(device=device))
    monkeypatch.setattr(transports, "pci_bus_id", lambda device: None)
    monkeypatch.setattr(transports, "_nccl_side", lambda *_: None)
    monkeypatch.setattr(transports, "_say_once", lambda rendezvous, text: found.append(("said", text)))
    maker = SimpleNamespace(connect=lambda wrap: None, links=dict)
    monkeypatch.setattr(transports, "LinkMaker", lambda rendezvous, gpu: maker)
    monkeypatch.setattr(transports, "agree_on_host_path", agree)
    monkeypatch.setattr(nccl_transport, "StreamTransport", lambda *_, **__: found.append(("one path", maker)))
    monkeypatch.setattr("adaptra_megatron.transport.dual_path.host_transport.HostTransport", two_paths)
    for name in (*BLOCKING_VARIABLES, ORDER_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return found


def make(host_transport: str) -> None:
    call: Any = SimpleNamespace(chunks=1, message_nbytes=64)
    rendezvous: Any = Rendezvous()
    make_transport(rendezvous, call, AdaptraConfig(host_transport=host_transport), None, 60.0)


@pytest.mark.parametrize(("value", "kinds"), [("1", ["one path"]), ("0", ["two paths"]), ("", ["two paths"])])
def test_where_nccl_keeps_the_order_of_launches_links_have_one_path(
    made: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch, value: str, kinds: list[str]
) -> None:
    """It refuses kernels from two threads, and the path that is not taken is probed by one of its own."""
    monkeypatch.setenv(ORDER_VARIABLE, value)
    make("auto")
    assert [kind for kind, _ in made if kind != "said"] == kinds


def test_a_host_path_that_was_asked_for_by_name_is_refused_there(
    made: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ORDER_VARIABLE, "1")
    with pytest.raises(TransportError, match=f"{ORDER_VARIABLE} has NCCL refuse kernels .*: unset it"):
        make("tcp")
    assert all(kind == "said" for kind, _ in made)


@pytest.mark.parametrize("variable", BLOCKING_VARIABLES)
def test_where_nccl_blocks_nothing_of_it_is_made_and_the_order_of_its_launches_is_no_matter(
    made: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    monkeypatch.setenv(ORDER_VARIABLE, "1")
    make("auto")
    assert [given for kind, given in made if kind == "two paths"] == [None]
    assert any(f"{variable}=1 keeps messages from the GPUs' own path" in text for kind, text in made if kind == "said")
