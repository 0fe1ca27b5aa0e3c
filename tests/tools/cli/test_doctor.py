# SPDX-License-Identifier: Apache-2.0
"""`adaptra doctor`: on hosts made up, and whether it tells the truth about this one."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from adaptra_megatron.patches import PATCHES
from support.made_up.host import MadeUpHost

from adaptra_megatron.tools.cli import doctor
from adaptra_megatron.tools.cli.main import main
from adaptra_megatron.tools.host_checks import software
from adaptra_megatron.tools.host_checks.devices import Interface, check_gpus, check_rnics, find_interfaces
from adaptra_megatron.tools.host_checks.host_findings import HostFinding, HostLevel, spelled_nbytes
from adaptra_megatron.tools.host_checks.software import check_patches
from adaptra_megatron.tools.host_checks.transport_checks import (
    ProcessLimits,
    check_limits,
    check_shm,
    check_tcp,
    check_verbs,
)
from adaptra_megatron.transport.gpu.hardware_queues import CONNECTIONS
from adaptra_megatron.transport.host_settings import MEBIBYTE, HostSettings
from adaptra_megatron.transport.wires.verbs.verbs_device import load_verbs

PLENTY = ProcessLimits(None, 1 << 20, 64 << 30)
CAP_IPC_LOCK = 1 << 14


@pytest.fixture
def host(tmp_path: Path) -> MadeUpHost:
    return MadeUpHost(tmp_path)


@pytest.fixture
def two_rails(host: MadeUpHost) -> MadeUpHost:
    """Two sockets, a GPU and an RNIC on each; the second RNIC has no link."""
    host.gpu("0000:17:00.0", 0, "NVIDIA H100 80GB HBM3")
    host.gpu("0000:97:00.0", 1, "NVIDIA H100 80GB HBM3")
    host.rnic("mlx5_0", "0000:18:00.0", 0, address=(10, 1, 0, 5))
    host.rnic("mlx5_1", "0000:98:00.0", 1, state="1: DOWN", address=(10, 2, 0, 5))
    return host


def one(findings: Sequence[HostFinding], subject: str) -> HostFinding:
    (found,) = [finding for finding in findings if finding.subject == subject]
    return found


class TestRnics:
    def test_each_port_with_all_that_the_kernel_says(self, two_rails: MadeUpHost) -> None:
        first, second = check_rnics(two_rails.roots)
        assert (first.subject, first.level, first.remedy) == ("mlx5_0/1", HostLevel.OK, "")
        assert first.text == (
            "ACTIVE, Ethernet, 200 Gb/sec (4X HDR), GID 3: 10.1.0.5 on eth_mlx5_0, RoCE v2, driver mlx5_core, "
            "firmware 28.39.1002, PCI 0000:18:00.0, NUMA node 0"
        )
        assert (second.level, second.details["physical_state"]) == (HostLevel.NOTE, "Disabled")
        assert "no link (Disabled), so verbs leaves it out" in second.text
        assert "ip link set eth_mlx5_1 up" in second.remedy

    def test_a_link_without_an_address_cannot_be_used(self, host: MadeUpHost) -> None:
        host.rnic("mlx5_0", "0000:18:00.0", 0)
        (found,) = check_rnics(host.roots)
        assert (found.level, found.fatal) == (HostLevel.PROBLEM, False)
        assert "mlx5_0 port 1 has no GID" in found.text
        assert found.remedy.startswith("ip address add")

    def test_the_first_version_of_roce_is_noted(self, host: MadeUpHost) -> None:
        host.rnic("mlx5_0", "0000:18:00.0", 0, address=(10, 1, 0, 5), gid_type="IB/RoCE v1")
        (found,) = check_rnics(host.roots)
        assert (found.level, "does not pass routers" in found.text) == (HostLevel.NOTE, True)

    def test_hardware_without_its_driver(self, host: MadeUpHost) -> None:
        assert check_rnics(host.roots)[0].level is HostLevel.OK
        host.pci("0000:18:00.0", 0, "0x15b3", "0x020700")
        (found,) = check_rnics(host.roots)
        assert (found.level, "0000:18:00.0" in found.text) == (HostLevel.PROBLEM, True)
        assert "modprobe mlx5_ib" in found.remedy


MANY_QUEUES = {CONNECTIONS: "32"}


class TestGpus:
    def test_each_has_its_nearest_rnic(self, two_rails: MadeUpHost) -> None:
        first, second = check_gpus(two_rails.roots, MANY_QUEUES)
        assert first.level is HostLevel.OK
        assert first.text == (
            "NVIDIA H100 80GB HBM3, NUMA node 0, the host path copies on CPUs 0-15, nearest RNIC mlx5_0 (on the same "
            "NUMA node)"
        )
        assert second.level is HostLevel.NOTE, "its own node's RNIC is down"
        assert "NUMA node 1, the host path copies on CPUs 16-31, nearest" in second.text
        assert second.text.endswith("nearest RNIC mlx5_0 (across NUMA nodes)")
        assert (second.details["nearest_rnics"], second.details["nearness"]) == (["mlx5_0"], "system")

    def test_without_its_driver(self, host: MadeUpHost) -> None:
        host.gpu("0000:17:00.0", 0)
        (found,) = check_gpus(host.roots, MANY_QUEUES)
        assert (found.level, "driver is not loaded" in found.text) == (HostLevel.PROBLEM, True)

    @pytest.mark.parametrize(("queues", "said"), [("1", "links take the host path"), ("", f"Set {CONNECTIONS}=32")])
    def test_what_plans_take_their_queues_for(self, two_rails: MadeUpHost, queues: str, said: str) -> None:
        found = check_gpus(two_rails.roots, {CONNECTIONS: queues})[-1]
        assert (found.subject, found.level, said in found.text) == ("hardware queues", HostLevel.NOTE, True)

    def test_none(self, host: MadeUpHost) -> None:
        (found,) = check_gpus(host.roots, MANY_QUEUES)
        assert (found.level, found.remedy) == (HostLevel.OK, "")


class TestLimits:
    def test_plenty(self, two_rails: MadeUpHost) -> None:
        found = check_limits(two_rails.roots, PLENTY, HostSettings())
        assert {finding.level for finding in found} == {HostLevel.OK}
        assert one(found, "TCP buffers").details == {
            "tcp_rmem": 16 * MEBIBYTE,
            "tcp_wmem": 16 * MEBIBYTE,
            "rmem_max": 212992,
            "wmem_max": 212992,
        }

    def test_too_little_locked_memory_for_both_rnics(self, two_rails: MadeUpHost) -> None:
        settings = HostSettings(slots=8, slot_nbytes=MEBIBYTE)
        little = dataclasses.replace(PLENTY, locked_nbytes=64 * MEBIBYTE - 1)
        found = one(check_limits(two_rails.roots, little, settings), "locked memory")
        assert (found.level, found.fatal) == (HostLevel.PROBLEM, False)
        assert found.details["needed_nbytes"] == 2 * 2 * 8 * MEBIBYTE * 2, "two rings, two neighbours, two RNICs"
        assert "ulimit -l unlimited" in found.remedy
        enough = dataclasses.replace(PLENTY, locked_nbytes=64 * MEBIBYTE)
        assert one(check_limits(two_rails.roots, enough, settings), "locked memory").level is HostLevel.OK

    def test_a_privileged_process_locks_what_it_likes(self, two_rails: MadeUpHost) -> None:
        two_rails.capabilities(CAP_IPC_LOCK)
        little = dataclasses.replace(PLENTY, locked_nbytes=65536)
        found = one(check_limits(two_rails.roots, little, HostSettings()), "locked memory")
        assert (found.level, "CAP_IPC_LOCK" in found.text) == (HostLevel.OK, True)

    def test_locked_memory_matters_to_rnics_alone(self, host: MadeUpHost) -> None:
        little = dataclasses.replace(PLENTY, locked_nbytes=65536)
        assert one(check_limits(host.roots, little, HostSettings()), "locked memory").level is HostLevel.OK

    def test_small_buffers_few_files_little_shared_memory(self, host: MadeUpHost) -> None:
        host.write("proc/sys/net/ipv4/tcp_rmem", "4096 87380 1048576")
        found = check_limits(host.roots, ProcessLimits(None, 256, 64 * MEBIBYTE), HostSettings())
        for subject, remedy in (
            ("TCP buffers", "net.ipv4.tcp_rmem="),
            ("open files", "ulimit -n"),
            ("shared memory", "--shm-size"),
        ):
            assert (one(found, subject).level, remedy in one(found, subject).remedy) == (HostLevel.NOTE, True), subject
        assert "tcp_wmem=" not in one(found, "TCP buffers").remedy

    @pytest.mark.parametrize(("release", "fatal"), [("3.10.0-1160.el7.x86_64", True), ("", False)])
    def test_a_kernel_that_is_too_old_or_unknown(self, host: MadeUpHost, release: str, fatal: bool) -> None:
        host.write("proc/sys/kernel/osrelease", release)
        found = one(check_limits(host.roots, PLENTY, HostSettings()), "kernel")
        assert (found.level, found.fatal) == (HostLevel.PROBLEM, fatal)

    def test_sizes_are_spelled(self) -> None:
        sizes = (512, 65536, 3 << 29, 1023 << 20, 3 << 40)
        assert list(map(spelled_nbytes, sizes)) == ["512 B", "64 KiB", "1.5 GiB", "1023 MiB", "3 TiB"]


class FailingDeviceError(Exception):
    """As pyverbs' own, without pyverbs."""


