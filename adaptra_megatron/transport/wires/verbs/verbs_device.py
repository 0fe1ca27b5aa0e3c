# SPDX-License-Identifier: Apache-2.0
"""Find this host's RNICs in the kernel's sysfs, and load pyverbs.

sysfs names devices, ports and GIDs without pyverbs, which is imported only where queue pairs are created.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SYSFS = Path("/sys/class/infiniband")


class VerbsUnavailableError(RuntimeError):
    """This host, or this Python, has no working verbs."""


@dataclass(frozen=True)
class Port:
    """One port of one RNIC."""

    device: str
    number: int

    def active(self, sysfs: Path = SYSFS) -> bool:
        """Return whether the port has a link."""
        return _read(self._directory(sysfs) / "state").endswith("ACTIVE")

    def gid(self, sysfs: Path = SYSFS) -> tuple[int, str]:
        """Return index and text of the GID to use: the first RoCE v2 one of an IPv4 address, or the next best.

        Raises VerbsUnavailableError. Indices change with the host's addresses: call this for each connection.
        """
        found = []
        for entry in sorted((self._directory(sysfs) / "gids").glob("*"), key=lambda entry: int(entry.name)):
            gid = _read(entry)
            if not gid.replace(":", "").strip("0"):
                continue
            routed = "v2" in _read(self._directory(sysfs) / "gid_attrs" / "types" / entry.name)
            version_4 = gid.startswith("0000:0000:0000:0000:0000:ffff:")
            found.append((routed, version_4, not gid.startswith("fe80:"), -int(entry.name), gid))
            if routed and version_4:
                break  # tables have up to thousands of entries
        if not found:
            raise VerbsUnavailableError(f"{self.device} port {self.number} has no GID: give its interface an address")
        # RoCE v2 crosses routers; a link-local address is good on one subnet alone.
        *_preferences, index, gid = max(found)
        return -index, gid

    def _directory(self, sysfs: Path) -> Path:
        return sysfs / self.device / "ports" / str(self.number)


def find_ports(devices: list[str], sysfs: Path = SYSFS) -> list[Port]:
    """Return the ports to use, in a fixed order: those of the named devices, or all that have a link.

    Raises VerbsUnavailableError if there is none.
    """
    present = sorted(entry.name for entry in sysfs.glob("*"))
    if missing := sorted(set(devices) - set(present)):
        raise VerbsUnavailableError(f"RDMA devices {', '.join(missing)} are not on this host; it has {present}")
    ports = []
    for device in devices or present:
        for entry in sorted((sysfs / device / "ports").glob("*"), key=lambda entry: int(entry.name)):
            port = Port(device, int(entry.name))
            if devices or port.active(sysfs):
                ports.append(port)
    if not ports:
        raise VerbsUnavailableError(f"no RDMA device has a port with a link; this host has {present}")
    return ports


def load_verbs() -> SimpleNamespace:
    """Return pyverbs' classes, and libibverbs' constants under their own names. Raises VerbsUnavailableError.

    rdma-core 44 (Debian 12) has the constants in pyverbs.enums, 57 and later in pyverbs.libibverbs_enums.
    """
    try:
        modules = [
            importlib.import_module(f"pyverbs.{name}") for name in ("addr", "cq", "device", "mr", "pd", "qp", "wr")
        ]
        errors = importlib.import_module("pyverbs.pyverbs_error")
        try:
            enums = importlib.import_module("pyverbs.libibverbs_enums")
        except ImportError:
            enums = importlib.import_module("pyverbs.enums")
    except ImportError as cause:
        raise VerbsUnavailableError(f"pyverbs cannot be imported ({cause}): install python3-pyverbs") from cause
    names: dict[str, Any] = {"Error": errors.PyverbsError}
    for module in modules:
        names |= {name: value for name, value in vars(module).items() if isinstance(value, type)}
    for value in vars(enums).values():
        members = getattr(value, "__members__", {})
        names |= {name: int(member) for name, member in members.items()}
    return SimpleNamespace(**names)


def why_unavailable(devices: list[str]) -> str | None:
    """Return why this process cannot use verbs; None if nothing is known to prevent it. Needs no peer."""
    try:
        find_ports(devices)
        load_verbs()
    except VerbsUnavailableError as cause:
        return str(cause)
    return None


def _read(path: Path) -> str:
    """Return the content of a sysfs file; "" if it is missing: entries without a value cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
