# SPDX-License-Identifier: Apache-2.0
"""Find GPUs, RDMA devices and network interfaces of this host, and the RNICs nearest to each GPU."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from adaptra_megatron.tools.host_checks.host_findings import HostFinding, HostLevel, Roots, read_number, read_text
from adaptra_megatron.transport.gpu.hardware_queues import queues_in_words
from adaptra_megatron.transport.setup.interfaces import interface_addresses
from adaptra_megatron.transport.setup.rnic_affinity import (
    HardwarePlace,
    Nearness,
    RdmaDevice,
    RdmaPort,
    nearest_rnics,
    nearness,
    pci_cpus,
    pci_place,
    rdma_devices,
)
from adaptra_megatron.transport.wires.verbs.verbs_device import Port, VerbsUnavailableError

_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"
_WORDS = {
    Nearness.BRIDGE: "behind the same PCIe switch",
    Nearness.HOST_BRIDGE: "behind the same PCIe host bridge",
    Nearness.NUMA_NODE: "on the same NUMA node",
    Nearness.SYSTEM: "across NUMA nodes",
}


def check_gpus(roots: Roots, environment: Mapping[str, str]) -> list[HostFinding]:
    """Return one finding per GPU, and one on their hardware queues; or one that there is no GPU."""
    pci = roots.sys / "bus" / "pci" / "devices"
    found = [
        _gpu(roots, entry.name)
        for entry in sorted(pci.glob("*"))
        if read_text(entry / "vendor") == _NVIDIA and read_text(entry / "class").startswith(_DISPLAY_CLASS)
    ]
    nothing = HostFinding(
        subject="none",
        level=HostLevel.OK,
        text="no NVIDIA GPU: this host can plan, simulate and emulate training on CPUs",
    )
    if not found:
        return [nothing]
    queues = queues_in_words(environment)
    if queues is not None:
        found.append(
            HostFinding(subject="hardware queues", level=HostLevel.NOTE, text=queues, remedy="see docs/transport.md")
        )
    return found


def _gpu(roots: Roots, bus_id: str) -> HostFinding:
    place = pci_place(roots.sys, bus_id) or HardwarePlace((), None)
    rnics = nearest_rnics(roots.sys, pci_bus_id=bus_id)
    distances = {device.name: nearness(device, place) for device in rdma_devices(roots.sys)}
    model = _model(roots, bus_id)
    details: dict[str, object] = {
        "pci": bus_id,
        "model": model,
        "numa_node": place.numa_node,
        "cpus": pci_cpus(roots.sys, bus_id),
        "nearest_rnics": list(rnics),
        "nearness": distances[rnics[0]].name.lower() if rnics else None,
    }
    said = [model or "model unknown: the NVIDIA driver is not loaded"]
    said.append("NUMA node unknown" if place.numa_node is None else f"NUMA node {place.numa_node}")
    if details["cpus"]:
        said.append(f"the host path copies on CPUs {details['cpus']}")
    level, remedy = HostLevel.OK, ""
    if not model:
        level, remedy = (
            HostLevel.PROBLEM,
            "install or load the NVIDIA driver (modprobe nvidia; nvidia-smi must list it)",
        )
    if rnics:
        said.append(f"nearest RNIC {', '.join(rnics)} ({_WORDS[distances[rnics[0]]]})")
        nodes_known = place.numa_node is not None
        if distances[rnics[0]] is Nearness.SYSTEM and nodes_known and level is HostLevel.OK:
            level, remedy = HostLevel.NOTE, "bring up an RNIC on its NUMA node, or bind its rank to the RNIC's node"
    return HostFinding(subject=bus_id, level=level, text=", ".join(said), remedy=remedy, details=details)


def _model(roots: Roots, bus_id: str) -> str:
    """Return the GPU's name from the driver; empty without the driver."""
    information = read_text(roots.proc / "driver" / "nvidia" / "gpus" / bus_id / "information")
    found = re.search(r"^Model:\s*(.+)$", information, re.MULTILINE)
    return found[1].strip() if found else ""


@dataclass(frozen=True)
class Interface:
    """One network interface."""

    name: str
    addresses: tuple[str, ...]
    up: bool
    speed_mbit_s: int | None
    """None if the driver does not report it, as for virtual interfaces."""
    mtu: int | None

    def __str__(self) -> str:
        speed = "speed unknown" if self.speed_mbit_s is None else f"{self.speed_mbit_s / 1000:g} Gb/s"
        return f"{self.name}, {speed}, MTU {self.mtu or 'unknown'}"


def find_interfaces(roots: Roots) -> list[Interface]:
    """Return all interfaces with an address, without loopback, by name: from sysfs, procfs and the kernel's ioctl."""
    found = []
    for entry in sorted((roots.sys / "class" / "net").glob("*")):
        addresses = interface_addresses(entry.name, roots.proc)
        if not addresses or ipaddress.ip_address(addresses[0]).is_loopback:
            continue
        speed = read_number(entry / "speed")
        found.append(
            Interface(
                name=entry.name,
                addresses=addresses,
                up=read_text(entry / "operstate") in ("up", "unknown"),
                speed_mbit_s=speed if speed is not None and speed > 0 else None,
                mtu=read_number(entry / "mtu"),
            )
        )
    return found


