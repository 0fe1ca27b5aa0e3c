# SPDX-License-Identifier: Apache-2.0
"""Builds what checks need with the compilers that are there: torch brings the headers of pybind11."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
BUILD = REPOSITORY / "build" / "gpu_check"
KERNELS = BUILD / "kernels.so"
NCCL_LIBRARY = "libnccl.so.2"
NCCL_FUNCTIONS = "SendRecv|AllReduce Sum * RING SIMPLE"
"""Of its device code: with all of it the build takes an hour."""
NATIVE = {"csrc/schedule": "adaptra_megatron/schedule/_native", "csrc/ring": "adaptra_megatron/transport/_ring"}


class BuildError(RuntimeError):
    """A compiler failed, or is not there; has the end of what it said."""


def native_commands(compiler: str) -> list[list[str]]:
    """What builds the package's extensions in its own folders, as setup.py does."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    flags = ["-std=c++17", "-O3", "-shared", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"]
    includes = [f"-I{Path(torch.origin).with_name('include')}", f"-I{sysconfig.get_path('include')}"]
    return [
        [compiler, *flags, *includes, *_sources(folder), "-o", f"{REPOSITORY / target}{suffix}"]
        for folder, target in NATIVE.items()
    ]


def kernel_command(nvcc: str, output: Path, architecture: str) -> list[str]:
    """What builds kernels.cu. `architecture`: "90" for sm_90. More registers than NCCL has are used by no kernel."""
    source = Path(__file__).with_name("kernels.cu")
    code = f"arch=compute_{architecture},code=sm_{architecture}"
    flags = ["-shared", "-Xcompiler", "-fPIC", "-O3", "-std=c++17", "-maxrregcount=96"]
    return [nvcc, *flags, "-gencode", code, str(source), "-o", str(output)]


def nccl_command(nvcc: str, sources: Path, build: Path, architecture: str, jobs: int) -> list[str]:
    """What builds NCCL with the device code of NCCL_FUNCTIONS alone."""
    return [
        *("make", "-C", str(sources), f"-j{jobs}", "src.build", f"BUILDDIR={build}", f"NVCC={nvcc}"),
        f"CUDA_HOME={cuda_home(nvcc)}",
        f"NVCC_GENCODE=-gencode=arch=compute_{architecture},code=sm_{architecture}",
        f"ONLY_FUNCS={NCCL_FUNCTIONS}",
    ]


def cuda_home(nvcc: str) -> str:
    """The toolkit's folder, as nvcc itself tells it: what is found by that name may be a script. Raises BuildError."""
    said = subprocess.run([nvcc, "--dryrun", "-E", "-x", "cu", "/dev/null"], capture_output=True, text=True).stderr
    found = re.search(r"^#\$ TOP=(.*)$", said, re.MULTILINE)
    if found is None:
        raise BuildError(f"{nvcc} does not tell where it is: {said[-500:]}")
    return str(Path(found[1]).resolve())


def build_nccl(source: Path, nvcc: str, architecture: str, until_s: float) -> Path:
    """The library, built from a tarball or a folder of NCCL's sources; a library is returned as it is.

    Raises BuildError, and tarfile.TarError or OSError for what cannot be read.
    """
    if source.is_file() and ".so" in source.name:
        return source
    folder, build = source, BUILD / "nccl"
    if source.is_file():
        folder = BUILD / "nccl-sources"
        shutil.rmtree(folder, ignore_errors=True)
        with tarfile.open(source) as archive:
            archive.extractall(folder, filter="data")
    roots = [path.parents[1] for path in folder.rglob("makefiles/version.mk")]
    if not roots:
        raise BuildError(f"{source} has no sources of NCCL: makefiles/version.mk is missing")
    run_all([nccl_command(nvcc, roots[0], build, architecture, os.cpu_count() or 1)], until_s)
    return build / "lib" / NCCL_LIBRARY


def run_all(commands: Sequence[Sequence[str]], until_s: float) -> None:
    """Run all at once, until `until_s` (time.monotonic). Raises BuildError for those that fail or do not end."""
    BUILD.mkdir(parents=True, exist_ok=True)
    failures, started = [], []
    for command in commands:
        try:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
            )
            started.append((command, process))
        except OSError as cause:
            failures.append(f"{command[0]}: {cause}")
    for command, process in started:
        try:
            said, _nothing = process.communicate(timeout=max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _nothing = process.communicate()
            said += "\nstopped: there was no more time"
        if process.returncode:
            failures.append(f"{command[0]} exited with {process.returncode}:\n{said[-2000:]}")
    if failures:
        raise BuildError("\n".join(failures))


def _sources(folder: str) -> list[str]:
    return sorted(map(str, (REPOSITORY / folder).glob("*.cpp")))
