# SPDX-License-Identifier: Apache-2.0
"""Calls of NCCL and of CUDA's runtime, against the libraries and their headers: `make test-nccl` fetches those that
torch comes with.

Without a GPU NCCL makes no communicators, but it tells its version and its errors, makes unique ids, and refuses what
is wrong; CUDA says that there is no driver. NCCL_DIRECTORY names another place than the package of this environment.
CUDA's packages are looked for next to NCCL's.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import subprocess
import sysconfig
from pathlib import Path

import pybind11
import pytest
import torch
from support.gpu.device_calls import LINK, DeviceCalls

from adaptra_megatron.transport._device import DeviceCallError, Transfers
from adaptra_megatron.transport.device_session.communicator_config import CommunicatorConfig, most_ctas
from adaptra_megatron.transport.device_session.nccl_library import (
    UNDEFINED,
    UNIQUE_ID_NBYTES,
    NcclConfig,
    NcclError,
    NcclLibrary,
    Result,
    torch_nccl,
)

REPOSITORY = Path(__file__).parents[3]
HEADER_CHECK = """
#include <stddef.h>
#include <stdio.h>
#include "nccl.h"

/* As nccl_library calls them. */
ncclResult_t (*version)(int*) = ncclGetVersion;
ncclResult_t (*unique_id)(ncclUniqueId*) = ncclGetUniqueId;
ncclResult_t (*init)(ncclComm_t*, int, ncclUniqueId, int, ncclConfig_t*) = ncclCommInitRankConfig;
ncclResult_t (*state)(ncclComm_t, ncclResult_t*) = ncclCommGetAsyncError;
ncclResult_t (*finalize)(ncclComm_t) = ncclCommFinalize, (*destroy)(ncclComm_t) = ncclCommDestroy;
ncclResult_t (*abort_)(ncclComm_t) = ncclCommAbort;
const char* (*error)(ncclResult_t) = ncclGetErrorString;
const char* (*last)(ncclComm_t) = ncclGetLastError;

int main(void) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  printf("%zu %x %d\\n", sizeof config, config.magic, config.blocking);
  printf("%d %d %d %d\\n", (int)sizeof(ncclUniqueId), ncclUint8, ncclSuccess, ncclInProgress);
  printf("%d %d\\n", (int)sizeof(ncclResult_t), (int)sizeof(ncclDataType_t));
