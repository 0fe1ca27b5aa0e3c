# SPDX-License-Identifier: Apache-2.0
"""Make the random numbers of a micro-batch equal at all cells of its stage."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.layout import JobLayout


class MicroBatchRandom:
    """Seeds the streams that a model draws from before each forward, by the micro-batch rather than the cell.

    These are torch's default generators and the states of Megatron's CudaRNGStatesTracker. Recomputation restores the
    states of the forward itself (megatron/core/tensor_parallel/random.py: CheckpointFunction).
    """

    def __init__(self, base: bytes) -> None:
        """`base`: equal on all cells of a stage; different for each stage, lane and start of the training."""
        self._base = base

    @classmethod
    def agreed(cls, control: ControlStore, layout: JobLayout, timeout_s: float, *, says: bool) -> MicroBatchRandom:
        """Agree on the base of this rank's stage and lane: it follows from the random states of the one rank with
        `says`.

        All of its ranks call this at their first iteration. Raises RuntimeError if the base does not come in time.
        """
        worker = layout.workers[layout.rank]
        store = control.client("random")
        store.set_timeout(timedelta(seconds=timeout_s))
        key = f"{worker.cell.stage}/{worker.lane}"
        if says:
            store.set(key, _states_digest())
        return cls(store.get(key))

    def begin(self, iteration: int, replica: int, micro_batch: int, chunk: int) -> None:
        """Seed the streams for the forward of a replica's micro-batch."""
        for name, seed in self._seeds(f"{iteration}/{replica}/{micro_batch}/{chunk}"):
            if name is None:
                torch.default_generator.manual_seed(seed)
                torch.cuda.manual_seed(seed)
            else:
                with get_cuda_rng_tracker().fork(name):
                    torch.cuda.manual_seed(seed)

    def _seeds(self, what: str) -> Iterator[tuple[str | None, int]]:
        for name in (None, *sorted(get_cuda_rng_tracker().get_states())):
            text = f"{what}/{name}".encode()
            digest = hashlib.blake2b(text, key=self._base, digest_size=8).digest()
            yield name, int.from_bytes(digest, "little") >> 1


def _states_digest() -> bytes:
    states: list[Any] = [torch.get_rng_state(), torch.cuda.get_rng_state()]
    tracked = get_cuda_rng_tracker().get_states()
    states += [tracked[name] for name in sorted(tracked)]
    digest = hashlib.blake2b(digest_size=32)
    for state in states:
        digest.update(state.cpu().numpy().tobytes())
    return digest.digest()
