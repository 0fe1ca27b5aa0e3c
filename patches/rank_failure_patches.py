# SPDX-License-Identifier: Apache-2.0
"""Patches for training that survives rank failures: of optimizers, gradient buffers and the start of training.

A restarted rank must rejoin before data are read, since data sets need to know where to begin:
megatron.training.training.pretrain creates model and optimizer, then data iterators, then trains.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from adaptra_megatron.patches.background_save_patches import PATCHES as BACKGROUND_PATCHES
from adaptra_megatron.patches.table import SUPPORTED, Patch

if TYPE_CHECKING:
    from adaptra_megatron.engine.runtime import AdaptraRuntime


def _with_copies(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    from adaptra_megatron.engine.fault_tolerance import FaultTolerance
    from adaptra_megatron.megatron.state.shard_copies import with_copies

    # A subclass, since Megatron tests its optimizers by isinstance.
    replacement: Callable[..., Any] = with_copies(stock, runtime.feature(FaultTolerance).sharded_optimizers)
    return replacement


def _refusing_layer_wise(stock: Callable[..., Any], _: AdaptraRuntime) -> Callable[..., Any]:
    from adaptra_megatron.megatron.feature_refusals import layer_wise_error

    @functools.wraps(stock)
    def __init__(optimizer: Any, *given: Any, **keywords: Any) -> None:  # noqa: N807
        if hasattr(optimizer, "shard_params"):  # LayerWiseDistributedOptimizer (from 0.16 on), whatever it is called
            raise layer_wise_error()
        stock(optimizer, *given, **keywords)

    return __init__


def _with_counts(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    from adaptra_megatron.elastic.process_group import counts_of

    @functools.wraps(stock)
    def reset(buffer: Any) -> None:
        stock(buffer)
        # A count must be zeroed with its gradients: on its own it would still hold the last iteration's micro-batches.
        for counts in counts_of([buffer]):
            counts.zero_()

    return reset


def _waiting_with_checks(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    from adaptra_megatron.engine.fault_tolerance import FaultTolerance
    from adaptra_megatron.engine.measuring import waiting_for_computation_alone

    # Megatron's own: between actions the other patch waits in the driver for the current stream.
    groups, original = runtime.feature(FaultTolerance).groups, inspect.unwrap(stock)

    @functools.wraps(stock)
    def start_or_stop(timer: Any, barrier: bool = False) -> None:
        if not groups.is_inside:
            stock(timer, barrier)
            return
        with waiting_for_computation_alone(groups.synchronize):
            original(timer, barrier)

    return start_or_stop


_OPERATIONS = "num_floating_point_operations_so_far"
_COUNTERS = (
    *("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples"),
    *(_OPERATIONS, "do_train", "do_valid", "do_test"),
)
"""Arguments of Megatron's that change while it trains, and what ranks that read data say to the others."""


def _progress(**counted: Any) -> Mapping[str, Any]:
    """Return how far training has come when an iteration begins. `counted`: counters that arguments do not follow."""
    from megatron.training import get_args

    args = get_args()
    counters = {name: getattr(args, name) for name in _COUNTERS if hasattr(args, name)}
    return {"iteration": args.curr_iteration, **counters, **counted}


_LOADED: Mapping[str, Any] = {
    "load": None,
    "pretrained_checkpoint": None,
    "moe_use_upcycling": False,
    "dump_param_to_param_group_map": None,
}
"""Arguments with which Megatron neither reads nor writes files for which all ranks meet."""


