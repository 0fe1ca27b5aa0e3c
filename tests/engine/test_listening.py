# SPDX-License-Identifier: Apache-2.0
"""Where sidecar processes of a rank listen for other ranks."""

from __future__ import annotations

import logging
import socket

import pytest
from support.made_up.job import layout

from adaptra_megatron.common.layout import JobLayout
from adaptra_megatron.common.ports import PortRange
from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.engine.training_job import listen_for

SAID = "measurements of ranks on other hosts cannot be handed in"


def two_ranks(*identities: str) -> JobLayout:
    """A pipeline of two stages on hosts of these identities."""
    made = layout([[0, 1]], 0)
    for rank, identity in enumerate(identities):
        made.move(rank, "host", identity)
    return made


def listening(job: JobLayout, config: AdaptraConfig) -> socket.socket:
    return listen_for(job, [0, 1], config, "so plans stay")


def test_a_replica_on_one_host_connects_by_loopback(caplog: pytest.LogCaptureFixture) -> None:
    with listening(two_ranks("boot/net", "boot/net"), AdaptraConfig()) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    assert not caplog.records


@pytest.mark.parametrize("other", ["other boot/net", "boot/other net"])
@pytest.mark.parametrize("interface", [None, "lo"])
def test_where_no_address_leads_there_the_job_begins_all_the_same(
    other: str, interface: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two hosts have two clocks, and so have two containers of one host."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with caplog.at_level(logging.WARNING):
        listener = listening(two_ranks("boot/net", other), AdaptraConfig(interface=interface))
    assert listener.getsockname()[0] == "127.0.0.1"
    listener.close()
    assert f"{SAID}, so plans stay: " in caplog.text
    assert "--adaptra-interface NAME" in caplog.text


def test_where_no_port_is_free_the_job_begins_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        config = AdaptraConfig(port_range=PortRange(port, port))
        with listening(two_ranks("boot/net", "boot/net"), config) as listener:
            assert listener.getsockname()[1] != port
    assert SAID in caplog.text
    assert f"no port of {port}-{port} is free" in caplog.text
