# SPDX-License-Identifier: Apache-2.0
"""Which RNICs are near what, on hosts made up: two sockets with switches, one node, containers, software devices."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.made_up.host import MadeUpHost

from adaptra_megatron.transport.setup.rnic_affinity import (
    HardwarePlace,
    Nearness,
    RdmaPort,
    RnicError,
    choose_rnics,
    cpus_numa_node,
    cpus_to_bind,
    fastest_rnic_gbit_per_s,
    nearest_rnics,
    nearness,
    pci_place,
    rank_rnics,
    rdma_devices,
    started_on,
)


class Host:
    """A sysfs made up."""

    def __init__(self, sysfs: Path) -> None:
        self.sysfs = sysfs

    def node(self, number: int, cpus: str) -> None:
        directory = self.sysfs / f"devices/system/node/node{number}"
        directory.mkdir(parents=True)
        (directory / "cpulist").write_text(f"{cpus}\n")

    def pci(self, path: str, numa_node: int) -> Path:
        directory = self.sysfs / "devices" / path
        directory.mkdir(parents=True)
        (directory / "numa_node").write_text(f"{numa_node}\n")
        (directory / "local_cpulist").write_text("0-3\n")
        listed = self.sysfs / "bus/pci/devices"
        listed.mkdir(parents=True, exist_ok=True)
        (listed / directory.name).symlink_to(directory)
        return directory

    def rnic(self, name: str, path: str, numa_node: int, state: str = "4: ACTIVE") -> None:
        hardware = self.pci(path, numa_node)
        entry = hardware / "infiniband" / name
        self._port(entry, state)
        (entry / "device").symlink_to(hardware)
        self._list(entry)

    def software_rnic(self, name: str, interface: str, hardware: Path | None) -> None:
        entry = self.sysfs / "devices/virtual/infiniband" / name
        self._port(entry, "4: ACTIVE")
        (entry / "parent").write_text(f"{interface}\n")
        net = self.sysfs / "class/net" / interface
        net.mkdir(parents=True)
        if hardware is not None:
            (net / "device").symlink_to(hardware)
        self._list(entry)

    def _port(self, entry: Path, state: str) -> None:
        port = entry / "ports/1"
        port.mkdir(parents=True)
        for name, value in (("state", state), ("rate", "200 Gb/sec (4X HDR)"), ("link_layer", "InfiniBand")):
            (port / name).write_text(f"{value}\n")

    def _list(self, entry: Path) -> None:
        listed = self.sysfs / "class/infiniband"
        listed.mkdir(parents=True, exist_ok=True)
        (listed / entry.name).symlink_to(entry)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.fixture
def two_sockets(host: Host) -> Host:
    """Two GPUs and two RNICs behind a switch of node 0 (one pair per downstream switch), one RNIC alone at its root
    port, one behind another host bridge, and one at node 1, with a second whose cable is out."""
    host.node(0, "0-3,8-11")
    host.node(1, "4-7,12-15")
    switch = "pci0000:16/0000:16:02.0/0000:17:00.0"
    host.pci(f"{switch}/0000:18:00.0/0000:19:00.0", 0)  # GPU 0
    host.rnic("mlx5_0", f"{switch}/0000:18:00.0/0000:1a:00.0", 0)
    host.pci(f"{switch}/0000:18:04.0/0000:1b:00.0", 0)  # GPU 1
    host.rnic("mlx5_1", f"{switch}/0000:18:04.0/0000:1c:00.0", 0)
    host.rnic("mlx5_2", "pci0000:16/0000:16:04.0/0000:2a:00.0", 0)
    host.rnic("mlx5_3", "pci0000:30/0000:30:02.0/0000:31:00.0", 0)
    host.rnic("mlx5_4", "pci0000:97/0000:97:02.0/0000:98:00.0", 1)
    host.rnic("mlx5_5", "pci0000:97/0000:97:02.0/0000:98:00.1", 1, "1: DOWN")
    host.pci("pci0000:b0/0000:b0:02.0/0000:b1:00.0", 1)  # GPU 2
    return host


GPU_0, GPU_1, GPU_2 = "0000:19:00.0", "0000:1b:00.0", "0000:b1:00.0"


def test_what_a_host_has(two_sockets: Host) -> None:
    devices = rdma_devices(two_sockets.sysfs)
    assert [device.name for device in devices] == [f"mlx5_{number}" for number in range(6)]
    assert devices[2].place == HardwarePlace(("pci0000:16", "0000:16:04.0", "0000:2a:00.0"), 0)
    assert devices[2].pci_bus_id == "0000:2a:00.0"
    assert devices[2].local_cpus == "0-3"
    assert devices[2].ports == (RdmaPort(1, "ACTIVE", "200 Gb/sec (4X HDR)", "InfiniBand"),)
    assert [device.active for device in devices] == [True] * 5 + [False]


def test_how_near_each_is(two_sockets: Host) -> None:
    place = pci_place(two_sockets.sysfs, GPU_0)
    assert place is not None
    levels = [nearness(device, place) for device in rdma_devices(two_sockets.sysfs)]
    near, far = [Nearness.BRIDGE] * 2, [Nearness.SYSTEM] * 2
    assert levels == [*near, Nearness.HOST_BRIDGE, Nearness.NUMA_NODE, *far]


@pytest.mark.parametrize(
    ("bus_id", "expected"),
    [
        (GPU_0, ("mlx5_0",)),
        (GPU_1, ("mlx5_1",)),
        (GPU_2, ("mlx5_4",)),  # no bridge in common: the one of its node that has a link
        ("00000000:1B:00.0", ("mlx5_1",)),  # as CUDA spells it
    ],
)
def test_the_nearest_to_a_gpu(two_sockets: Host, bus_id: str, expected: tuple[str, ...]) -> None:
    assert nearest_rnics(two_sockets.sysfs, pci_bus_id=bus_id) == expected


def test_the_nearest_to_a_numa_node(two_sockets: Host) -> None:
    assert nearest_rnics(two_sockets.sysfs, numa_node=0) == ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3")
    assert nearest_rnics(two_sockets.sysfs, numa_node=1) == ("mlx5_4",)


@pytest.mark.parametrize("place", [{}, {"pci_bus_id": "0000:ff:00.0"}, {"pci_bus_id": "nonsense"}, {"numa_node": 7}])
def test_all_with_a_link_where_the_place_is_unknown(two_sockets: Host, place: dict[str, str]) -> None:
    assert nearest_rnics(two_sockets.sysfs, **place) == tuple(f"mlx5_{number}" for number in range(5))


def test_an_unknown_gpu_leaves_its_numa_node(two_sockets: Host) -> None:
    assert nearest_rnics(two_sockets.sysfs, pci_bus_id="0000:ff:00.0", numa_node=1) == ("mlx5_4",)


def test_all_functions_of_the_same_distance(host: Host) -> None:
    host.node(0, "0-3")
    for function in range(2):
        host.rnic(f"mlx5_{function}", f"pci0000:00/0000:00:01.0/0000:01:00.{function}", -1)
    host.pci("pci0000:00/0000:00:02.0/0000:02:00.0", -1)
    assert nearest_rnics(host.sysfs, pci_bus_id="0000:02:00.0") == ("mlx5_0", "mlx5_1")


def test_a_single_node_needs_no_telling(host: Host) -> None:
    host.node(0, "0-3")
    host.rnic("mlx5_0", "pci0000:00/0000:00:01.0/0000:01:00.0", -1)
    assert rdma_devices(host.sysfs)[0].place.numa_node == 0


def test_software_devices_are_where_their_interface_is(host: Host) -> None:
    host.node(0, "0-3")
    host.node(1, "4-7")
    nic = host.pci("pci0000:97/0000:97:02.0/0000:98:00.0", 1) / "virtio0"
    nic.mkdir()
    host.software_rnic("rxe0", "eth0", nic)
    host.software_rnic("rxe1", "veth0", None)
    assert [device.place.numa_node for device in rdma_devices(host.sysfs)] == [1, None]
    assert [device.pci_bus_id for device in rdma_devices(host.sysfs)] == ["0000:98:00.0", None]
    assert nearest_rnics(host.sysfs, numa_node=1) == ("rxe0",)


def test_a_host_without_any(host: Host) -> None:
    assert rdma_devices(host.sysfs) == []
    assert nearest_rnics(host.sysfs, numa_node=0) == ()
    with pytest.raises(RnicError, match="mlx5_0 cannot be used: the RDMA devices of this host are none;"):
        choose_rnics(["mlx5_0"], host.sysfs)


def test_named_devices_are_used_as_named_and_must_work(two_sockets: Host) -> None:
    assert choose_rnics(["mlx5_4", "mlx5_0"], two_sockets.sysfs, pci_bus_id=GPU_1) == ("mlx5_4", "mlx5_0")
    assert choose_rnics([], two_sockets.sysfs, pci_bus_id=GPU_1) == ("mlx5_1",)
    with pytest.raises(RnicError, match=r"mlx5_5, mlx5_9 cannot be used.*mlx5_4 \(active\), mlx5_5 \(down\)"):
        choose_rnics(["mlx5_0", "mlx5_5", "mlx5_9"], two_sockets.sysfs)


@pytest.mark.parametrize(("cpus", "node"), [({0, 9}, 0), ({5}, 1), ({0, 4}, None), (set(), None), ({99}, None)])
def test_the_numa_node_of_a_process(two_sockets: Host, cpus: set[int], node: int | None) -> None:
    assert cpus_numa_node(two_sockets.sysfs, cpus) == node


@pytest.mark.parametrize(("cpus", "expected"), [({4, 13}, ("mlx5_4",)), ({0, 4}, tuple(f"mlx5_{n}" for n in range(5)))])
def test_a_rank_without_a_gpu_uses_those_of_its_cpus(
    two_sockets: Host, monkeypatch: pytest.MonkeyPatch, cpus: set[int], expected: tuple[str, ...]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: cpus)
    assert rank_rnics((), None, two_sockets.sysfs) == expected
    assert rank_rnics((), GPU_0, two_sockets.sysfs) == ("mlx5_0",)
    assert rank_rnics(("mlx5_3",), GPU_0, two_sockets.sysfs) == ("mlx5_3",)


@pytest.mark.parametrize(
    ("bus_id", "may_run_on", "expected"),
    [
        ("0000:17:00.0", range(32), range(16)),
        ("0000:97:00.0", range(32), range(16, 32)),
        ("0000:97:00.0", range(12, 20), range(16, 20)),
        ("0000:97:00.0", range(8), ()),  # bound elsewhere by the user
        ("0000:97:00.0", range(16, 32), ()),  # nothing to bind
        ("0000:c7:00.0", range(32), ()),  # the kernel does not say
        ("0000:ff:00.0", range(32), ()),
        (None, range(32), ()),
    ],
)
def test_copies_run_near_their_gpu_where_the_process_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bus_id: str | None, may_run_on: range, expected: range
) -> None:
    host = MadeUpHost(tmp_path)
    for gpu, node in (("0000:17:00.0", 0), ("0000:97:00.0", 1), ("0000:c7:00.0", -1)):
        host.gpu(gpu, node)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(may_run_on))
    assert cpus_to_bind(bus_id, host.roots.sys) == set(expected)


@pytest.mark.parametrize("binds", [True, False])
def test_what_is_started_is_bound_and_the_starting_thread_is_not(binds: bool) -> None:
    before = os.sched_getaffinity(0)
    cpus = {min(before)} if binds else set()
    seen: list[object] = []

    def look() -> None:
        seen.append(os.sched_getaffinity(0))
        code = "import os; print(os.sched_getaffinity(0))"
        seen.append(eval(subprocess.check_output([sys.executable, "-c", code])))

    with started_on(cpus):
        thread = threading.Thread(target=look)
        thread.start()
    assert os.sched_getaffinity(0) == before
    thread.join()
    assert seen == [cpus or before] * 2


def test_the_fastest_port_that_is_up_says_what_a_host_carries(tmp_path: Path) -> None:
    assert fastest_rnic_gbit_per_s(tmp_path) == 0.0
    host = Host(tmp_path)
    host.rnic("mlx5_0", "pci0000:00/0000:00:01.0", 0, state="1: DOWN")
    assert fastest_rnic_gbit_per_s(tmp_path) == 0.0
    host.rnic("mlx5_1", "pci0000:00/0000:00:02.0", 0)
    assert fastest_rnic_gbit_per_s(tmp_path) == 200.0
