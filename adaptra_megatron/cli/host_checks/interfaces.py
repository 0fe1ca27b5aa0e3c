# SPDX-License-Identifier: Apache-2.0
"""Network interfaces of this host: addresses, speed, state."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass

from adaptra_megatron.cli.host_checks.findings import Roots, read_number, read_text

_SIOCGIFADDR = 0x8915
_NAME_NBYTES, _ADDRESS_AT = 16, 20


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
        addresses = tuple(address for address in (_ipv4(entry.name), *_ipv6(roots, entry.name)) if address)
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


def _ipv4(interface: str) -> str | None:
    """Its first address."""
    request = struct.pack(f"{_NAME_NBYTES}s{_NAME_NBYTES + 8}x", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[_ADDRESS_AT : _ADDRESS_AT + 4])


def _ipv6(roots: Roots, interface: str) -> list[str]:
    """Without link-local ones, which need a scope to be used."""
    rows = [line.split() for line in read_text(roots.proc / "net" / "if_inet6").splitlines()]
    addresses = [ipaddress.IPv6Address(bytes.fromhex(row[0])) for row in rows if row[-1] == interface]
    return [str(address) for address in addresses if not address.is_link_local]
