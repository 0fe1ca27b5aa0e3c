# SPDX-License-Identifier: Apache-2.0
"""Start and end a sidecar process, and pass its log lines and events to its rank."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from adaptra_megatron.authentication.socket_io import receive_descriptor
from adaptra_megatron.log import logger_of
from adaptra_megatron.telemetry.events.events import Event, Stamp, StampedEvent, decode, encode
from adaptra_megatron.transport._ring import die_with_parent

_NO_STAMP = Stamp(run="", rank=0, sequence=0, iteration=0, wall_s=0.0, monotonic_s=0.0)
_OTHER_FILES = 32
"""Descriptors of the process itself, and of connections that have not proven themselves."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Line to log."""

    module: str
    level: int
    text: str


class Notes(logging.Handler):
    """Lines of the log and events that have not been handed to the rank yet."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[Line] = []
        self._events: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line of the package's loggers for the rank, which logs it under its own prefix."""
        text = record.getMessage().removeprefix("adaptra: ")
        self._lines.append(Line(module=record.name, level=record.levelno, text=text))

    def log(self, event: Event) -> None:
        """See RunTelemetry."""
        self._events.append(encode(StampedEvent(stamp=_NO_STAMP, event=event)))

    def take_all(self) -> tuple[tuple[Line, ...], tuple[str, ...]]:
        """All lines, and all events as lines of an event log whose stamps are not used; they are handed out once."""
        lines, events = tuple(self._lines), tuple(self._events)
        self._lines.clear()
        self._events.clear()
        return lines, events

    def collect(self, level: int) -> None:
        """Take in all that the package's loggers have to say from now on, from `level` on."""
        logger = logging.getLogger("adaptra_megatron")
        logger.setLevel(level)
        logger.addHandler(self)
        logger.propagate = False


def log_lines(lines: tuple[Line, ...], word: str = "") -> None:
    """Log lines of a sidecar process of this rank. `word`: before each."""
    for line in lines:
        logger_of(line.module).log(line.level, "%s%s", word, line.text)


def log_events(events: tuple[str, ...], log: Callable[[Event], None]) -> None:
    """Pass the events of a sidecar process of this rank to its telemetry."""
    for event in events:
        log(decode(event).event)


def allow_connections(count: int, what: str) -> None:
    """Raise this process's limit of open files as far as it goes; warn where `count` connections exceed it. `what`:
    the process, in words."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most < count + _OTHER_FILES:
        logger_of(__name__).warning(
            "%d ranks connect to this %s, which may open %d files: raise the hard limit (ulimit -Hn)",
            *(count, what, most),
        )


def serve(arguments: list[str], work: Callable[[socket.socket, socket.socket], Awaitable[None]]) -> None:
    """Run a sidecar process until its channel ends; it ends with the rank.

    `arguments`: the descriptor of its channel, and the rank's process id. `work(channel, listener)`: the channel does
    not block; the listener is the rank's, which was sent first.
    """
    descriptor, parent = map(int, arguments)
    die_with_parent(parent)
    try:
        asyncio.run(_served(socket.socket(fileno=descriptor), work))
    except OSError:  # the channel has ended
        os._exit(0)
    except Exception:
        traceback.print_exc()
        os._exit(1)


async def _served(channel: socket.socket, work: Callable[[socket.socket, socket.socket], Awaitable[None]]) -> None:
    channel.setblocking(False)
    await work(channel, socket.socket(fileno=await receive_descriptor(channel)))
