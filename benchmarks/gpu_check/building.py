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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
BUILD = REPOSITORY / "build" / "gpu_check"
KERNELS = BUILD / "kernels.so"
NCCL_LIBRARY = "libnccl.so.2"
NCCL_FUNCTIONS = "SendRecv|AllReduce Sum * RING SIMPLE"
"""The part of its device code that is built: with all of it the build takes an hour."""
NATIVE = {
    "csrc/schedule": "adaptra_megatron/schedule/_native",
    "csrc/ring": "adaptra_megatron/transport/_ring",
    "csrc/device": "adaptra_megatron/transport/_device",
}


class BuildError(RuntimeError):
    """A compiler failed, or is not there; has the end of what it said."""


def build_native(compiler: str, until_s: float) -> None:
    """Build the package's extensions in its own folders, as setup.py does. Raises BuildError."""
    compiling, linking = native_commands(compiler)
    run_all(compiling, until_s)
    run_all(linking, until_s)


def native_commands(compiler: str) -> tuple[list[list[str]], list[list[str]]]:
    """What compiles each source, and what links each extension of those."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    flags = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-c"]
    includes = [f"-I{Path(torch.origin).with_name('include')}", f"-I{sysconfig.get_path('include')}"]
    compiling, linking = [], []
    for folder, target in NATIVE.items():
        objects = []
        for source in sorted((REPOSITORY / folder).rglob("*.cpp")):
            objects.append(str(BUILD / f"{source.parent.name}_{source.stem}.o"))
            compiling.append([compiler, *flags, *includes, str(source), "-o", objects[-1]])
        output = f"{REPOSITORY / target}{sysconfig.get_config_var('EXT_SUFFIX')}"
        linking.append([compiler, "-shared", *objects, "-o", output])
    return compiling, linking


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
    """Run as many at once as there are cores, until `until_s` (time.monotonic).

    Raises BuildError for those that fail, or do not end in time.
    """
    BUILD.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        failures = list(filter(None, threads.map(lambda command: _failure(command, until_s), commands)))
    if failures:
        raise BuildError("\n".join(failures))


def _failure(command: Sequence[str], until_s: float) -> str | None:
    """Failure of one command, with the end of what it printed; None if it succeeds."""
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
    except OSError as cause:
        return f"{command[0]}: {cause}"
    try:
        said, _nothing = process.communicate(timeout=max(0.0, until_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said = f"{process.communicate()[0]}\nstopped: there was no more time"
    return f"{command[0]} exited with {process.returncode}:\n{said[-2000:]}" if process.returncode else None