_MELLANOX = "0x15b3"
_NETWORK_CLASS = "0x02"


def check_rnics(roots: Roots) -> list[HostFinding]:
    """Return one finding per port, or one that says why there is none."""
    found = [_port(roots, device, port) for device in rdma_devices(roots.sys) for port in device.ports]
    return found or [_none(roots)]


def _none(roots: Roots) -> HostFinding:
    pci = roots.sys / "bus" / "pci" / "devices"
    idle = [
        entry.name
        for entry in sorted(pci.glob("*"))
        if read_text(entry / "vendor") == _MELLANOX and read_text(entry / "class").startswith(_NETWORK_CLASS)
    ]
    if idle:
        return HostFinding(
            subject="none",
            level=HostLevel.PROBLEM,
            text=f"no RDMA device, although there is NVIDIA networking hardware at PCI {', '.join(idle)}",
            remedy="load its driver: modprobe mlx5_ib (for a container: on the host)",
            details={"pci_without_driver": idle},
        )
    return HostFinding(
        subject="none",
        level=HostLevel.OK,
        text="this host has no RDMA device; stages on other hosts are reached over TCP",
    )


def _port(roots: Roots, device: RdmaDevice, port: RdmaPort) -> HostFinding:
    directory = roots.sys / "class" / "infiniband" / device.name
    physical_state = read_text(directory / "ports" / str(port.number) / "phys_state").rpartition(":")[2].strip()
    details: dict[str, object] = {
        "device": device.name,
        "port": port.number,
        "state": port.state,
        "physical_state": physical_state,
        "link_layer": port.link_layer,
        "rate": port.rate,
        "driver": _driver(directory),
        "firmware": read_text(directory / "fw_ver"),
        "pci": device.pci_bus_id,
        "numa_node": device.place.numa_node,
    }
    said = [port.state, port.link_layer or "unknown link layer", *filter(None, [port.rate])]
    level, remedy = HostLevel.OK, ""
    if not port.active:
        level, remedy = HostLevel.NOTE, _how_to_raise(directory / "ports" / str(port.number))
        said.append(f"no link ({physical_state or 'physical state unknown'}), so verbs leaves it out")
    else:
        try:
            said.append(_gid(directory.parent, Port(device.name, port.number), details))
        except VerbsUnavailableError as cause:
            level, remedy = HostLevel.PROBLEM, "ip address add ADDRESS/BITS dev INTERFACE, for its network interface"
            said.append(str(cause))
        if details.get("gid_type") == "IB/RoCE v1" and port.link_layer == "Ethernet":
            level, remedy = HostLevel.NOTE, "enable RoCE v2 and give its interface an address"
            said.append("which does not pass routers")
    said.append(_identity(details))
    subject = f"{device.name}/{port.number}"
    return HostFinding(subject=subject, level=level, text=", ".join(said), remedy=remedy, details=details)


def _gid(sysfs: Path, port: Port, details: dict[str, object]) -> str:
    """Describe the GID that verbs would use. Raises VerbsUnavailableError."""
    index, gid = port.gid(sysfs)
    attributes = sysfs / port.device / "ports" / str(port.number) / "gid_attrs"
    kind, interface = read_text(attributes / "types" / str(index)), read_text(attributes / "ndevs" / str(index))
    address = ipaddress.IPv6Address(gid)
    spelled = str(address.ipv4_mapped or address)
    details |= {"gid_index": index, "gid": spelled, "gid_type": kind, "interface": interface}
    return f"GID {index}: {spelled}" + (f" on {interface}" if interface else "") + (f", {kind}" if kind else "")


def _identity(details: dict[str, object]) -> str:
    said = [f"driver {details['driver'] or 'unknown'}"]
    for name, key in (("firmware", "firmware"), ("PCI", "pci"), ("NUMA node", "numa_node")):
        if details[key] not in ("", None):
            said.append(f"{name} {details[key]}")
    return ", ".join(said)


def _driver(device: Path) -> str:
    driver = device / "device" / "driver"
    if driver.exists():
        return driver.resolve().name
    parent = read_text(device / "parent")  # Soft-RoCE names the network interface that it uses
    return f"software over {parent}" if parent else ""


def _how_to_raise(port: Path) -> str:
    interfaces = {read_text(entry) for entry in (port / "gid_attrs" / "ndevs").glob("*")} - {""}
    if interfaces:
        return f"if it should be used: connect its cable, then ip link set {min(interfaces)} up"
    return "if it should be used: connect its cable; InfiniBand needs a subnet manager in the fabric"
