# SPDX-License-Identifier: Apache-2.0
"""Find which RNICs and CPUs are near a GPU or a NUMA node, from the kernel's sysfs, and which ones a rank uses.

All functions read a sysfs tree (`/sys`, or a test's) and nothing else. Needs neither torch nor pyverbs.
"""

from __future__ import annotations

import contextlib
import enum
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys")
_BUS_ID = re.compile(r"(?:([0-9a-f]+):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")


class RnicError(ValueError):
    """A requested RDMA device does not exist on this host or is unusable; names the existing devices."""


class Nearness(enum.IntEnum):
    """Distance between two PCI devices, or from a NUMA node to one; nvidia-smi's abbreviations in brackets."""

    BRIDGE = 0
    """They share a PCIe bridge or switch (PIX, PXB)."""
    HOST_BRIDGE = 1
    """They share a PCIe host bridge (PHB)."""
    NUMA_NODE = 2
    """Between host bridges of one NUMA node (NODE)."""
    SYSTEM = 3
    """Between NUMA nodes, or unknown (SYS)."""


@dataclass(frozen=True)
class RdmaPort:
    """One port of an RDMA device."""

    number: int
    state: str
    """As the kernel writes it: ACTIVE, DOWN, INIT, ..."""
    rate: str
    """For example "200 Gb/sec (4X HDR)"."""
    link_layer: str
    """InfiniBand or Ethernet."""

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"


@dataclass(frozen=True)
class HardwarePlace:
    """Place of a device in the PCI and NUMA topology."""

    bridges: tuple[str, ...]
    """Path from the host bridge down to the device; empty if it is not on a PCI bus."""
    numa_node: int | None
    """None: unknown to the kernel."""


@dataclass(frozen=True)
class RdmaDevice:
    """One RDMA device of this host."""

    name: str
    place: HardwarePlace
    """Its place; for a software device (Soft-RoCE), that of its network interface."""
    local_cpus: str
    """As the kernel writes it ("0-15,32-47"); empty if unknown."""
    ports: tuple[RdmaPort, ...]

    @property
    def active(self) -> bool:
        """Return whether any port has a link."""
        return any(port.active for port in self.ports)

    @property
    def pci_bus_id(self) -> str | None:
        return self.place.bridges[-1] if self.place.bridges else None


def rdma_devices(sysfs: Path = SYSFS) -> list[RdmaDevice]:
    """Return all RDMA devices, with or without a link, sorted by name."""
    return [_device(sysfs, entry) for entry in sorted((sysfs / "class/infiniband").glob("*"))]


def fastest_rnic_gbit_per_s(sysfs: Path = SYSFS) -> float:
    """Return the rate of the host's fastest active port in Gbit/s, from sysfs ("400 Gb/sec (4X NDR)"); 0 without
    any."""
    rates = [
        port.rate.split()[0] for device in rdma_devices(sysfs) for port in device.ports if port.active and port.rate
    ]
    return max(map(float, rates), default=0.0)


def pci_place(sysfs: Path, pci_bus_id: str) -> HardwarePlace | None:
    """Return the place of a PCI device ("0000:3b:00.0", or as CUDA spells it); None if there is none."""
    entry = _pci_entry(sysfs, pci_bus_id)
    return _place(sysfs, entry) if entry is not None else None


def pci_cpus(sysfs: Path, pci_bus_id: str) -> str:
    """Return the CPUs of a PCI device's NUMA node, as the kernel writes them ("0-15,32-47"); empty if unknown."""
    entry = _pci_entry(sysfs, pci_bus_id)
    return _read(entry / "local_cpulist") if entry is not None else ""


def cpus_to_bind(pci_bus_id: str | None, sysfs: Path = SYSFS) -> frozenset[int]:
    """Return the CPUs for a GPU's copies: CPUs near the GPU that this process may use.

    Returns none, which means not to bind: without a GPU, if the kernel does not report nearby CPUs, if all usable CPUs
    are near, or if none is near because the user has bound the process elsewhere.
    """
    may_run_on = os.sched_getaffinity(0)
    near = _parse_cpus(pci_cpus(sysfs, pci_bus_id)) & may_run_on if pci_bus_id is not None else set()
    return frozenset(near if near != may_run_on else ())


@contextlib.contextmanager
def started_on(cpus: Collection[int]) -> Iterator[None]:
    """Run threads and processes that the calling thread starts within this context on `cpus`; empty: on any."""
    before = os.sched_getaffinity(0)
    if cpus:
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        if cpus:
            os.sched_setaffinity(0, before)


def cpus_numa_node(sysfs: Path, cpus: Collection[int]) -> int | None:
    """Return the NUMA node of all these CPUs; None if they belong to several."""
    nodes = {
        int(entry.name.removeprefix("node"))
        for entry in (sysfs / "devices/system/node").glob("node[0-9]*")
        if not _parse_cpus(_read(entry / "cpulist")).isdisjoint(cpus)
    }
    return nodes.pop() if len(nodes) == 1 else None


def nearness(device: RdmaDevice, place: HardwarePlace) -> Nearness:
    """Return the distance between an RDMA device and a place, which may be only a NUMA node."""
    shared = _shared_bridges(device.place, place)
    # The first of the bridges is the host bridge: two that share more share a PCIe switch.
    if shared:
        return Nearness.BRIDGE if shared > 1 else Nearness.HOST_BRIDGE
    same_node = place.numa_node is not None and place.numa_node == device.place.numa_node
    return Nearness.NUMA_NODE if same_node else Nearness.SYSTEM


