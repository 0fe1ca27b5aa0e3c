# SPDX-License-Identifier: Apache-2.0
"""Hold a rank's view of its job: created once, at the first iteration, when all ranks have met."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.gathering import gather_layout
from adaptra_megatron.common.layout import JobLayout
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.control.clocks import ClockSettings, RelatedClock, relate_clocks
from adaptra_megatron.control.exchange import exchange_error
from adaptra_megatron.megatron.megatron_call import PipelineCall, shared_groups
from adaptra_megatron.transport.gpu.training_device import current_device, pci_bus_id
from adaptra_megatron.transport.message_keys import TransportError
from adaptra_megatron.transport.setup.host_placement import listen_tcp, listening_host
from adaptra_megatron.transport.setup.rnic_affinity import RnicError, rank_rnics

logger = logger_of(__name__)


Result = TypeVar("Result")


class Job(NamedTuple):
    """One rank's view of the job."""

    layout: JobLayout
    control: ControlStore
    clock: RelatedClock
    """To be closed when the job ends."""
    timeout_s: float
    """Longest wait for another rank: as set by the user, or else the timeout of torch.distributed, Megatron's
    --distributed-timeout-minutes.
    """


class Counters(NamedTuple):
    """Numbers of iterations that have run: all, and training iterations."""

    iterations: int
    training_iterations: int


class JobEntry:
    """How a pipeline enters its job: with all other ranks, at its first call."""

    rejoins = False
    """True if the other ranks have begun before."""
    counters = Counters(0, 0)

    def job(self, call: PipelineCall, config: AdaptraConfig) -> Job:
        """Return the rank's view of the job. Collective, and raises, as `join_job`."""
        return join_job(call.pipeline_group, shared_groups(call.config, call.groups), config)

    def control(self, job: Job) -> ControlStore:
        """Return the part of the job's store in which links and exchange meet."""
        return job.control

    def wait(self, wait: Callable[[], Result], what: str) -> Result:
        """Return the result of `wait`, which waits for other ranks of the cell. `what`: name of the result in
        errors.
        """
        return wait()


def join_job(pipeline: dist.ProcessGroup, shared_groups: Sequence[Sequence[int]], config: AdaptraConfig) -> Job:
    """Gather the layout and secret of the job. Collective over all its ranks. `shared_groups`: see `PipelineCall`.

    Raises ExchangeError if a rank does not come, SecretError if the job's secret cannot be read.
    """
    rank = dist.get_rank()
    try:
        together = config.reroute != "off"
        ranks = dist.get_process_group_ranks(pipeline)
        layout = gather_layout(ranks, shared_groups, together=together, rnics=_rnics(config))
    except RuntimeError as cause:
        raise exchange_error(rank, "join the other ranks for planning", config.timeout_s, cause) from cause
    control = ControlStore.of_job(layout.token)
    timeout_s = control.timeout_s if config.timeout_s is None else config.timeout_s
    try:
        clocks = ClockSettings(interface=config.interface, port_range=config.port_range)
        clock = relate_clocks(control, layout, timeout_s, clocks)
    except RuntimeError as cause:
        raise exchange_error(rank, "join the other ranks for planning", timeout_s, cause) from cause
    return Job(layout, control, clock, timeout_s)


def _rnics(config: AdaptraConfig) -> tuple[str, ...]:
    """Return the RDMA devices of this rank, for messages. Unusable ones are refused elsewhere."""
    with contextlib.suppress(RnicError):
        return rank_rnics(config.rnics, pci_bus_id(current_device()))
    return config.rnics


def listen_for(layout: JobLayout, ranks: Collection[int], config: AdaptraConfig, effect: str) -> socket.socket:
    """Return a socket on which `ranks` can reach this rank.

    If no address of this host can be reached from other hosts, only ranks of this host can connect, and a warning names
    the consequence (`effect`).
    """
    one_host = layout.share_network(ranks)
    try:
        return listen_tcp(listening_host(config.interface, one_host=one_host), config.port_range)[0]
    except TransportError as cause:
        logger.warning("measurements of ranks on other hosts cannot be handed in, %s: %s", effect, cause)
        return listen_tcp("127.0.0.1")[0]  # a firewall between hosts does not matter, and the range may be full
