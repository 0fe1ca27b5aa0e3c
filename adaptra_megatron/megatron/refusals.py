# SPDX-License-Identifier: Apache-2.0
"""Refuse features that the executor cannot run, before an iteration begins.

The tables need neither torch nor Megatron: `adaptra check` reads them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class UnsupportedFeatureError(RuntimeError):
    """A Megatron feature does not work together with --adaptra; names the feature, the reason and the flag to drop."""

    def __init__(self, what: str, why: str = "") -> None:
        super().__init__(f"{what}: {why}" if why else what)
        self.what, self.why = what, why


@dataclass(frozen=True)
class Refusal:
    """One unsupported feature: how to detect it, and why it is refused."""

    feature: str
    is_on: Callable[[Any], bool]
    reason: str
    by_order: bool = False
    """True if it works only in stock's order: under --adaptra-policy observe."""


def setting(name: str) -> Callable[[Any], bool]:
    """Return a test of whether a setting is on."""
    return lambda config: bool(getattr(config, name, False))


def either(*names: str) -> Callable[[Any], bool]:
    """Return a test of whether any of several settings is on, or of one setting that has different names in arguments
    and configs.
    """
    return lambda config: any(bool(getattr(config, name, False)) for name in names)


combines = setting("overlap_moe_expert_parallel_comm")
"""Whether Megatron trains with combined 1F1B."""


def generates(settings: Any) -> bool:
    """Return whether a script generates text and never trains; scripts that train do not know this flag."""
    return getattr(settings, "num_tokens_to_generate", None) is not None


def graphs_of(config: Any) -> str:
    """Return what makes CUDA graphs in training (--cuda-graph-impl), by old names, too; "none" if nothing does."""
    found = str(getattr(config, "cuda_graph_impl", None) or "none")
    if found == "none" and getattr(config, "external_cuda_graph", False):
        return "transformer_engine"
    if found == "none" and getattr(config, "enable_cuda_graph", False):
        found = "local"
    if found == "local" and "full_iteration" in str(getattr(config, "cuda_graph_scope", "")):
        return "full_iteration"
    # Megatron's RL takes layers out of their graphs to train (rl_utils.py: toggle_cuda_graphs).
    rolls_out = getattr(config, "perform_rl_step", False) and not getattr(config, "rl_training_cuda_graphs", False)
    return "none" if found == "local" and (rolls_out or generates(config)) else found


offloads = setting("fine_grained_activation_offloading")
"""Return whether a job offloads the activations of some modules to the CPU."""


def _offloads_in_graphs(config: Any) -> bool:
    scope = getattr(config, "cuda_graph_modules", None) or getattr(config, "cuda_graph_scope", None) or "full"
    parts = {part.rpartition(".")[2] for part in (scope.split(",") if isinstance(scope, str) else map(str, scope))}
    inside = parts & {"full", "moe"} or set(getattr(config, "offload_modules", None) or ()) - {"expert_fc1", "moe_act"}
    return offloads(config) and graphs_of(config) != "none" and bool(inside)


has_experts = either("num_experts", "num_moe_experts")
REFUSALS = (
    Refusal(
        "CUDA graphs of whole iterations (--cuda-graph-impl full_iteration, or local with this scope)",
        lambda config: graphs_of(config) not in ("none", "local", "transformer_engine"),
        "one graph has all forwards, backwards and messages in stock's order",
        by_order=True,
    ),
    Refusal(
        "CUDA graphs of layers that Megatron makes itself (--cuda-graph-impl local)",
        lambda config: graphs_of(config) == "local",
        "they return a stage's output as a view, and schedules fail when they free it: no pipeline trains with them. "
        "Use --cuda-graph-impl transformer_engine",
    ),
    Refusal(
        "hybrid context parallelism (--hybrid-context-parallel)",
        setting("hybrid_context_parallel"),
        "it runs a schedule of its own",
    ),
    Refusal(
        "activation offloading in CUDA graphs (--offload-modules other than expert_fc1 and moe_act)",
        _offloads_in_graphs,
        "graphs for another order would be captured before the order of what they offload is recorded",
        by_order=True,
    ),
    Refusal(
        "ring exchange (use_ring_exchange_p2p)",
        setting("use_ring_exchange_p2p"),
        "it replaces the same point-to-point communication",
    ),
    Refusal(
        "partial activation checkpointing (--num-microbatches-with-partial-activation-checkpoints)",
        lambda config: getattr(config, "num_microbatches_with_partial_activation_checkpoints", None) is not None,
        "it counts micro-batches in flight by the stock schedule",
        by_order=True,
    ),
    Refusal(
        "paged stashing of experts' activations (--moe-paged-stash)",
        setting("moe_paged_stash"),
        "it counts forwards and backwards by the stock schedule",
        by_order=True,
    ),
    Refusal(
        "generalized tensor parallelism (--tensor-parallel-num-weight-shards)",
        lambda config: (
            (getattr(config, "gtp_weight_remat_size", 1) or 1) > 1
            or (getattr(config, "expert_gtp_weight_remat_size", 1) or 1) > 1
            or (getattr(config, "tensor_parallel_num_weight_shards", 0) or 0)
            > (getattr(config, "tensor_model_parallel_size", 1) or 1)
            or (getattr(config, "expert_tensor_parallel_num_weight_shards", 0) or 0)
            > (
                getattr(config, "expert_tensor_parallel_size", None)
                or getattr(config, "tensor_model_parallel_size", 0)
                or 1
            )
        ),
        "weights are gathered inside of each forward and backward over ranks of several pipelines, which have plans of "
        "their own",
        by_order=True,
    ),
)

