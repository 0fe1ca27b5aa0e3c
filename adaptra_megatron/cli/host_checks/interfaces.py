# SPDX-License-Identifier: Apache-2.0
"""Network interfaces of this host: addresses, speed, state."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from adaptra_megatron.cli.host_checks.findings import Roots, read_number, read_text
from adaptra_megatron.transport.setup.interfaces import interface_addresses


@dataclass(frozen=True)
class Interface:
    """One network interface."""

    name: str
    addresses: tuple[str, ...]
    up: bool
    speed_mbit_s: int | None
    """None where the driver does not say, as virtual ones do not."""
    mtu: int | None

    def __str__(self) -> str:
        speed = "speed unknown" if self.speed_mbit_s is None else f"{self.speed_mbit_s / 1000:g} Gb/s"
        return f"{self.name}, {speed}, MTU {self.mtu or 'unknown'}"


def find_interfaces(roots: Roots) -> list[Interface]:
    """All with an address but loopback, as sysfs, procfs and the kernel's ioctl have them, in the order of names."""
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
