# SPDX-License-Identifier: Apache-2.0
"""List the torch names that keep Megatron-core 0.16.1 from running on a CPU-only torch, with their replacements.

`megatron_on_cpu.install()` applies the table. Nothing of Megatron itself is replaced, except one name that Megatron
fails to define without Transformer Engine (`megatron_names`).
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import defaultdict
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed
import torch.distributed.distributed_c10d as c10d

from adaptra_megatron.common.gathering import gloo_group
from testing.replacing import Replacement

CPU = torch.device("cpu")
TENSOR_FACTORIES = (
    *("empty", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "rand", "randn", "randint", "eye"),
    *("linspace", "empty_like", "zeros_like", "ones_like", "full_like"),
)


class CpuEvent:
    """A CUDA event on the CPU, where work is complete when the call returns: always reached."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Do nothing: work is complete."""

    def wait(self, stream: Any = None) -> None:
        """Do nothing: work is complete."""

    def synchronize(self) -> None:
        """Do nothing: work is complete."""

    def query(self) -> bool:
        """Return True: work is complete."""
        return True

    def elapsed_time(self, end_event: CpuEvent) -> float:
        """Return 0.0 ms: no device time passes."""
        return 0.0


class CpuStream(CpuEvent):
    """A CUDA stream on the CPU, where work is complete when the call returns."""

    device = CPU

    def wait_event(self, event: Any) -> None:
        """Do nothing: work is complete."""

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: work is complete."""

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """Return a complete event."""
        return event or CpuEvent()

    def __enter__(self) -> CpuStream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class CpuGenerators:
    """`torch.cuda.default_generators` in which every device has the CPU's generator."""

    def __getitem__(self, device: Any) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def _returning(value: Any) -> Callable[..., Any]:
    def stand_in(*_: Any, **__: Any) -> Any:
        return value

    return stand_in


def cuda_functions() -> list[Replacement]:
    """Return replacements of torch.cuda functions that Megatron calls on any device."""
    cuda, stream = torch.cuda, CpuStream()
    properties = SimpleNamespace(name="cpu", major=8, minor=0, total_memory=1 << 34, multi_processor_count=1)
    random = "the tensor-parallel RNG tracker keeps CUDA states: the CPU generator plays their part"
    table: list[tuple[str, Any, str]] = [
        ("current_device", _returning(CPU), "Megatron only ever passes it on as device="),
        ("device_count", lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")), "one device per local rank"),
        ("is_initialized", _returning(True), "otherwise torch.cuda._lazy_call queues its calls for ever"),
        ("_lazy_init", _returning(None), "imported by name in tensor_parallel/random.py; raises without CUDA"),
        ("get_device_capability", _returning((8, 0)), "read to choose kernels; raises without CUDA"),
        ("get_device_properties", _returning(properties), "read to choose kernels; raises without CUDA"),
        ("get_rng_state", lambda device="cuda": torch.get_rng_state(), random),
        ("set_rng_state", lambda new_state, device="cuda": torch.set_rng_state(new_state), random),
        ("manual_seed", lambda seed: torch.manual_seed(seed), random),
        ("default_generators", CpuGenerators(), random),
        ("current_stream", _returning(stream), "there is one stream: the program itself"),
        ("default_stream", _returning(stream), "there is one stream: the program itself"),
        ("stream", lambda stream=None: contextlib.nullcontext(), "there is one stream: the program itself"),
        ("Stream", CpuStream, "there is one stream: the program itself"),
        ("Event", CpuEvent, "work is done when a call returns"),
        ("memory_stats", lambda device=None: defaultdict(int), "memory of the host is not torch.cuda's"),
    ]
    table += [
        (name, _returning(None), "nothing to do without a device")
        for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "init")
    ]
    table += [
        (name, _returning(0), "memory of the host is not torch.cuda's")
        for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    ]
    table += [
        (f"{dtype}Tensor", getattr(torch, f"{dtype}Tensor"), "optimizers sort parameters by these types")
        for dtype in ("Float", "Half", "BFloat16", "Double", "Int", "Long", "Byte", "Bool")
    ]
    found = [Replacement(cuda, name, value, reason) for name, value, reason in table]
    found.append(Replacement(cuda.random, "get_rng_state", lambda device="cuda": torch.get_rng_state(), random))
    found += [
        Replacement(cuda.nvtx, name, _returning(None), "ranges for a profiler of CUDA; they raise without it")
        for name in ("range_push", "range_pop", "mark")
    ]
    return found


def _is_cuda(device: Any) -> bool:
    return device.type == "cuda" if isinstance(device, torch.device) else str(device).startswith("cuda")


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def stand_in(*args: Any, **keywords: Any) -> Any:
        if _is_cuda(keywords.get("device")):
            keywords["device"] = CPU
        if keywords.get("pin_memory"):
            keywords["pin_memory"] = False
        return factory(*args, **keywords)

    return stand_in


