# SPDX-License-Identifier: Apache-2.0
"""What the checks of benchmarks/gpu_check run on where there is no GPU: the model of the device, simulated devices and
NCCL, and the CPU."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from gpu_check import t5_sessions, t6_host_path, t7_training
from gpu_check.gpu import HostCall, Point, Standing, Stream
from gpu_check.stages import Decorate
from gpu_check.t7_memory import NotedMeter
from support.device_model import Device, Rank, play
from support.device_model.calls import Call, Compute, StreamWait
from support.gpu.simulated_device import SimulatedEvent
from support.gpu.simulated_nccl import SimulatedTransfers
from support.gpu.simulated_pipeline import TIMEOUT_S, ProcessEndedError, SimulatedStage
from support.made_up.memory import MadeUpMemory

from adaptra_megatron.transport.device_session.communicator_config import CommunicatorConfig
from adaptra_megatron.transport.device_session.nccl_link import NcclSide
from adaptra_megatron.transport.dual_path.host_transport import HostTransport
from adaptra_megatron.transport.gpu.device_clock import DeviceClock
from adaptra_megatron.transport.setup.link_setup import LinkMaker
from adaptra_megatron.transport.setup.rendezvous import Rendezvous
from adaptra_megatron.transport.single_path.nccl_transport import StreamTransport
from testing.replacing import Replaced, Replacement

FOR_EVER_S = 1e6
TILES = 96
"""Tiles of a matrix product of the model."""


class ModelledPoint:
    """Has been reached if the model says so of all that was launched by now, and is released by now."""

    def __init__(self, gpu: ModelledGpu, number: int) -> None:
        self._gpu, self._number = gpu, number

    def query(self) -> bool:
        """Plays everything anew."""
        return self._gpu.reached(self._number)


class ModelledStanding:
    """A kernel that lasts for ever until it is released."""

    def __init__(self, gpu: ModelledGpu, number: int, blocks: int) -> None:
        self.gpu, self.number, self.blocks, self.released = gpu, number, blocks, False

    def release(self) -> None:
        """From now on it has lasted no time."""
        if not self.released:
            self.released = True
            self.gpu.resident -= self.blocks


class ModelledGpu:
    """Implements gpu_check's Gpu on the model of the device. Its host calls are made up: `waits` names those that wait
    for what stands, `stuck` those that never return."""

    compute = "compute"

    def __init__(
        self,
        queues: int = 32,
        seed: int = 0,
        *,
        serial: bool = False,
        waits: str = "",
        stuck: str = "",
        blocks: int = 132,
    ) -> None:
        self.resident = 0
        self._device, self._seed = Device(queues=queues, serial=serial), seed
        self._waits, self._stuck, self._blocks = waits, stuck, blocks
        self._program: list[Call] = []
        self._standing: dict[int, ModelledStanding] = {}
        self._streams = 0

    def pooled_streams(self) -> list[Stream]:
        """As many as torch has."""
        return self.link_streams(32)

    def link_streams(self, count: int) -> list[Stream]:
        """By their names."""
        first, self._streams = self._streams, self._streams + count
        return [f"stream {number}" for number in range(first, first + count)]

    def stand(self, stream: Stream) -> Standing:
        """A standing kernel that has no block."""
        return self.take_multiprocessors(stream, 0, 1)

    def take_multiprocessors(self, stream: Stream, blocks: int, cluster: int) -> Standing:
        """Counted only."""
        number = self._launch(Compute(stream, 0.0, len(self._program)))
        self._standing[number] = ModelledStanding(self, number, blocks)
        self.resident += blocks
        return self._standing[number]

    def kernel(self, stream: Stream) -> None:
        """Launch a kernel that takes no time."""
        self._launch(Compute(stream, 0.0, len(self._program)))

    def record(self, stream: Stream) -> Point:
        """As an event: an operation of its own, which waits in the queue for what is before it on its stream."""
        return ModelledPoint(self, self._launch(Compute(stream, 0.0, len(self._program))))

    def make_wait(self, stream: Stream, point: Any) -> None:
        """For the event."""
        self._launch(StreamWait(stream, (point._number,)))

    def product_s(self, rows: int, inner: int, columns: int) -> float:
        """One wave of tiles, or more."""
        return 1e-3 * -(-TILES // (self._blocks - self.resident))

    def synchronize(self) -> None:
        """Return at once: no kernel stands any more."""
        assert self.resident == 0
        assert all(standing.released for standing in self._standing.values()), "this would never return"
        self._program.clear()
        self._standing.clear()

    def host_calls(self) -> Mapping[str, HostCall]:
        """Two that may wait and one that may not, and two that this machine does not have."""
        return {
            "query": HostCall(partial(self._call, "query"), may_wait=False, at_once_s=0.1),
            "free": HostCall(partial(self._call, "free"), may_wait=True, at_once_s=0.1),
            "fail": HostCall(lambda stream: self._fails, may_wait=True),
            "compile": HostCall(self._lacks, may_wait=True),
            "allocate": HostCall(partial(self._call, "allocate"), may_wait=True),
        }

    def reached(self, number: int) -> bool:
        """Return whether the work of that number is over while what stands goes on."""
        program = [
            call._replace(seconds=FOR_EVER_S)
            if isinstance(call, Compute) and index in self._standing and not self._standing[index].released
            else call
            for index, call in enumerate(self._program)
        ]
        rank = Rank(0, 0)
        outcome = play({rank: {"training": program}}, self._device, self._seed)
        return outcome.times_s[rank, number][1] < FOR_EVER_S

    def _launch(self, call: Call) -> int:
        self._program.append(call)
        return len(self._program) - 1

    def _call(self, name: str, stream: Stream) -> Callable[[], None]:
        def call() -> None:
            while name == self._stuck or (name == self._waits and not self._all_released()):
                time.sleep(1e-3)

        return call

    def _all_released(self) -> bool:
        return all(standing.released for standing in self._standing.values())

    def _fails(self) -> None:
        raise RuntimeError("out of memory")

    def _lacks(self, stream: Stream) -> Callable[[], None]:
        raise ImportError("no compiler")


class SimulatedKernel(SimulatedEvent):
    """A kernel that stands on a simulated device; in its stream, what is waited for."""

    def release(self) -> None:
        """It ends."""
        self.set()


class SimulatedGpu:
    """What gpu_check's T2 needs of a Gpu, of a simulated device."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def link_streams(self, count: int) -> list[Stream]:
        """As links have them."""
        return [self._device.new_stream() for _ in range(count)]

    def stand(self, stream: Stream) -> Standing:
        """Until it is released."""
        kernel = SimulatedKernel(self._device)
        self._device.make_wait(stream, kernel)
        return kernel

    def synchronize(self) -> None:
        """Return at once: no kernel stands any more."""
        self._device.run_until(lambda: not any(stream.operations for stream in self._device.streams))


