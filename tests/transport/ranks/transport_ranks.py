# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of transports over gloo: `transport_ranks.py {torch,shm,tcp} SCENARIO...`.

A scenario checks on its rank and raises when something is wrong. The pipeline's group is the whole job.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from transport_checks import (
    CPU,
    MEBIBYTE,
    activation,
    connected,
    content,
    expect,
    flush,
    gradient,
    host_transport,
    our_threads,
)
from transport_failures import killed, silent

from adaptra_megatron.transport.device_session.pair_group import PairGroup
from adaptra_megatron.transport.dual_path.host_transport import HostTransport
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.link_paths import Path
from adaptra_megatron.transport.message_keys import (
    MessageKey,
    MessageTimes,
    TensorSpecification,
    Transport,
)
from adaptra_megatron.transport.setup.rendezvous import Rendezvous
from adaptra_megatron.transport.single_path.gloo_transport import WaitingThreadTransport
from testing.waiting import until

CONTENTS = [
    ((1,), torch.uint8),
    ((1,), torch.int64),
    ((1, 1, 1), torch.bfloat16),
    ((3, 5, 7), torch.float32),
    ((129, 2, 33), torch.bfloat16),
    ((64, 4, 1024), torch.float32),
    ((2, 3, 4, 5, 6), torch.int64),
    ((4 * MEBIBYTE,), torch.float32),
]
VARYING = [(7, 2, 16), (1, 2, 16), (300, 1, 16), (), (5,)]


def contents(transport: Transport) -> None:
    """Both ranks send every shape and dtype to each other at the same time."""
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    for number, (shape, dtype) in enumerate(CONTENTS):
        transport.describe(TensorSpecification(shape, dtype, CPU))
        keys = (activation(number), gradient(number))
        transport.post_receive(keys[peer], peer)
        transport.post_send(keys[rank], peer, content(shape, dtype, 2 * number + rank))
        expect(transport, keys[peer], content(shape, dtype, 2 * number + peer))
        flush(transport)
    transport.describe(TensorSpecification((6, 4), torch.float32, CPU))
    transport.post_receive(activation(0, iteration=1), peer)
    transposed = content((4, 6), torch.float32, 0).t().requires_grad_()  # neither contiguous nor free of autograd
    transport.post_send(activation(0, iteration=1), peer, transposed * 1.0)
    expect(transport, activation(0, iteration=1), content((4, 6), torch.float32, 0).t())
    flush(transport)


def other_order(transport: Transport) -> None:
    """Rank 1 posts receives ahead from both neighbours and consumes them in another order, over three iterations."""
    rank, count, shape = dist.get_rank(), 4, (16, 3)
    transport.describe(TensorSpecification(shape, torch.float32, CPU))
    for iteration in range(3):
        keys = [key(i, iteration=iteration, chunk=chunk) for i in range(count) for chunk, key in enumerate(_KINDS)]
        if rank == 1:
            for source in (0, 2):
                for key in keys:
                    transport.post_receive(_from(key, source), source)
            for key in reversed(keys):
                for source in (2, 0):
                    expect(transport, _from(key, source), content(shape, torch.float32, _seed(key, source)))
        else:
            for key in keys:
                transport.post_send(_from(key, rank), 1, content(shape, torch.float32, _seed(key, rank)))
            flush(transport)


_KINDS = (activation, gradient)


def _from(key: MessageKey, source: int) -> MessageKey:
    """Keys name a message of the job once, so the two sources send to different chunks."""
    return key._replace(chunk=2 * key.chunk + (source == 2))


def _seed(key: MessageKey, source: int) -> int:
    """Content says who sent it, as which key and in which iteration: any mix-up is seen."""
    return ((key.iteration * 100 + key.micro_batch) * 10 + key.chunk) * 10 + source


def varying(transport: Transport) -> None:
    """Shapes that the receiver does not know; consumed in another order than sent."""
    transport.describe(TensorSpecification(None, torch.bfloat16, CPU))
    if dist.get_rank() == 0:
        for number, shape in enumerate(VARYING):
            transport.post_send(activation(number), 1, content(shape, torch.bfloat16, number))
        flush(transport)
        return
    for number in range(len(VARYING)):
        transport.post_receive(activation(number), 0)
    for number in (1, 0, 4, 3, 2):
        expect(transport, activation(number), content(VARYING[number], torch.bfloat16, number))


