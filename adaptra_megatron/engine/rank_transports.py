# SPDX-License-Identifier: Apache-2.0
"""Choose the transport of a pipeline: by its device, by the user's settings, and by availability."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from adaptra_megatron.common.log import logger_of
from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.control.sidecar.planner_client import PathPolicy
from adaptra_megatron.transport.device_session.link_watch import LinkWatch
from adaptra_megatron.transport.gpu.cuda_device import Device, device_of
from adaptra_megatron.transport.gpu.device_clock import DeviceClock
from adaptra_megatron.transport.gpu.hardware_queues import queues_in_words
from adaptra_megatron.transport.gpu.training_device import current_device, has_one_queue, pci_bus_id, shares_queues
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.link_paths import Path, PathSettings
from adaptra_megatron.transport.message_keys import Transport, TransportError, TwoPathTransport
from adaptra_megatron.transport.setup.link_setup import LinkMaker
from adaptra_megatron.transport.setup.rendezvous import Rendezvous, agree_on_host_path
from adaptra_megatron.transport.setup.rnic_affinity import RnicError, cpus_to_bind, fastest_rnic_gbit_per_s, rank_rnics

if TYPE_CHECKING:
    from adaptra_megatron.megatron.megatron_call import PipelineCall
    from adaptra_megatron.transport.device_session.nccl_link import NcclSide

logger = logger_of(__name__)

NCCL_LIMIT_S = 15.0
"""Time limit for creating an NCCL communicator, which may take seconds. The host path carries messages meanwhile."""
GLOO_LIMIT_S = PathSettings.probe_limit_s

BLOCKING_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": "a receive would block the host until its message has come, which may need work that this "
    "stage has not launched yet",
    "NCCL_COMM_BLOCKING": "calls of NCCL would block, and neither a stage that does not come nor one that dies could "
    "be left alone",
}
"""Environment variables with which NCCL cannot transfer anything, and why."""
ORDER_VARIABLE = "NCCL_LAUNCH_ORDER_IMPLICIT"


def make_transport(
    rendezvous: Rendezvous,
    call: PipelineCall,
    config: AdaptraConfig,
    clock: DeviceClock | None,
    timeout_s: float,
) -> Transport:
    """Return the pipeline's transport. All of its ranks call this at the same point, with its first call.

    `clock`: times messages between GPUs; None elsewhere. Raises TransportError, alike on all ranks, if the requested
    transport cannot be set up, or none can.
    """
    device = device_of(current_device())
    blocked = None if device is None else why_blocked(os.environ)
    maker, watch, chunks = None, LinkWatch(), call.chunks
    if device is not None and (queues := queues_in_words(model=config.queue_model)) is not None:
        _say_once(rendezvous, queues)
    if blocked is None:
        gpu = None if device is None else _nccl_side(device, config, watch, timeout_s, call.message_nbytes)
        maker = LinkMaker(rendezvous, gpu)
        maker.connect(wrap=chunks > 1)
    if config.host_transport != "off":
        try:
            return _two_paths(rendezvous, chunks, config, maker, device, timeout_s)
        except TransportError as cause:  # the same on all ranks of the pipeline
            if config.needs_host_path or maker is None:
                raise
            _say_once(rendezvous, f"links between stages have one path, torch.distributed's: {cause}")
    if maker is None:
        raise TransportError(f"{blocked}. Use --adaptra-host-transport auto: messages then go by the host path alone")
    links, layout = maker.links(), rendezvous.layout
    if device is None:
        from adaptra_megatron.transport.single_path.gloo_transport import WaitingThreadTransport

        return WaitingThreadTransport(layout.rank, links, chunks, timeout_s, layout.name)
    from adaptra_megatron.transport.single_path.nccl_transport import StreamTransport

    return StreamTransport(layout.rank, links, device, clock, watch, timeout_s, name=layout.name)


def path_policy(config: AdaptraConfig, transport: Transport) -> PathPolicy | None:
    """Return the policy by which links choose between their paths; None if messages use torch.distributed's
    path alone.
    """
    if not isinstance(transport, TwoPathTransport):
        return None
    device = current_device()
    host_alone = device.type == "cuda" and why_blocked(os.environ) is not None
    preferred = Path.HOST if host_alone else preferred_path(config, device)
    return PathPolicy(preferred=preferred, device_blocks=shares_queues(device), rendezvous=device.type == "cuda")


def has_serial_queue(config: AdaptraConfig, device: torch.device) -> bool:
    """Return whether plans must assume a single hardware queue, which starts no kernel before the previous one has
    ended.
    """
    return has_one_queue(device) and config.queue_model == "serial"


def keeps_stock(config: AdaptraConfig, device: Callable[[], torch.device], *, host_path: bool = True) -> bool:
    """Return whether Megatron's own schedule and exchanges run, because no plan would be faster.

    They do with a serial queue and without a host path. `device`: called only if the answer depends on it. `host_path`:
    whether the host path came up, if it was asked for. The executor runs nevertheless for a given plan, for given
    costs, and for features that need it.
    """
    needs_executor = config.is_fault_tolerant or config.staggered_optimizer or config.reroute != "off"
    measures = config.plan_csv is None and config.costs_json is None
    device_alone = not host_path or config.path == "device" or config.host_transport == "off"
    if needs_executor or not device_alone or not measures or why_blocked(os.environ) is not None:
        return False
    return has_serial_queue(config, device())


def preferred_path(config: AdaptraConfig, device: torch.device) -> Path:
    """Return the path of messages while it is healthy."""
    if config.path != "auto":
        return Path(config.path)
    return Path.HOST if has_serial_queue(config, device) else Path.DEVICE


def why_blocked(environment: Mapping[str, str]) -> str | None:
    """Return why NCCL cannot transfer anything under these environment variables; None if it can."""
    for name, reason in BLOCKING_VARIABLES.items():
        if environment.get(name, "0") not in ("", "0"):
            return f"{name}={environment[name]} keeps messages from the GPUs' own path: {reason}"
    return None


def _two_paths(
    rendezvous: Rendezvous,
    chunks: int,
    config: AdaptraConfig,
    maker: LinkMaker | None,
    device: Device | None,
    timeout_s: float,
) -> Transport:
    """Return a transport whose links have a host path and, if `maker` is given, a device path.

    Raises TransportError on all ranks.
    """
    failure: Exception | None = None
    try:
        # Only here, for it needs the package's native part for rings.
        from adaptra_megatron.transport.dual_path.host_transport import HostTransport

        place = pci_bus_id(current_device())
        settings = HostSettings(
            transport=config.host_transport,
            interface=config.interface,
            port_range=config.port_range,
            timeout_s=timeout_s,
            rnics=rank_rnics(config.rnics, place),
            cpus=cpus_to_bind(place),
            is_fault_tolerant=config.is_fault_tolerant,
        )
        if maker is not None and device is not None and os.environ.get(ORDER_VARIABLE, "0") not in ("", "0"):
            raise TransportError(
                f"{ORDER_VARIABLE} has NCCL refuse kernels from more than one thread, and a link with two paths probes "
                "one of them for the training: unset it"
            )
    except (ImportError, RnicError, TransportError) as cause:
        failure = cause
    agree_on_host_path(rendezvous, "able", failure)
    if maker is None:
        _say_once(rendezvous, f"messages between stages go by the host path alone: {why_blocked(os.environ)}")
    on_gpu = device is not None
    preferred = preferred_path(config, current_device())
    # In serial queues probes of a link's two directions wait for each other, and computation behind them for both.
    standby = preferred is Path.DEVICE or not has_serial_queue(config, current_device())
    limit_s = NCCL_LIMIT_S if on_gpu else GLOO_LIMIT_S
    paths = PathSettings(preferred=preferred, standby=standby, probe_limit_s=limit_s)
    return HostTransport(rendezvous, chunks, settings, paths, maker, device)


def _nccl_side(
    device: Device, config: AdaptraConfig, watch: LinkWatch, timeout_s: float, message_nbytes: int
) -> NcclSide:
    from adaptra_megatron.transport.device_session.nccl_library import torch_nccl
    from adaptra_megatron.transport.device_session.nccl_link import NcclSide, gpu_identity

    identity = gpu_identity(device.device, fastest_rnic_gbit_per_s(), message_nbytes)
    return NcclSide(torch_nccl, device, identity, config.communicators, watch, timeout_s, device.new_stream())


def _say_once(rendezvous: Rendezvous, text: str) -> None:
    """Log `text` on the first rank of one pipeline of the job."""
    if rendezvous.stage == 0 and rendezvous.first_of_the_job_to(text.partition(":")[0]):
        logger.warning("%s", text)
