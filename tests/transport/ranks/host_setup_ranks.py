# SPDX-License-Identifier: Apache-2.0
"""What two ranks do in test_host_setup.py: `host_setup_ranks.py SCENARIO...`. A scenario raises when it goes wrong.

In each, something keeps rank 1 alone from taking part; both must learn of it at once, and keep nothing.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transport_checks import CPU, activation, content, expect, flush, host_transport, no_more

from adaptra_megatron.common import gathering
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.message_keys import TensorSpecification, TransportError
from adaptra_megatron.transport.setup import host_setup
from adaptra_megatron.transport.setup.host_setup import HostSetup
from testing.waiting import until

AT_ONCE_S = 5.0
"""Far less than the 40 s that a process group waits for a rank that does not come."""
SETTINGS = HostSettings(transport="tcp", timeout_s=30.0)


def held() -> dict[str, int]:
    gc.collect()  # what errors held until now must not be counted before, and be gone after
    return {"descriptors": len(os.listdir("/proc/self/fd")), "threads": threading.active_count()}


@contextmanager
def instead(name: str, replacement: Callable[..., Any], owner: ModuleType = host_setup) -> Iterator[None]:
    """On rank 1, `replacement` is what `owner` calls by `name`."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(owner, name, replacement)
        yield


def refused(settings: HostSettings, *said: str) -> None:
    """Both ranks get the same error, soon, and keep nothing; `said` are parts of it."""
    before, start_s = held(), time.monotonic()
    with pytest.raises(TransportError) as caught:
        host_transport(settings)
    assert time.monotonic() - start_s < AT_ONCE_S
    message = str(caught.value)
    messages: list[Any] = [None, None]
    dist.all_gather_object(messages, message)
    assert messages == [message, message]
    assert f"rank 1 (stage 1 on {socket.gethostname()})" in message
    for part in said:
        assert part in message, f"{part!r} is not in {message!r}"
    del caught
    # Connections go a moment after their other ends have.
    until(lambda: no_more(held(), before), f"more than {before} is held")
    dist.barrier()  # the other rank's next client would be counted


def usable() -> None:
    """The same ranks can still do it right."""
    rank = dist.get_rank()
    transport = host_transport(SETTINGS)
    transport.describe(TensorSpecification(None, torch.float32, CPU))
    if rank == 0:
        transport.post_send(activation(0), 1, content((1000,), torch.float32, 1))
        flush(transport)
    else:
        transport.post_receive(activation(0), 0)
        expect(transport, activation(0), content((1000,), torch.float32, 1))
    dist.barrier()
    transport.close()


def no_such_interface() -> None:
    mine = replace(SETTINGS, interface="adaptra-none" if dist.get_rank() == 1 else "lo")
    refused(mine, "'adaptra-none' does not exist; this host has lo (127.0.0.1)", "--adaptra-interface")


def cannot_listen() -> None:
    def listen_tcp(*_: Any) -> Any:
        raise OSError(24, "Too many open files")

    with instead("listen_tcp", listen_tcp):
        refused(SETTINGS, "Too many open files", "--adaptra-host-transport off")


def a_bug() -> None:
    def listening_host(interface: str | None, *, one_host: bool) -> str:
        raise KeyError("something unforeseen")

    with instead("listening_host", listening_host):
        refused(SETTINGS, "KeyError: 'something unforeseen'")


def different_hosts() -> None:
    """Forced shared memory with a rank on another host: an error of both, and both are named."""
    with instead("host_identity", lambda: "elsewhere/1", gathering):
        refused(replace(SETTINGS, transport="shm"), "rank 0 (stage 0", "link 0<->1: shared memory", "link 1<->0")


def half_listening() -> None:
    """What did listen before another listener failed is closed, and so is that of the rank that could."""
    opened: list[socket.socket] = []
    listen_shm = host_setup.listen_shm

    def watched() -> Any:
        opened.append((found := listen_shm())[0])
        return found

    def listen_tcp(*_: Any) -> Any:
        raise OSError(24, "Too many open files")

    with pytest.MonkeyPatch.context() as patch, instead("listen_tcp", listen_tcp):
        patch.setattr(host_setup, "listen_shm", watched)
        patch.setattr(HostSetup, "choose", lambda *_: "shm")
        listen = HostSetup.listen_for
        patch.setattr(HostSetup, "listen_for", lambda setup, wanted, ranks: listen(setup, {"shm", "tcp"}, ranks))
        refused(SETTINGS, "Too many open files")
    assert {listener.fileno() for listener in opened} == {-1}


def supervisor_fails() -> None:
    """After the meeting: an error of both, who keep nothing, though the links' threads run already."""
    from adaptra_megatron.transport.dual_path import link_opener

    def no_supervisor(*_: Any, **__: Any) -> Any:
        raise OSError(11, "Resource temporarily unavailable")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(link_opener, "Supervisor", no_supervisor)
        refused(SETTINGS, "Resource temporarily unavailable")


SCENARIOS = (no_such_interface, cannot_listen, a_bug, different_hosts, half_listening, supervisor_fails)


def main(names: list[str]) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    dist.barrier()
    usable()  # pays for what torch.distributed and the standard library keep
    scenarios = {scenario.__name__: scenario for scenario in SCENARIOS}
    for name in names:
        scenarios[name]()
        sys.stdout.write(f"{Path(__file__).stem}: {name} passed\n")
    usable()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
