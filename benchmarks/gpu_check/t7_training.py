# SPDX-License-Identifier: Apache-2.0
"""T7: stages that share a GPU train over the host path, or over real NCCL, compared bitwise with stock Megatron.

Megatron's own groups are gloo's here, which sends host memory only: stock's transfers are taken through host memory by
a decorator of torch.distributed's isend and irecv, which copies, sends, and copies back. Stock runs twice: where those
two runs differ, the kernels are not deterministic, and equality would mean nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from gpu_check.building import REPOSITORY
from gpu_check.findings import Report
from gpu_check.plan import SHARING
from gpu_check.t7_memory import Bytes, NotedMeter, judge_kept

ITERATIONS = 30
MODEL = (
    "--num-layers 8 --global-batch-size 16 --micro-batch-size 4 --mock-data --no-gradient-accumulation-fusion "
    f"--distributed-backend gloo --train-iters {ITERATIONS} --eval-iters 1 --eval-interval 15"
)
OURS = "--adaptra --emulate-prompt-planner"
"""Each iteration waits for its decision: else the last may be over before the planner process has started, and no costs
are known."""
STOCK = {"stock": "", "stock again": ""}
HOST = {
    "host path, shm": f"{OURS} --adaptra-host-transport shm --adaptra-path host",
    "host path, tcp": f"{OURS} --adaptra-host-transport tcp --adaptra-path host",
}
ALONE, WITH_HOST_PATH = "device path alone", "device path with shm"
DEVICE = {
    ALONE: f"{OURS} --adaptra-host-transport off --adaptra-queue-model shared",
    WITH_HOST_PATH: f"{OURS} --adaptra-host-transport shm",
}
EQUAL = "losses, parameters and optimizer state are stock's, bit for bit"
FRACTION = 0.9
"""Share of the GPU's memory to which our training keeps."""


class Trainer(Protocol):
    """Where Megatron trains."""

    layouts: Mapping[str, str]
    """Names, and more arguments of the training."""

    def ready(self) -> contextlib.AbstractContextManager[None]:
        """Within it, Megatron's processes can train."""

    def begin_peaks(self) -> None:
        """Forget the peaks of memory, and what actions changed."""

    def peaks(self) -> dict[str, float]:
        """Most memory since then, by kind, as fractions of the GPU's; empty where nothing is known."""

    def kept(self) -> dict[str, float] | None:
        """As NotedMeter's; None where nothing was noted since then."""


