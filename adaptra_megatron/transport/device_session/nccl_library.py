# SPDX-License-Identifier: Apache-2.0
"""Call the functions of NCCL that a link needs, in the library that torch has loaded.

Each link has a communicator of its own, with one end as rank 0 and the other as rank 1. It is non-blocking: long
operations run in NCCL's threads, `in_progress` polls them, and `abort` ends them at any time, even while the
communicator connects. NVIDIA's own bindings (nccl4py) find the same library. But pip cannot install them without the
CUDA version, and they bring packages that a dozen functions do not need.
"""

from __future__ import annotations

import ctypes
import enum
import os
from typing import TYPE_CHECKING, Any

from adaptra_megatron.transport.device_session.communicator_config import CommunicatorConfig

if TYPE_CHECKING:
    from adaptra_megatron.transport._device import Transfers

UNIQUE_ID_NBYTES = 128
UNDEFINED = -(1 << 31)
"""NCCL_CONFIG_UNDEF_INT: NCCL's default."""
MAGIC = 0xCAFEBEEF

_NAMES: dict[str, bytes] = {}
"""Names of all communicators, never freed: NCCL keeps the pointer, and profiler plugins read it at any time."""

Communicator = int
"""Opaque handle: an ncclComm_t."""


class Result(enum.IntEnum):
    """Values of ncclResult_t that mean no error."""

    SUCCESS = 0
    IN_PROGRESS = 7


class NcclError(RuntimeError):
    """A call of NCCL failed; names the function and NCCL's own message."""


