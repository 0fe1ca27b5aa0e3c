# SPDX-License-Identifier: Apache-2.0
"""What ranks do in test_wait_any.py: `wait_any_ranks.py {torch,shm,dual} SCENARIO`. Rank 1 waits for ranks 0 and 2."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from transport_checks import CPU, activation, connected, content, expect, flush, gradient, host_transport

from adaptra_megatron.transport.dual_path.host_transport import HostTransport
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.link_paths import Path, PathSettings
from adaptra_megatron.transport.message_keys import MessageKey, TensorSpecification, Transport, TransportError
from adaptra_megatron.transport.setup.rendezvous import Rendezvous
from adaptra_megatron.transport.single_path.gloo_transport import WaitingThreadTransport
from testing.waiting import until

SHAPE = (64, 4)
ROUNDS = 20


def soon() -> float:
    return time.monotonic() + 20.0


def from_either(transport: Transport) -> None:
    """The neighbour that sends first wakes the waiting rank, whichever it is, in time and not before."""
    rank = dist.get_rank()
    for number in range(ROUNDS):
        keys: dict[int, MessageKey] = {0: activation(number), 2: gradient(number)}
        first, last = (0, 2) if number % 2 else (2, 0)
        if rank == 1:
            assert all(map(transport.can_poll, keys))
            for source, key in keys.items():
                transport.post_receive(key, source)
            assert not transport.wait_any(list(keys.values()), time.monotonic() + 0.01)
            assert not any(map(transport.ready, keys.values()))
        dist.barrier()
        if rank == first:
            transport.post_send(keys[rank], 1, content(SHAPE, torch.float32, number))
            flush(transport)
        if rank == 1:
            assert transport.wait_any(list(keys.values()), soon())
            assert transport.ready(keys[first])
            assert not transport.ready(keys[last])
            expect(transport, keys[first], content(SHAPE, torch.float32, number))
            assert not transport.wait_any([keys[last]], time.monotonic())
        dist.barrier()
        if rank == last:
            transport.post_send(keys[rank], 1, content(SHAPE, torch.float32, number))
            flush(transport)
        if rank == 1:
            assert transport.wait_any([keys[last]], soon())
            expect(transport, keys[last], content(SHAPE, torch.float32, number))


def lost(transport: Transport) -> None:
    """One of two that are waited for dies: an error that names it, at once or where its message is then asked for."""
    if dist.get_rank() == 1:
        transport.post_receive(activation(0), 0)
        transport.post_receive(gradient(0), 2)
    dist.barrier()
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 1:
        with pytest.raises(TransportError) as caught:
            _wait_for_both(transport)
        assert any(name in str(caught.value) for name in ("link 2->1", "rank 2 (stage 2 on"))
        assert "Look at rank 2" in str(caught.value)
    else:
        time.sleep(4.0)  # it is not to die too
    sys.stdout.write("survived")
    sys.stdout.flush()
    os._exit(0)


def _wait_for_both(transport: Transport) -> None:
    assert transport.wait_any([activation(0), gradient(0)], soon()), "said nothing until the deadline"
    assert not transport.ready(activation(0))
    transport.wait(gradient(0), soon())


def paths_change(transport: Transport) -> None:
    """The links go by either path, and from one to the other while a rank waits."""
    assert isinstance(transport, HostTransport)
    rank = dist.get_rank()
    for number in range(ROUNDS):
        for peer in (0, 2) if rank == 1 else (1,):
            transport.prefer(peer, (Path.HOST, Path.DEVICE)[number // 5 % 2])
        keys: dict[int, MessageKey] = {0: activation(number, iteration=1), 2: gradient(number, iteration=1)}
        if rank == 1:
            for source, key in keys.items():
                transport.post_receive(key, source)
            waiting = dict(keys)
            while waiting:
                assert transport.wait_any(list(waiting.values()), soon())
                for source, key in list(waiting.items()):
                    if transport.ready(key):
                        expect(transport, key, content(SHAPE, torch.float32, number))
                        del waiting[source]
        else:
            time.sleep(0.02 * (rank == 0) + 0.01)
            transport.post_send(keys[rank], 1, content(SHAPE, torch.float32, number))
            flush(transport)
    if rank == 1:
        _, received = transport.take_times()
        assert {times.path for times in received} == set(Path)
        assert {transport.last_receive_path(source) for source in (0, 2)} <= set(Path)
        assert transport.last_receive_path(0) is [times.path for times in received if times.peer == 0][-1]


SCENARIOS = {scenario.__name__: scenario for scenario in (from_either, lost, paths_change)}


def main(path: str, name: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    transport: Transport
    if path == "torch":
        links = connected(Rendezvous.of(dist.group.WORLD, 30.0), 1).links()
        transport = WaitingThreadTransport(dist.get_rank(), links, 1, 30.0)
    else:
        paths = PathSettings(preferred=Path.HOST) if path == "dual" else None
        transport = host_transport(HostSettings(transport="shm", timeout_s=30.0, grace_s=2.0), paths)
    transport.describe(TensorSpecification(SHAPE, torch.float32, CPU))
    if path == "dual":
        until(lambda: all(each._paths.sender.device_healthy for each in transport._links.values()), "no device path")  # type: ignore[attr-defined]
    SCENARIOS[name](transport)
    dist.barrier()
    transport.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