def swapped(transport: Transport) -> None:
    """The storage under a sent tensor is swapped at once; the bytes arrive, and are let go when they have left."""
    shape, refs = (MEBIBYTE,), []
    transport.describe(TensorSpecification(shape, torch.float32, CPU))
    if dist.get_rank() == 1:
        dist.barrier()
        transport.post_receive(activation(0), 0)
        expect(transport, activation(0), content(shape, torch.float32, 5))
        time.sleep(0.2)
        transport.post_send(gradient(0), 0, content(shape, torch.float32, 6))
        flush(transport)
        return
    transport.post_receive(gradient(0), 1)
    with _watched_sends(refs):
        tensor = content(shape, torch.float32, 5)
        transport.post_send(activation(0), 1, tensor)
    tensor.data = torch.empty(1)  # Megatron's deallocate_output_tensor
    time.sleep(0.2)
    assert len(refs) == 2
    assert all(ref() is not None for ref in refs), "let go before the receiver had posted: cannot have been sent"
    dist.barrier()
    expect(transport, gradient(0), content(shape, torch.float32, 6))
    until(lambda: all(ref() is None for ref in refs), "a sent tensor is still held although a later wait is over")
    flush(transport)


@contextmanager
def _watched_sends(refs: list[weakref.ref[Any]]) -> Iterator[None]:
    send = PairGroup.send

    def watched(group: PairGroup, tensor: torch.Tensor, tag: int) -> Any:
        work = send(group, tensor, tag)
        refs.extend((weakref.ref(tensor), weakref.ref(work)))
        return work

    PairGroup.send = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        PairGroup.send = send  # type: ignore[method-assign]


def times(transport: Transport) -> None:
    """Posted before sent before arrived; arrival is when it came, not when asked for. Sizes and paths are recorded."""
    path = Path.HOST if isinstance(transport, HostTransport) else Path.DEVICE
    transport.describe(TensorSpecification((8,), torch.float32, CPU))
    moment = torch.zeros(1, dtype=torch.float64)
    if dist.get_rank() == 0:
        dist.barrier()
        time.sleep(0.3)
        transport.post_send(activation(0), 1, torch.ones(8))
        flush(transport)
        (sent,), received = transport.take_times()
        assert received == []
        assert sent == MessageTimes(activation(0), 1, sent.posted_s, sent.done_s, 32, path)
        dist.send(torch.tensor([sent.posted_s], dtype=torch.float64), 1)
        return
    transport.post_receive(activation(0), 0)
    assert not transport.ready(activation(0))
    dist.barrier()
    dist.recv(moment, 0)
    until(lambda: transport.ready(activation(0)), "a message that was sent does not become ready")
    time.sleep(0.3)
    asked_s = time.monotonic()
    transport.wait(activation(0), asked_s)  # a deadline that is over already: nothing to wait for
    sent, (received,) = transport.take_times()
    assert sent == []
    assert received == MessageTimes(activation(0), 0, received.posted_s, received.done_s, 32, path)
    assert received.posted_s < moment.item() <= received.done_s < asked_s - 0.25
    assert transport.take_times() == ([], [])


def closed(transport: Transport) -> None:
    """close() ends the threads, twice does no harm."""
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    transport.describe(TensorSpecification((4,), torch.float32, CPU))
    transport.post_receive(activation(peer), peer)
    transport.post_send(activation(rank), peer, torch.ones(4))
    expect(transport, activation(peer), torch.ones(4))
    flush(transport)
    until(lambda: "adaptra-store" not in our_threads(), "what connected the link does not end")
    assert len(our_threads()) == 2, f"one thread to wait for sends and one for receives, not {our_threads()}"
    transport.close()
    assert not our_threads()
    transport.close()


def every_link(transport: Transport) -> None:
    """All ranks send to both neighbours, the wrap-around link included."""
    rank, size, shape = dist.get_rank(), dist.get_world_size(), (5, 2)
    transport.describe(TensorSpecification(shape, torch.float32, CPU))
    after, before = (rank + 1) % size, (rank - 1) % size
    for micro_batch in range(3):
        transport.post_receive(activation(micro_batch), before)
        transport.post_receive(gradient(micro_batch), after)
    for micro_batch in range(3):
        transport.post_send(activation(micro_batch), after, content(shape, torch.float32, 10 * micro_batch + rank))
        transport.post_send(gradient(micro_batch), before, content(shape, torch.float32, 100 + 10 * micro_batch + rank))
    for micro_batch in range(3):
        expect(transport, gradient(micro_batch), content(shape, torch.float32, 100 + 10 * micro_batch + after))
        expect(transport, activation(micro_batch), content(shape, torch.float32, 10 * micro_batch + before))
    flush(transport)


SCENARIOS = (contents, other_order, varying, swapped, times, silent, killed, closed, every_link)


def _transport(path: str) -> Transport:
    if path in ("shm", "tcp"):
        return host_transport(HostSettings(transport=path, timeout_s=30.0, grace_s=2.0), chunks=4)
    links = connected(Rendezvous.of(dist.group.WORLD, 30.0), 4).links()
    return WaitingThreadTransport(dist.get_rank(), links, 4, 30.0)


def main(names: list[str], path: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    # Groups that only some ranks are in, as Megatron's embedding groups are.
    dist.new_group([0])
    scenarios = {scenario.__name__: scenario for scenario in SCENARIOS}
    for name in names:
        transport = _transport(path)
        scenarios[name](transport)
        transport.close()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[2:], sys.argv[1])
