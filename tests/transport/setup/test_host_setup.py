# SPDX-License-Identifier: Apache-2.0
"""Setting up the host path: which address a stage listens on, and that what fails on one stage fails on all at once."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from adaptra_megatron.common import layout as identity
from adaptra_megatron.transport.message_keys import TransportError
from adaptra_megatron.transport.setup import host_placement as placement
from adaptra_megatron.transport.setup.interfaces import InterfaceError, interface_address, interface_addresses

RANKS = str(Path(__file__).parents[1] / "ranks" / "host_setup_ranks.py")

SCENARIOS = (
    "no_such_interface",
    "cannot_listen",
    "a_bug",
    "different_hosts",
    "half_listening",
    "supervisor_fails",
)


def test_what_keeps_one_rank_from_it_is_an_error_of_all(start_ranks: Callable[..., list]) -> None:
    for rank in start_ranks(2, [RANKS, *SCENARIOS], timeout_s=60.0):
        assert rank.output.count(" passed\n") == len(SCENARIOS)


def beyond_loopback() -> str:
    """The name of an interface with an address that others could use."""
    for _index, name in socket.if_nameindex():
        if name != "lo" and interface_addresses(name):
            return name
    pytest.skip("this machine has loopback alone")


class TestInterfaces:
    def test_an_address_of_ipv4_comes_first(self) -> None:
        assert interface_address("lo") == "127.0.0.1"
        with socket.socket() as listener:
            listener.bind((interface_address("lo"), 0))

    @pytest.mark.parametrize("name", ["", "adaptra-none", "a-name-longer-than-the-kernel-has", "eth\udcff"])
    def test_an_unknown_one_is_an_error_that_names_the_others(self, name: str) -> None:
        with pytest.raises(InterfaceError, match=r"does not exist; this host has .*lo \(127\.0\.0\.1\)"):
            interface_address(name)

    def test_ipv6_without_scope_and_without_doubt(self, tmp_path: Path) -> None:
        (tmp_path / "net").mkdir()
        rows = (
            "fe800000000000000000000000000001 02 40 20 80 six0",
            "20010db8000000000000000000000001 02 40 00 c0 six0",  # tentative
            "20010db8000000000000000000000002 02 40 00 88 six0",  # another host has it too
            "20010db8000000000000000000000003 02 40 00 80 six0",
            "20010db8000000000000000000000004 02 40 00 80 other0",
        )
        (tmp_path / "net" / "if_inet6").write_text("\n".join(rows) + "\n")
        assert interface_addresses("six0", tmp_path) == ("2001:db8::3",)

    def test_a_host_without_ipv6(self, tmp_path: Path) -> None:
        assert interface_addresses("lo", tmp_path) == ("127.0.0.1",)


class TestListeningHost:
    def test_the_interface_that_was_asked_for(self) -> None:
        name = beyond_loopback()
        for one_host in (True, False):
            assert placement.listening_host(name, one_host=one_host, environment={}) == interface_address(name)

    def test_loopback_leads_to_no_other_host(self) -> None:
        assert placement.listening_host("lo", one_host=True) == "127.0.0.1"
        with pytest.raises(TransportError, match="'lo' is loopback, .* by --adaptra-interface NAME"):
            placement.listening_host("lo", one_host=False)

    @pytest.mark.parametrize("listed", ["{}", "{},adaptra-none", " {} , lo"])
    def test_gloos_interface_is_ours_between_hosts(self, listed: str) -> None:
        name = beyond_loopback()
        environment = {"GLOO_SOCKET_IFNAME": listed.format(name), "MASTER_ADDR": "127.0.0.1"}
        assert placement.listening_host(None, one_host=False, environment=environment) == interface_address(name)
        assert placement.listening_host(None, one_host=True, environment=environment) == "127.0.0.1"

    @pytest.mark.parametrize("name", ["adaptra-none", "lo"])
    def test_gloos_interface_is_ignored_where_it_cannot_be(self, name: str, caplog: pytest.LogCaptureFixture) -> None:
        there = interface_address(beyond_loopback())
        environment = {"GLOO_SOCKET_IFNAME": name, "MASTER_ADDR": there}
        assert placement.listening_host(None, one_host=False, environment=environment) == there
        assert "GLOO_SOCKET_IFNAME is ignored: the network interface" in caplog.text

    @pytest.mark.parametrize("master", ["", "a" * 300, "no such host.", "a..b", "127.0.0.1"])
    def test_a_master_that_says_nothing_is_an_error_with_a_remedy(self, master: str) -> None:
        with pytest.raises(TransportError, match=r"MASTER_ADDR is .* --adaptra-interface NAME"):
            placement.listening_host(None, one_host=False, environment={"MASTER_ADDR": master})


class TestHostIdentity:
    def test_the_same_for_processes_that_can_share_memory(self) -> None:
        assert identity.host_identity() == identity.host_identity()
        assert len(identity.boot_identity()) == 36

    def test_a_masked_boot_is_no_error_and_no_hosts(self, tmp_path: Path) -> None:
        assert identity.boot_identity(tmp_path) != identity.boot_identity(tmp_path)

    @pytest.mark.parametrize("missing", ["sys/kernel/random/boot_id", "self/ns/net"])
    def test_a_host_without_an_identity_is_no_hosts(self, missing: str, tmp_path: Path) -> None:
        for name in ("sys/kernel/random/boot_id", "self/ns/net"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            if name != missing:
                (tmp_path / name).write_text("something")
        ours, theirs = identity.host_identity(tmp_path), identity.host_identity(tmp_path)
        assert ours.partition("/")[0] != theirs.partition("/")[0]
        assert placement.choose_transport("auto", ours, theirs, "0<->1") == "tcp"
