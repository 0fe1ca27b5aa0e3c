# SPDX-License-Identifier: Apache-2.0
"""Let Megatron's persistent checkpoint writer run on the CPU, and make writers of checkpoints slow."""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable
from typing import Any

from testing.replacing import Replacement


def writer_names() -> list[Replacement]:
    """Return replacements of names of the persistent writer. Imports Megatron."""
    module: Any = importlib.import_module("megatron.core.dist_checkpointing.strategies.async_utils")
    caller = module.PersistentAsyncCaller
    return [
        Replacement(caller, "async_loop", staticmethod(loop_on_cpu), "chooses a CUDA device, in a process of its own"),
        Replacement(
            caller,
            "schedule_async_call",
            _with_copies(caller.schedule_async_call),
            "copies tensors from the GPU; on the CPU training would change those that are being written",
        ),
    ]


def loop_on_cpu(*given: Any) -> None:
    """Run the persistent writer's loop in its process, which has the names of a CPU alone."""
    from testing.megatron.cuda_names import torch_names
    from testing.replacing import Replaced

    Replaced(torch_names())
    module: Any = importlib.import_module("megatron.core.dist_checkpointing.strategies.async_utils")
    module.PersistentAsyncCaller.async_loop(*given)


def _with_copies(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def schedule_async_call(self: Any, request: Any) -> None:
        if request.preload_fn is None:
            stock(self, request)
            return
        buckets = [
            (file, key, (data, [(item, tensor.clone()) for item, tensor in tensors]))
            for file, key, (data, tensors) in request.async_fn_args[1]
        ]
        place, _, *rest = request.async_fn_args
        preload = functools.partial(request.preload_fn.func, buckets, *request.preload_fn.args[1:])
        stock(self, request._replace(async_fn_args=[place, buckets, *rest], preload_fn=preload))

    return schedule_async_call


def slowed(request: Any, seconds: float) -> Any:
    """Return an AsyncRequest whose writers begin `seconds` late."""
    if request.async_fn is None or not seconds:
        return request
    return request._replace(async_fn=functools.partial(_write_late, seconds, request.async_fn))


def _write_late(seconds: float, write: Callable[..., Any], *given: Any, **keywords: Any) -> Any:
    time.sleep(seconds)
    return write(*given, **keywords)
