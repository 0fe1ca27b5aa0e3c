# SPDX-License-Identifier: Apache-2.0
"""Define the settings of links' communicators, and how many thread blocks a transfer may use."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class CommunicatorConfig:
    """Settings of the communicators of links: Megatron's entry "pp" of --nccl-communicator-config-path."""

    max_ctas: int | None = None
    """Maximum thread blocks of a transfer. Each occupies a multiprocessor while it waits for the peer. None:
    `most_ctas`.
    """
    min_ctas: int | None = None
    cga_cluster_size: int | None = None
    net_name: str | None = None


_NETWORK_NBYTES_PER_S, _NVLINK_NBYTES_PER_S = 14e9, 20e9
"""Bandwidth of one CTA in bytes/s, as NCCL 2.29.7 assumes (graph/paths.cc P2P_PER_CHANNEL_NET_BW; graph/topo.h)."""
_HIDDEN_S = 0.5e-3
"""A message that takes no longer than this is hidden behind actions of milliseconds: more CTAs gain nothing."""


def most_ctas(same_host: bool, rnic_gbit_per_s: float, message_nbytes: float = 0.0) -> int:
    """Return how many CTAs a link's transfers may use: as many as NCCL would, but no more than needed to hide a
    message.

    `rnic_gbit_per_s`: fastest RNIC of the slower end; 0: unknown. `message_nbytes`: largest message; 0: unknown. NCCL
    uses powers of two. Within a host it uses 2 without NVLink and 32 or more with it, of which at most 8 are used here,
    so that most multiprocessors are left to computation. Between hosts it uses as many as the network's bandwidth needs
    (4 if unknown).
    """
    nbytes_per_s = _NVLINK_NBYTES_PER_S if same_host else _NETWORK_NBYTES_PER_S
    network = _power_of_two(rnic_gbit_per_s * 1e9 / 8 / nbytes_per_s) if rnic_gbit_per_s > 0 else 4
    most = 8 if same_host else network
    return min(most, _power_of_two(message_nbytes / nbytes_per_s / _HIDDEN_S)) if message_nbytes else most


def _power_of_two(least: float) -> int:
    """Return the lowest power of two that is at least `least`."""
    return 1 << max(0, math.ceil(least) - 1).bit_length()
