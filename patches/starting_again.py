# SPDX-License-Identifier: Apache-2.0
"""Patches of megatron.training that let a restarted rank rejoin the job.

The rank must rejoin before data are read, since data sets need to know where to begin:
megatron.training.training.pretrain creates model and optimizer, then data iterators, then trains.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from adaptra_megatron.patches.table import SUPPORTED, Patch

if TYPE_CHECKING:
    from adaptra_megatron.engine.runtime import AdaptraRuntime

_COUNTERS = (
    *("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples"),
    *("num_floating_point_operations_so_far", "do_train", "do_valid", "do_test"),
)
"""Arguments of Megatron's that change while it trains, and what ranks that read data say to the others."""


def _progress() -> Mapping[str, Any]:
    """Return how far training has come when an iteration begins."""
    from megatron.training import get_args

    args = get_args()
    counters = {name: getattr(args, name) for name in _COUNTERS if hasattr(args, name)}
    return {"iteration": args.curr_iteration, **counters}


def _made(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    @functools.wraps(stock)
    def setup_model_and_optimizer(*given: Any, **keywords: Any) -> Any:
        from megatron.training import get_args

        from adaptra_megatron.engine.fault_tolerance import FaultTolerance
        from adaptra_megatron.engine.rejoining import Training, settings_of

        # Before stock runs, which may change arguments.
        settings = settings_of(get_args())
        made = stock(*given, **keywords)
        model, optimizer, scheduler = made
        # Evaluation jobs have no optimizer; they cannot be rejoined.
        training = None if optimizer is None else Training(model, optimizer, scheduler, _progress, settings)
        runtime.feature(FaultTolerance).training = training
        return made

    return setup_model_and_optimizer


def _begun(stock: Callable[..., Any], runtime: AdaptraRuntime) -> Callable[..., Any]:
    @functools.wraps(stock)
    def build_train_valid_test_data_iterators(*given: Any, **keywords: Any) -> Any:
        from megatron.training import get_args

        from adaptra_megatron.engine.fault_tolerance import FaultTolerance

        for name, value in (runtime.feature(FaultTolerance).rejoin() or {}).items():
            setattr(get_args(), name, value)
        return stock(*given, **keywords)

    return build_train_valid_test_data_iterators


PATCHES = (
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
)