#define AT(field) printf("%zu ", offsetof(ncclConfig_t, field));
  AT(size) AT(magic) AT(version) AT(blocking) AT(cgaClusterSize) AT(minCTAs) AT(maxCTAs) AT(netName) AT(splitShare)
  AT(trafficClass) AT(commName)
  return 0;
}
"""


@pytest.fixture(scope="module")
def directory() -> Path:
    """Directory of the package nvidia-nccl: with `lib` and `include`."""
    named = os.environ.get("NCCL_DIRECTORY")
    if named:
        return Path(named).resolve()
    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        found = None
    if found is None or not found.submodule_search_locations:
        pytest.skip("NCCL is not installed here: make test-nccl fetches it")
    return Path(next(iter(found.submodule_search_locations)))


@pytest.fixture(scope="module")
def library(directory: Path) -> NcclLibrary:
    return NcclLibrary(nccl_in(directory))


@pytest.fixture(scope="module")
def cuda(directory: Path) -> Path:
    """Directory with the packages nvidia-cuda-runtime and what its headers include."""
    if not list(directory.parent.rglob("crt/host_defines.h")):
        pytest.skip("CUDA's headers are not next to NCCL: make test-nccl fetches them")
    return directory.parent


def nccl_in(directory: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(directory / "lib/libnccl.so.2"))


def begin(transfers: Transfers, sends: bool) -> None:
    tensor = torch.empty(8, dtype=torch.uint8)
    transfers.begin(sends, tensor, tensor.data_ptr(), tensor.nbytes, None, 1.0)


def test_functions_and_the_configuration_are_declared_as_they_are_called(directory: Path, tmp_path: Path) -> None:
    for name in ("cuda_runtime.h", "cuda_fp16.h", "cuda_bf16.h"):  # all that the header wants of CUDA
        (tmp_path / name).write_text("#pragma once\ntypedef struct CUstream_st* cudaStream_t;\n")
    (tmp_path / "cuda_runtime.h").write_text(
        "#pragma once\ntypedef struct CUstream_st* cudaStream_t;\ntypedef struct CUevent_st* cudaEvent_t;\n"
    )
    (tmp_path / "check.c").write_text(HEADER_CHECK)
    paths = [f"-I{directory / 'include'}", f"-I{tmp_path}", f"-L{directory / 'lib'}"]
    command = ["cc", "-Werror=incompatible-pointer-types", *paths, "check.c", "-l:libnccl.so.2", "-o", "check"]
    subprocess.run(command, cwd=tmp_path, check=True)
    environment = os.environ | {"LD_LIBRARY_PATH": str(directory / "lib")}
    out = subprocess.run(["./check"], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout
    config, numbers, sizes, offsets = out.splitlines()
    size, magic, undefined = config.split()
    assert int(size) >= ctypes.sizeof(NcclConfig)
    assert (int(magic, 16), int(undefined)) == (0xCAFEBEEF, UNDEFINED)
    assert numbers.split() == [str(UNIQUE_ID_NBYTES), "1", str(int(Result.SUCCESS)), str(int(Result.IN_PROGRESS))]
    assert sizes.split() == ["4", "4"]
    ours = [str(getattr(NcclConfig, field[0]).offset) for field in NcclConfig._fields_]
    assert offsets.split() == ours


def test_native_code_calls_functions_as_they_are_declared(cuda: Path, directory: Path, tmp_path: Path) -> None:
    """Number and kind of arguments, and the constants of csrc/device and of gpu/cuda_device.py."""
    for name in ("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h"):  # for device code, with headers of other packages
        (tmp_path / name).write_text("#pragma once\n")
    (tmp_path / "cuda_runtime.h").write_text("#include <cuda_runtime_api.h>\n")
    found = {path.parent for path in cuda.rglob("cuda_runtime_api.h")}
    found |= {path.parent.parent for path in cuda.rglob("crt/host_defines.h")}
    ours = [REPOSITORY / "csrc/device", sysconfig.get_paths()["include"], pybind11.get_include()]
    paths = [f"-I{each}" for each in (tmp_path, directory / "include", *sorted(found), *ours)]
    source = REPOSITORY / "tests/support/gpu/declarations.cpp"
    subprocess.run(["g++", "-std=c++17", "-fsyntax-only", "-w", *paths, str(source)], check=True)


def test_the_library_tells_its_version_and_makes_unique_ids(library: NcclLibrary) -> None:
    assert library.version() >= 22703
    ids = [library.new_unique_id() for _ in range(3)]
    assert len(set(ids)) == 3
    assert {len(each) for each in ids} == {UNIQUE_ID_NBYTES}


def test_what_nccl_refuses_is_an_error_in_its_words(directory: Path, library: NcclLibrary, tmp_path: Path) -> None:
    with pytest.raises(NcclError, match="ncclCommGetAsyncError failed: invalid argument"):
        library.in_progress(0)
    library.abort(0)
    runtime = DeviceCalls(tmp_path).library  # one that has a device
    transfers = NcclLibrary(nccl_in(directory), runtime).transfers(0, 0, LINK, 0)
    for sends, words in ((True, "ncclSend failed: invalid argument"), (False, "ncclRecv failed: invalid argument")):
        with pytest.raises(DeviceCallError, match=words):
            begin(transfers, sends)


def test_what_cuda_refuses_is_an_error_in_its_words(cuda: Path, directory: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("here it has a GPU")
    runtime = ctypes.CDLL(str(next(iter(sorted(cuda.rglob("libcudart.so.*"))))))
    transfers = NcclLibrary(nccl_in(directory), runtime).transfers(0, 0, LINK, 0)
    with pytest.raises(
        DeviceCallError, match="cudaGetDevice failed: (CUDA driver version is insufficient|no CUDA-cap)"
    ):
        begin(transfers, sends=True)


def test_without_a_gpu_there_is_no_communicator(library: NcclLibrary) -> None:
    with pytest.raises(NcclError, match="ncclCommInitRankConfig failed: unhandled cuda error"):
        library.init_rank(library.new_unique_id(), 0, "adaptra 0>1", CommunicatorConfig())


def test_every_result_has_a_text(library: NcclLibrary) -> None:
    texts = [library._library.ncclGetErrorString(result).decode() for result in range(8)]
    assert texts[Result.SUCCESS] == "no error"
    assert texts[Result.IN_PROGRESS] == "NCCL operation in progress"
    assert texts[6].startswith("remote process exited")
    assert len(set(texts)) == 8


def test_a_torch_without_cuda_has_no_nccl() -> None:
    if torch_has_cuda():
        pytest.skip("this torch has CUDA")
    with pytest.raises(NcclError, match=r"built without CUDA: libtorch_cuda\.so"):
        torch_nccl()


def torch_has_cuda() -> bool:
    import torch

    return torch.version.cuda is not None


def test_a_library_without_these_functions_is_an_error() -> None:
    with pytest.raises(NcclError, match="cannot be called: .*ncclGetVersion"):
        NcclLibrary(ctypes.CDLL(None))


class Recorded:
    """libnccl, as far as a call's arguments go."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.state = int(Result.IN_PROGRESS)

    def __getattr__(self, name: str) -> object:
        def call(*arguments: object) -> object:
            self.calls.append((name, *arguments))
            if name == "ncclCommInitRankConfig":
                arguments[0]._obj.value = 77  # type: ignore[attr-defined]
                return int(Result.IN_PROGRESS)
            if name == "ncclCommGetAsyncError":
                arguments[1]._obj.value = self.state  # type: ignore[attr-defined]
            if name == "ncclGetVersion":
                arguments[0]._obj.value = 22907  # type: ignore[attr-defined]
            return f"error {arguments[0]}".encode() if name in ("ncclGetErrorString", "ncclGetLastError") else 0

        call.name = name  # type: ignore[attr-defined]
        self.__dict__[name] = call
        return call