class WaitingNccl:
    """A decorator of NCCL that has one function wait until no kernel stands on the device."""

    def __init__(self, nccl: Any, function: str) -> None:
        self._nccl, self._function = nccl, function

    def transfers(self, handle: int, peer: int, stream: int, device: int) -> SimulatedTransfers:
        """Of this one, whose functions they call."""
        return SimulatedTransfers(self, handle, peer, stream)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._nccl, name)
        if name != self._function:
            return function

        def wait(*arguments: Any) -> Any:
            streams = self._nccl.device.streams
            while any(isinstance(each, SimulatedKernel) for stream in streams for each in tuple(stream.operations)):
                time.sleep(1e-3)
            return function(*arguments)

        return wait


class ForgetfulMaker(LinkMaker):
    """Has each session make a stream."""

    def make(self, link: tuple[int, int], session: int, timeout_s: float, opening: int = 1) -> Any:
        """As if it were the first."""
        self._streams.clear()
        return super().make(link, session, timeout_s)


class StageOnSimulation:
    """Implements gpu_check's Stage on a SimulatedStage, one thread per stage."""

    largest_nbytes = 20_000
    tensors = torch.device("cpu")

    def __init__(
        self,
        simulated: SimulatedStage,
        rendezvous: Rendezvous,
        *,
        adds: int = 0,
        leaks: str = "",
        abort_hangs: bool = False,
        waits: str = "",
    ) -> None:
        """`adds`: what computation gets wrong. `leaks`: "memory" with each look at it, or "streams" with each session.
        `abort_hangs`: NCCL's. `waits`: the function of NCCL that waits for kernels."""
        self.stage, self.rendezvous, self.simulated = simulated.stage, rendezvous, simulated
        self.device: Any = simulated.device
        self._adds, self._leaks, self._waits, self._used = adds, leaks, waits, 0
        if abort_hangs:
            simulated.nccl.abort_hangs.set()
        self.device.train_here()

    def gpu(self) -> Any:
        """As far as T2 needs it."""
        return SimulatedGpu(self.device)

    def side(self, decorate: Decorate = lambda library: library, *, identity: str | None = None) -> NcclSide:
        """As CudaStage's."""
        nccl: Any = WaitingNccl(self.simulated.nccl, self._waits)
        name = identity or f"gpu {self.stage}"
        return NcclSide(
            lambda: decorate(nccl),
            self.device,
            name,
            CommunicatorConfig(),
            self.simulated.watch,
            TIMEOUT_S,
            self.simulated.headers,
        )

    def maker(self, decorate: Decorate = lambda library: library, *, identity: str | None = None) -> LinkMaker:
        """As CudaStage's."""
        make = ForgetfulMaker if self._leaks == "streams" else LinkMaker
        return make(self.rendezvous, self.side(decorate, identity=identity))

    def transport(self, timeout_s: float) -> StreamTransport:
        """Timed by the host's clock."""
        device, apart = self.device, self.device.new_stream()

        class Events:
            def new_event(self) -> SimulatedEvent:
                return SimulatedEvent(device)

            def record_apart(self) -> SimulatedEvent:
                return device.record(apart)

        maker = self.maker()
        maker.connect(wrap=False)
        return StreamTransport(
            self.stage,
            maker.links(),
            device,
            DeviceClock(Events()),
            self.simulated.watch,
            timeout_s,
            self.simulated.end_process,
        )

    def tensor(self, number: int, nbytes: int) -> torch.Tensor:
        """Poison until it is computed."""
        return self.device.tensor(torch.full((nbytes // 4,), number, dtype=torch.int32))

    def plus(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """Reads and writes when it is computed."""
        made = self.device.empty(tensor.shape, tensor.dtype, self.device.compute)
        from_, to, nbytes = tensor.data_ptr(), made.data_ptr(), tensor.nbytes
        self.device.put(self.device.compute, partial(_add, from_, to, nbytes, number + self._adds))
        return made

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Filled when computation comes there."""
        return self.device.read(tensor)

    def synchronize(self) -> None:
        """The device works meanwhile."""
        self.device.record(self.device.compute).synchronize()

    def used_nbytes(self) -> int:
        """Made up."""
        self._used += 1 << 30 if self._leaks == "memory" else 0
        return self._used

    def streams(self) -> int:
        """All that the device has."""
        return len(self.device.streams)

    def die(self) -> None:
        """The stage's thread ends."""
        raise ProcessEndedError


def _add(from_: int, to: int, nbytes: int, number: int) -> None:
    words = ctypes.c_int32 * (nbytes // 4)
    source, target = (torch.frombuffer(words.from_address(each), dtype=torch.int32) for each in (from_, to))
    torch.add(source, number, out=target)


class CpuStage:
    """Implements gpu_check's Stage on the CPU, with links over gloo, one process per stage."""

    largest_nbytes = 1 << 20
    tensors = torch.device("cpu")
    device = None

    def __init__(self) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=20))
        t5_sessions.ABORTS = t6_host_path.ROUNDS = 2
        t5_sessions.QUEUED_NBYTES = 1 << 16
        # How fast the CPU is shows nothing.
        t6_host_path.MOST_LATE_S = t6_host_path.MOST_ONE_WAY_S = math.inf
        t6_host_path.LEAST_GB_PER_S = 0.0
        self.stage = dist.get_rank()
        assert dist.group.WORLD is not None
        self.rendezvous = Rendezvous.of(dist.group.WORLD, 20.0)

    def maker(self, decorate: Decorate = lambda library: library, *, identity: str | None = None) -> LinkMaker:
        """NCCL plays no part, but to refuse GPUs of the same `identity`."""
        return LinkMaker(self.rendezvous, None) if identity is None else RefusingMaker(self.rendezvous, None)

    def tensor(self, number: int, nbytes: int) -> torch.Tensor:
        """At once."""
        return torch.full((nbytes // 4,), number, dtype=torch.int32)

    def plus(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """At once."""
        return tensor + number

    def synchronize(self) -> None:
        """Return at once: no copy is ever under way."""


class RefusingMaker(LinkMaker):
    """As NcclLink on a GPU that is the peer's, too."""

    def make(self, link: tuple[int, int], session: int, timeout_s: float, opening: int = 1) -> NoReturn:
        """Never."""
        raise RuntimeError("both stages are on one GPU, and NCCL connects different GPUs only")


class FailingCpuStage(CpuStage):
    """As CpuStage, but every message comes changed, and whatever is measured is too slow."""

    def __init__(self) -> None:
        super().__init__()
        wait = HostTransport.wait
        HostTransport.wait = lambda *arguments: wait(*arguments) + 1  # type: ignore[method-assign]
        t6_host_path.MOST_LATE_S = t6_host_path.MOST_ONE_WAY_S = -1.0
        t6_host_path.LEAST_GB_PER_S = math.inf


class CpuTrainer:
    """Implements t7_training's Trainer: a tiny model, with Megatron on the CPU where the rank was forked from."""

    def __init__(self) -> None:
        model = (
            f"--emulate-cpu --pipeline-model-parallel-size {os.environ['WORLD_SIZE']} --hidden-size 32 "
            "--num-attention-heads 2 --seq-length 16 --num-layers 4 --train-iters 80 --eval-interval 40"
        )
        self.layouts = {"2 chunks": f"{model} --num-virtual-stages-per-pipeline-rank 2"}
        self._meters: list[NotedMeter] = []

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """It is; with memory of which nothing is ever taken."""
        from adaptra_megatron.engine import pipeline

        memory = Replacement(pipeline, "memory_of", lambda device: MadeUpMemory(1 << 30), "host memory is not counted")
        in_use = dict.fromkeys(("allocated", "active"), 0)
        with Replaced([memory]), t7_training.noted_meters(self._meters, lambda: in_use):
            yield

    def begin_peaks(self) -> None:
        """For the next training."""
        self._meters.clear()

    def peaks(self) -> dict[str, float]:
        """Peaks of this GPU, none of which is known."""
        return {}

    def kept(self) -> dict[str, float] | None:
        """Keep nothing."""
        return self._meters[0].kept() if self._meters else None
