# SPDX-License-Identifier: Apache-2.0
"""A pipeline whose stages are threads of this process, each with a simulated GPU, NCCL and plain device path."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist
from support.gpu.simulated_device import SimulatedDevice
from support.gpu.simulated_nccl import Fabric, SimulatedNccl
from support.made_up.job import rendezvous

from adaptra_megatron.transport.device_session.communicator_config import CommunicatorConfig
from adaptra_megatron.transport.device_session.link_watch import LinkWatch
from adaptra_megatron.transport.device_session.nccl_link import NcclSide
from adaptra_megatron.transport.gpu.device_clock import DeviceClock
from adaptra_megatron.transport.setup.link_setup import LinkMaker
from adaptra_megatron.transport.setup.rendezvous import Rendezvous
from adaptra_megatron.transport.single_path.nccl_transport import StreamTransport

TIMEOUT_S = 20.0
WORK_EVERY_S = 0.5e-3


class ProcessEndedError(RuntimeError):
    """The process of a stage has ended: what its threads wait for on its device never comes."""


class SimulatedStage:
    """What a stage's process has. The device computes for the thread that calls `transport` first."""

    def __init__(self, stage: int, fabric: Fabric, first: str | None = None) -> None:
        self.stage = stage
        self.device: Any = SimulatedDevice(stage, first=first)
        self.nccl: Any = SimulatedNccl(fabric, self.device)
        self.headers = self.device.new_stream()
        self.watch = LinkWatch(interval_s=0.005)
        self.ended = threading.Event()
        """Set when the process was ended as a last resort."""

    def maker(self, rendezvous: Rendezvous, gpu: str | None = None) -> LinkMaker:
        """Maker of this stage's links."""
        identity = gpu or f"gpu {self.stage}"
        return LinkMaker(
            rendezvous,
            NcclSide(
                lambda: self.nccl, self.device, identity, CommunicatorConfig(), self.watch, TIMEOUT_S, self.headers
            ),
        )

    def transport(self, rendezvous: Rendezvous, clock: DeviceClock | None = None) -> StreamTransport:
        """The plain device path, connected."""
        self.device.train_here()
        maker = self.maker(rendezvous)
        maker.connect(wrap=False)
        return StreamTransport(self.stage, maker.links(), self.device, clock, self.watch, TIMEOUT_S, self.end_process)

    def work(self, over: threading.Event) -> None:
        """Have the device work, as devices do, until it is `over`, or the process is."""
        while not over.wait(WORK_EVERY_S) and not self.ended.is_set():
            self.device.run()

    def end_process(self) -> None:
        """What is waited for on the device raises from now on, in all threads."""
        self.ended.set()
        self.device.fail(ProcessEndedError())


def play(stages: int, program: Callable[[SimulatedStage, Rendezvous], Any]) -> list[Any]:
    """Run a program on each stage; its results, or what it raised, by stage."""
    fabric, shared = Fabric(), dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(number: int) -> Any:
        stage, over = SimulatedStage(number, fabric), threading.Event()
        worker = threading.Thread(target=stage.work, args=(over,))
        worker.start()
        try:
            return program(stage, rendezvous(shared, range(stages), number, TIMEOUT_S))
        except Exception as error:  # of any stage: the test looks at it
            return error
        finally:
            over.set()
            worker.join()
            stage.watch.close()

    with ThreadPoolExecutor(stages) as threads:
        return [result.result() for result in [threads.submit(run, stage) for stage in range(stages)]]
