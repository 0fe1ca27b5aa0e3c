# SPDX-License-Identifier: Apache-2.0
"""Refuse features that a single feature of --adaptra does not run with: staggered steps, synchronisation modes,
rerouting, recovery, sums around a straggler.

The tables need neither torch nor Megatron: `adaptra check` reads them, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from adaptra_megatron.megatron.refusals import (
    Refusal,
    UnsupportedFeatureError,
    either,
    graphs_of,
    has_experts,
    refuse_settings,
    setting,
)

_GRAPH = "--optimizer-cuda-graph"
_CAPTURED = "CUDA graphs (--cuda-graph-impl)"
_REPLAYED = "a step that was captured is replayed as it was, and what is decided anew for each would be left out"
_NOT_COPIED = "the copies by which a step is taken back would lack its state"


def _scales_losses(settings: Any) -> bool:
    return bool(getattr(settings, "fp16", False)) or getattr(settings, "loss_scale", None) is not None


def _reruns(settings: Any) -> bool:
    return getattr(settings, "rerun_mode", "disabled") != "disabled"


def _checks_hashes(settings: Any) -> bool:
    return bool(getattr(settings, "check_weight_hash_across_dp_replicas_interval", None))


STAGGERING = (
    Refusal(
        "--fp16 (a loss scaler)",
        _scales_losses,
        "a step that the scaler skips would have to be known of before the next loss is scaled; use --bf16",
    ),
    Refusal(
        "--rerun-mode other than disabled",
        _reruns,
        "Megatron then has all ranks meet before each step, and nothing would be gained; give --rerun-mode disabled",
    ),
    Refusal(
        "embeddings that the first and the last stage share",
        lambda config: not getattr(config, "untie_embeddings_and_output_weights", True),
        "the first stage waits for the last one's gradients anyway; give --untie-embeddings-and-output-weights",
    ),
    Refusal(
        "--calculate-per-token-loss",
        setting("calculate_per_token_loss"),
        "all stages wait for the last one's count of tokens anyway",
    ),
    Refusal(
        "experts (--num-experts)",
        has_experts,
        "what routers count would be counted twice where an iteration is computed again",
    ),
    Refusal(
        "--fp8-format",
        lambda config: bool(getattr(config, "fp8", None) or getattr(config, "fp4", None)),
        "the history of scales of an iteration that is computed again would stay",
    ),
    Refusal(
        "optimizers other than Adam (--optimizer)",
        lambda config: getattr(config, "optimizer", "adam") != "adam",
        "a step by a gradient that should have been clipped could overflow before it is taken back",
    ),
    Refusal("--log-num-zeros-in-grad", setting("log_num_zeros_in_grad"), "stages would meet to count them"),
    Refusal("--use-precision-aware-optimizer", setting("use_precision_aware_optimizer"), _NOT_COPIED),
    Refusal("--optimizer-cpu-offload", setting("optimizer_cpu_offload"), _NOT_COPIED),
    Refusal(_GRAPH, setting("optimizer_cuda_graph"), _REPLAYED),
    Refusal(
        _CAPTURED,
        lambda config: graphs_of(config) != "none",
        "they are captured where gradients are zero, before an iteration that may have to be repeated",
    ),
)
"""Features that --adaptra-staggered-optimizer does not support."""


def refuse_for_staggering(settings: Any) -> None:
    """Raise UnsupportedFeatureError for the first feature in `settings` with which steps cannot be staggered.

    `settings`: Megatron's parsed arguments, or one of its configs.
    """
    _raise_first(_staggering_errors(settings))


_APART = "all replicas meet for it in each iteration, and none would go on without the others"
SYNC_MODES = (
    Refusal(
        "the distributed optimizer (--use-distributed-optimizer)",
        setting("use_distributed_optimizer"),
        "each replica, the late ones, too, has a part of the optimizer's state, without which no update can be made",
    ),
    Refusal(
        "experts (--num-experts)",
        has_experts,
        "replicas share experts, and meet for each micro-batch",
    ),
    Refusal(
        "context parallelism (--context-parallel-size)",
        lambda settings: getattr(settings, "context_parallel_size", 1) > 1,
        "gradients of the parts of a sequence are summed up over the same groups as those of replicas",
    ),
    Refusal(
        "--overlap-grad-reduce",
        setting("overlap_grad_reduce"),
        "which replicas' gradients are summed up is known once a replica has all of its own",
    ),
    Refusal("--calculate-per-token-loss", setting("calculate_per_token_loss"), _APART),
    Refusal(
        "--fp16 (a loss scaler)",
        _scales_losses,
        "replicas would scale losses by different factors; use --bf16",
    ),
    Refusal(
        "--rerun-mode other than disabled",
        _reruns,
        f"{_APART}; give --rerun-mode disabled",
    ),
    Refusal("--exit-duration-in-mins", lambda settings: bool(getattr(settings, "exit_duration_in_mins", None)), _APART),
    Refusal("--exit-signal-handler", setting("exit_signal_handler"), _APART),
    Refusal(
        "--rampup-batch-size",
        lambda settings: bool(getattr(settings, "rampup_batch_size", None)),
        "gradients that are added up would be of batches of different sizes",
    ),
    Refusal("--check-weight-hash-across-dp-replicas-interval", _checks_hashes, _APART),
    Refusal("--log-straggler", setting("log_straggler"), _APART),
    Refusal(
        "a layer-wise distributed optimizer (--optimizer dist_muon)",
        lambda settings: str(getattr(settings, "optimizer", "")).startswith("dist_"),
        "each replica steps some of the layers, without which no update can be made",
    ),
    Refusal(
        "--param-name-patterns-for-fp32-local-accumulation",
        setting("param_name_patterns_for_fp32_local_accumulation"),
        "gradients are then not all in the buffers that are summed up",
    ),
    Refusal(_GRAPH, setting("optimizer_cuda_graph"), _REPLAYED),
)
"""Features that an --adaptra-sync-mode other than ssgd does not support."""


def refuse_for_sync_mode(mode: str, *settings: Any) -> None:
    """Raise UnsupportedFeatureError for the first feature that prevents replicas from making updates without each
    other.

    `settings`: Megatron's parsed arguments, or its configs.
    """
    _raise_first(_sync_mode_errors(mode, *settings))


def ranks_of_replica(settings: Any) -> int:
    """Return the number of ranks of a replica, all that meet in a forward: where experts span data-parallel ranks,
    also these (`settings`: before defaults are filled in).
    """

    def size(name: str, default: int = 1) -> int:
        return getattr(settings, f"{name}_parallel_size", None) or default

    experts = size("expert_model") * size("expert_tensor", size("tensor_model")) if has_experts(settings) else 1
    return math.lcm(size("tensor_model") * size("context"), experts) * size("pipeline_model")


def _replicas_meet(settings: Any) -> bool:
    """Return whether all ranks meet in each forward, as far as `settings` say how many there are."""
    kinds = getattr(settings, "moe_router_load_balancing_type", None) or ""
    world_size = getattr(settings, "world_size", None) or 0
    return has_experts(settings) and ("global_aux_loss" in kinds or 0 < world_size < 2 * ranks_of_replica(settings))


def _keeps_scales(settings: Any) -> bool:
    """Return whether FP8 scales come from earlier micro-batches (Transformer Engine's DelayedScaling)."""
    return bool(getattr(settings, "fp8", None)) and getattr(settings, "fp8_recipe", "delayed") == "delayed"


def _skips_iterations(settings: Any) -> bool:
    names = "iterations_to_skip", "result_rejected_tracker_filename"
    return any(getattr(settings, name, None) for name in names)


REROUTING = (
    Refusal(
        "experts that span all data-parallel replicas, or a global auxiliary loss",
        _replicas_meet,
        "all ranks then meet in each forward, and none can take another's micro-batch; it takes twice as many ranks as "
        "the larger of --expert-model-parallel-size x --expert-tensor-parallel-size and --tensor-model-parallel-size x "
        "--context-parallel-size, for each stage, and no global_aux_loss in --moe-router-load-balancing-type",
    ),
    Refusal(
        "--fp8-recipe delayed",
        _keeps_scales,
        "scales follow from the micro-batches that a cell has computed before, in their order, and all replicas of a "
        "stage may meet for them in each forward and backward; other recipes have no such state",
    ),
    Refusal(
        "--defer-embedding-wgrad-compute",
        setting("defer_embedding_wgrad_compute"),
        "Megatron pairs the output layer's activations and gradients by their order, and routed forwards and backwards "
        "have orders of their own",
    ),
    Refusal(
        "--moe-enable-routing-replay",
        setting("moe_enable_routing_replay"),
        "routers replay what was recorded in the order of forwards, and routed backwards have an order of their own",
    ),
    Refusal(
        "--fim-data",
        setting("fim_data"),
        "a sample depends on those that its process has read before, so inputs and labels that two cells read of one "
        "micro-batch would differ",
    ),
    Refusal(
        "--logits-load-dir, --logits-save-dir",
        either("logits_load_dir", "logits_save_dir"),
        "a teacher's logits are paired with a student's by their order",
    ),
    Refusal(
        "--dsa-indexer-loss-coeff",
        lambda settings: bool(getattr(settings, "dsa_indexer_loss_coeff", None)),
        "replicas meet for its mean in the log, and a cell that routes leave without micro-batches knows no group",
    ),
    Refusal(
        "--iterations-to-skip, --result-rejected-tracker-filename",
        _skips_iterations,
        "other replicas' micro-batches are read by number, and Megatron reads those of a skipped iteration uncounted",
    ),
    Refusal(
        "--qk-clip, --log-max-attention-logit",
        either("qk_clip", "log_max_attention_logit"),
        "all replicas meet for the largest logit, and a cell that routes leave without micro-batches has none",
    ),
)
"""Features that --adaptra-reroute does not support. The groups that ranks have made decide on the first one again
before the first iteration."""

_ASKED = "all ranks are asked for a part of what is compared, and one that has failed has none"
_POINTWISE = "groups that survive their members have no sends, receives and coalesced operations"
_STATISTICS = "report_determinism_stats", "report_stats"
_LACKING = "the copies of shards of the optimizer's state would lack it"


def _is_layer_wise(settings: Any) -> bool:
    optimizer = str(getattr(settings, "optimizer", "adam"))
    distributed = optimizer not in ("adam", "sgd") and getattr(settings, "use_distributed_optimizer", False)
    asked = getattr(settings, "use_layer_wise_distributed_optimizer", False)
    return optimizer.startswith("dist_") or bool(distributed or asked)


def _sends_sequences(settings: Any) -> bool:
    if getattr(settings, "context_parallel_size", 1) == 1:
        return False
    given = getattr(settings, "cp_comm_type", None) or "p2p"
    kinds = [given] if isinstance(given, str) else given
    return bool(getattr(settings, "mtp_num_layers", None)) or any("p2p" in kind for kind in kinds)


def _gathers_quantized(settings: Any) -> bool:
    blocks = bool(getattr(settings, "fp8", None)) and getattr(settings, "fp8_recipe", "") in ("mxfp8", "blockwise")
    return getattr(settings, "tensor_model_parallel_size", 1) > 1 and (blocks or bool(getattr(settings, "fp4", None)))


def _gathers_shards(settings: Any) -> bool:
    gathers = getattr(settings, "ckpt_format", "") == "torch"
    gathers = gathers or getattr(settings, "dist_ckpt_optim_fully_reshardable", False)
    return bool(gathers and getattr(settings, "save", None) and getattr(settings, "use_distributed_optimizer", False))


_LAYER_WISE = Refusal(
    "a layer-wise distributed optimizer (--optimizer dist_muon, or one other than adam and sgd with "
    "--use-distributed-optimizer)",
    _is_layer_wise,
    "each replica alone has the state of some layers, and a rank that fails takes it with it; --optimizer muon without "
    "--use-distributed-optimizer has all state in each replica",
)
RECOVERY = (
    _LAYER_WISE,
    Refusal("--optimizer-cpu-offload", setting("optimizer_cpu_offload"), _LACKING),
    Refusal(
        _GRAPH,
        setting("optimizer_cuda_graph"),
        "a captured step sums up norms over process groups that a rank which fails takes with it",
    ),
    Refusal(
        "--ddp-reduce-scatter-with-fp32-accumulation",
        either("ddp_reduce_scatter_with_fp32_accumulation", "reduce_scatter_with_fp32_accumulation"),
        _LACKING,
    ),
    Refusal(
        "--use-megatron-fsdp",
        either("use_megatron_fsdp", "use_custom_fsdp"),
        "a rank that fails takes its shard of the parameters with it",
    ),
    Refusal(
        "--overlap-param-gather with --fp16 or --loss-scale",
        lambda settings: _scales_losses(settings) and getattr(settings, "overlap_param_gather", False),
        "a rank that rejoins gathers no parameters in forwards, as the others do, until it has made a step, and one "
        "that overflows is skipped; use --bf16",
    ),
    Refusal(
        "--fp8-param-gather, --fp4-param-gather",
        either("fp8_param_gather", "fp8_param", "fp4_param_gather", "fp4_param"),
        "the scale of a parameter follows from its largest value, which may be in the shard of a rank that has failed",
    ),
    Refusal("--check-weight-hash-across-dp-replicas-interval", _checks_hashes, _ASKED),
    Refusal("--log-straggler", setting("log_straggler"), _ASKED),
    Refusal(
        "--rerun-mode report_determinism_stats",
        lambda settings: getattr(settings, "rerun_mode", "disabled") in _STATISTICS,
        _ASKED,
    ),
    Refusal(
        "--sft with --eval-iters other than 0",
        lambda settings: getattr(settings, "sft", False) and getattr(settings, "eval_iters", 0) != 0,
        "Megatron divides the sum of the replicas' validation losses by their number at the start, also where some "
        "have failed; give --eval-iters 0",
    ),
    Refusal(
        "--context-parallel-size with --cp-comm-type p2p or a2a+p2p, or with --mtp-num-layers",
        _sends_sequences,
        f"{_POINTWISE}; give --cp-comm-type allgather or a2a",
    ),
    Refusal(
        "--fp8-recipe mxfp8 or blockwise, or --fp4-format, with tensor parallelism",
        _gathers_quantized,
        f"{_POINTWISE}: Transformer Engine gathers values and scales together",
    ),
    Refusal("--use-nccl-ub", setting("nccl_ub"), "communicators with registered memory cannot be aborted"),
    Refusal(
        "--cuda-graph-warmup-steps 0 with --cuda-graph-impl transformer_engine",
        lambda settings: (
            graphs_of(settings) == "transformer_engine" and getattr(settings, "cuda_graph_warmup_steps", 3) == 0
        ),
        "iterations without a failed rank alone run with graphs, and Megatron requires them after the first one",
    ),
    Refusal(
        "--ckpt-format torch or --dist-ckpt-optim-fully-reshardable, with --save and --use-distributed-optimizer",
        _gathers_shards,
        "one rank gathers all shards for a checkpoint, which ends the job where a rank has failed",
    ),
    Refusal(
        "--non-persistent-ckpt-type local",
        lambda settings: getattr(settings, "non_persistent_ckpt_type", None) == "local",
        "its files go by the numbers of ranks, which are others where some have failed",
    ),
    Refusal("--full-validation", setting("full_validation"), "rank 0 says how long it lasts, and may have failed"),
)
"""Features that --adaptra-reroute failures does not support."""


def refuse_for_rerouting(config: Any) -> None:
    """Raise UnsupportedFeatureError for the first feature in Megatron's `config` with which no cell can compute
    another's micro-batches.
    """
    _raise_first(_met(REROUTING, "--adaptra-reroute", config))


def refuse_for_recovery(reroute: str, *settings: Any) -> None:
    """Raise UnsupportedFeatureError for the first feature that cannot be repeated, or whose state is lost with a rank.

    `settings`: Megatron's parsed arguments, or its configs. `reroute`: the value of --adaptra-reroute.
    """
    _raise_first(_met(RECOVERY, f"--adaptra-reroute {reroute}", *settings))


def _staggering_errors(settings: Any) -> Iterator[UnsupportedFeatureError]:
    flag = "--adaptra-staggered-optimizer"
    return _met(STAGGERING, flag, settings, remedy=f"Or drop {flag}")


def _sync_mode_errors(mode: str, *settings: Any) -> Iterator[UnsupportedFeatureError]:
    return _met(SYNC_MODES, f"--adaptra-sync-mode {mode}", *settings, remedy="Or drop --adaptra-sync-mode")


def _met(
    table: Sequence[Refusal], flag: str, *settings: Any, remedy: str = "Drop one of the two"
) -> Iterator[UnsupportedFeatureError]:
    for refusal in table:
        if any(refusal.is_on(each) for each in settings):
            yield _error(refusal, flag, remedy)


def _error(refusal: Refusal, flag: str, remedy: str = "Drop one of the two") -> UnsupportedFeatureError:
    return UnsupportedFeatureError(f"{flag} does not run with {refusal.feature}", f"{refusal.reason}. {remedy}")


def _raise_first(errors: Iterator[UnsupportedFeatureError]) -> None:
    for error in errors:
        raise error


def errors_of_flags(arguments: Any) -> Iterator[UnsupportedFeatureError]:
    """Yield an error for each feature in Megatron's parsed arguments that a flag of --adaptra does not run with."""
    mode = getattr(arguments, "adaptra_gradient_sync", "stock")
    instances = getattr(arguments, "num_distributed_optimizer_instances", None) or 1
    if mode != "stock" and getattr(arguments, "use_distributed_optimizer", False) and instances == 1:
        yield sharded_gradients_error(mode)
    sync_mode = getattr(arguments, "adaptra_sync_mode", "ssgd")
    if sync_mode != "ssgd":
        yield from _sync_mode_errors(sync_mode, arguments)
    reroute = getattr(arguments, "adaptra_reroute", "off")
    if reroute != "off":
        yield from _met(REROUTING, f"--adaptra-reroute {reroute}", arguments)
    if reroute in ("failures", "all"):
        yield from _met(RECOVERY, f"--adaptra-reroute {reroute}", arguments)
    if getattr(arguments, "adaptra_staggered_optimizer", False):
        yield from _staggering_errors(arguments)


def refuse_arguments(arguments: Any) -> None:
    """Raise UnsupportedFeatureError for features visible in Megatron's parsed arguments that --adaptra or a flag of it
    does not run with, before any GPU is touched.
    """
    _raise_first(errors_of_flags(arguments))
    refuse_settings(arguments)


def refuse_to_split(mode: str, replicas: int) -> NoReturn:
    """Raise UnsupportedFeatureError for --adaptra-sync-mode in a job of one replica."""
    raise UnsupportedFeatureError(
        f"--adaptra-sync-mode {mode} is for replicas that do not wait for each other, but the job has {replicas} "
        "(data-parallel size): add some, or drop the flag"
    )


def layer_wise_error() -> UnsupportedFeatureError:
    """Return the error for --adaptra-reroute failures with an optimizer that is sharded by layers."""
    return _error(_LAYER_WISE, "--adaptra-reroute failures")


def sharded_gradients_error(mode: str) -> UnsupportedFeatureError:
    """Return the error for --adaptra-gradient-sync with a single distributed optimizer."""
    return UnsupportedFeatureError(
        f"--adaptra-gradient-sync {mode} does not run with the distributed optimizer (--use-distributed-optimizer)",
        "it reduces and scatters gradients and gathers parameters, so that the straggler must send and receive as much "
        "as ever, and there is nothing to gain. Drop one of the two; with several instances of it "
        "(--num-distributed-optimizer-instances) their sums are made around the straggler",
    )
