# SPDX-License-Identifier: Apache-2.0
"""Gather typed data of every rank of a group: torch's own gathering of objects unpickles."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.layout import Introduction, JobLayout, host_identity, layout_of
from adaptra_megatron.common.typed_messages import packed, unpacked


def epoch_group(control: ControlStore, name: str, ranks: Sequence[int], rank: int, timeout_s: float) -> Any:
    """Create a gloo group of `ranks` (global) in the generation of `control`. All call this at about the same time.

    `name`: unique within the generation. Members are addressed by their index in `ranks`. Raises RuntimeError if one
    does not come within `timeout_s`.
    """
    make: Any = dist.ProcessGroupGloo
    with control.lent(name, timeout_s, sealed=False) as store:
        return make(store, ranks.index(rank), len(ranks), timedelta(seconds=timeout_s))


def gloo_group(store: Any, rank: int, size: int, timeout: timedelta, devices: Sequence[Any]) -> Any:
    """Create a gloo group with one worker thread, whose connections are made by `devices`.

    With two threads, torch's default, torch 2.13 frees one string twice: docs/upstream/torch_gloo_double_free.md.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._threads, options._timeout = list(devices), 1, timeout
    return gloo(store, rank, size, options)


def nccl_group(store: Any, rank: int, size: int, timeout_s: float) -> Any:
    """Create an NCCL group of `size` processes that meet in `store`; this one has rank `rank` in it."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupNCCL(store, rank, size, options)


Entry = TypeVar("Entry")

_MOST_NBYTES = 1 << 20
"""Maximum size of one rank's entry."""


def gather_layout(
    pipeline: Sequence[int],
    joined: Iterable[Sequence[int]] = (),
    group: dist.ProcessGroup | None = None,
    *,
    together: bool = False,
    rnics: Sequence[str] = (),
) -> JobLayout:
    """Return the layout of the ranks in `group` (None: the whole job). All of them call this: it is the job's only
    collective.

    `pipeline`: global ranks of this rank's pipeline, by stage. `joined`: members of each group whose collectives this
    rank joins inside F, B and W. `together`: see `JobLayout`. `rnics`: this rank's RNICs, for messages. Raises
    RuntimeError if a rank does not come within the group's timeout.
    """
    rank, token = dist.get_rank(), secrets.token_hex(16)
    firsts = sorted({min(ranks) for ranks in joined})
    where = socket.gethostname(), host_identity()
    mine = Introduction(rank, pipeline[0], pipeline.index(rank), firsts, *where, token, ",".join(rnics))
    return layout_of(gather(mine, group), rank, together=together)


def gather(mine: Entry, group: dist.ProcessGroup | None = None) -> list[Entry]:
    """Return the entries of all ranks in `group` (None: the whole job), by rank. All of them call this.

    `mine`: this rank's entry, a dataclass or NamedTuple of the same type on all ranks. Raises RuntimeError if a rank
    does not come within the group's timeout, or sends anything else.
    """
    kind, packet = type(mine), packed(mine)
    device = dist.distributed_c10d._get_object_coll_device(group)  # as torch's all_gather_object
    ranks = range(dist.get_world_size(group))
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in ranks]
    dist.all_gather(sizes, torch.tensor([len(packet)], device=device), group=group)
    of_each = torch.cat(sizes).tolist()
    if not 0 < min(of_each) <= max(of_each) <= _MOST_NBYTES:
        raise RuntimeError(f"entries have {of_each} bytes, of {_MOST_NBYTES} at most: install one release on all")
    # all_gather needs equal sizes.
    padded = torch.frombuffer(bytearray(packet.ljust(max(of_each))), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(padded) for _ in ranks]
    dist.all_gather(gathered, padded, group=group)
    try:
        return [unpacked(entry.cpu().numpy().tobytes(), kind, _MOST_NBYTES) for entry in gathered]
    except ValueError as cause:
        raise RuntimeError(f"the entry of a rank is no {kind.__name__} of this release: {cause}") from cause
