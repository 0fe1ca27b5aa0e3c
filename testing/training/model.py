# SPDX-License-Identifier: Apache-2.0
"""Build the trained GPT: Megatron's configuration, model chunks, optimizer and learning-rate schedule."""

from __future__ import annotations

import argparse
import importlib.util
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads as finalize_model_grads_function
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from testing.megatron.megatron_on_cpu import FUSED_WEIGHT_GRADIENT_MODULE
from testing.training.context_parallel import GatheringAttention
from testing.training.corpus import VOCABULARY

_STORED = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.uint8}


class TorchNorm:
    """torch's LayerNorm or RMSNorm for Megatron's local layers, with sequence parallelism.

    Megatron's own wrapper of these refuses sequence_parallel. It suffices to mark the parameters: finalize_model_grads
    then sums their gradients over the tensor-parallel ranks, each of which has seen its part of the sequence.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:  # type: ignore[misc]
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm: torch.nn.Module = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def build_config(args: argparse.Namespace) -> TransformerConfig:
    """Return Megatron's configuration of the model in `args` (checked by `training_arguments.check_arguments`)."""
    interleaved = args.virtual_pipeline_model_parallel_size is not None
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    overlap_p2p = interleaved and args.overlap_p2p_comm
    optional: dict[str, Any] = {}
    if args.num_experts:
        optional.update(
            num_moe_experts=args.num_experts,
            moe_router_topk=args.moe_router_topk,
            moe_router_score_function=args.moe_router_score_function,
            moe_router_enable_expert_bias=args.moe_router_enable_expert_bias,
            moe_shared_expert_intermediate_size=args.moe_shared_expert_intermediate_size,
            moe_aux_loss_coeff=1e-2,
            moe_z_loss_coeff=1e-3,
        )
    if args.fine_grained_activation_offloading:
        optional.update(
            fine_grained_activation_offloading=True,
            offload_modules=args.offload_modules,
            min_offloaded_tensor_size=0,
        )
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        normalization=args.normalization,
        attention_dropout=args.attention_dropout,
        hidden_dropout=args.hidden_dropout,
        add_bias_linear=args.add_bias_linear and not args.num_experts,
        use_cpu_initialization=args.emulate_cpu,
        bf16=args.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        cp_comm_type="all_gather",
        expert_model_parallel_size=args.expert_model_parallel_size,
        overlap_moe_expert_parallel_comm=args.overlap_moe_expert_parallel_comm,
        delay_wgrad_compute=args.delay_wgrad_compute,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        microbatch_group_size_per_vp_stage=args.microbatch_group_size_per_virtual_pipeline_stage,
        sequence_parallel=args.sequence_parallel,
        variable_seq_lengths=args.variable_seq_lengths,
        moe_token_dispatcher_type=args.moe_token_dispatcher_type,  # variable lengths allow the default alone
        overlap_p2p_comm=overlap_p2p,
        batch_p2p_comm=not overlap_p2p,
        batch_p2p_sync=False,
        deallocate_pipeline_outputs=True,
        calculate_per_token_loss=args.calculate_per_token_loss,
        recompute_granularity=args.recompute_granularity,
        recompute_method=args.recompute_method,
        recompute_num_layers=args.recompute_num_layers,
        recompute_modules=args.recompute_modules,
        mtp_num_layers=args.mtp_num_layers,
        **({} if args.cuda_graph_impl == "none" else _graphs(args)),
        gradient_accumulation_fusion=fuses_weight_gradient(args),
        bias_activation_fusion=False,
        persist_layer_norm=False,
        **optional,
    )


def _graphs(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "cuda_graph_impl": args.cuda_graph_impl,
        "cuda_graph_scope": [] if args.cuda_graph_scope == ["full"] else args.cuda_graph_scope,
        "cuda_graph_warmup_steps": args.cuda_graph_warmup_steps,
    }


def captured_layers(args: argparse.Namespace, config: TransformerConfig, model: Any, optimizer: Any) -> Any:
    """Return Megatron's helper that captures layers as CUDA graphs; None without --cuda-graph-impl."""
    if args.cuda_graph_impl == "none":
        return None
    from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

    return TECudaGraphHelper(model, config, args.seq_length, args.micro_batch_size, [optimizer])


def fuses_weight_gradient(args: argparse.Namespace) -> bool:
    """Return whether weight gradients are accumulated by apex's extension or, on the CPU, by its replacement.

    On the CPU this must be requested, as only preloaded processes have the replacement, and results must not depend on
    that.
    """
    if not args.gradient_accumulation_fusion:
        return False
    if args.emulate_cpu:
        return bool(args.emulate_fused_weight_gradient)
    return importlib.util.find_spec(FUSED_WEIGHT_GRADIENT_MODULE) is not None


