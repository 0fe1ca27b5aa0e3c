# SPDX-License-Identifier: Apache-2.0
"""Find network interfaces of this host by name, with addresses that other hosts can reach.

This module does not import torch, because `adaptra doctor` uses it where torch cannot be imported.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915
_NAME_NBYTES, _ADDRESS_AT = 16, 20
_NOT_USABLE = 0x08 | 0x40
"""IFA_F_DADFAILED | IFA_F_TENTATIVE: another host has, or may have, this address."""


class InterfaceError(ValueError):
    """There is no such interface, or it has no usable address; names the usable ones."""


def interface_address(name: str, proc: Path = Path("/proc")) -> str:
    """Return the interface's first IPv4 address, or else its first IPv6 address that needs no scope.

    Raises InterfaceError.
    """
    if addresses := interface_addresses(name, proc):
        return addresses[0]
    names = [known for _index, known in socket.if_nameindex()]
    usable = ", ".join(f"{known} ({found[0]})" for known in names if (found := interface_addresses(known, proc)))
    lacks = "has no address" if name in names else "does not exist"
    raise InterfaceError(f"the network interface {name!r} {lacks}; this host has {usable or 'none with an address'}")


def interface_addresses(name: str, proc: Path = Path("/proc")) -> tuple[str, ...]:
    """Return all usable addresses, the first of IPv4 first."""
    ipv4 = _ipv4(name)
    return (*([ipv4] if ipv4 is not None else []), *_ipv6(name, proc))


def _ipv4(name: str) -> str | None:
    encoded = name.encode(errors="surrogateescape")
    if not 0 < len(encoded) < _NAME_NBYTES:  # the kernel would cut it
        return None
    request = struct.pack(f"{_NAME_NBYTES}s{_NAME_NBYTES + 8}x", encoded)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[_ADDRESS_AT : _ADDRESS_AT + 4])


def _ipv6(name: str, proc: Path) -> list[str]:
    """Return the IPv6 addresses but link-local ones, which need a scope."""
    rows: list[list[str]] = []
    with contextlib.suppress(OSError):  # no IPv6 here
        rows = [line.split() for line in (proc / "net" / "if_inet6").read_text(errors="replace").splitlines()]
    usable = [row for row in rows if row[-1] == name and not int(row[4], 16) & _NOT_USABLE]
    addresses = [ipaddress.IPv6Address(bytes.fromhex(row[0])) for row in usable]
    return [str(address) for address in addresses if not address.is_link_local]
