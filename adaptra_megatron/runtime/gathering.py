# SPDX-License-Identifier: Apache-2.0
"""What every rank of a group hands in, for all of them: typed data; torch's own gathering of objects unpickles."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

from adaptra_megatron.transport.tagged_json import packed, unpacked

Entry = TypeVar("Entry")

_MOST_NBYTES = 1 << 20
"""Of one rank's."""


def gather(mine: Entry, group: dist.ProcessGroup | None = None) -> list[Entry]:
    """By rank in `group` (None: the whole job), which all call with a dataclass or NamedTuple of one kind.

    Raises RuntimeError when a rank does not come within the group's timeout, or hands in anything else.
    """
    kind, packet = type(mine), packed(mine)
    device = dist.distributed_c10d._get_object_coll_device(group)  # as torch's all_gather_object
    ranks = range(dist.get_world_size(group))
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in ranks]
    dist.all_gather(sizes, torch.tensor([len(packet)], device=device), group=group)
    of_each = [int(size.item()) for size in sizes]
    if not 0 < min(of_each) <= max(of_each) <= _MOST_NBYTES:
        raise RuntimeError(f"ranks hand in {of_each} bytes, of {_MOST_NBYTES} at most: install one release on all")
    padded = torch.frombuffer(bytearray(packet.ljust(max(of_each))), dtype=torch.uint8).to(device)
    everybodys = [torch.empty_like(padded) for _ in ranks]
    dist.all_gather(everybodys, padded, group=group)
    try:
        return [unpacked(entry.cpu().numpy().tobytes(), kind, _MOST_NBYTES) for entry in everybodys]
    except ValueError as cause:
        raise RuntimeError(f"a rank hands in what is no {kind.__name__} of this release: {cause}") from cause
