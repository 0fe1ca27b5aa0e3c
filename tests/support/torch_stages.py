# SPDX-License-Identifier: Apache-2.0
"""Stages for the schedule classes of torch.distributed.pipelining."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from adaptra_megatron.schedule.ir import Placement


def torch_stages(placement: Placement) -> list[SimpleNamespace]:
    """Rank 0's stages, as far as torch's schedule classes look at them before they run anything."""
    virtual_stages = len(placement.stage_of)
    return [
        SimpleNamespace(
            num_stages=virtual_stages,
            group_size=placement.stages,
            group_rank=0,
            stage_index=virtual,
            is_first=virtual == 0,
            is_last=virtual + 1 == virtual_stages,
            submod=torch.nn.Identity(),
        )
        for virtual in (placement.virtual_stage(0, chunk) for chunk in range(placement.chunks))
    ]
