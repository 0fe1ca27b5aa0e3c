# SPDX-License-Identifier: Apache-2.0
"""T2, with a second process: whether NCCL waits for a kernel that stands on the GPU when a link's session is made or
ended.

Rank 0's GPU has the kernel; rank 1 does its half of each call. A session before it has loaded NCCL's kernels, as those
do that are made at the start of a job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from adaptra_megatron.transport.device_session.nccl_link import NcclLink
from adaptra_megatron.transport.device_session.pair_group import PairEnds
from adaptra_megatron.transport.setup.link_setup import greet
from gpu_check.findings import Report
from gpu_check.gpu import HostCall, Stream
from gpu_check.stages import Stage
from gpu_check.t2_host_calls import look

MADE_S = 20.0
AT_ONCE_S = 8.0
"""What each call takes at most where nothing stands; the kernel gives up after 30."""
NAMES = {
    "init": "ncclCommInitRankConfig, with its peer,",
    "connect": "the first transfer of a communicator",
    "abort": "ncclCommAbort",
}
MAY_WAIT = ("abort",)
"""A thread of its own makes this call. The others are made during training, while its receives are pending."""


def run(stage: Stage, report: Report, call: str) -> None:
    """`call`: a key of NAMES."""
    loading = _Session(stage, "loads")
    for step in loading.steps.values():
        step()
    session = _Session(stage, "looked at")
    earlier = list(NAMES)[: list(NAMES).index(call)]

    def prepare(stream: Stream | None) -> Callable[[], None]:
        for name in earlier:
            session.steps[name]()
        stage.rendezvous.gather("ready", None)
        return session.steps[call]

    if stage.stage == 0:
        gpu = stage.gpu()
        look(gpu, report, gpu.link_streams(1)[0], NAMES[call], HostCall(prepare, call in MAY_WAIT, AT_ONCE_S))
    else:
        prepare(None)()
    stage.rendezvous.gather("over", None)
    session.abort()


class _Session:
    """One end of a session from rank 0 to rank 1, on a stream of its own."""

    def __init__(self, stage: Stage, name: str) -> None:
        self.steps: Mapping[str, Callable[[], None]] = {
            "init": self._init,
            "connect": self._connect,
            "abort": self.abort,
        }
        side = stage.side()
        self._store = stage.rendezvous.control.client(name)
        self._side, self._stream, self._sends = side, side.device.new_stream(), stage.stage == 0
        self._link: NcclLink | None = None

    def _init(self) -> None:
        ends = PairEnds(0, 1)
        self._link = NcclLink(self._store, ends, self._side, self._stream, sends=self._sends, timeout_s=MADE_S)

    def _connect(self) -> None:
        assert self._link is not None
        greet(self._link, self._sends, time.monotonic() + MADE_S)

    def abort(self) -> None:
        """Returns once NCCL has freed the communicator."""
        if self._link is None:
            return
        self._link.abort()
        if not self._link.wait_until_freed(time.monotonic() + MADE_S):
            raise RuntimeError(f"it had not been freed after {MADE_S:g} s")
