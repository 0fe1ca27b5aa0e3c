# SPDX-License-Identifier: Apache-2.0
"""Hosts as sysfs and procfs would show them, made of files in a directory."""

from __future__ import annotations

from pathlib import Path

from adaptra_megatron.tools.host_checks.host_findings import Roots

CPUS = {0: "0-15", 1: "16-31"}
"""By NUMA node."""
IPV4_GID = "0000:0000:0000:0000:0000:ffff:{:02x}{:02x}:{:02x}{:02x}"


class MadeUpHost:
    """Two sockets at first, with nothing attached."""

    def __init__(self, directory: Path) -> None:
        self.roots = Roots(directory / "sys", directory / "proc", directory / "dev")
        for node, cpus in CPUS.items():
            self.write(f"sys/devices/system/node/node{node}/cpulist", cpus)
        self.write("proc/sys/kernel/osrelease", "5.15.0-91-generic")
        for name in ("tcp_rmem", "tcp_wmem"):
            self.write(f"proc/sys/net/ipv4/{name}", "4096\t131072\t16777216")
        for name in ("rmem_max", "wmem_max"):
            self.write(f"proc/sys/net/core/{name}", "212992")
        self.capabilities(0)

    def write(self, path: str, content: str) -> Path:
        """A file below `sys`, `proc` or `dev`."""
        root, _, rest = path.partition("/")
        file: Path = getattr(self.roots, root) / rest
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
        return file

    def capabilities(self, effective: int) -> None:
        """Set the capabilities of this process."""
        self.write("proc/self/status", f"Name:\tpython\nCapEff:\t{effective:016x}\nSeccomp:\t2")

    def pci(self, bus_id: str, numa_node: int, vendor: str, kind: str) -> Path:
        """A PCI device; the first two digits of its bus say which host bridge it is behind."""
        directory = self.roots.sys / f"devices/pci{bus_id[:7]}/{bus_id}"
        cpus = CPUS.get(numa_node, ",".join(CPUS.values()))
        values = {"numa_node": numa_node, "local_cpulist": cpus, "vendor": vendor, "class": kind}
        for name, value in values.items():
            self.write(f"sys/{directory.relative_to(self.roots.sys)}/{name}", str(value))
        self._link(f"bus/pci/devices/{bus_id}", directory)
        return directory

    def gpu(self, bus_id: str, numa_node: int, model: str = "") -> None:
        """An NVIDIA GPU; without a model, the driver is not loaded."""
        self.pci(bus_id, numa_node, "0x10de", "0x030200")
        if model:
            self.write(f"proc/driver/nvidia/gpus/{bus_id}/information", f"Model: \t\t {model}\nIRQ:   \t\t 64")

    def rnic(
        self,
        name: str,
        bus_id: str,
        numa_node: int,
        *,
        state: str = "4: ACTIVE",
        address: tuple[int, int, int, int] | None = None,
        gid_type: str = "RoCE v2",
    ) -> None:
        """A ConnectX of one port; with an address, its table of GIDs has one at index 3."""
        hardware = self.pci(bus_id, numa_node, "0x15b3", "0x020000")
        entry = f"sys/class/infiniband/{name}"
        for path, value in (
            ("fw_ver", "28.39.1002"),
            ("ports/1/state", state),
            ("ports/1/phys_state", "5: LinkUp" if "ACTIVE" in state else "3: Disabled"),
            ("ports/1/link_layer", "Ethernet"),
            ("ports/1/rate", "200 Gb/sec (4X HDR)"),
            ("ports/1/gid_attrs/ndevs/3", f"eth_{name}"),
        ):
            self.write(f"{entry}/{path}", value)
        if address is not None:
            self.write(f"{entry}/ports/1/gids/3", IPV4_GID.format(*address))
            self.write(f"{entry}/ports/1/gid_attrs/types/3", gid_type)
        self._link(f"class/infiniband/{name}/device", hardware)
        driver = self.roots.sys / "bus/pci/drivers/mlx5_core"
        driver.mkdir(parents=True, exist_ok=True)
        (hardware / "driver").symlink_to(driver)

    def _link(self, path: str, target: Path) -> None:
        link = self.roots.sys / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
