# SPDX-License-Identifier: Apache-2.0
"""Results of operations outside of calls, until all ranks are known to have them.

Outside of calls an operation has one result, which all its ranks see. Where a rank fails in one, some have its result
and others have not: these get it from the lowest rank that has, over the job's store, or carry it out anew where none
has. Results are kept from one commit to the next: who commits call n has seen all others come to the end of their
attempts at n, so all have carried out what comes before it. Replicas may be several operations apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from adaptra_megatron.common.authentication.sealed_store import SealedStore
from adaptra_megatron.common.typed_messages import Natural, packed, unpacked
from adaptra_megatron.elastic.awaiting import awaited

MOST_KEPT_NBYTES = 16 << 20
"""Largest results of one operation that are kept."""
CHUNK_NBYTES = 512 << 10
"""Of one value in the store: torch's TCPStore carries 8 MiB, and all other requests wait meanwhile."""
_MANIFEST_NBYTES = 1 << 16


@dataclass(frozen=True)
class _Manifest:
    """What a holder has put into the store of one operation's result."""

    nbytes: tuple[Natural, ...] | None
    """Of each output, whose bytes follow one another; None: more than MOST_KEPT_NBYTES, and not kept."""


class KeptResults:
    """Results of one rank's operations, since its last commit. For the training thread."""

    def __init__(self) -> None:
        self._kept: dict[str, list[list[bytes] | None]] = {}
        """By name of a group, in the order of its operations."""
        self._holders: Mapping[str, int] = {}
        self._fetch: Callable[[str], bytes] = _nowhere

    def counts(self, groups: Sequence[str]) -> dict[str, int]:
        """Return how many operations have been carried out, by name of the `groups` that this rank is in."""
        return {group: len(self._kept.get(group, ())) for group in groups}

    def forget(self) -> None:
        """Forget all: every live rank has them."""
        self._kept.clear()
        self._holders = {}

    def keep(self, group: str, outputs: Sequence[torch.Tensor]) -> None:
        """Keep what an operation of `group` has come to."""
        results = self._kept.setdefault(group, [])
        if sum(output.nbytes for output in outputs) > MOST_KEPT_NBYTES:
            results.append(None)
            return
        flat = [output.detach().cpu().contiguous().reshape(-1) for output in outputs]
        results.append([each.view(torch.uint8).numpy().tobytes() if each.numel() else b"" for each in flat])

    def publish(self, store: SealedStore, groups: Sequence[str]) -> None:
        """Put the results in `groups`, of which another rank lacks some, into the store of the new generation."""
        for group in groups:
            for number, outputs in enumerate(self._kept[group]):
                place = f"kept/{group}/{number}"
                whole = b"".join(outputs or ())
                for chunk, begin in enumerate(range(0, len(whole), CHUNK_NBYTES)):
                    store.set(f"{place}/{chunk}", whole[begin : begin + CHUNK_NBYTES])
                manifest = _Manifest(None if outputs is None else tuple(map(len, outputs)))
                store.set(place, packed(manifest))
            store.set(f"kept/{group}", str(len(self._kept[group])).encode())

    def found_with(
        self, holders: Mapping[str, int], store: SealedStore, timeout_s: float, check: Callable[[], None]
    ) -> None:
        """Look for results that this rank lacks with their `holders`, from now on. `check`: raises what ends the wait
        for one. `store`: of the generation."""
        self._holders = holders
        self._fetch = lambda key: awaited(lambda: store.peek(key), timeout_s, check)

    def known(self, group: str, outputs: Sequence[torch.Tensor]) -> bool:
        """Fill the `outputs` of the next operation of `group` with its result, if another rank has it.

        Returns whether one has. Raises RuntimeError where it was too large to be kept, and TimeoutError where its
        holder does not give it.
        """
        number = len(self._kept.get(group, ()))
        if group not in self._holders or number >= int(self._fetch(f"kept/{group}")):
            return False
        place = f"kept/{group}/{number}"
        manifest: _Manifest = unpacked(self._fetch(place), _Manifest, _MANIFEST_NBYTES)
        if manifest.nbytes is None:
            raise RuntimeError(
                f"the result of operation {number} of {group} is lost: it has more than {MOST_KEPT_NBYTES >> 20} MiB"
            )
        chunks = range(-(-sum(manifest.nbytes) // CHUNK_NBYTES))
        whole = b"".join(self._fetch(f"{place}/{chunk}") for chunk in chunks)
        begin = 0
        for output, nbytes in zip(outputs, manifest.nbytes, strict=True):
            if nbytes:
                flat = torch.frombuffer(bytearray(whole[begin : begin + nbytes]), dtype=torch.uint8)
                output.copy_(flat.view(output.dtype).view(output.shape))
            begin += nbytes
        return True


def _nowhere(key: str) -> Any:
    raise AssertionError(f"{key} is looked for before ranks have met")
