# SPDX-License-Identifier: Apache-2.0
"""One stage of a pipeline of real processes on real GPUs, which may share one: what checks of links begin with."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from adaptra_megatron.transport.device_session.communicator_config import CommunicatorConfig
from adaptra_megatron.transport.device_session.link_watch import LinkWatch
from adaptra_megatron.transport.device_session.nccl_library import NcclLibrary, torch_nccl
from adaptra_megatron.transport.device_session.nccl_link import NcclSide, gpu_identity
from adaptra_megatron.transport.gpu.cuda_device import CudaDevice, Device, Stream
from adaptra_megatron.transport.gpu.device_clock import CudaEvents, DeviceClock
from adaptra_megatron.transport.setup.link_setup import LinkMaker
from adaptra_megatron.transport.setup.rendezvous import Rendezvous
from adaptra_megatron.transport.single_path.nccl_transport import StreamTransport
from gpu_check.cuda_gpu import CudaGpu
from gpu_check.gpu import Gpu

TIMEOUT_S = 60.0
Decorate = Callable[[NcclLibrary], Any]


class Stage(Protocol):
    """A stage of a pipeline whose ranks are one stage each."""

    stage: int
    rendezvous: Rendezvous
    device: Device | None
    """None: tensors are on the CPU."""
    tensors: torch.device
    largest_nbytes: int
    """Largest message that is worth sending here."""

    def gpu(self) -> Gpu:
        """The GPU by itself."""

    def side(self, decorate: Decorate = lambda library: library, *, identity: str | None = None) -> NcclSide:
        """What links are made with. `decorate`: NCCL. `identity`: of its GPU; None: one that no other stage has."""

    def maker(self, decorate: Decorate = lambda library: library, *, identity: str | None = None) -> LinkMaker:
        """The maker of this stage's links; arguments as for `side`."""

    def transport(self, timeout_s: float) -> StreamTransport:
        """The plain device path, connected, with a clock."""

    def tensor(self, number: int, nbytes: int) -> torch.Tensor:
        """int32, computed on the current stream."""

    def plus(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """A new tensor, computed likewise."""

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """What computation sees of it, in host memory once `synchronize` has returned."""

    def synchronize(self) -> None:
        """Wait for computation."""

    def used_nbytes(self) -> int:
        """Memory of the GPU that all processes use."""

    def streams(self) -> int:
        """How many `device` has made."""

    def die(self) -> None:
        """End the process at once."""


class CountedStreams(CudaDevice):
    """A GPU that counts the streams that are made of it. None is ever destroyed, so as many there are.

    NCCL's own, which it makes and destroys through a runtime of its own, show in the used memory alone.
    """

    def __init__(self, device: torch.device) -> None:
        self.streams = 0
        super().__init__(device)

    def new_stream(self) -> Stream:
        self.streams += 1
        return super().new_stream()


class CudaStage:
    """Implements Stage: rank N has GPU N, or shares the last."""

    largest_nbytes = 64 << 20

    def __init__(self) -> None:
        rank, count = int(os.environ["RANK"]), torch.cuda.device_count()
        torch.cuda.set_device(min(rank, count - 1))
        self.device = CountedStreams(torch.device("cuda"))
        self.tensors = self.device.device
        dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
        self.stage = dist.get_rank()
        assert dist.group.WORLD is not None
        self.rendezvous = Rendezvous.of(dist.group.WORLD, TIMEOUT_S)
        self._watch = LinkWatch()
        self._headers = self.device.new_stream()
        self.plus(self.tensor(1, 1024), 1)  # kernels are loaded at their first use, which may wait for the whole GPU
        torch.cuda.synchronize()

    def gpu(self) -> CudaGpu:
        return CudaGpu()

    def side(self, decorate: Decorate = lambda library: library, *, identity: str | None = None) -> NcclSide:
        # NCCL itself refuses ranks that share a GPU unless NCCL_MULTI_RANK_GPU_ENABLE is set.
        name = identity or f"{gpu_identity(self.tensors)} of rank {self.stage}"
        parts = CommunicatorConfig(), self._watch, TIMEOUT_S, self._headers
        return NcclSide(lambda: decorate(torch_nccl()), self.device, name, *parts)

    def maker(self, decorate: Decorate = lambda library: library, *, identity: str | None = None) -> LinkMaker:
        return LinkMaker(self.rendezvous, self.side(decorate, identity=identity))

    def transport(self, timeout_s: float) -> StreamTransport:
        maker = self.maker()
        maker.connect(wrap=False)
        clock = DeviceClock(CudaEvents())
        return StreamTransport(self.stage, maker.links(), self.device, clock, self._watch, timeout_s)

    def tensor(self, number: int, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes // 4,), number, dtype=torch.int32, device=self.tensors)

    def plus(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        return tensor + number

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()

    def synchronize(self) -> None:
        torch.cuda.current_stream().synchronize()

    def used_nbytes(self) -> int:
        free, total = torch.cuda.mem_get_info()
        return int(total - free)

    def streams(self) -> int:
        return self.device.streams

    def die(self) -> Any:
        os._exit(0)
