# SPDX-License-Identifier: Apache-2.0
"""Which transport a pipeline gets: by its device, and by what the user has asked for."""

from __future__ import annotations

import os

from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.runtime.device import current_device, pci_bus_id
from adaptra_megatron.runtime.megatron_call import PipelineCall
from adaptra_megatron.runtime.path_leader import PathPolicy
from adaptra_megatron.transport.affinity import cpus_to_bind, rank_rnics
from adaptra_megatron.transport.device_clock import DeviceClock
from adaptra_megatron.transport.host_path import HostTransport
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.messages import Transport
from adaptra_megatron.transport.paths import Path, PathSettings
from adaptra_megatron.transport.stream_path import StreamTransport
from adaptra_megatron.transport.torch_path import WaitingThreadTransport

NCCL_LIMIT_S = 15.0
"""Making an NCCL communicator may take seconds; the host path carries messages meanwhile."""
GLOO_LIMIT_S = PathSettings.probe_limit_s


def make_transport(call: PipelineCall, config: AdaptraConfig, clock: DeviceClock | None) -> Transport:
    """Collective over the pipeline's ranks. `clock`: times messages between GPUs; None elsewhere.

    Raises TransportError when the host path does not come up.
    """
    group, device = call.pipeline_group, current_device()
    on_gpu = device.type == "cuda"
    if config.host_transport != "off":
        return HostTransport(
            group,
            call.chunks,
            HostSettings(
                transport=config.host_transport,
                interface=config.interface,
                timeout_s=config.timeout_s,
                rnics=rank_rnics(config.rnics, pci_bus_id(device)),
                cpus=cpus_to_bind(pci_bus_id(device)),
            ),
            PathSettings(preferred=Path(config.path), probe_limit_s=NCCL_LIMIT_S if on_gpu else GLOO_LIMIT_S),
            device,
        )
    if on_gpu:
        return StreamTransport(group, config.timeout_s, clock)
    return WaitingThreadTransport(group, call.chunks, config.timeout_s)


def path_policy(config: AdaptraConfig) -> PathPolicy | None:
    """How links choose between their paths; None where they have one."""
    if config.host_transport == "off":
        return None
    one_queue = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    return PathPolicy(preferred=Path(config.path), device_blocks=one_queue and current_device().type == "cuda")