class NcclConfig(ctypes.Structure):
    """Layout of ncclConfig_t up to the fields that all releases since 2.27 have; NCCL fills in the rest."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
        ("traffic_class", ctypes.c_int),
        ("comm_name", ctypes.c_char_p),
    )


class UniqueId(ctypes.Structure):
    """Layout of ncclUniqueId, which is passed by value."""

    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_NBYTES),)


class NcclLibrary:
    """Functions of NCCL. For any thread, but one call at a time per communicator. All calls release the GIL.

    Calls raise NcclError if NCCL returns an error. A communicator belongs to the CUDA device that was current at
    `init_rank`.
    """

    def __init__(self, library: Any, runtime: Any = None) -> None:
        """`library`, `runtime`: ctypes.CDLL with libnccl's and libcudart's functions. Raises NcclError if one is
        missing.
        """
        self._library, self._runtime = library, runtime
        try:
            for name, (result, *arguments) in _SIGNATURES.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
        except AttributeError as cause:
            raise NcclError(f"the NCCL that torch has loaded cannot be called: {cause}") from cause

    def version(self) -> int:
        """Return the version as one number: 22907 is 2.29.7."""
        version = ctypes.c_int()
        self._check("ncclGetVersion", self._library.ncclGetVersion(ctypes.byref(version)))
        return version.value

    def new_unique_id(self) -> bytes:
        """Return a new ncclUniqueId. NCCL listens for connections with it from now on."""
        unique_id = UniqueId()
        self._check("ncclGetUniqueId", self._library.ncclGetUniqueId(ctypes.byref(unique_id)))
        return bytes(unique_id)

    def init_rank(self, unique_id: bytes, rank: int, name: str, config: CommunicatorConfig) -> Communicator:
        """Begin to create a communicator of two ranks; `in_progress` returns whether it is ready. `name`: for NCCL's
        log.
        """
        communicator = ctypes.c_void_p()
        settings = NcclConfig(
            size=ctypes.sizeof(NcclConfig),
            magic=MAGIC,
            version=self.version(),
            blocking=0,
            cga_cluster_size=_or_default(config.cga_cluster_size),
            min_ctas=_or_default(config.min_ctas),
            max_ctas=_or_default(config.max_ctas),
            net_name=None if config.net_name is None else config.net_name.encode(),
            split_share=UNDEFINED,
            traffic_class=UNDEFINED,
            comm_name=_NAMES.setdefault(name, name.encode()),
        )
        identity = UniqueId.from_buffer_copy(unique_id)
        made = self._library.ncclCommInitRankConfig(
            ctypes.byref(communicator), 2, identity, rank, ctypes.byref(settings)
        )
        self._check("ncclCommInitRankConfig", made, communicator.value)
        assert communicator.value is not None
        return communicator.value

    def in_progress(self, communicator: Communicator) -> bool:
        """Return whether the last call on the communicator is still in progress. If so, no other may begin. Raises its
        error.
        """
        state = ctypes.c_int()
        called = self._library.ncclCommGetAsyncError(communicator, ctypes.byref(state))
        self._check("ncclCommGetAsyncError", called, communicator)
        self._check("what was begun with NCCL", state.value, communicator)
        return state.value == Result.IN_PROGRESS

    def transfers(self, communicator: Communicator, peer: int, stream: int, device: int) -> Transfers:
        """Return native send and receive to `peer` on `stream` (a cudaStream_t) of the device with this index."""
        from adaptra_megatron.transport._device import Transfers  # settings are read without native code or torch

        functions = {name: getattr(self._library, name) for name in _OF_TRANSFERS}
        functions |= {name: getattr(self._runtime, name) for name in _OF_EVENTS}
        addresses = {name: ctypes.cast(each, ctypes.c_void_p).value or 0 for name, each in functions.items()}
        return Transfers(addresses, device, communicator, stream, peer)

    def finalize(self, communicator: Communicator) -> None:
        """Begin to flush all pending sends."""
        self._check("ncclCommFinalize", self._library.ncclCommFinalize(communicator), communicator)

    def destroy(self, communicator: Communicator) -> None:
        """Free a communicator that has been finalized."""
        self._check("ncclCommDestroy", self._library.ncclCommDestroy(communicator))

    def abort(self, communicator: Communicator) -> None:
        """Abort all transfers, on the device too, and free the communicator. May wait for the device."""
        self._check("ncclCommAbort", self._library.ncclCommAbort(communicator))

    def _check(self, what: str, result: int, communicator: Communicator | None = None) -> None:
        if result in (Result.SUCCESS, Result.IN_PROGRESS):
            return
        text = self._library.ncclGetErrorString(result).decode()
        last = self._library.ncclGetLastError(communicator).decode() if communicator else ""
        raise NcclError(f"{what} failed: {text}{f' ({last})' if last else ''}")


def torch_nccl() -> NcclLibrary:
    """Return the NCCL that torch has loaded. Raises NcclError if this torch has none, or hides it."""
    try:
        # What is found through torch's own library is what it was linked with, whatever its path and its version.
        library = ctypes.CDLL("libtorch_cuda.so", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError as cause:
        raise NcclError(f"this torch was built without CUDA: {cause}") from cause
    from adaptra_megatron.transport.gpu.cuda_device import cuda_runtime

    return NcclLibrary(library, cuda_runtime())


def _or_default(value: int | None) -> int:
    return UNDEFINED if value is None else value


_OF_TRANSFERS = ("ncclSend", "ncclRecv", "ncclCommGetAsyncError", "ncclGetErrorString", "ncclGetLastError")
_OF_EVENTS = (
    "cudaGetDevice",
    "cudaSetDevice",
    "cudaEventCreateWithFlags",
    "cudaEventRecord",
    "cudaEventQuery",
    "cudaEventDestroy",
    "cudaStreamWaitEvent",
    "cudaGetErrorString",
)
_RESULT, _HANDLE = ctypes.c_int, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (_RESULT, ctypes.POINTER(ctypes.c_int)),
    "ncclGetUniqueId": (_RESULT, ctypes.POINTER(UniqueId)),
    "ncclCommInitRankConfig": (
        _RESULT,
        ctypes.POINTER(_HANDLE),
        ctypes.c_int,
        UniqueId,
        ctypes.c_int,
        ctypes.POINTER(NcclConfig),
    ),
    "ncclCommGetAsyncError": (_RESULT, _HANDLE, ctypes.POINTER(ctypes.c_int)),
    "ncclCommFinalize": (_RESULT, _HANDLE),
    "ncclCommDestroy": (_RESULT, _HANDLE),
    "ncclCommAbort": (_RESULT, _HANDLE),
    "ncclGetErrorString": (ctypes.c_char_p, ctypes.c_int),
    "ncclGetLastError": (ctypes.c_char_p, _HANDLE),
}
"""Return type and argument types of each function, from nccl.h."""
