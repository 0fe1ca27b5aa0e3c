# SPDX-License-Identifier: Apache-2.0
"""Listeners of a job stay within the ports that a firewall lets through, whatever else listens there."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch.distributed as dist
from support.made_up.job import SECRET, layout
from support.namespaces import ADDRESSES, Host, joined_hosts

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.ports import PortRange, bound_within
from adaptra_megatron.control.clocks import ClockSettings, _Relating
from adaptra_megatron.tools.local_ranks.launch_ranks import free_port
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.message_keys import TransportError
from adaptra_megatron.transport.setup.host_placement import listen_tcp
from adaptra_megatron.transport.setup.host_setup import HostSetup

HERE = "127.0.0.1"


def a_range(ports: int) -> PortRange:
    """A range in which nothing listens on loopback."""
    while True:
        first = free_port()
        try:
            with ExitStack() as stack:
                for port in range(first, first + ports):
                    probe = stack.enter_context(socket.socket())
                    probe.bind((HERE, port))
        except OSError:
            continue
        return PortRange(first, first + ports - 1)


@pytest.fixture
def listening() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_range_is_read_as_it_is_written() -> None:
    assert PortRange.parsed("20000-20127") == PortRange(20000, 20127)
    assert str(PortRange.parsed("29500-29500")) == "29500-29500"


@pytest.mark.parametrize("text", ["", "20000", "20000-", "-20000", "a-b", "20000:20127", " 1-2", "1-2-3", "1-200000"])
def test_what_is_no_range_is_an_error_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no range of ports: give FIRST-LAST, for example 20000-20127"):
        PortRange.parsed(text)


@pytest.mark.parametrize("text", ["0-10", "20127-20000", "65000-65536"])
def test_ports_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=rf"the ports {text} are no range: FIRST-LAST must be from 1 to 65535"):
        PortRange.parsed(text)


def test_ports_that_are_taken_are_passed_over_until_none_is_left(listening: ExitStack) -> None:
    ports = a_range(3)
    listening.enter_context(socket.create_server((HERE, ports.first + 1)))
    found = [listening.enter_context(bound_within(HERE, ports)).getsockname()[1] for _ in range(2)]
    assert found == [ports.first, ports.last]
    with pytest.raises(TransportError, match=rf"no port of {ports} is free; .* --adaptra-port-range") as refused:
        listen_tcp(HERE, ports)
    assert "--adaptra-interface" not in str(refused.value)


def test_an_address_of_another_host_is_no_matter_of_ports() -> None:
    with pytest.raises(OSError, match="Cannot assign requested address"):
        bound_within("192.0.2.1", PortRange(20000, 20127))


def test_ranks_that_search_at_the_same_time_find_different_ports(listening: ExitStack) -> None:
    ports = a_range(24)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: bound_within(HERE, ports), range(24)))
    for each in found:
        listening.enter_context(each)
    assert sorted(each.getsockname()[1] for each in found) == list(range(ports.first, ports.last + 1))


def test_a_job_that_has_just_ended_does_not_hold_its_ports() -> None:
    """The side that closes first keeps a connection's port for a minute."""
    ports = a_range(1)
    for _ in range(2):
        with bound_within(HERE, ports) as listener, socket.create_connection(listener.getsockname()) as client:
            accepted, _address = listener.accept()
            accepted.close()
            assert client.recv(1) == b""


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with joined_hosts(2) as both:
        yield both


@pytest.mark.parametrize("machines", [("one", "other"), ("one/here", "one/there")])
def test_all_that_two_hosts_listen_on_is_within_the_range(
    machines: tuple[str, str], hosts: tuple[Host, Host], listening: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines, or two containers of one machine that each have a network, and a loopback, of their own."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "wire")
    ports = PortRange(20000, 20005)
    reached = []
    for rank, host in enumerate(hosts):
        job = layout([[0, 1]], rank, hosts=machines)
        setup = HostSetup(job, HostSettings(transport="tcp", port_range=ports))
        listening.callback(setup.close)
        assert host.call(setup.listen_for, {"tcp"}, [0, 1]) == ["tcp"]
        reached += [setup.mine.addresses["tcp"], setup.mine.line_addresses["tcp"]]
        settings = ClockSettings(port_range=ports)
        clocks = _Relating(ControlStore(dist.HashStore(), SECRET, "job"), job, 1.0, settings)
        server, address = host.call(clocks._serve)
        listening.callback(server.close)
        reached.append(list(address))
    assert reached == [[address, port] for address in ADDRESSES[:2] for port in (20000, 20001, 20002)]
    for number, (address, port) in enumerate(reached):
        hosts[number < 3].call(socket.create_connection, (address, port), 5.0).close()