def build_model(args: argparse.Namespace, config: TransformerConfig) -> list[DistributedDataParallel]:
    """Return this stage's model chunks, wrapped for data parallelism; set the schedule's hooks in `config`."""
    chunks = args.virtual_pipeline_model_parallel_size
    data_parallel = DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.bf16,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        align_param_gather=args.align_param_gather,
        use_distributed_optimizer=args.use_distributed_optimizer,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        bucket_size=args.ddp_bucket_size,
        average_in_collective=args.ddp_average_in_collective,
        delay_wgrad_compute=args.delay_wgrad_compute,
    )
    model = []
    for index in range(chunks or 1):
        chunk: torch.nn.Module = _build_chunk(args, config, index if chunks else None)
        if args.bf16:
            chunk = Float16Module(config, chunk)
        # Megatron: bucketing serves to overlap, and only the first chunk's reduction is exposed.
        model.append(DistributedDataParallel(config, data_parallel, chunk, disable_bucketing=index > 0))
    _set_hooks(args, config, model)
    return model


def _build_chunk(args: argparse.Namespace, config: TransformerConfig, vp_stage: int | None) -> GPTModel:
    layer = get_gpt_layer_local_spec(num_experts=args.num_experts, normalization=config.normalization)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = TorchNorm
    if config.context_parallel_size > 1:
        layer.submodules.self_attention.submodules.core_attention = GatheringAttention
    layers = [layer] * get_num_layers_to_build(config, vp_stage)
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=layers, layer_norm=TorchNorm),
        mtp_block_spec=_mtp_spec(config, layer, vp_stage),
        vocab_size=padded_vocabulary(args),
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
    )
    chunk.model_type = ModelType.encoder_or_decoder
    return chunk if args.emulate_cpu else chunk.cuda()


def _mtp_spec(config: TransformerConfig, layer: ModuleSpec, vp_stage: int | None) -> Any:
    """Return the multi-token prediction layer for `layer`; None if this chunk has none."""
    if config.mtp_num_layers is None:
        return None
    block = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False, vp_stage=vp_stage)
    for each in [] if block is None else block.layer_specs:
        each.submodules.enorm = each.submodules.hnorm = each.submodules.layer_norm = TorchNorm
    return block


def padded_vocabulary(args: argparse.Namespace) -> int:
    """Return the size of the byte vocabulary, padded as Megatron does."""
    multiple: int = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return -(-VOCABULARY // multiple) * multiple


def _set_hooks(args: argparse.Namespace, config: TransformerConfig, model: list[DistributedDataParallel]) -> None:
    """Set the hooks of Megatron's train(): lists for the interleaved schedule, single functions otherwise."""

    def one_or_list(functions: list[Any]) -> Any:
        return functions[0] if len(functions) == 1 else functions

    if args.overlap_grad_reduce:
        config.no_sync_func = one_or_list([chunk.no_sync for chunk in model])
        if args.align_grad_reduce:
            config.grad_sync_func = one_or_list([chunk.start_grad_sync for chunk in model])
    if args.overlap_param_gather and args.align_param_gather:
        config.param_sync_func = one_or_list([chunk.start_param_sync for chunk in model])
    config.finalize_model_grads_func = finalize_model_grads_function


def build_optimizer(
    args: argparse.Namespace, config: TransformerConfig, model: list[DistributedDataParallel]
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Make Adam and its learning-rate schedule, as Megatron configures them. Sets `config.grad_scale_func`."""
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=args.lr,
            min_lr=args.min_lr,
            weight_decay=args.weight_decay,
            clip_grad=args.clip_grad,
            bf16=args.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=args.use_distributed_optimizer,
            overlap_param_gather=args.overlap_param_gather,
            fp8_recipe=args.fp8_recipe,
            use_precision_aware_optimizer=args.use_precision_aware_optimizer,
            main_params_dtype=_STORED[args.main_params_dtype],
            exp_avg_dtype=_STORED[args.exp_avg_dtype],
            exp_avg_sq_dtype=_STORED[args.exp_avg_sq_dtype],
        ),
        model,
        use_gloo_process_groups=args.distributed_backend != "gloo",
    )
    config.grad_scale_func = optimizer.scale_loss
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * args.global_batch_size,
        lr_decay_steps=max(args.train_iters, args.lr_warmup_iters + 1) * args.global_batch_size,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.train_iters * args.global_batch_size,
        wd_incr_style="constant",
    )
    return optimizer, scheduler