def fake_verbs(failing: str = "") -> SimpleNamespace:
    class Context:
        def __init__(self, name: str) -> None:
            if name == failing:
                raise FailingDeviceError("Failed to open device")

        def close(self) -> None:
            opened.append(self)

    opened: list[Context] = []
    return SimpleNamespace(Context=Context, Error=FailingDeviceError, opened=opened)


class TestVerbs:
    @pytest.fixture
    def open_files(self, two_rails: MadeUpHost) -> MadeUpHost:
        two_rails.write("sys/class/infiniband_verbs/uverbs0/ibdev", "mlx5_0")
        two_rails.write("dev/infiniband/uverbs0", "")
        return two_rails

    def test_usable_over_the_ports_with_a_link(self, open_files: MadeUpHost) -> None:
        verbs = fake_verbs()
        found = check_verbs(open_files.roots, lambda: verbs)
        assert (found.level, found.details) == (HostLevel.OK, {"usable": True, "ports": ["mlx5_0/1"]})
        assert len(verbs.opened) == 1

    def test_pyverbs_is_missing(self, open_files: MadeUpHost, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pyverbs", None)
        found = check_verbs(open_files.roots, load_verbs)
        assert (found.level, found.fatal, "usable" in found.details) == (HostLevel.PROBLEM, False, False)
        assert "pyverbs cannot be imported" in found.text
        assert "falls back to auto" in found.text
        assert "apt-get install python3-pyverbs" in found.remedy

    def test_the_device_file_is_not_in_the_container(self, two_rails: MadeUpHost) -> None:
        two_rails.write("sys/class/infiniband_verbs/uverbs0/ibdev", "mlx5_0")
        found = check_verbs(two_rails.roots, fake_verbs)
        assert (found.level, "/dev/infiniband/uverbs0 (mlx5_0) cannot be opened" in found.text) == (
            HostLevel.PROBLEM,
            True,
        )
        assert "--device=/dev/infiniband" in found.remedy

    def test_a_device_does_not_open(self, open_files: MadeUpHost) -> None:
        found = check_verbs(open_files.roots, lambda: fake_verbs("mlx5_0"))
        assert (found.level, "mlx5_0 does not open: Failed to open device" in found.text) == (HostLevel.PROBLEM, True)

    def test_no_device_and_no_link_are_no_problem_but_worth_a_word(self, host: MadeUpHost) -> None:
        found = check_verbs(host.roots, fake_verbs)
        assert (found.level, "rdma link add" in found.remedy) == (HostLevel.NOTE, True)
        host.rnic("mlx5_0", "0000:18:00.0", 0, state="1: DOWN")
        assert check_verbs(host.roots, fake_verbs).remedy == "see RNICs above"


class TestTcp:
    def test_over_the_way_to_the_master(self) -> None:
        interfaces = find_interfaces(doctor.Roots())
        host = interfaces[0].addresses[0] if interfaces else pytest.skip("this machine has loopback alone")
        found = check_tcp(interfaces, {"MASTER_ADDR": host})
        assert (found.level, found.details["listens_on"]) == (HostLevel.OK, host)
        assert found.details["interface"] == interfaces[0].name

    def test_a_faster_interface_is_named(self) -> None:
        (mine, *_) = find_interfaces(doctor.Roots()) or pytest.skip("this machine has loopback alone")
        slow = dataclasses.replace(mine, speed_mbit_s=1000, up=True)
        fast = Interface("ib0", ("10.9.8.7",), True, 200_000, 4096)
        down = Interface("ib1", ("10.9.8.6",), False, 400_000, 4096)
        found = check_tcp([slow, fast, down], {"MASTER_ADDR": slow.addresses[0]})
        assert (found.level, "ib0, 200 Gb/s, MTU 4096 is faster" in found.text) == (HostLevel.NOTE, True)

    def test_a_master_that_leads_nowhere_else(self) -> None:
        found = check_tcp([], {"MASTER_ADDR": "localhost"})
        assert (found.level, "leads to" in found.text, found.details["usable"]) == (HostLevel.NOTE, True, True)

    def test_outside_of_a_job(self) -> None:
        found = check_tcp([Interface("eth0", ("10.9.8.7",), True, None, 1500)], {})
        assert (found.level, "10.9.8.7 (eth0, speed unknown, MTU 1500)" in found.text) == (HostLevel.OK, True)


def importer(*missing: str) -> Any:
    """The import of a Python in which some modules cannot be imported."""

    def import_module(name: str) -> Any:
        if name in missing:
            raise ImportError(f"{name}: cannot open shared object file\nand more")
        return software.import_quietly(name) if name != "megatron.core" else None

    return import_module


class TestSoftware:
    def test_what_cannot_be_imported_stops_everything(self, host: MadeUpHost) -> None:
        found = software.check_versions(host.roots, importer("torch"))
        torch = one(found, "torch")
        assert (torch.level, torch.fatal) == (HostLevel.PROBLEM, True)
        assert torch.text == "cannot be imported: ImportError: torch: cannot open shared object file"
        assert torch.remedy.startswith("pip install 'torch")
        assert not [finding for finding in found if finding.subject == "CUDA"]

    def test_a_release_outside_the_window(self, host: MadeUpHost, monkeypatch: pytest.MonkeyPatch) -> None:
        real = metadata.version
        monkeypatch.setattr(
            software.metadata, "version", lambda name: "0.17.0" if name == "megatron-core" else real(name)
        )
        monkeypatch.setattr(
            software.metadata,
            "requires",
            lambda name: ["megatron-core<0.17,>=0.16.1; extra == 'megatron'", "x; extra=='y'"],
        )
        found = one(software.check_versions(host.roots, importer()), "megatron-core")
        assert (found.level, found.fatal) == (HostLevel.PROBLEM, True)
        assert found.text == "0.17.0 is installed, <0.17,>=0.16.1 is needed"

    def test_a_checkout_on_the_path_counts_and_not_what_is_installed(self, host: MadeUpHost) -> None:
        def import_module(name: str) -> Any:
            checkout = SimpleNamespace(__version__="0.13.0")
            return checkout if name == "megatron.core" else software.import_quietly(name)

        found = one(software.check_versions(host.roots, import_module), "megatron-core")
        assert (found.level, found.fatal) == (HostLevel.PROBLEM, True)
        assert found.text.startswith("0.13.0 is installed, ")

    def test_a_driver_that_torch_does_not_use(self, host: MadeUpHost, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        host.write(
            "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19"
        )
        found = one(software.check_versions(host.roots), "CUDA")
        assert (found.level, found.details["driver"], found.details["gpus"]) == (HostLevel.PROBLEM, "535.129.03", 0)

    def test_a_native_module_that_does_not_load(self) -> None:
        broken, good, _good = software.check_native_modules(importer("adaptra_megatron.schedule._native"))
        assert (broken.fatal, good.level) == (True, HostLevel.OK)
        assert "schedule._native" in broken.subject


class TestPatches:
    def test_all_fit_the_installed_megatron(self) -> None:
        found = check_patches()
        assert [finding.subject for finding in found] == [patch.identity for patch in PATCHES]
        assert {finding.level for finding in found} == {HostLevel.OK}

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            ({"parameters": ("unknown_parameter",)}, "has no parameter unknown_parameter"),
            ({"target": "megatron.core.pipeline_parallel.schedules:gone"}, "there is no megatron.core"),
            ({"versions": ">=9"}, "is written for megatron-core >=9"),
        ],
    )
    def test_one_that_does_not_fit(self, change: dict[str, Any], why: str) -> None:
        (found,) = check_patches([dataclasses.replace(PATCHES[0], **change)])
        assert (found.level, found.fatal, why in found.text) == (HostLevel.PROBLEM, True, True)
        assert found.remedy.startswith("pip install 'megatron-core")