def _to_on_cpu(to: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(to)
    def stand_in(self: Any, *args: Any, **keywords: Any) -> Any:
        if args and isinstance(args[0], str | torch.device) and _is_cuda(args[0]):
            args = (CPU, *args[1:])
        if _is_cuda(keywords.get("device")):
            keywords["device"] = CPU
        return to(self, *args, **keywords)

    return stand_in


def _type_as_on_cuda(type_of: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(type_of)
    def stand_in(self: torch.Tensor, dtype: Any = None, *args: Any, **keywords: Any) -> Any:
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        result = type_of(self, dtype, *args, **keywords)
        return result.replace("torch.", "torch.cuda.") if isinstance(result, str) else result

    return stand_in


def tensor_names() -> list[Replacement]:
    """Return replacements of the ways to put a tensor on a device."""
    device = 'called with device="cuda" or pin_memory=True'
    found = [Replacement(torch, name, _on_cpu(getattr(torch, name)), device) for name in TENSOR_FACTORIES]
    for owner in (torch.Tensor, torch.nn.Module):
        found.append(Replacement(owner, "cuda", lambda self, *_, **__: self, "the CPU is the device"))
        found.append(Replacement(owner, "to", _to_on_cpu(owner.to), device))
    stream = "a block of the host's memory is used on no stream"
    found.append(Replacement(torch.Tensor, "record_stream", _returning(None), stream))
    compared = 'optimizers compare Tensor.type() with "torch.cuda.FloatTensor" and the like'
    found.append(Replacement(torch.Tensor, "type", _type_as_on_cuda(torch.Tensor.type), compared))
    return found


def _isend_of_alias(isend: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(isend)
    def stand_in(tensor: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        return isend(tensor.detach(), *args, **keywords)

    return stand_in


def _as_list(sizes: Any) -> Any:
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes


class _OneWorker(type):
    """Metaclass of `OneWorkerGloo`, which stands for ProcessGroupGloo in isinstance checks."""

    def __call__(cls, store: Any, rank: int, size: int, *, timeout: Any, **_of_newer_torch: Any) -> Any:
        gloo: Any = torch.distributed.ProcessGroupGloo
        interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        devices = [gloo.create_device(interface=name) for name in interfaces] or [gloo.create_default_device()]
        return gloo_group(store, rank, size, timeout, devices)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.distributed.ProcessGroupGloo)


class OneWorkerGloo(metaclass=_OneWorker):
    """`ProcessGroupGloo` with one worker thread, so that collectives of a group run one after the other, in order.

    With the default two threads, both write the name of the last collective without a lock. They free the same string
    twice when coalesced all-gathers end at the same time (torch 2.13, `ProcessGroupGloo::runLoop`:
    docs/upstream/torch_gloo_double_free.md).
    """


def distributed_names() -> list[Replacement]:
    """Return replacements that use gloo instead of NCCL."""
    barrier, init_process_group = torch.distributed.barrier, torch.distributed.init_process_group
    isend = _isend_of_alias(torch.distributed.isend)

    @functools.wraps(barrier)
    def barrier_without_device(*args: Any, device_ids: Any = None, **keywords: Any) -> Any:
        return barrier(*args, **keywords)

    @functools.wraps(init_process_group)
    def init_over_gloo(backend: str | None = None, *args: Any, device_id: Any = None, **keywords: Any) -> Any:
        return init_process_group("gloo" if backend == "nccl" else backend, *args, **keywords)

    exchange = torch.distributed.all_to_all_single

    @functools.wraps(exchange)
    def exchange_by_lists(
        output: Any, given: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, **keywords: Any
    ) -> Any:
        return exchange(output, given, _as_list(output_split_sizes), _as_list(input_split_sizes), **keywords)

    # Megatron's interleaved schedule with overlap_p2p_comm and deallocate_pipeline_outputs frees an output
    # (`out.data = ...`) while its send is pending. NCCL keeps the storage alive; gloo's work keeps the tensor only,
    # and sends freed memory. An alias keeps the storage until the work is done.
    freed = "Megatron frees outputs whose send is pending: gloo would send freed memory"
    owners: tuple[ModuleType, ...] = (torch.distributed, c10d)  # P2POp compares with c10d's name
    return [
        *(Replacement(owner, "isend", isend, freed) for owner in owners),
        Replacement(c10d, "ProcessGroupGloo", OneWorkerGloo, "two workers of a group may free one string twice"),
        Replacement(torch.distributed, "barrier", barrier_without_device, "gloo refuses device_ids"),
        Replacement(
            torch.distributed,
            "all_to_all_single",
            exchange_by_lists,
            "Megatron makes lists of CUDA's sizes alone",
        ),
        Replacement(torch.distributed, "init_process_group", init_over_gloo, "there is no NCCL: gloo"),
    ]


def torch_names() -> list[Replacement]:
    """Return all replacements of torch names, in the order of application."""
    return [*cuda_functions(), *tensor_names(), *distributed_names()]
