# SPDX-License-Identifier: Apache-2.0
"""Open the socket on which other ranks send their measurements."""

from __future__ import annotations

import socket
from collections.abc import Collection

from adaptra_megatron.common.layout import JobLayout
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.transport.message_keys import TransportError
from adaptra_megatron.transport.setup.host_placement import listen_tcp, listening_host

logger = logger_of(__name__)


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
