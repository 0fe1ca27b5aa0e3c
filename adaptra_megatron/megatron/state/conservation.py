# SPDX-License-Identifier: Apache-2.0
"""Check that the gradients of an iteration hold each micro-batch of each replica exactly once.

Every gradient bucket has a count, an int32. Each backward that completes weight gradients of a chunk adds 1 to the
counts of its buckets, before a hook can start their reduction. A count is zeroed with its buffer, and reduced wherever
its bucket is reduced (`FaultTolerantGroup`): over the same ranks, after it in the same queue or stream, and written
together with the bucket's sum. So after the reduction each rank has the number of micro-batches in each of its buckets:
as many per rank of the bucket's group, also if live cells computed those of dead ones. For experts that span
data-parallel ranks that is one of each replica, as their tokens come from all ranks at once. The number differs if a
micro-batch is missing or doubled, if a bucket was not zeroed, not reduced or reduced twice, or if a late reduction of
an earlier attempt wrote to it.

The count is stored next to the bucket rather than in its padding. A bucket has padding only with the distributed
optimizer, and even then none if its size is a multiple of the replicas and of 128, as in most large models. Added
padding would change the bucket's size, and with it shards, checkpoint formats, and the order in which a library adds
three or more addends, so that results would differ from stock's. A separate count is also exact whatever the gradients'
dtype, and scaling, gradient norms and checks for NaN see the same buffers as in stock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from adaptra_megatron.elastic.failure_errors import UnsoundAttemptError
from adaptra_megatron.elastic.process_group import COUNTS
from adaptra_megatron.megatron.megatron_call import PipelineCall


class MiscountedGradientsError(UnsoundAttemptError):
    """Reduced gradients do not hold each micro-batch once: the attempt must not be committed."""

    def __init__(self, stage: int, chunk: int, bucket: int, expected: int, found: int) -> None:
        """`bucket`: index among the chunk's buckets, experts' last."""
        self.stage, self.chunk, self.bucket, self.expected, self.found = stage, chunk, bucket, expected, found
        super().__init__(self.describe())

    def describe(self) -> str:
        """Return the difference, in one sentence."""
        return (
            f"stage {self.stage}, chunk {self.chunk}, bucket {self.bucket}: gradients hold {self.found} of "
            f"{self.expected} micro-batches (ranks x micro-batches), so they are not those of the global batch"
        )


class Conserved(NamedTuple):
    """Verified counts of one rank, which ranks compare with each other."""

    buckets: int
    """Number of checked buckets."""
    tokens: int | None = None
    """With a loss per token: tokens of the micro-batches whose loss this rank computed; 0 except on the last stage. The
    sum over the replicas of one lane is the divisor.
    """
    divisor: int | None = None
    """With a loss per token: the number by which this rank divided its gradients."""


class _Counted(NamedTuple):
    counts: torch.Tensor
    addends: tuple[int, ...]
    """Number of ranks over which each bucket is summed."""


class Conservation:
    """Counts of one process, for the life of the job. Only if `FaultTolerantGroup` carries reductions."""

    def __init__(self) -> None:
        self._chunks: dict[torch.nn.Module, _Counted] = {}

    def begin(self, model_chunks: Sequence[torch.nn.Module]) -> None:
        """Create counts for the buckets of `model_chunks` that have none."""
        for chunk in model_chunks:
            if chunk not in self._chunks:
                self._chunks[chunk] = _counted(chunk)

    def count(self, chunk: torch.nn.Module) -> None:
        """Count one micro-batch, whose last gradients for `chunk` are computed next."""
        self._chunks[chunk].counts.add_(1)

    def verify(
        self, call: PipelineCall, tokens: torch.Tensor | None = None, divisor: torch.Tensor | None = None
    ) -> Conserved:
        """Return `Conserved` for the reduced gradients of `call`. Call it before the optimizer steps.

        The device must have finished, since this reads from it and cannot be interrupted. `tokens`, `divisor`: see
        `Conserved`. Raises MiscountedGradientsError.
        """
        counted = [self._chunks[chunk] for chunk in call.model_chunks]
        read = iter(torch.cat([each.counts for each in counted]).tolist())
        for chunk, each in enumerate(counted):
            for bucket, addends in enumerate(each.addends):
                expected, found = addends * call.micro_batches, next(read)
                if found != expected:
                    raise MiscountedGradientsError(call.stage, chunk, bucket, expected, found)
        buckets = sum(len(each.addends) for each in counted)
        if tokens is None or divisor is None:
            return Conserved(buckets)
        return Conserved(buckets, int(tokens), int(divisor))


def _counted(chunk: Any) -> _Counted:
    """Give the buffers, buckets and shards of a DistributedDataParallel their counts."""
    buffers = [*chunk.buffers, *chunk.expert_parallel_buffers]
    buckets = [bucket for buffer in buffers for bucket in buffer.buckets]
    device = buckets[0].grad_data.device if buckets else None
    counts = torch.zeros(len(buckets), dtype=torch.int32, device=device)
    first = 0
    for buffer in buffers:
        setattr(buffer, COUNTS, counts[first : first + len(buffer.buckets)])
        first += len(buffer.buckets)
    places = {id(bucket): place for place, bucket in enumerate(buckets)}
    addends = [0] * len(buckets)
    for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
        settings = group.ddp_config
        sharded = settings.use_distributed_optimizer
        over = group.intra_distributed_optimizer_instance_group if sharded else group.data_parallel_group
        instances = settings.num_distributed_optimizer_instances
        for index, bucket in enumerate(group.buckets):
            place = places[id(bucket)]
            addends[place] = over.size() * instances
            setattr(bucket.grad_data, COUNTS, counts[place : place + 1])
            if instances > 1:
                # What stock makes in its first reduction, and then adds up over the instances.
                shards = list(bucket.grad_data.chunk(group.intra_distributed_optimizer_instance_size))
                group.cached_grad_buffer_shard_list[index] = shards
                setattr(shards[group.intra_distributed_optimizer_instance_rank], COUNTS, counts[place : place + 1])
    return _Counted(counts, tuple(addends))


# Digests of parameters.

_WORDS = 1 << 18
"""Number of 32-bit words in a block: 1 MiB, of which the arithmetic needs several times as much."""
_TABLES = 2
_GOLDEN = 0x9E3779B97F4A7C15


def digest_of(model_chunks: Sequence[Any], iterations: int, scheduler_steps: int) -> bytes:
    """Return 32 bytes that are equal on two ranks if, and almost certainly only if, their parameters and the biases of
    their routers (`expert_bias`) are equal bit for bit.

    The digest also covers the order, shapes and types of all parameters of `model_chunks`, `iterations` and
    `scheduler_steps`. No other buffers: they may differ between replicas by design. Parameters must have been gathered
    and the device must have finished, as this reads from it. 16 bytes of each MiB are copied to the host. Integer
    arithmetic modulo 2^64 gives the same on all devices, in any order of addition.

    For each block of words x the device computes two sums of a_i * x_i, with fixed tables of odd a. One differing word
    always changes both sums, as an odd number has an inverse modulo 2^64. Several differing words leave one sum
    unchanged for at most one of 2^32 tables (their differences have 32 bits, so at least 32 bits of a decide), and both
    sums for one of 2^64. Errors do not depend on the tables, so fixed tables detect them as well as random ones would.
    They are no defence against somebody who constructs two models with the same digest. The sums of blocks, the sizes
    and counters are hashed by blake2b.
    """
    total = hashlib.blake2b(f"{iterations}/{scheduler_steps}".encode(), digest_size=32)
    blocks: dict[torch.device, _BlockSums] = {}
    sums: list[torch.Tensor] = []
    for chunk in model_chunks:
        buffers = torch.nn.Module.named_buffers(chunk)
        # As 32 bits, which a router makes of its bias in its first forward: replicas may not all have come to theirs.
        biases = (buffer.float() for name, buffer in buffers if name.endswith("expert_bias"))
        for tensor in (*chunk.parameters(), *biases):
            total.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
            device = tensor.device
            blocks[device] = blocks.get(device) or _BlockSums(device)
            sums += blocks[device].of(tensor.detach())
    if sums:
        total.update(torch.stack(sums).cpu().numpy().tobytes())
    return total.digest()


class _BlockSums:
    """Sums of blocks on one device, whose memory is allocated once."""

    def __init__(self, device: torch.device) -> None:
        self._tables = _tables(device)
        self._words, self._products = (torch.empty(_WORDS, dtype=torch.int64, device=device) for _ in range(2))

    def of(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Return the sums of each block of a tensor, as scalars."""
        flat = tensor.contiguous().reshape(-1)
        per_block = 4 * _WORDS // flat.element_size()
        for first in range(0, flat.numel(), per_block):
            block = flat[first : first + per_block].view(torch.uint8)
            # A copy where there is no whole number of words, or none begins here: parameters of 16 bits.
            if block.numel() % 4 or block.storage_offset() % 4:
                block = torch.nn.functional.pad(block, (0, -block.numel() % 4))
            size = block.numel() // 4
            words, products = self._words[:size], self._products[:size]
            words.copy_(block.view(torch.int32))
            for table in self._tables:
                yield torch.mul(words, table[:size], out=products).sum()


def _tables(device: torch.device) -> torch.Tensor:
    """Return odd 64-bit numbers [tables, words], by splitmix64 of their positions."""
    mask = (1 << 64) - 1
    place = torch.arange(1, _TABLES * _WORDS + 1, dtype=torch.int64, device=device) * _signed(_GOLDEN)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        # torch shifts in copies of the sign.
        place = (place ^ ((place >> shift) & (mask >> shift))) * _signed(factor)
    return (place | 1).view(_TABLES, _WORDS)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
