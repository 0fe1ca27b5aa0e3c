#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Real RDMA queue pairs without RDMA hardware: Debian's kernel with Soft-RoCE (rdma_rxe) in QEMU.

    softroce_vm.py test                       run tests/rdma in it (what `make test-rdma` does)
    softroce_vm.py bench [FILE]               throughput of verbs and of ib_write_bw; the table goes into FILE too
    softroce_vm.py run [-t SECONDS] -- CMD    run one command in it; its exit status is the command's
    softroce_vm.py prepare                    only fetch and build what is needed

The guest's root is this machine's, through 9p with a writable layer on top that is thrown away. Kernel, modules and
Debian's pyverbs are kept in $SOFTROCE_CACHE (~/.cache/softroce). Emulated without KVM: for correctness, not speed.
Rails: rxa0 <-> rxa1 on the veth pair va0/va1 (10.0.1.1 and .2), rxb0 <-> rxb1 on vb0/vb1 (10.0.2.1 and .2).
"""

from __future__ import annotations

import argparse
import base64
import io
import lzma
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

CACHE = Path(os.environ.get("SOFTROCE_CACHE", "~/.cache/softroce")).expanduser()
REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = [
    "qemu-system-x86",
    "busybox-static",
    "ibverbs-providers",
    f"libpython3.{sys.version_info.minor}",
    "iproute2",
]
QEMU = "qemu-system-x86_64"
FORMAT = "1"
"""Changes when what is cached has to be built again."""
TEST_LIMIT_S, BENCH_LIMIT_S = 420.0, 600.0
NO_STATUS, LATE = 125, 124
MODULES = ["crc32_generic", "rdma_rxe", "ib_uverbs", "veth", "sch_netem", "virtio_pci", "9pnet_virtio", "9p", "overlay"]
MODULE_PATHS = re.compile(r"/(infiniband|net|crypto|virtio|9p|fs|lib|char|block)/")

INIT = r"""#!/bb/sh
export PATH=/bb
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
for m in $(cat /mod/order); do insmod /mod/$m.ko || echo "softroce: insmod $m failed"; done
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=1048576,cache=loose host /lower || echo "softroce: no root"
mount -t tmpfs rw /rw; mkdir /rw/u /rw/w; mount -t overlay -o lowerdir=/lower,upperdir=/rw/u,workdir=/rw/w ov /new
for d in proc sys dev; do mount -o bind /$d /new/$d; done
mkdir -p /new/dev/shm /new/dev/pts /new/run/softroce
mount -t tmpfs shm /new/dev/shm; mount -t devpts pts /new/dev/pts
cp /net.sh /new/run/softroce/
echo "softroce: up at $(cut -d' ' -f1 /proc/uptime) s"
CMD=$(sed -n 's/.*vcmd=\([^ ]*\).*/\1/p' /proc/cmdline | base64 -d)
/bb/busybox chroot /new /bin/sh -c "$CMD"; rc=$?
echo "softroce: status $rc at $(cut -d' ' -f1 /proc/uptime) s"
sync; printf "\\$(printf %03o $rc)" | dd of=/dev/port bs=1 seek=244 2>/dev/null
poweroff -f
"""

# Both ends in one network namespace, as rxe of Linux 6.1 carries nothing between two: hence the settings of ARP.
NETWORK = r"""set -e
ip link set lo up
echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter
for r in a:1 b:2; do n=${r%:*}; k=${r#*:}
  ip link add v${n}0 mtu 4500 type veth peer name v${n}1 mtu 4500
  for e in 0 1; do
    ip addr add 10.0.$k.$((e+1))/24 dev v${n}$e; ip link set v${n}$e up
    for c in accept_local=1 rp_filter=0 arp_ignore=1 arp_announce=2; do
      echo ${c#*=} > /proc/sys/net/ipv4/conf/v${n}$e/${c%=*}
    done
    rdma link add rx${n}$e type rxe netdev v${n}$e
  done
done
"""


class Archive:
    """A cpio archive in the kernel's format ("newc")."""

    def __init__(self) -> None:
        self._bytes = io.BytesIO()
        self._files = 0

    def add(self, name: str, mode: int, content: bytes = b"", device: tuple[int, int] = (0, 0)) -> None:
        self._files += 1
        encoded = name.encode() + b"\0"
        numbers = (self._files, mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(encoded), 0)
        self._bytes.write(b"070701" + b"".join(b"%08X" % number for number in numbers) + encoded)
        self._pad()
        self._bytes.write(content)
        self._pad()

    def finish(self) -> bytes:
        self.add("TRAILER!!!", 0)
        return self._bytes.getvalue()

    def _pad(self) -> None:
        self._bytes.write(b"\0" * (-self._bytes.tell() % 4))


def prepared() -> bool:
    version = CACHE / "version"
    return version.exists() and version.read_text() == FORMAT


def prepare() -> None:
    """Fetch Debian's kernel and pyverbs, and build what QEMU boots. About 70 MB, some seconds."""
    CACHE.mkdir(parents=True, exist_ok=True)
    depends = _output(["apt-cache", "depends", "linux-image-amd64"])
    found = re.search(r"Depends: (linux-image-\S+)", depends)
    if found is None:
        raise SystemExit("softroce: apt knows no linux-image-amd64: run apt-get update")
    with tempfile.TemporaryDirectory(dir=CACHE) as directory:
        fetch = ["apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", found[1], "python3-pyverbs"]
        subprocess.run(fetch, cwd=directory, check=True)
        (image,) = Path(directory).glob("linux-image*.deb")
        (pyverbs,) = Path(directory).glob("python3-pyverbs*.deb")
        _keep_pyverbs(pyverbs)
        kernel, modules, builtin = _read_kernel(image)
    tag = f"cpython-{sys.version_info.major}{sys.version_info.minor}"
    if not list((CACHE / "pyverbs").glob(f"device.{tag}-*.so")):
        raise SystemExit(f"softroce: Debian's pyverbs is not for this Python ({tag}): use the one of the distribution")
    _replace("vmlinux", _uncompressed(kernel))
    _replace("initrd", _initial_files(modules, builtin))
    _replace("version", FORMAT.encode())


def run(command: str, limit_s: float, memory_mib: int = 1536, said: list[str] | None = None) -> int:
    """Boot, run a shell command, power off. Its exit status; LATE after `limit_s`, NO_STATUS if none came.

    What it says is printed, and goes into `said` line by line.
    """
    environment = (
        "export HOME=/root LANG=C.UTF-8 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "
        f"PYTHONDONTWRITEBYTECODE=1 PYTHONPATH={shlex.quote(str(CACHE))}; sh /run/softroce/net.sh || exit 97; "
    )
    encoded = base64.b64encode((environment + command).encode()).decode()
    if len(encoded) > 1800:
        raise SystemExit("softroce: the command does not fit into the kernel's command line: put it into a file")
    machine = ["-M", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-m", str(memory_mib), "-smp", "2"]
    quiet = ["-display", "none", "-no-reboot", "-nodefaults", "-serial", "stdio"]
    append = f"console=ttyS0 panic=-1 quiet no_timer_check vcmd={encoded}"
    boot = ["-kernel", str(CACHE / "vmlinux"), "-initrd", str(CACHE / "initrd"), "-append", append]
    root = ["-fsdev", "local,id=f0,path=/,security_model=none,readonly=on,multidevs=remap"]
    devices = ["-device", "isa-debug-exit,iobase=0xf4,iosize=0x04", "-device", "virtio-9p-pci,fsdev=f0,mount_tag=host"]
    arguments = [QEMU, *machine, *quiet, *boot, *root, *devices]
    process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    late = threading.Timer(limit_s, process.kill)
    late.start()
    assert process.stdout is not None
    try:
        for line in process.stdout:
            text = line.replace(b"\r", b"").decode(errors="replace")
            sys.stdout.write(text)
            sys.stdout.flush()
            if said is not None:
                said.append(text)
        status = process.wait()
    finally:
        timed_out = not late.is_alive()
        late.cancel()
        process.kill()
    if status > 0 and status & 1:  # QEMU's way to pass on what the guest wrote to its exit device
        return status >> 1
    return LATE if timed_out else NO_STATUS


def test() -> int:
    """Run tests/rdma. 0 with a loud notice where QEMU cannot be installed."""
    if missing := _install():
        print("=" * 100)
        print(f"== RDMA TESTS SKIPPED: {missing}. Nothing of the verbs transport has been tested.")
        print("=" * 100)
        return 0
    if not prepared():
        prepare()
    options = "-v -p no:cacheprovider -o python_files='guest_*.py' -o faulthandler_timeout=60 --confcutdir=tests/rdma"
    here, python = shlex.quote(str(REPOSITORY)), shlex.quote(sys.executable)
    plugins = "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1"
    status = run(f"cd {here} && {plugins} {python} -m pytest -o timeout=0 {options} tests/rdma 2>&1", TEST_LIMIT_S)
    meaning = {0: "passed", LATE: f"not done after {TEST_LIMIT_S:g} s", NO_STATUS: "the guest gave no status"}
    print(f"== RDMA tests: {meaning.get(status, f'FAILED, status {status}')}")
    return status


def bench(output: Path | None) -> int:
    """Run benchmarks/verbs.py over one rail."""
    said: list[str] = []
    here, python = shlex.quote(str(REPOSITORY)), shlex.quote(sys.executable)
    status = run(f"cd {here} && {python} benchmarks/verbs.py rxa0 rxa1 10.0.1.2", BENCH_LIMIT_S, said=said)
    if status == 0 and output is not None:
        first = said.index("# Throughput over verbs\n")
        title, *table = [line for line in said[first:] if not line.startswith("softroce: ")]
        cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        host = f"{os.cpu_count()} CPUs ({cpu[1] if cpu else os.uname().machine})"
        where = f"\nSoft-RoCE (rdma_rxe) over a veth pair, in QEMU without KVM on a machine with {host}.\n"
        output.write_text("".join([title, where, *table]))
    return status


def _install(*, bench: bool = False) -> str | None:
    """What is missing and cannot be installed; None once everything is here. `bench`: ib_write_bw too."""
    if not sys.platform.startswith("linux") or os.uname().machine != "x86_64":
        return "they need an x86-64 Linux machine"
    packages = [*PACKAGES, "perftest"] if bench else PACKAGES
    here = shutil.which(QEMU) and Path("/bin/busybox").exists() and prepared()
    if here and (not bench or shutil.which("ib_write_bw")):
        return None
    if shutil.which("apt-get") is None:
        return f"{QEMU} is missing, and there is no apt-get to install it"
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
    for command in (install, ["apt-get", "update", "-qq"], install):
        if command[1] == "install" and subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0:
            return None
        if command[1] == "update":
            subprocess.run(command, stdout=subprocess.DEVNULL)
    return f"apt-get could not install {' '.join(packages)}"


def _keep_pyverbs(package: Path) -> None:
    """Debian's build works with any CPython of its version, from any directory."""
    for name, content in _files_of(package):
        inside = name.partition("/dist-packages/")[2]
        if inside.startswith("pyverbs/"):
            target = CACHE / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)


def _read_kernel(package: Path) -> tuple[bytes, dict[str, bytes], set[str]]:
    """The kernel, the modules that might be needed, and the names of those that are built in."""
    kernel, modules, builtin = b"", {}, set()
    for name, content in _files_of(package):
        base = name.rpartition("/")[2]
        if base.endswith(".ko") and MODULE_PATHS.search(name):
            modules[_module(base)] = content
        elif base.startswith("vmlinuz-"):
            kernel = content
        elif base == "modules.builtin":
            builtin = {_module(line.rpartition("/")[2]) for line in content.decode().split()}
    return kernel, modules, builtin


def _initial_files(modules: dict[str, bytes], builtin: set[str]) -> bytes:
    order: list[str] = []

    def need(name: str) -> None:
        if name in builtin or name in order:
            return
        for depends in re.findall(rb"\0depends=([^\0]*)\0", modules[name]):
            for other in filter(None, depends.decode().split(",")):
                need(other.replace("-", "_"))
        order.append(name)

    for name in MODULES:
        need(name)
    archive = Archive()
    for directory in ["proc", "sys", "dev", "mod", "bb", "lower", "rw", "new"]:
        archive.add(directory, 0o40755)
    archive.add("dev/console", 0o20600, device=(5, 1))
    archive.add("bb/busybox", 0o100755, Path("/bin/busybox").read_bytes())
    for applet in _output(["/bin/busybox", "--list"]).split():
        if applet != "busybox":
            archive.add(f"bb/{applet}", 0o120777, b"busybox")
    for name in order:
        archive.add(f"mod/{name}.ko", 0o100644, modules[name])
    archive.add("mod/order", 0o100644, "\n".join(order).encode())
    archive.add("init", 0o100755, INIT.encode())
    archive.add("net.sh", 0o100755, NETWORK.encode())
    return archive.finish()


def _uncompressed(kernel: bytes) -> bytes:
    """The ELF image inside a bzImage, which QEMU boots without real mode (PVH). Offsets: Linux's boot protocol."""
    sectors = kernel[0x1F1] or 4
    offset, nbytes = struct.unpack_from("<II", kernel, 0x248)
    payload = kernel[(sectors + 1) * 512 + offset :][:nbytes]
    if payload[:6] != b"\xfd7zXZ\0":
        raise SystemExit("softroce: the kernel is not compressed with xz as Debian 12's is")
    return lzma.LZMADecompressor().decompress(payload)


def _files_of(package: Path) -> Iterator[tuple[str, bytes]]:
    process = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE)
    with process, tarfile.open(fileobj=process.stdout, mode="r|") as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None:
                yield member.name, content.read()


def _module(file: str) -> str:
    return file.removesuffix(".ko").replace("-", "_")


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _replace(name: str, content: bytes) -> None:
    """All or nothing: another run may be reading."""
    partial = CACHE / f"{name}.{os.getpid()}"
    partial.write_bytes(content)
    partial.replace(CACHE / name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["test", "bench", "run", "prepare"])
    parser.add_argument("file", type=Path, nargs="?", metavar="FILE", help="where `bench` writes its table")
    parser.add_argument("-t", type=float, default=300.0, metavar="SECONDS", help="time limit of `run`")
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments = parser.parse_args(sys.argv[1:cut])
    if arguments.what == "test":
        return test()
    if missing := _install(bench=arguments.what == "bench"):
        print(f"softroce: {missing}", file=sys.stderr)
        return 1
    if arguments.what == "prepare" or not prepared():
        prepare()
    if arguments.what == "bench":
        return bench(arguments.file)
    return 0 if arguments.what == "prepare" else run(" ".join(sys.argv[cut + 1 :]), arguments.t)


if __name__ == "__main__":
    sys.exit(main())