_REPLACING = "they replace the same function of Megatron's"
SEEN_IN_ARGUMENTS = (
    Refusal(
        "FSDP (--use-megatron-fsdp, --use-torch-fsdp2)",
        either("use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2"),
        "it requires Megatron's DistributedDataParallel, whose hooks say when gradients are reduced",
    ),
    Refusal(
        "in-process restarts (--inprocess-restart)",
        setting("inprocess_restart"),
        "they keep the process but not the process groups, on which the links between stages were built",
    ),
    Refusal(
        "UCC between stages (--pipeline-model-parallel-comm-backend ucc)",
        lambda arguments: getattr(arguments, "pipeline_model_parallel_comm_backend", None) == "ucc",
        "links between stages are made here, over NCCL and host memory, and UCC would carry none of their messages",
    ),
    Refusal(
        "knowledge distillation (--export-kd-teacher-load)",
        setting("export_kd_teacher_load"),
        "messages of several tensors per micro-batch are not carried",
    ),
    Refusal(
        "Primus's own pipeline schedules (patch_primus_pipeline, patch_zero_bubble)",
        either("patch_primus_pipeline", "patch_zero_bubble"),  # enable_zero_bubble alone, its default, changes nothing
        _REPLACING,
    ),
    Refusal(
        "MindSpeed's own pipeline schedules (--schedules-method, --moe-fb-overlap, --recompute-in-advance and others)",
        either(
            *("schedules_method", "moe_fb_overlap", "use_nanopipe", "recompute_in_bubble", "recompute_in_advance"),
            *("automated_pipeline_perf", "optimize_send_recv_comm", "use_multiparameter_pipeline_model_parallel"),
        ),
        _REPLACING,
    ),
)


def kept_in_order(config: Any) -> list[str]:
    """Return the features of Megatron's `config` that work only in stock's order."""
    return [refusal.feature for refusal in REFUSALS if refusal.by_order and refusal.is_on(config)]


def refuse_unsupported(config: Any, model_chunks: Sequence[torch.nn.Module], arguments: Mapping[str, Any]) -> None:
    """Raise UnsupportedFeatureError for the first feature found that the executor cannot run."""
    for refusal in REFUSALS:
        if refusal.is_on(config):
            raise _refused(refusal)
    if arguments.get("adjust_tensor_shapes_fn") is not None:
        raise UnsupportedFeatureError(
            "--adaptra does not run with adjust_tensor_shapes_fn (knowledge distillation): messages of several "
            "tensors per micro-batch are not carried. Drop one of the two"
        )
    from adaptra_megatron.megatron.compat import is_encoder_decoder

    for model in model_chunks:
        if is_encoder_decoder(model):
            raise UnsupportedFeatureError(
                "--adaptra does not run encoder-decoder models: it schedules a single chain of stages. Drop --adaptra"
            )
        if not _reduces_as_expected(model):
            raise UnsupportedFeatureError(
                f"--adaptra does not run models wrapped in {type(model).__name__}: it has to know when gradients are "
                "reduced. Use Megatron's DistributedDataParallel (drop --use-megatron-fsdp / --use-torch-fsdp2)"
            )


def refuse_settings(arguments: Any) -> None:
    """Raise UnsupportedFeatureError for features visible in Megatron's parsed arguments, before any GPU is touched.

    `refuse_unsupported` checks the resulting configs again in the first iteration.
    """
    for refusal in refused_of(arguments):
        raise _refused(refusal)


def refused_of(arguments: Any) -> list[Refusal]:
    """Return the refusals that Megatron's `arguments` (or settings by these names) meet."""
    if pipeline_stages(arguments) == 1:
        return []  # stock's schedule runs
    observes = getattr(arguments, "adaptra_policy", "adapt") == "observe"
    return [
        refusal
        for refusal in (*REFUSALS, *SEEN_IN_ARGUMENTS)
        if refusal.is_on(arguments) and not (observes and refusal.by_order)
    ]


def pipeline_stages(arguments: Any) -> int | None:
    """Return the pipeline size in Megatron's parsed arguments; None if a checkpoint may set it."""
    if any(getattr(arguments, name, False) for name in ("use_checkpoint_args", "use_mp_args_from_checkpoint_args")):
        return None
    return getattr(arguments, "pipeline_model_parallel_size", None)


def _refused(refusal: Refusal) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(
        f"--adaptra does not run with {refusal.feature}", f"{refusal.reason}. {remedy_of(refusal)}"
    )


def remedy_of(refusal: Refusal) -> str:
    return "Drop one of the two" + (", or give --adaptra-policy observe" if refusal.by_order else "")


def _reduces_as_expected(model: torch.nn.Module) -> bool:
    name = type(model).__name__.lower()
    return "fsdp" not in name and "fullysharded" not in name
