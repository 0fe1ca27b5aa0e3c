# SPDX-License-Identifier: Apache-2.0
"""Which transport a pipeline gets: by its device, by what the user has asked for, and by what works."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from torch.distributed.distributed_c10d import _get_default_store

from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.runtime.device import current_device, pci_bus_id
from adaptra_megatron.runtime.megatron_call import PipelineCall
from adaptra_megatron.runtime.path_leader import PathPolicy
from adaptra_megatron.transport.affinity import RnicError, cpus_to_bind, rank_rnics
from adaptra_megatron.transport.cuda_device import Device, device_of
from adaptra_megatron.transport.device_clock import DeviceClock
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.link_setup import LinkMaker
from adaptra_megatron.transport.link_watch import LinkWatch
from adaptra_megatron.transport.messages import Transport, TransportError, TwoPathTransport
from adaptra_megatron.transport.nccl_library import torch_nccl
from adaptra_megatron.transport.nccl_link import NcclSide, gpu_identity
from adaptra_megatron.transport.paths import Path, PathSettings
from adaptra_megatron.transport.placement import agree_on_host_path
from adaptra_megatron.transport.rendezvous import Rendezvous
from adaptra_megatron.transport.stream_path import StreamTransport
from adaptra_megatron.transport.torch_path import WaitingThreadTransport

logger = logging.getLogger("adaptra_megatron.runtime")

NCCL_LIMIT_S = 15.0
"""Making an NCCL communicator may take seconds; the host path carries messages meanwhile."""
GLOO_LIMIT_S = PathSettings.probe_limit_s

BLOCKING_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": "a receive would block the host until its message has come, which may need work that this "
    "stage has not launched yet",
    "NCCL_COMM_BLOCKING": "calls of NCCL would block, and neither a stage that does not come nor one that dies could "
    "be left alone",
}
"""Environment variables under which nothing can go by NCCL, and why."""
ORDER_VARIABLE = "NCCL_LAUNCH_ORDER_IMPLICIT"


def timeout_s(config: AdaptraConfig) -> float:
    """Longest wait for another rank: what was asked for, or what torch.distributed was initialised with.

    Megatron initialises it with --distributed-timeout-minutes.
    """
    if config.timeout_s is not None:
        return config.timeout_s
    store: Any = _get_default_store()
    limit_s: float = store.timeout.total_seconds()
    return limit_s


def make_transport(call: PipelineCall, config: AdaptraConfig, clock: DeviceClock | None) -> Transport:
    """Called by all ranks of the pipeline at the same point. `clock`: times messages between GPUs; None elsewhere.

    Raises TransportError, on all of them alike, when what was asked for does not come up, or nothing does.
    """
    rendezvous = Rendezvous.of(call.pipeline_group, timeout_s(config))
    device = device_of(current_device())
    blocked = None if device is None else why_blocked(os.environ)
    maker, watch = None, LinkWatch()
    if blocked is None:
        maker = LinkMaker(rendezvous, None if device is None else _nccl_side(device, config, watch))
        maker.connect(wrap=call.chunks > 1)
    if config.host_transport != "off":
        try:
            return _two_paths(call, config, rendezvous, maker, device)
        except TransportError as cause:  # the same on all ranks of the pipeline
            if config.needs_host_path or maker is None:
                raise
            _say_once(rendezvous, f"links between stages have one path, torch.distributed's: {cause}")
    if maker is None:
        raise TransportError(f"{blocked}. Use --adaptra-host-transport auto: messages then go by the host path alone")
    links = maker.links()
    if device is None:
        return WaitingThreadTransport(rendezvous.stage, links, call.chunks, timeout_s(config))
    return StreamTransport(rendezvous.stage, links, device, clock, watch, timeout_s(config))


def path_policy(config: AdaptraConfig, transport: Transport) -> PathPolicy | None:
    """How links choose between their paths; None where messages have torch.distributed's alone."""
    if not isinstance(transport, TwoPathTransport):
        return None
    on_gpu = current_device().type == "cuda"
    one_queue = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    host_alone = on_gpu and why_blocked(os.environ) is not None
    return PathPolicy(preferred=Path.HOST if host_alone else Path(config.path), device_blocks=one_queue and on_gpu)


def why_blocked(environment: Mapping[str, str]) -> str | None:
    """Why nothing can go by NCCL under these environment variables; None where it can."""
    for name, reason in BLOCKING_VARIABLES.items():
        if environment.get(name, "0") not in ("", "0"):
            return f"{name}={environment[name]} keeps messages from the GPUs' own path: {reason}"
    return None


def _two_paths(
    call: PipelineCall,
    config: AdaptraConfig,
    rendezvous: Rendezvous,
    maker: LinkMaker | None,
    device: Device | None,
) -> Transport:
    """Links with a host path, and a device path too where `maker` is given. Raises TransportError on all ranks."""
    failure: Exception | None = None
    try:
        # Only here, for it needs the package's native part for rings.
        from adaptra_megatron.transport.host_path import HostTransport

        place = pci_bus_id(current_device())
        settings = HostSettings(
            transport=config.host_transport,
            interface=config.interface,
            timeout_s=timeout_s(config),
            rnics=rank_rnics(config.rnics, place),
            cpus=cpus_to_bind(place),
        )
        if maker is not None and device is not None and os.environ.get(ORDER_VARIABLE, "0") not in ("", "0"):
            raise TransportError(
                f"{ORDER_VARIABLE} has NCCL refuse kernels from more than one thread, and a link with two paths probes "
                "one of them beside the training: unset it"
            )
    except (ImportError, RnicError, TransportError) as cause:
        failure = cause
    agree_on_host_path(rendezvous, "able", failure)
    if maker is None:
        _say_once(rendezvous, f"messages between stages go by the host path alone: {why_blocked(os.environ)}")
    on_gpu = device is not None
    paths = PathSettings(preferred=Path(config.path), probe_limit_s=NCCL_LIMIT_S if on_gpu else GLOO_LIMIT_S)
    return HostTransport(rendezvous, call.chunks, settings, paths, maker, device)


def _nccl_side(device: Device, config: AdaptraConfig, watch: LinkWatch) -> NcclSide:
    return NcclSide(torch_nccl, device, gpu_identity(device.device), config.communicators, watch)


def _say_once(rendezvous: Rendezvous, text: str) -> None:
    """In the log of the first rank of a pipeline, and of one pipeline only."""
    if rendezvous.stage == 0 and rendezvous.first_of_the_job_to(text.partition(":")[0]):
        logger.warning("adaptra: %s", text)
