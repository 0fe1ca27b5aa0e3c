# SPDX-License-Identifier: Apache-2.0
"""Which RNICs are used, and what a host without any says."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from adaptra_megatron.transport.setup.host_placement import choose_transport, lacks_verbs, verbs_or_auto
from adaptra_megatron.transport.wires.verbs.verbs_device import (
    SYSFS,
    Port,
    VerbsUnavailableError,
    find_ports,
    load_verbs,
)

HOST_RANKS = str(Path(__file__).parents[2] / "ranks" / "host_ranks.py")
IPV4 = "0000:0000:0000:0000:0000:ffff:0a00:0101"
LINK_LOCAL = "fe80:0000:0000:0000:1c2b:feff:fe00:0001"
NONE = "0000:0000:0000:0000:0000:0000:0000:0000"


@pytest.fixture
def add(tmp_path: Path) -> Callable[..., Path]:
    """Add a device to a sysfs made up."""

    def add(device: str, state: str, *gids: tuple[str, str]) -> Path:
        port = tmp_path / device / "ports" / "1"
        (port / "gids").mkdir(parents=True)
        (port / "gid_attrs" / "types").mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        for index, (gid, kind) in enumerate(gids):
            (port / "gids" / str(index)).write_text(f"{gid}\n")
            (port / "gid_attrs" / "types" / str(index)).write_text(f"{kind}\n")
        return tmp_path

    return add


def test_ports_with_a_link_in_the_order_of_their_names(add: Callable[..., Path]) -> None:
    for name, state in (("mlx5_1", "4: ACTIVE"), ("mlx5_0", "4: ACTIVE"), ("mlx5_2", "1: DOWN")):
        sysfs = add(name, state)
    assert [port.device for port in find_ports([], sysfs)] == ["mlx5_0", "mlx5_1"]
    assert [port.device for port in find_ports(["mlx5_2", "mlx5_1"], sysfs)] == ["mlx5_2", "mlx5_1"]
    with pytest.raises(VerbsUnavailableError, match="RDMA devices mlx5_7 are not on this host"):
        find_ports(["mlx5_7"], sysfs)


def test_a_host_without_a_link_says_so(add: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(VerbsUnavailableError, match=r"no RDMA device has a port with a link; this host has \[\]"):
        find_ports([], tmp_path / "nothing")
    with pytest.raises(VerbsUnavailableError, match=r"this host has \['mlx5_0'\]"):
        find_ports([], add("mlx5_0", "1: DOWN"))


@pytest.mark.parametrize(
    ("gids", "index"),
    [
        ([(LINK_LOCAL, "IB/RoCE v1"), (LINK_LOCAL, "RoCE v2"), (IPV4, "IB/RoCE v1"), (IPV4, "RoCE v2")], 3),
        ([(NONE, ""), (LINK_LOCAL, "RoCE v2"), ("2001:" + IPV4[5:], "RoCE v2")], 2),
        ([(LINK_LOCAL, "IB/RoCE v1")], 0),
    ],
)
def test_the_gid_that_is_routed(add: Callable[..., Path], gids: list[tuple[str, str]], index: int) -> None:
    sysfs = add("mlx5_0", "4: ACTIVE", *gids)
    assert Port("mlx5_0", 1).gid(sysfs) == (index, gids[index][0])


def test_a_port_without_a_gid_says_so(add: Callable[..., Path]) -> None:
    with pytest.raises(VerbsUnavailableError, match="mlx5_0 port 1 has no GID"):
        Port("mlx5_0", 1).gid(add("mlx5_0", "4: ACTIVE", (NONE, "")))


def test_missing_pyverbs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    importlib.invalidate_caches()
    with pytest.raises(VerbsUnavailableError, match="install python3-pyverbs"):
        load_verbs()


@pytest.mark.parametrize("enums", ["enums", "libibverbs_enums"])
def test_constants_of_old_and_new_pyverbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enums: str) -> None:
    package = tmp_path / "pyverbs"
    package.mkdir()
    for module in ("__init__", "addr", "cq", "device", "mr", "pd", "qp", "wr"):
        (package / f"{module}.py").write_text("")
    (package / "qp.py").write_text("class QP: ...\n")
    (package / "pyverbs_error.py").write_text("class PyverbsError(Exception): ...\n")
    (package / f"{enums}.py").write_text("import enum\nclass ibv_qp_type(enum.IntEnum):\n    IBV_QPT_RC = 2\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyverbs"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        verbs = load_verbs()
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "pyverbs"]:
            del sys.modules[name]
    assert verbs.IBV_QPT_RC == 2
    assert verbs.QP.__name__ == "QP"
    assert verbs.Error.__name__ == "PyverbsError"


def test_verbs_is_chosen_where_both_ends_can(caplog: pytest.LogCaptureFixture) -> None:
    lacking = {0: None, 1: None, 2: "no RDMA device has a port with a link"}
    assert choose_transport(verbs_or_auto(lacking, 0, 1), "a", "b", "0<->1") == "verbs"
    with caplog.at_level(logging.WARNING):
        assert verbs_or_auto(lacking, 1, 2) == verbs_or_auto(lacking, 2, 1) == "auto"
    assert [record.getMessage() for record in caplog.records] == [
        f"adaptra: link {link}: no verbs, rank 2: no RDMA device has a port with a link; falling back to auto"
        for link in ("1<->2", "2<->1")
    ]


def test_auto_uses_verbs_between_hosts_where_both_ends_can(caplog: pytest.LogCaptureFixture) -> None:
    lacking = {0: None, 1: None, 2: "no RDMA device has a port with a link"}
    assert choose_transport("auto", "a", "a", "0<->1", lacks_verbs(lacking, 0, 1)) == "shm"
    assert choose_transport("auto", "a", "b", "0<->1", lacks_verbs(lacking, 0, 1)) == "verbs"
    with caplog.at_level(logging.INFO):
        assert choose_transport("auto", "a", "b", "1<->2", lacks_verbs(lacking, 1, 2)) == "tcp"
    (record,) = caplog.records
    assert record.getMessage() == "adaptra: link 1<->2: tcp, not verbs: rank 2: no RDMA device has a port with a link"


@pytest.mark.skipif(SYSFS.exists(), reason="this host has RDMA devices")
def test_without_a_device_the_host_path_falls_back_and_says_so_once(start_ranks: Callable[..., list]) -> None:
    for rank in start_ranks(2, [HOST_RANKS, "verbs", "held_until_acknowledged"], timeout_s=60.0):
        assert rank.output.count("link 0<->1: no verbs") + rank.output.count("link 1<->0: no verbs") == 1, rank.output
