# SPDX-License-Identifier: Apache-2.0
"""Set up training that survives rank failures, and refuse what it cannot have."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from adaptra_megatron.common.job.membership import MembershipRecords
from adaptra_megatron.control.order.plan_book import Layout
from adaptra_megatron.elastic.job_joining import JoinResult
from adaptra_megatron.elastic.live_groups import FaultTolerantGroups
from adaptra_megatron.elastic.survival import RecoveryManager
from adaptra_megatron.engine.training_job import Job
from adaptra_megatron.megatron.megatron_call import PipelineCall
from adaptra_megatron.megatron.refusals import UnsupportedFeatureError

PATIENCE_S = 20.0
"""For the launcher to say which rank has left, after a message or a collective has failed."""
CONNECT_S = 60.0
_FLAG = "--adaptra-reroute failures"


def outlive(
    job: Job, groups: FaultTolerantGroups, interrupt: Callable[[str], None], joined: JoinResult | None
) -> RecoveryManager:
    """This rank's part in a job that survives rank failures. `interrupt`: wakes what it waits in, with the cause.
    `joined`: of a process that takes the place of a rank that had left.

    Raises UnsupportedFeatureError where no launcher says which ranks live.
    """
    try:
        records = MembershipRecords.of_rank(CONNECT_S)
        known = records.newest() is not None
    except KeyError:
        known = False
    if not known:
        raise UnsupportedFeatureError(
            f"{_FLAG} has to learn from the launcher which ranks have died, and this one says nothing of them: start "
            "the job with `adaptra launch --no-kill`, or drop the flag"
        )
    survival = RecoveryManager(job.layout, job.control, groups, records, job.timeout_s, PATIENCE_S, joined)
    survival.when_ended(functools.partial(interrupt, "the set of live ranks has changed"))
    return survival


def hold_copies(job: Job, optimizers: Sequence[Any]) -> None:
    """Have a copy of each shard of the distributed `optimizers` at another cell. Collective.

    Raises UnsupportedFeatureError where there is no other.
    """
    for optimizer in optimizers:
        try:
            optimizer.hold_copy(job.layout)
        except ValueError as cause:
            raise UnsupportedFeatureError(
                f"{_FLAG} with --use-distributed-optimizer: {cause}. Drop one of the two"
            ) from cause


def refuse_fault_tolerance(call: PipelineCall, layout: Layout, optimizers: Sequence[Any]) -> None:
    """Raise UnsupportedFeatureError for what cannot be redone, or is lost with a rank, before anything is computed.
    `optimizers`: the distributed ones that can hold copies of shards."""
    config = call.config
    ddp: Any = call.model_chunks[0].ddp_config
    sharded = bool(ddp.use_distributed_optimizer)

    def of_optimizer(name: str) -> bool:
        return any(bool(getattr(optimizer.config, name, False)) for optimizer in optimizers)

    no_copy = "the copies of shards of the optimizer's state would lack it"
    reasons = {
        "a distributed optimizer that was made before --adaptra was enabled": (
            sharded and not optimizers,
            "a rank that dies would take its shard of the optimizer's state with it",
        ),
        "--use-precision-aware-optimizer": (of_optimizer("use_precision_aware_optimizer"), no_copy),
        "--optimizer-cpu-offload": (of_optimizer("optimizer_cpu_offload"), no_copy),
        "--optimizer-cuda-graph": (
            of_optimizer("optimizer_cuda_graph"),
            "a captured step sums up norms over process groups that a rank which dies takes with it",
        ),
        "--ddp-reduce-scatter-with-fp32-accumulation": (
            bool(getattr(ddp, "reduce_scatter_with_fp32_accumulation", False)),
            no_copy,
        ),
        "--ddp-average-in-collective": (bool(ddp.average_in_collective), "an average would be of those that live"),
        "--use-megatron-fsdp": (
            any(bool(getattr(ddp, name, False)) for name in ("use_megatron_fsdp", "use_custom_fsdp")),
            "a rank that dies takes its shard of the parameters with it",
        ),
        "--fp8-format": (bool(getattr(config, "fp8", None)), "the history of scales of an attempt would stay"),
        "--moe-router-enable-expert-bias": (
            bool(getattr(config, "moe_router_enable_expert_bias", False)),
            "the bias would be updated by an attempt that is redone",
        ),
        "CUDA_DEVICE_MAX_CONNECTIONS=1": (layout.shared_queue, "routes between replicas need several hardware queues"),
    }
    for feature, (is_on, reason) in reasons.items():
        if is_on:
            raise UnsupportedFeatureError(f"{_FLAG} does not run with {feature}: {reason}. Drop one of the two")