FAILING_OVER_VERBS = """
import json, os, sys, time
_name, results, *transports = sys.argv
for transport in transports:
    if transport == "verbs":
        while transports[0] != "verbs" and not os.path.getsize(results):
            time.sleep(0.02)
        raise SystemExit("no way")
    if os.environ["RANK"] == "1":
        open(results, "a").write(json.dumps(
            {"transport": transport, "message_mib": 1, "gib_per_s": 2.0, "round_trip_us": 3.0}) + "\\n")
"""


class TestSelfTest:
    @pytest.fixture
    def ranks(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        """The program that the two processes run instead."""
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        monkeypatch.setattr(doctor, "_RANK_MODULE", "made_up_rank")
        return tmp_path / "made_up_rank.py"

    def test_a_transport_that_fails_does_not_keep_the_others_from_running(self, ranks: Path) -> None:
        ranks.write_text(FAILING_OVER_VERBS)
        shm, verbs, tcp = doctor.run_self_test(["shm", "verbs", "tcp"], 20.0)
        assert (shm.level, shm.details["gib_per_s"], tcp.level) == (HostLevel.OK, 2.0, HostLevel.OK)
        assert (verbs.level, "says no way" in verbs.text) == (HostLevel.PROBLEM, True)

    def test_a_hang_ends_at_the_deadline(self, ranks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        ranks.write_text("import time\ntime.sleep(60)\n")
        monkeypatch.setattr(doctor, "_LEAST_S", 1.0)
        start_s = time.monotonic()
        shm, tcp = doctor.run_self_test(["shm", "tcp"], 1.5)
        assert time.monotonic() - start_s < 8.0
        assert "it was not over within 1 s" in shm.text
        assert "not run: 1.5 s were over" in tcp.text


def test_the_exit_status_says_whether_it_can_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fine = HostFinding(subject="shm", level=HostLevel.PROBLEM, text="cannot be used", remedy="do this")
    fatal = HostFinding(subject="torch", level=HostLevel.PROBLEM, text="cannot be imported", fatal=True)
    for found, status in (([fine], 0), ([fine, fatal], 1)):
        monkeypatch.setattr(doctor, "examine", lambda *_, found=found, **__: {"versions": found})
        assert main(["doctor"]) == status
        text = capsys.readouterr().out
        assert "problem shm: cannot be used\n          -> do this\n" in text
        assert ("cannot run here before this is remedied: torch; problems: 2" in text) == bool(status)
        assert main(["doctor", "--json"]) == status
        assert json.loads(capsys.readouterr().out)["works"] == (not status)


def test_the_text_is_the_same_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    note = HostFinding(subject="a", level=HostLevel.NOTE, text="seen " * 40, remedy="nothing [to] be done")
    doctor.print_text({"section": [note]})
    with_rich = capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "rich.console", None)
    doctor.print_text({"section": [note]})
    assert capsys.readouterr().out == with_rich
    assert "note    a: seen seen" in with_rich
    assert max(map(len, with_rich.splitlines())) <= 120


def run_doctor(*arguments: str, before: str = "") -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """Exit status and findings by section, of the real command."""
    program = f"import sys\n{before}\nfrom adaptra_megatron.tools.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "doctor", "--json", *arguments]
    environment = {key: value for key, value in os.environ.items() if key != "MASTER_ADDR"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.stderr == ""
    sections: dict[str, list[dict[str, Any]]] = {}
    for finding in json.loads(done.stdout)["findings"]:
        sections.setdefault(finding["section"], []).append(finding)
    return done.returncode, sections


def test_it_tells_the_truth_about_this_machine() -> None:
    status, sections = run_doctor("--self-test")
    assert status == 0
    devices = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    assert sorted({finding["details"].get("device") for finding in sections["RNICs"]} - {None}) == devices
    limits = {finding["subject"]: finding["details"] for finding in sections["limits"]}
    assert limits["kernel"]["release"] == os.uname().release
    assert limits["open files"]["limit"] in (resource.getrlimit(resource.RLIMIT_NOFILE)[0], None)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert limits["locked memory"]["limit_nbytes"] == (None if locked == resource.RLIM_INFINITY else locked)
    for name in ("rmem_max", "wmem_max"):
        assert limits["TCP buffers"][name] == int(Path(f"/proc/sys/net/core/{name}").read_text())
    versions = {finding["subject"]: finding for finding in sections["versions"]}
    for name in ("torch", "megatron-core", "numpy"):
        assert versions[name]["details"]["version"] == metadata.version(name)
    addresses = one_section(sections, "transports", "tcp")["details"]["addresses"]
    assert set(addresses) <= {path.name for path in Path("/sys/class/net").iterdir()} - {"lo"}
    assert one_section(sections, "transports", "shm")["level"] == "ok"
    assert {finding["level"] for finding in sections["patches"] + sections["native modules"]} == {"ok"}
    tested = {finding["subject"]: finding for finding in sections["self-test"]}
    assert {"shm", "tcp"} <= set(tested)
    for finding in tested.values():
        assert finding["level"] == "ok", finding
        assert finding["details"]["gib_per_s"] > 0.01


def test_without_torch_and_megatron_it_still_runs() -> None:
    status, sections = run_doctor(before="sys.modules['torch'] = sys.modules['megatron'] = None")
    assert status == 1
    fatal = {finding["subject"] for found in sections.values() for finding in found if finding["fatal"]}
    assert {"torch", "megatron-core"} <= fatal
    assert one_section(sections, "transports", "shm")["level"] == "ok"
    assert one_section(sections, "native modules", "transport._ring")["level"] == "ok"


def test_a_self_test_without_torch_says_so() -> None:
    _, sections = run_doctor("--self-test", before="sys.modules['torch'] = None")
    assert {finding["level"] for finding in sections["self-test"]} == {"problem"}
    assert all("the job's store cannot be served" in finding["text"] for finding in sections["self-test"])


def one_section(sections: dict[str, list[dict[str, Any]]], section: str, subject: str) -> dict[str, Any]:
    (found,) = [finding for finding in sections[section] if finding["subject"] == subject]
    return found


def test_shared_memory_works_here() -> None:
    assert check_shm().level is HostLevel.OK
