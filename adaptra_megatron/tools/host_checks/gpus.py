# SPDX-License-Identifier: Apache-2.0
"""GPUs of this host, where they sit, and which RNICs are nearest to each."""

from __future__ import annotations

import re
from collections.abc import Mapping

from adaptra_megatron.tools.host_checks.host_findings import HostFinding, HostLevel, Roots, read_text
from adaptra_megatron.transport.gpu.hardware_queues import queues_in_words
from adaptra_megatron.transport.setup.rnic_affinity import (
    HardwarePlace,
    Nearness,
    nearest_rnics,
    nearness,
    pci_cpus,
    pci_place,
    rdma_devices,
)

_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"
_WORDS = {
    Nearness.BRIDGE: "behind the same PCIe switch",
    Nearness.HOST_BRIDGE: "behind the same PCIe host bridge",
    Nearness.NUMA_NODE: "on the same NUMA node",
    Nearness.SYSTEM: "across NUMA nodes",
}


def check_gpus(roots: Roots, environment: Mapping[str, str]) -> list[HostFinding]:
    """One finding per GPU, and one on their hardware queues, or one that says that there is none."""
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
    """Name by the driver; empty without the driver."""
    information = read_text(roots.proc / "driver" / "nvidia" / "gpus" / bus_id / "information")
    found = re.search(r"^Model:\s*(.+)$", information, re.MULTILINE)
    return found[1].strip() if found else ""