def _made(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    @functools.wraps(stock)
    def setup_model_and_optimizer(*given: Any, **keywords: Any) -> Any:
        from megatron.training import get_args

        from adaptra_megatron.engine.fault_tolerance import FaultTolerance
        from adaptra_megatron.engine.rejoining import Training, settings_of

        feature, args = runtime.feature(FaultTolerance), get_args()
        # Before stock runs, which may change arguments.
        settings = settings_of(args)
        # A rejoining process receives all state. It could load no checkpoint, for which all ranks have to meet.
        rejoins = feature.groups.place is not None
        loaded = {name: getattr(args, name) for name in _LOADED if rejoins and hasattr(args, name)}
        vars(args).update({name: _LOADED[name] for name in loaded})
        try:
            made = stock(*given, **keywords)
        finally:
            vars(args).update(loaded)
        model, optimizer, scheduler = made
        # Evaluation jobs have no optimizer; they cannot be rejoined.
        training = None if optimizer is None else Training(model, optimizer, scheduler, _progress, settings)
        feature.training = training
        return made

    return setup_model_and_optimizer


def _counted(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def checkpoint_and_decide_exit(*given: Any, **keywords: Any) -> Any:
        from adaptra_megatron.engine.fault_tolerance import FaultTolerance

        feature = runtime.feature(FaultTolerance)
        if feature.training is not None:
            # train() alone knows how many there have been: a local variable, which it hands over here.
            counted = {_OPERATIONS: signature.bind(*given, **keywords).arguments[_OPERATIONS]}
            feature.training = feature.training._replace(progress=functools.partial(_progress, **counted))
        return stock(*given, **keywords)

    return checkpoint_and_decide_exit


def _begun(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    built: dict[str, Any] = {}

    @functools.wraps(stock)
    def build_train_valid_test_data_iterators(build_train_valid_test_datasets_provider: Any) -> Any:
        from megatron.core.num_microbatches_calculator import update_num_microbatches
        from megatron.training import get_args

        from adaptra_megatron.engine.fault_tolerance import FaultTolerance

        feature, provider = runtime.feature(FaultTolerance), build_train_valid_test_datasets_provider
        if feature.rejoins and feature.training is not None:
            built.update(_built_before(provider, len(feature.training.model)))
        for name, value in (progress := feature.rejoin() or {}).items():
            setattr(get_args(), name, value)
        if progress:
            # Else this process alone would come to a barrier, after its first iteration.
            get_args().distributed_timeout_seconds_after_init = None
            # Of batches that have grown (--rampup-batch-size). train() would save where their size changes, alone.
            update_num_microbatches(get_args().consumed_train_samples, consistency_check=False)

        @functools.wraps(provider)
        def provide(numbers: Any) -> Any:
            # Others in another phase of training (--phase-transition-iterations).
            asked = _asked(provider, numbers)
            return built[asked] if asked in built else provider(numbers)

        return stock(provide if built else provider)

    return build_train_valid_test_data_iterators


def _logged(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    from adaptra_megatron.engine.fault_tolerance import FaultTolerance

    groups = runtime.feature(FaultTolerance).groups

    @functools.wraps(stock)
    def training_log(*given: Any, **keywords: Any) -> Any:
        if groups.place is not None and "is_first_iteration" in keywords:
            keywords["is_first_iteration"] = False
        return stock(*given, **keywords)

    return training_log


def _shown(stock: Callable[..., bool], runtime: AdaptraRuntime) -> Callable[..., bool]:
    from adaptra_megatron.engine.fault_tolerance import FaultTolerance

    groups = runtime.feature(FaultTolerance).groups

    @functools.wraps(stock)
    def is_last_rank() -> bool:
        shows = groups.last_live
        return stock() if shows is None else groups.rank == shows

    return is_last_rank


def _random_states(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    from adaptra_megatron.engine.fault_tolerance import FaultTolerance

    groups, asked = runtime.feature(FaultTolerance).groups, dict[str, bool]()

    @functools.wraps(stock)
    def get_rng_state(*given: Any, **keywords: Any) -> Any:
        from megatron.training import get_args

        args = get_args()
        left_out = asked.setdefault("no_save_rng", args.no_save_rng)
        # Each replica has its own then (with experts in some releases alone). A checkpoint with those of the live ones
        # could not be read by all.
        experts = args.ckpt_format == "torch_dist" and getattr(args, "expert_model_parallel_size", 1) > 1
        own = args.data_parallel_random_init or experts
        args.no_save_rng = left_out or (own and not groups.is_whole)  # also saved: loading goes by it
        return stock(*given, **keywords)

    return get_rng_state


def _aligned(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    from adaptra_megatron.engine.fault_tolerance import FaultTolerance

    feature, numbers = runtime.feature(FaultTolerance), itertools.count()

    @functools.wraps(stock)
    def _get_param_groups(*given: Any, **keywords: Any) -> Any:
        import torch.distributed as dist

        gather, number = dist.all_gather_object, next(numbers)

        def all_gather_object(found: list[Any], *sent: Any, **how: Any) -> None:
            gather(found, *sent, **how)
            found[:] = feature.aligned_groups(number, found)

        dist.all_gather_object = all_gather_object  # type: ignore[assignment]
        try:
            return stock(*given, **keywords)
        finally:
            dist.all_gather_object = gather

    return _get_param_groups


def _built_before(provider: Callable[..., Any], chunks: int) -> Mapping[str, Any]:
    """Build the datasets of all `chunks` now, before other ranks wait for this process; return them by `_asked`."""
    from megatron.core import parallel_state
    from megatron.training import training

    if not getattr(provider, "is_distributed", False) and parallel_state.get_tensor_model_parallel_rank():
        return {}  # stock builds none here
    providers = [provider]
    if "vp_stage" in getattr(provider, "keywords", {}):  # pretrain asks for those of one chunk after the other
        providers = [functools.partial(provider, vp_stage=chunk) for chunk in range(chunks)]
    samples = training.get_train_valid_test_num_samples()
    return {_asked(each, samples): each(samples) for each in providers}


def _asked(provider: Any, numbers: Any) -> str:
    return f"{numbers} samples, {getattr(provider, 'keywords', {})}"


FAULT_TOLERANCE_PATCHES = (
    *BACKGROUND_PATCHES,
    Patch(
        identity="distributed-optimizer",
        target="megatron.core.optimizer:DistributedOptimizer",
        versions=SUPPORTED,
        parameters=("optimizer", "config", "grad_scaler", "model_chunks", "per_model_buffers", "data_parallel_group"),
        reason="a rank that fails takes its shard of the optimizer's state with it: another steps a copy of each",
        replace=_with_copies,
    ),
    Patch(
        identity="parameter-groups",
        target="megatron.core.optimizer:_get_param_groups",
        versions=SUPPORTED,
        parameters=("model_chunks",),
        reason="ranks have all groups that others have: a restarted rank, which is alone, receives their keys",
        replace=_aligned,
    ),
    Patch(
        identity="chained-optimizer",
        target="megatron.core.optimizer.optimizer:ChainedOptimizer.__init__",
        versions=SUPPORTED,
        parameters=("self", "chained_optimizers"),
        reason="a layer-wise optimizer, which is a chain, has shards of its state that no other rank has",
        replace=_refusing_layer_wise,
    ),
    Patch(
        identity="gradient-counts",
        target="megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer.reset",
        versions=SUPPORTED,
        parameters=("self",),
        reason="how many micro-batches a buffer's gradients hold is counted from 0 again where these are set to 0",
        replace=_with_counts,
    ),
    *(
        Patch(
            identity=f"timer-{action}-with-checks",
            target=f"megatron.core.timers:Timer.{action}",
            versions=SUPPORTED,
            parameters=("self", "barrier"),
            reason="in a call it waits for the GPU with checks: a collective of a failed rank keeps that busy for ever",
            replace=_waiting_with_checks,
        )
        for action in ("start", "stop")
    ),
    Patch(
        identity="setup-model-and-optimizer",
        target="megatron.training.training:setup_model_and_optimizer",
        versions=SUPPORTED,
        parameters=("model_provider_func", "model_type"),
        reason="restarted ranks receive the state of model and optimizer",
        replace=_made,
    ),
    Patch(
        identity="data-iterators",
        target="megatron.training.training:build_train_valid_test_data_iterators",
        versions=SUPPORTED,
        parameters=("build_train_valid_test_datasets_provider",),
        reason="a restarted rank receives the others' state, and reads data from their position",
        replace=_begun,
    ),
    Patch(
        identity="training-log",
        target="megatron.training.training:training_log",
        versions=SUPPORTED,
        parameters=("iteration",),
        reason="all ranks meet to log a process's first iteration, which of a restarted rank is no other's",
        replace=_logged,
    ),
    *(
        Patch(
            identity=f"last-rank{which}",
            target=f"megatron.training.utils{module}:is_last_rank",
            versions=SUPPORTED,
            parameters=(),
            reason="the last rank prints losses: while it has failed, the last live one of its stage does",
            replace=_shown,
        )
        for which, module in (("", ""), ("-common", ".common_utils"))  # from 0.18 on utils is a package
    ),
    Patch(
        identity="random-states",
        target="megatron.training.checkpointing:get_rng_state",
        versions=SUPPORTED,
        parameters=(),
        reason="a checkpoint of fewer replicas has no random states of each: a restarted job has more",
        replace=_random_states,
    ),
    Patch(
        identity="operations",
        target="megatron.training.training:checkpoint_and_decide_exit",
        versions=SUPPORTED,
        parameters=("iteration", _OPERATIONS),
        reason="a restarted rank counts floating-point operations from where the others are",
        replace=_counted,
    ),
)
