# SPDX-License-Identifier: Apache-2.0
"""A running delegate as its training process has it: the process, and the channel to it."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence

from adaptra_megatron.child_process import ChildProcess
from adaptra_megatron.transport.delegate import control
from adaptra_megatron.transport.delegate.control import ControlEndedError, Start
from adaptra_megatron.transport.delegate.heartbeat import Heartbeat


class DelegateProcess(ChildProcess):
    """One running delegate process."""

    def __init__(self, start: Start, listeners: Sequence[socket.socket]) -> None:
        """Starts it, as ChildProcess says."""
        self.heartbeat = Heartbeat(time.monotonic())
        super().__init__("adaptra_megatron.transport.delegate.delegate", socket.SOCK_SEQPACKET)
        self.channel.settimeout(5.0)
        with contextlib.suppress(ControlEndedError):  # seen where the channel is read
            control.send(self.channel, start, [listener.fileno() for listener in listeners])
