# SPDX-License-Identifier: Apache-2.0
"""Four stages on one GPU: training over the host path, compared bitwise with stock Megatron.

NCCL refuses two ranks on one GPU and gloo sends host memory only, so here stock's own transfers are taken through host
memory too: by a decorator of torch.distributed's isend and irecv, which copies, sends by gloo, and copies back. Stock
runs twice: where those two runs differ, the kernels are not deterministic, and equality would mean nothing.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

STAGES = 4
ITERATIONS = 10
LAYOUTS = {
    "1 chunk": "--num-layers 8 --global-batch-size 16",
    "2 chunks": "--num-layers 8 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 16",
}
MODEL = (
    f"--pipeline-model-parallel-size {STAGES} --hidden-size 512 --num-attention-heads 8 --seq-length 512 "
    "--micro-batch-size 4 --mock-data --no-gradient-accumulation-fusion --distributed-backend gloo "
    f"--train-iters {ITERATIONS} --eval-iters 1 --eval-interval 5"
)
VARIANTS = {
    "stock": "",
    "stock again": "",
    "host path, shm": "--adaptra --adaptra-host-transport shm --adaptra-path host",
    "host path, tcp": "--adaptra --adaptra-host-transport tcp --adaptra-path host",
}


class HostedReceive:
    """A receive into host memory whose wait brings it to the device."""

    def __init__(self, work: Any, host: Any, target: Any) -> None:
        self._work, self._host, self._target = work, host, target

    def wait(self, timeout: Any = None) -> bool:
        """As a receive's; the copy is on the current stream."""
        self._work.wait() if timeout is None else self._work.wait(timeout)
        self._target.detach().copy_(self._host)
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return bool(self._work.is_completed())


def hosted(isend: Callable[..., Any], irecv: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """torch.distributed's isend and irecv, for tensors of a device over a backend of host memory."""

    @functools.wraps(isend)
    def hosted_isend(tensor: Any, *args: Any, **keywords: Any) -> Any:
        return isend(tensor.detach().cpu(), *args, **keywords)

    @functools.wraps(irecv)
    def hosted_irecv(tensor: Any, *args: Any, **keywords: Any) -> Any:
        if tensor.device.type == "cpu":
            return irecv(tensor, *args, **keywords)
        host = tensor.detach().cpu()
        return HostedReceive(irecv(host, *args, **keywords), host, tensor)

    return hosted_isend, hosted_irecv


class Uncoalesced:
    """What a coalescing manager yields where each operation was waited for as it came."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


@contextlib.contextmanager
def one_gpu() -> Iterator[None]:
    """Let Megatron's processes share a GPU over gloo."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d
    from megatron.core.distributed import param_and_grad_buffer

    from adaptra_megatron.emulation.replacing import Replaced, Replacement

    @contextlib.contextmanager
    def each_alone(*_: Any, **__: Any) -> Iterator[Uncoalesced]:
        yield Uncoalesced()

    hosted_isend, hosted_irecv = hosted(dist.isend, dist.irecv)
    replacements = [
        Replacement(owner, name, value, "gloo sends and receives host memory only")
        for owner in (dist, c10d)
        for name, value in (("isend", hosted_isend), ("irecv", hosted_irecv))
    ]
    reason = "gloo coalesces no operations on a device; nothing here is asynchronous"
    replacements.append(Replacement(param_and_grad_buffer, "_coalescing_manager", each_alone, reason))
    with Replaced(replacements):
        yield


def measure(report: Path) -> None:
    """What a rank does: trains every variant of every layout; rank 0 writes the report."""
    os.environ["LOCAL_RANK"] = "0"  # the one GPU
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    import torch
    import torch.distributed as dist

    from adaptra_megatron.emulation.process_groups import leave_job

    torch.use_deterministic_algorithms(True, warn_only=True)
    rows = []
    with one_gpu():
        for layout, shape in LAYOUTS.items():
            rows += _layout(layout, [*MODEL.split(), *shape.split()])
        if dist.get_rank() == 0:
            report.write_text(json.dumps(rows))
        leave_job()


def _layout(layout: str, arguments: list[str]) -> list[dict[str, Any]]:
    import torch.distributed as dist

    from adaptra_megatron.emulation.arguments import parse_arguments
    from adaptra_megatron.emulation.results import differences
    from adaptra_megatron.emulation.training import train

    expected: dict[str, Any] | None = None
    rows = []
    for name, flags in VARIANTS.items():
        result = train(parse_arguments([*arguments, *flags.split()]))
        tensors = result.tensors()
        found = [] if expected is None else differences(expected, tensors)
        compared = 0 if expected is None else sum(tensor.numel() for tensor in expected.values())
        expected = tensors if expected is None else expected
        summary = result.adaptra or {}
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(
            parts, (found[:1], compared, result.iteration_seconds, summary.get("transports"), result.losses)
        )
        rows.append(
            {
                "layout": layout,
                "name": name,
                "different": [f"rank {rank}: {part[0][0]}" for rank, part in enumerate(parts) if part[0]],
                "compared": sum(part[1] for part in parts),
                "iteration_s": [max(times) for times in zip(*(part[2] for part in parts), strict=True)],
                "transports": parts[0][3],
                "losses": parts[-1][4],
            }
        )
    return rows


def table(report: list[dict[str, Any]]) -> str:
    """The report as markdown."""
    lines = [
        f"## {STAGES} stages on one GPU",
        "",
        f"{ITERATIONS} iterations of a small GPT; losses, parameters and optimizer state of all ranks compared bitwise",
        "with stock's. Stock's transfers go through host memory and gloo here, as NCCL refuses to share a GPU and gloo",
        "knows no device memory: its times are no measure of stock with NCCL.",
        "",
        "| layout | variant | last loss | median iteration, ms | elements compared | equal to stock |",
        "|---|---|---|---|---|---|",
    ]
    for row in report:
        equal = "-" if row["name"] == "stock" else ("yes" if not row["different"] and row["compared"] else "NO")
        lines.append(
            f"| {row['layout']} | {row['name']} | {row['losses'][-1]:.6f} | "
            f"{1000 * statistics.median(row['iteration_s'][2:]):.1f} | {row['compared']} | {equal} |"
        )
    return "\n".join(lines) + "\n"


def failures(report: list[dict[str, Any]]) -> list[str]:
    """What is not as it must be."""
    found = []
    for row in report:
        where = f"{row['layout']}, {row['name']}"
        if row["name"] != "stock" and not row["compared"]:
            found.append(f"{where}: nothing was compared")
        if row["different"]:
            found.append(f"{where} differs from stock: {'; '.join(row['different'])}")
        if VARIANTS[row["name"]] and row["transports"] != ["HostTransport"]:
            found.append(f"{where}: messages went by {row['transports']}")
        if row["losses"][-1] >= row["losses"][0]:
            found.append(f"{where}: nothing was learnt")
    return found


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