def run(trainer: Trainer, report: Report, paths: str) -> None:
    """`paths`: host or device, those that are compared with stock."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    import torch
    import torch.distributed as dist

    from testing.training.process_groups import leave_job

    torch.use_deterministic_algorithms(True, warn_only=True)
    with trainer.ready():
        for layout, shape in trainer.layouts.items():
            arguments = [*MODEL.split(), *shape.split()]
            expected: dict[str, Any] = {}
            for name, flags in {**STOCK, **(HOST if paths == "host" else DEVICE)}.items():
                promise = f"{layout}, {name}: {EQUAL if expected else 'it learns'}"
                report.begin(promise)
                trainer.begin_peaks()
                expected = _train(report, promise, name, [*arguments, *flags.split()], expected, trainer)
        dist.barrier()
        leave_job()


def _train(
    report: Report, promise: str, name: str, arguments: list[str], expected: dict[str, Any], trainer: Trainer
) -> dict[str, Any]:
    """Returns the tensors to compare with: those of the first training."""
    import torch.distributed as dist

    from testing.results import differences
    from testing.training.train import train
    from testing.training.training_arguments import parse_arguments

    result = train(parse_arguments(arguments))
    tensors, links = result.tensors(), result.adaptra.get("links", {})
    mine = {
        "different": differences(expected, tensors)[:1] if expected else [],
        "compared": sum(tensor.numel() for tensor in expected.values()),
        "seconds": result.iteration_seconds,
        "transports": result.adaptra.get("transports", []),
        "by_device": sum((link["paths"] or {}).get("sent_by_device", 0) for link in links.values()),
        "costs": result.adaptra.get("measured_costs"),
        "losses": result.losses,
        "peaks": trainer.peaks(),
        "kept": trainer.kept(),
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    if dist.get_rank() == 0:
        report.show(promise, *judge(name, ranks))
        if name not in STOCK:
            promise = promise.replace(EQUAL, "between I and W no more is kept than plans reckon with")
            released = (mine["costs"] or {}).get("released_at_backward_input")
            report.show(promise, *judge_kept([each["kept"] for each in ranks], released))
    return expected or tensors


def judge(name: str, ranks: list[dict[str, Any]]) -> tuple[str, bool]:
    """What was seen of one training, and whether that is what was promised."""
    problems = [f"rank {rank}: {each['different'][0]}" for rank, each in enumerate(ranks) if each["different"]]
    compared = sum(each["compared"] for each in ranks)
    losses = ranks[-1]["losses"]
    if name != "stock" and not compared:
        problems.append("nothing was compared")
    expected = [] if name in STOCK else ["StreamTransport" if name == ALONE else "HostTransport"]
    if ranks[0]["transports"] != expected:
        problems.append(f"messages went by {ranks[0]['transports']}")
    by_device = sum(each["by_device"] for each in ranks)
    if bool(by_device) is not (name == WITH_HOST_PATH):
        problems.append(f"links with two paths sent {by_device} messages by the device path")
    if losses[-1] >= losses[0]:
        problems.append("nothing was learnt")
    # The ranks share the GPU.
    peaks = {kind: sum(each["peaks"][kind] for each in ranks) for kind in ranks[0]["peaks"]}
    if peaks.get("reserved", 0.0) > FRACTION:
        problems.append(f"more than {FRACTION:g} of the GPU was reserved")
    median_s = statistics.median(max(times) for times in zip(*(each["seconds"] for each in ranks), strict=True))
    seen = [*problems, f"{compared} elements compared, last loss {losses[-1]:.6f}, {1e3 * median_s:.0f} ms/iteration"]
    if peaks:
        seen.append("peaks of memory: " + ", ".join(f"{kind} {share:.4f}" for kind, share in peaks.items()))
    return "; ".join(seen), not problems


class SharedGpu:
    """Implements Trainer: all ranks on GPU 0, Megatron's groups over gloo, links over NCCL where it connects them."""

    def __init__(self) -> None:
        import_patches()
        os.environ["LOCAL_RANK"] = "0"
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        model = (
            f"--pipeline-model-parallel-size {os.environ['WORLD_SIZE']} --hidden-size 512 --num-attention-heads 8 "
            "--seq-length 512"
        )
        self.layouts = {"1 chunk": model, "2 chunks": f"{model} --num-virtual-stages-per-pipeline-rank 2"}
        self._peaks = dict.fromkeys(("allocated", "active", "reserved"), 0)
        self._meters: list[NotedMeter] = []

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        with one_gpu(), noted_meters(self._meters, self._in_use):
            yield

    def begin_peaks(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats()
        self._peaks = dict.fromkeys(self._peaks, 0)
        self._meters.clear()

    def peaks(self) -> dict[str, float]:
        import torch

        self._in_use()
        return {name: nbytes / torch.cuda.mem_get_info()[1] for name, nbytes in self._peaks.items()}

    def kept(self) -> dict[str, float] | None:
        return self._meters[0].kept() if self._meters else None

    def _in_use(self) -> dict[str, float]:
        """And takes in the peaks, which meters begin anew."""
        import torch

        stats = torch.cuda.memory_stats_as_nested_dict()
        for name, nbytes in self._peaks.items():
            self._peaks[name] = max(nbytes, stats[f"{name}_bytes"]["all"]["peak"])
        return {name: stats[f"{name}_bytes"]["all"]["current"] for name in ("allocated", "active")}


@contextlib.contextmanager
def noted_meters(meters: list[NotedMeter], in_use: Callable[[], Bytes]) -> Iterator[None]:
    """Have all meters of this process note what actions change, and put them on a list."""
    from adaptra_megatron.engine import pipeline
    from testing.replacing import Replaced, Replacement

    make_meter = pipeline.make_meter

    def make(*arguments: Any, **keywords: Any) -> NotedMeter:
        meters.append(NotedMeter(make_meter(*arguments, **keywords), in_use))
        return meters[-1]

    with Replaced([Replacement(pipeline, "make_meter", make, "what actions change is noted")]):
        yield


def import_patches() -> None:
    """Import the package's patches where it is not installed: they are in a folder of their own."""
    name = "adaptra_megatron.patches"
    if importlib.util.find_spec(name) is None:
        spec = importlib.util.spec_from_file_location(name, REPOSITORY / "patches" / "__init__.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])


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
        """Return whether `wait` would return at once."""
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
        """Return at once: no work is under way."""


@contextlib.contextmanager
def one_gpu() -> Iterator[None]:
    """Let Megatron's processes share a GPU over gloo."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d
    from megatron.core.distributed import param_and_grad_buffer

    from adaptra_megatron.engine import rank_transports as transports
    from testing.replacing import Replaced, Replacement

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
    if os.environ.get(SHARING) == "1":
        reason = f"NCCL lets ranks share a GPU under {SHARING}"
        identity = f"GPU-of-rank-{os.environ['RANK']}"
        replacements.append(Replacement(transports, "gpu_identity", lambda *_: identity, reason))
    with Replaced(replacements):
        yield
