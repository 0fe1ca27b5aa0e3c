# SPDX-License-Identifier: Apache-2.0
"""What the executor cannot run, refused before anything of an iteration is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from adaptra_megatron.runtime.megatron.compat import is_encoder_decoder


class UnsupportedFeatureError(RuntimeError):
    """A Megatron feature that does not go together with --adaptra; says which, why, and what to drop."""


@dataclass(frozen=True)
class Refusal:
    """One feature: how to see that it is on, and why it cannot be."""

    feature: str
    is_on: Callable[[Any], bool]
    reason: str


def _setting(name: str) -> Callable[[Any], bool]:
    return lambda config: bool(getattr(config, name, False))


REFUSALS = (
    Refusal(
        "CUDA graphs (--cuda-graph-impl)",
        lambda config: (
            getattr(config, "cuda_graph_impl", "none") != "none"
            or bool(getattr(config, "enable_cuda_graph", False) or getattr(config, "external_cuda_graph", False))
        ),
        "a captured graph fixes the order of actions that is re-planned here",
    ),
    Refusal(
        "combined 1F1B (--overlap-moe-expert-parallel-comm)",
        _setting("overlap_moe_expert_parallel_comm"),
        "it fuses a forward and a backward into one action",
    ),
    Refusal(
        "delayed weight gradients (--delay-wgrad-compute)",
        _setting("delay_wgrad_compute"),
        "it needs combined 1F1B, and weight gradients are scheduled here already",
    ),
    Refusal(
        "hybrid context parallelism (--hybrid-context-parallel)",
        _setting("hybrid_context_parallel"),
        "it runs a schedule of its own",
    ),
    Refusal(
        "fine-grained activation offloading (--fine-grained-activation-offloading)",
        _setting("fine_grained_activation_offloading"),
        "it assumes that backwards come in the order of the stock schedule",
    ),
    Refusal(
        "ring exchange (use_ring_exchange_p2p)",
        _setting("use_ring_exchange_p2p"),
        "it replaces the same point-to-point communication",
    ),
    Refusal(
        "partial activation checkpointing (--num-microbatches-with-partial-activation-checkpoints)",
        lambda config: getattr(config, "num_microbatches_with_partial_activation_checkpoints", None) is not None,
        "it counts micro-batches in flight by the stock schedule",
    ),
    Refusal(
        "paged stashing of experts' activations (--moe-paged-stash)",
        _setting("moe_paged_stash"),
        "it counts forwards and backwards by the stock schedule",
    ),
    Refusal(
        "multi-token prediction (--mtp-num-layers)",
        lambda config: bool(getattr(config, "mtp_num_layers", None)),
        "its shared output layer has not been compared with stock under re-ordered weight gradients",
    ),
)

SEEN_IN_ARGUMENTS = (
    Refusal(
        "FSDP (--use-megatron-fsdp, --use-torch-fsdp2)",
        lambda arguments: any(
            getattr(arguments, name, False) for name in ("use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2")
        ),
        "it requires Megatron's DistributedDataParallel, whose hooks say when gradients are reduced",
    ),
    Refusal(
        "in-process restarts (--inprocess-restart)",
        _setting("inprocess_restart"),
        "they keep the process but not the process groups, on which the links between stages were built",
    ),
    Refusal(
        "UCC between stages (--pipeline-model-parallel-comm-backend ucc)",
        lambda arguments: getattr(arguments, "pipeline_model_parallel_comm_backend", None) == "ucc",
        "links between stages are made here, over NCCL and host memory, and UCC would carry none of their messages",
    ),
)


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


def refuse_arguments(arguments: Any) -> None:
    """Raise UnsupportedFeatureError for what Megatron's parsed arguments show already, before any GPU is touched.

    `refuse_unsupported` looks again at what came of them, in the first iteration.
    """
    mode = getattr(arguments, "adaptra_gradient_sync", "stock")
    if mode != "stock" and getattr(arguments, "use_distributed_optimizer", False):
        refuse_sharded_gradients(mode)
    if pipeline_stages(arguments) == 1:
        return  # stock's schedule runs
    for refusal in (*REFUSALS, *SEEN_IN_ARGUMENTS):
        if refusal.is_on(arguments):
            raise _refused(refusal)


def refuse_sharded_gradients(mode: str) -> NoReturn:
    """Raise UnsupportedFeatureError for --adaptra-gradient-sync beside a distributed optimizer."""
    raise UnsupportedFeatureError(
        f"--adaptra-gradient-sync {mode} does not run with the distributed optimizer (--use-distributed-optimizer): it "
        "reduces and scatters gradients and gathers parameters, so that the straggler must send and receive as much as "
        "ever, and there is nothing to gain. Drop one of the two"
    )


def pipeline_stages(arguments: Any) -> int | None:
    """The size of the pipeline that Megatron's parsed arguments ask for; None where it may come from a checkpoint."""
    if any(getattr(arguments, name, False) for name in ("use_checkpoint_args", "use_mp_args_from_checkpoint_args")):
        return None
    return getattr(arguments, "pipeline_model_parallel_size", None)


def _refused(refusal: Refusal) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(
        f"--adaptra does not run with {refusal.feature}: {refusal.reason}. Drop one of the two"
    )


def _reduces_as_expected(model: torch.nn.Module) -> bool:
    name = type(model).__name__.lower()
    return "fsdp" not in name and "fullysharded" not in name