def test_communicators_do_not_block_and_are_configured_as_asked() -> None:
    recorded = Recorded()
    library = NcclLibrary(recorded)
    config = CommunicatorConfig(max_ctas=1, min_ctas=1, cga_cluster_size=0, net_name="IB")
    assert library.init_rank(bytes(range(128)), 1, "adaptra 4>8", config) == 77
    _name, _made, ranks, unique_id, rank, reference = recorded.calls[-1]
    given = reference._obj
    assert (ranks, rank, bytes(unique_id)) == (2, 1, bytes(range(128)))
    assert (given.size, given.version, given.blocking) == (ctypes.sizeof(NcclConfig), 22907, 0)
    assert (given.min_ctas, given.max_ctas, given.cga_cluster_size) == (1, 1, 0)
    assert (given.net_name, given.comm_name) == (b"IB", b"adaptra 4>8")
    library.init_rank(bytes(128), 0, "", CommunicatorConfig())
    given = recorded.calls[-1][-1]._obj
    assert (given.min_ctas, given.max_ctas, given.cga_cluster_size) == (UNDEFINED, UNDEFINED, UNDEFINED)
    assert given.net_name is None


def test_a_communicators_name_lasts_as_long_as_the_process() -> None:
    """NCCL copies the pointer (init.cc, parseCommConfig), and profiler plugins read there later."""
    recorded = Recorded()
    NcclLibrary(recorded).init_rank(bytes(128), 0, f"adaptra {12}>{13}", CommunicatorConfig())
    copied = NcclConfig.from_buffer_copy(bytes(recorded.calls.pop()[-1]._obj))
    recorded.calls.clear()
    gc.collect()
    others = [bytes([65]) * 13 for _ in range(2000)]
    assert copied.comm_name == b"adaptra 12>13"
    assert len(others) == 2000


@pytest.mark.parametrize(
    ("same_host", "rate", "mebibytes", "expected"),
    [
        (True, 400, 0, 8),
        (False, 800, 0, 8),
        (False, 400, 0, 4),
        (False, 200, 0, 2),
        (False, 100, 0, 1),
        (False, 0, 0, 4),
        (True, 400, 64, 8),
        (True, 400, 16, 2),
        (True, 400, 1, 1),
        (False, 400, 64, 4),
        (False, 800, 8, 2),
        (False, 100, 64, 1),
    ],
)
def test_transfers_take_what_nccl_would_and_no_more_than_hides_a_message(
    same_host: bool, rate: float, mebibytes: int, expected: int
) -> None:
    assert most_ctas(same_host, rate, mebibytes << 20) == expected


def test_what_goes_wrong_later_is_an_error_when_it_is_looked_for() -> None:
    recorded = Recorded()
    library = NcclLibrary(recorded)
    assert library.in_progress(77)
    recorded.state = 0
    assert not library.in_progress(77)
    recorded.state = 6
    with pytest.raises(NcclError, match="what was begun with NCCL failed: error 6"):
        library.in_progress(77)
