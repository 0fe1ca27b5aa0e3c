# SPDX-License-Identifier: Apache-2.0
"""All checks, in the two calls in which they are run: what the first finds decides what the second is worth."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gpu_check.building import REPOSITORY
from gpu_check.watchdog import Check

GPU, STAGE, NONE = "gpu_check.cuda_gpu:CudaGpu", "gpu_check.stages:CudaStage", "builtins:object"
TORCH = "gpu_check.torch_gpu:TorchGpu"
TRAINER = "gpu_check.t7_training:SharedGpu"
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
"""A variable of NCCL since 2.30.3."""
NATIVE, KERNELS = "the package's native parts", "kernels.cu"
NCCL, MEGATRON, MSGSPEC = "an NCCL that shares a GPU", "Megatron-core", "msgspec"
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


def first_call() -> tuple[Check, ...]:
    """What decides the device path, which needs torch alone, then T1 to T3 and T0: the GPU by itself."""
    queues = "computation waits for no other stream, or for all of them"
    waits = "what the host calls while a receive stands does not wait for it, or may"
    tests = {"PYTHONPATH": str(REPOSITORY / "tests")}
    return (
        _first("first, events, one queue", "events", 25.0, **{QUEUES: "1"}),
        _first("first, events, 8 queues", "events", 25.0),
        _first("first, events, 32 queues", "events", 25.0, **{QUEUES: "32"}),
        _first("first, full queue", "full", 20.0, **{QUEUES: "1"}),
        _first("first, captures", "capture", 15.0),
        _first("first, costs", "costs", 25.0),
        _one("T1, one queue", queues, "t1_queues", 30.0, "1", **{QUEUES: "1"}),
        _one("T1, queues by default", queues, "t1_queues", 30.0, "8"),
        _one("T1, 32 queues", queues, "t1_queues", 30.0, "32", **{QUEUES: "32"}),
        _one("T2, lazy loading", waits, "t2_host_calls", 60.0, CUDA_MODULE_LOADING="LAZY"),
        _one("T2, eager loading", waits, "t2_host_calls", 60.0, CUDA_MODULE_LOADING="EAGER"),
        _one("T3", "links' blocks cost computation little", "t3_resident", 45.0),
        Check("T0", "tests pass", "gpu_check.t0_tests", NONE, 150.0, environment=tests, needs=(NATIVE,)),
    )


def second_call(nccl: Path | None) -> tuple[Check, ...]:
    """T2 of NCCL, T4, training (T7), T5 and T6. `nccl`: a library that lets ranks share a GPU."""
    sharing = {SHARING: "1", "NCCL_MAX_CTAS": "2", "NCCL_NVLS_ENABLE": "0", "NCCL_DEBUG": "WARN"}
    # What torch was linked with is then found to be loaded already.
    real = {} if nccl is None else {**sharing, "LD_PRELOAD": str(nccl)}
    one_queue = {**real, QUEUES: "1"}
    by_nccl, host = (NATIVE, NCCL), (NATIVE,)
    standing = (*by_nccl, KERNELS)
    waits = "NCCL does not wait for a kernel that stands, or may"
    iterations = "iterations over NCCL end, in a plan's order"
    return (
        _two("T2, init", waits, "t2_sessions", 45.0, "init", real, standing),
        _two("T2, first transfer", waits, "t2_sessions", 45.0, "connect", real, standing),
        _two("T2, abort", waits, "t2_sessions", 45.0, "abort", real, standing),
        _two("T4", iterations, "t4_stream_path", 40.0, "iterations", real, by_nccl),
        _two("T4, one queue", iterations, "t4_stream_path", 40.0, "iterations", one_queue, by_nccl),
        _two("T4, arrivals", "arrival times are true", "t4_stream_path", 20.0, "arrivals", real, by_nccl),
        _two("T4, error", "an error of one stage ends all", "t4_stream_path", 30.0, "error", real, by_nccl, 15.0),
        _training("T7, host path", "host", 4, 180.0, {}, (*host, MEGATRON, MSGSPEC)),
        _training("T7, NCCL", "device", 2, 120.0, real, (*by_nccl, MEGATRON, MSGSPEC)),
        _two("T5, sessions", "sessions leave nothing behind", "t5_sessions", 100.0, "sessions", real, by_nccl),
        _two("T5, death", "a peer that dies is given up", "t5_sessions", 20.0, "death", real, by_nccl),
        _two("T5, both paths", "links use either path", "t5_sessions", 40.0, "paths", real, by_nccl),
        _two("T5, one GPU", "where NCCL refuses, the host path carries all", "t5_sessions", 30.0, "one_gpu", {}, host),
        _two("T6, stalls", "the host path holds up no computation", "t6_host_path", 30.0, "stalls", {}, host),
        _two("T6, shm", "the host path is fast", "t6_host_path", 30.0, "throughput shm", {}, host),
        _two("T6, tcp", "the host path is fast", "t6_host_path", 30.0, "throughput tcp", {}, host),
        _two("T6, ring", "rings are page-locked", "t6_host_path", 15.0, "ring", {}, host, ranks=1),
    )


def _first(name: str, part: str, limit_s: float, **environment: str) -> Check:
    promise = "what decides the device path is known"
    return Check(name, promise, "gpu_check.first", TORCH, limit_s, (part,), environment=environment)


def _one(name: str, promise: str, module: str, limit_s: float, *arguments: str, **environment: str) -> Check:
    needs = (NATIVE, KERNELS)
    return Check(name, promise, f"gpu_check.{module}", GPU, limit_s, arguments, environment=environment, needs=needs)


def _two(
    name: str,
    promise: str,
    module: str,
    limit_s: float,
    part: str,
    environment: Mapping[str, str],
    needs: tuple[str, ...],
    ends_within_s: float | None = None,
    ranks: int = 2,
) -> Check:
    module, arguments = f"gpu_check.{module}", tuple(part.split())
    return Check(name, promise, module, STAGE, limit_s, arguments, ranks, environment, ends_within_s, needs)


def _training(
    name: str, paths: str, ranks: int, limit_s: float, environment: Mapping[str, str], needs: tuple[str, ...]
) -> Check:
    promise = "training is stock's, bit for bit"
    return Check(name, promise, "gpu_check.t7_training", TRAINER, limit_s, (paths,), ranks, environment, needs=needs)