def nearest_rnics(
    sysfs: Path = SYSFS, *, pci_bus_id: str | None = None, numa_node: int | None = None
) -> tuple[str, ...]:
    """Return the RDMA devices with a link that are nearest to a GPU, or else to a NUMA node, in a fixed order.

    Returns several if they are equally near; if they share bridges with the GPU, those with the closest one. Returns
    all devices with a link if neither place is given or known.
    """
    place = pci_place(sysfs, pci_bus_id) if pci_bus_id is not None else None
    place = place or HardwarePlace((), numa_node)
    active = [device for device in rdma_devices(sysfs) if device.active]
    # Behind one switch of several levels, the deeper common bridge is the shorter way.
    distances = [(nearness(device, place), -_shared_bridges(device.place, place)) for device in active]
    return tuple(device.name for device, distance in zip(active, distances, strict=True) if distance == min(distances))


def choose_rnics(
    named: Sequence[str], sysfs: Path = SYSFS, *, pci_bus_id: str | None = None, numa_node: int | None = None
) -> tuple[str, ...]:
    """Return the devices to use: the named ones in their order, or else the nearest.

    Raises RnicError if a named one is missing or has no link.
    """
    if not named:
        return nearest_rnics(sysfs, pci_bus_id=pci_bus_id, numa_node=numa_node)
    devices = {device.name: device for device in rdma_devices(sysfs)}
    usable = {name for name, device in devices.items() if device.active}
    if unusable := [name for name in named if name not in usable]:
        here = ", ".join(map(_describe, devices.values())) or "none"
        raise RnicError(
            f"--adaptra-rnics: {', '.join(unusable)} cannot be used: the RDMA devices of this host are {here}; "
            "name active ones, or leave the flag out to use the nearest"
        )
    return tuple(named)


def rank_rnics(named: Sequence[str], pci_bus_id: str | None, sysfs: Path = SYSFS) -> tuple[str, ...]:
    """Return this process's devices: the named ones, or those nearest to its GPU or, without a GPU, to its CPUs.

    `pci_bus_id`: of its GPU. Raises RnicError.
    """
    # Without a GPU: the CPUs that a user, or a launcher with numactl, has bound this process to.
    numa_node = cpus_numa_node(sysfs, os.sched_getaffinity(0))
    return choose_rnics(named, sysfs, pci_bus_id=pci_bus_id, numa_node=numa_node)


def _describe(device: RdmaDevice) -> str:
    states = sorted({port.state for port in device.ports})
    return f"{device.name} ({'active' if device.active else ' '.join(states).lower() or 'without ports'})"


def _device(sysfs: Path, entry: Path) -> RdmaDevice:
    hardware = entry / "device"
    if not hardware.exists():  # a software device names the network interface that it works over
        interface = _read(entry / "parent")
        hardware = sysfs / "class/net" / interface / "device" if interface else hardware
    ports = sorted((entry / "ports").glob("*"), key=lambda port: int(port.name))
    return RdmaDevice(
        name=entry.name,
        place=_place(sysfs, hardware) if hardware.exists() else HardwarePlace((), None),
        local_cpus=_read(hardware / "local_cpulist"),
        ports=tuple(_port(port) for port in ports),
    )


def _port(directory: Path) -> RdmaPort:
    return RdmaPort(
        number=int(directory.name),
        state=_read(directory / "state").rpartition(":")[2].strip() or "UNKNOWN",
        rate=_read(directory / "rate"),
        link_layer=_read(directory / "link_layer"),
    )


def _pci_entry(sysfs: Path, pci_bus_id: str) -> Path | None:
    found = _BUS_ID.fullmatch(pci_bus_id.lower())
    if found is None:
        return None
    domain, bus, device, function = found.groups()
    entry = sysfs / "bus/pci/devices" / f"{int(domain or '0', 16):04x}:{bus}:{device}.{function}"
    return entry if entry.exists() else None


def _place(sysfs: Path, hardware: Path) -> HardwarePlace:
    path = hardware.resolve()
    bridges = []
    for directory in (path, *path.parents):
        if _BUS_ID.fullmatch(directory.name):
            bridges.append(directory.name)
        elif directory.name.startswith("pci"):
            bridges.append(directory.name)
            break
    return HardwarePlace(tuple(reversed(bridges)), _numa_node(sysfs, path))


def _numa_node(sysfs: Path, hardware: Path) -> int | None:
    """Return the NUMA node of a device, or of its bridges; None if the firmware gives none (-1) and there are
    several."""
    node = next(filter(None, (_read(directory / "numa_node") for directory in (hardware, *hardware.parents))), "-1")
    if int(node) >= 0:
        return int(node)
    nodes = [entry.name for entry in (sysfs / "devices/system/node").glob("node[0-9]*")]
    return int(nodes[0].removeprefix("node")) if len(nodes) == 1 else None


def _shared_bridges(one: HardwarePlace, other: HardwarePlace) -> int:
    shared = 0
    for mine, theirs in zip(one.bridges, other.bridges, strict=False):
        if mine != theirs:
            break
        shared += 1
    return shared


def _parse_cpus(text: str) -> set[int]:
    """Parse a CPU list as the kernel writes it."""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _read(path: Path) -> str:
    """Return the content of a sysfs file; "" if it is missing or cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
