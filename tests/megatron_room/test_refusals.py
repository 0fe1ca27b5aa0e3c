# SPDX-License-Identifier: Apache-2.0
"""Each feature that the executor cannot run is refused by name, with a remedy, before anything is computed."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
import torch
from adaptra_megatron.patches.rank_failure_patches import FAULT_TOLERANCE_PATCHES
from megatron.core import ModelParallelConfig
from megatron.core.enums import ModelType
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import TransformerConfig, cuda_graphs
from megatron.core.transformer.transformer_layer import BaseTransformerLayer

from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.engine.runtime import AdaptraRuntime
from adaptra_megatron.megatron import megatron_call
from adaptra_megatron.megatron.feature_refusals import (
    RECOVERY,
    STAGGERING,
    SYNC_MODES,
    errors_of_flags,
    refuse_arguments,
    refuse_for_recovery,
    refuse_for_rerouting,
    refuse_for_staggering,
    refuse_for_sync_mode,
    refuse_to_split,
)
from adaptra_megatron.megatron.gradients.linear_wgrad import WeightGradientQueue
from adaptra_megatron.megatron.megatron_call import message_shape, pipeline_call, recomputed_spans, work_of
from adaptra_megatron.megatron.prospects import prospects_of
from adaptra_megatron.megatron.refusals import (
    REFUSALS,
    SEEN_IN_ARGUMENTS,
    UnsupportedFeatureError,
    graphs_of,
    refuse_unsupported,
    refused_of,
)

try:
    from megatron.core.optimizer import layer_wise_optimizer as layer_wise
except ImportError:  # before 0.16
    layer_wise = None

SETTINGS: dict[str, tuple[Any, str]] = {
    "cuda_graph_impl": ("full_iteration", "--cuda-graph-impl full_iteration"),
    "enable_cuda_graph": (True, "--cuda-graph-impl local"),
    "hybrid_context_parallel": (True, "--hybrid-context-parallel"),
    "use_ring_exchange_p2p": (True, "use_ring_exchange_p2p"),
    "num_microbatches_with_partial_activation_checkpoints": (
        2,
        "--num-microbatches-with-partial-activation-checkpoints",
    ),
    "moe_paged_stash": (True, "--moe-paged-stash"),
    "gtp_weight_remat_size": (2, "--tensor-parallel-num-weight-shards"),
    "expert_gtp_weight_remat_size": (2, "--tensor-parallel-num-weight-shards"),
    "tensor_parallel_num_weight_shards": (4, "--tensor-parallel-num-weight-shards"),
    "expert_tensor_parallel_num_weight_shards": (4, "--tensor-parallel-num-weight-shards"),
}
ARGUMENTS: dict[str, tuple[Any, str]] = {
    "use_megatron_fsdp": (True, "--use-megatron-fsdp"),
    "use_custom_fsdp": (True, "--use-megatron-fsdp"),
    "use_torch_fsdp2": (True, "--use-torch-fsdp2"),
    "inprocess_restart": (True, "--inprocess-restart"),
    "pipeline_model_parallel_comm_backend": ("ucc", "--pipeline-model-parallel-comm-backend ucc"),
    "export_kd_teacher_load": ("/teacher", "--export-kd-teacher-load"),
    "patch_primus_pipeline": (True, "patch_primus_pipeline"),
    "patch_zero_bubble": (True, "patch_zero_bubble"),
    "schedules_method": ("dualpipev", "--schedules-method"),
    **dict.fromkeys(
        (
            *("moe_fb_overlap", "use_nanopipe", "recompute_in_bubble", "recompute_in_advance"),
            *("automated_pipeline_perf", "optimize_send_recv_comm", "use_multiparameter_pipeline_model_parallel"),
        ),
        (True, "MindSpeed"),
    ),
}
"""What shows in Megatron's parsed arguments alone."""
OFFLOADS = {
    "pipeline_model_parallel_size": 2,
    "fine_grained_activation_offloading": True,
    "offload_modules": ["moe_act"],
}
OF_LATER_RELEASES = {
    "moe_paged_stash": "0.19",
    "gtp_weight_remat_size": "0.19",
    "expert_gtp_weight_remat_size": "0.19",
    "tensor_parallel_num_weight_shards": "0.19",
    "expert_tensor_parallel_num_weight_shards": "0.19",
}
DEFAULTS = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}


class Model(torch.nn.Module):
    """Fails when anything is computed."""

    def __init__(self, model_type: ModelType = ModelType.encoder_or_decoder, **settings: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**(DEFAULTS | settings))
        self.model_type = model_type

    def forward(self, *_: Any) -> NoReturn:
        raise AssertionError("computed")


def refused(model: torch.nn.Module, **arguments: Any) -> str:
    """The text of the error; the whole way from the patched schedule, with everything of Megatron's out of reach."""

    def forward_step(*_: Any) -> NoReturn:
        raise AssertionError("computed")

    call = {
        "forward_step_func": forward_step,
        "data_iterator": iter(()),
        "model": model,
        "num_microbatches": 4,
        "seq_length": 8,
        "micro_batch_size": 1,
        **arguments,
    }
    runtime = AdaptraRuntime(AdaptraConfig(), WeightGradientQueue(layers))
    with pytest.raises(UnsupportedFeatureError) as error:
        runtime.forward_backward(call, interleaved=False)
    assert not runtime._pipelines, "something was set up for a call that is refused"
    return str(error.value)


def test_the_defaults_are_not_refused() -> None:
    refuse_unsupported(Model().config, [Model(), torch.nn.Sequential(Model()).get_submodule("0")], {})


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_refused_by_its_flag(name: str) -> None:
    assert name in DEFAULTS or name in OF_LATER_RELEASES, "no megatron-core has it: it would never fire"
    value, flag = SETTINGS[name]
    text = refused(Model(**{name: value}))
    assert flag in text
    assert "Drop one of the two" in text


@pytest.mark.parametrize("name", SETTINGS)
def test_what_only_another_order_breaks_is_observed(name: str) -> None:
    """Stock's own schedule function runs then, with all that it was given."""
    value, _flag = SETTINGS[name]
    by_order = any(each.by_order and each.is_on(Model(**{name: value}).config) for each in REFUSALS)
    parsed = {"pipeline_model_parallel_size": 2, "adaptra_policy": "observe", name: value}
    if not by_order:
        with pytest.raises(UnsupportedFeatureError):
            refuse_arguments(SimpleNamespace(**parsed))
        return
    refuse_arguments(SimpleNamespace(**parsed))
    runtime = AdaptraRuntime(AdaptraConfig(policy="observe"), WeightGradientQueue(layers))
    ran: list[Any] = []
    runtime.run_stock = lambda *given: ran.append(given)  # type: ignore[method-assign]
    call, stock = {"model": [Model(**{name: value})]}, object()
    runtime.forward_backward(call, interleaved=True, stock=stock)  # type: ignore[arg-type]
    assert ran[0][:2] == (stock, call)
    assert "not timed" in ran[0][2]


def test_every_refusal_is_tried_and_says_why() -> None:
    tried = [{name: value} for name, (value, _flag) in SETTINGS.items()]
    tried.append(OFFLOADS | {"cuda_graph_impl": "transformer_engine"})
    fired = {refusal.feature for settings in tried for refusal in REFUSALS if refusal.is_on(Model(**settings).config)}
    assert fired == {refusal.feature for refusal in REFUSALS}
    assert len(fired) == len(REFUSALS)
    assert all(len(refusal.reason) > 20 for refusal in REFUSALS)


@pytest.mark.parametrize("name", [*SETTINGS, *ARGUMENTS])
def test_parsed_arguments_are_refused_before_anything_else_is_done(name: str) -> None:
    value, flag = {**SETTINGS, **ARGUMENTS}[name]
    parsed = {"pipeline_model_parallel_size": 2, **dict.fromkeys(ARGUMENTS, False)}
    refuse_arguments(SimpleNamespace(**parsed))
    with pytest.raises(UnsupportedFeatureError, match="Drop one of the two") as error:
        refuse_arguments(SimpleNamespace(**{**parsed, name: value}))
    assert flag in str(error.value)


def test_every_refusal_of_arguments_is_tried() -> None:
    fired = {
        one.feature
        for one in SEEN_IN_ARGUMENTS
        for name, (value, _flag) in ARGUMENTS.items()
        if one.is_on(SimpleNamespace(**{name: value}))
    }
    assert fired == {one.feature for one in SEEN_IN_ARGUMENTS}
    assert len(fired) == len(SEEN_IN_ARGUMENTS)


@pytest.mark.parametrize("flag", ["use_checkpoint_args", "use_mp_args_from_checkpoint_args"])
def test_nothing_is_refused_to_a_single_stage_unless_a_checkpoint_may_have_more(flag: str) -> None:
    asked = {"pipeline_model_parallel_size": 1, "use_torch_fsdp2": True}
    refuse_arguments(SimpleNamespace(**asked, **{flag: False}))
    with pytest.raises(UnsupportedFeatureError, match="FSDP"):
        refuse_arguments(SimpleNamespace(**asked, **{flag: True}))


def test_megatrons_own_settings_switch_cuda_graphs_on_in_a_way_that_is_seen() -> None:
    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
    found = {"enable_cuda_graph": "local", "external_cuda_graph": "transformer_engine"}
    for name, graphs in found.items():
        for config in (TransformerConfig(**sizes, **{name: True}), SimpleNamespace(**{name: True})):
            assert graphs_of(config) == graphs
            assert any(each.is_on(config) for each in REFUSALS) == (graphs == "local")
    assert graphs_of(TransformerConfig(**sizes)) == "none"


@pytest.mark.parametrize("graphs", ["local", "full_iteration", "transformer_engine"])
def test_graphs_are_refused_where_their_order_is_not_ours(graphs: str) -> None:
    pipeline = {"pipeline_model_parallel_size": 2, "cuda_graph_impl": graphs}
    for combined in (False, True):
        settings = SimpleNamespace(**pipeline, overlap_moe_expert_parallel_comm=combined)
        assert bool(refused_of(settings)) == (graphs != "transformer_engine")
    assert not list(errors_of_flags(SimpleNamespace(**pipeline, adaptra_reroute="failures")))
    untied = {"untie_embeddings_and_output_weights": True, "adaptra_staggered_optimizer": True}
    (error,) = errors_of_flags(SimpleNamespace(**pipeline, **untied))
    assert "CUDA graphs (--cuda-graph-impl)" in str(error)


@pytest.mark.parametrize("scope", [["attn", "moe_router"], "attn,mlp", [], None, ["moe"]])
def test_offloading_is_refused_inside_of_graphs_alone(scope: Any) -> None:
    assert not refused_of(SimpleNamespace(**OFFLOADS, cuda_graph_scope=scope)), "there are no graphs"
    assert not refused_of(SimpleNamespace(**OFFLOADS | {"offload_modules": ["core_attn"]}))
    graphs = OFFLOADS | {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": scope}
    assert bool(refused_of(SimpleNamespace(**graphs))) == (not scope or "moe" in scope)
    (refusal,) = refused_of(SimpleNamespace(**graphs | {"offload_modules": ["moe_act", "core_attn"]}))
    assert "--offload-modules other than expert_fc1 and moe_act" in refusal.feature
    assert not refused_of(SimpleNamespace(**graphs, adaptra_policy="observe"))


def test_graphs_that_no_training_has_are_not_refused() -> None:
    local = {"pipeline_model_parallel_size": 2, "cuda_graph_impl": "local"}
    learns, generates = {"perform_rl_step": True}, {"num_tokens_to_generate": 30}
    for settings in (learns, generates):
        assert not refused_of(SimpleNamespace(**local, **settings))
        (refusal,) = refused_of(SimpleNamespace(**local, **settings, cuda_graph_scope=["full_iteration"]))
        assert "whole iterations" in refusal.feature
    (refusal,) = refused_of(SimpleNamespace(**local, **learns, rl_training_cuda_graphs=True))
    assert "local" in refusal.feature
    text = refused(Model(cuda_graph_impl="local"))
    assert "no pipeline trains with them" in text, "whatever the arguments were"


def test_stock_cannot_free_the_output_of_a_layer_that_it_records_for_a_graph() -> None:
    """Mended by a release, this is no reason any more to refuse them."""
    runner = SimpleNamespace(status=cuda_graphs._GraphStatus.FWD_READY)
    output = cuda_graphs._CudagraphRecordNode.apply(runner, 1.0 * torch.ones(2, requires_grad=True))
    schedules.deallocate_output_tensor(output, False)
    with pytest.raises(AssertionError, match="view of another tensor"):
        schedules.deallocate_output_tensor(output, True)


def test_several_tensors_per_message_are_refused() -> None:
    text = refused(Model(), adjust_tensor_shapes_fn=lambda *shapes: shapes)
    assert "adjust_tensor_shapes_fn" in text
    assert "Drop one of the two" in text


def test_encoder_decoder_models_are_refused() -> None:
    assert "encoder-decoder models" in refused(Model(ModelType.encoder_and_decoder))


@pytest.mark.parametrize("name", ["FullyShardedDataParallel", "TorchFullyShardedDataParallel", "MegatronFSDP"])
def test_fully_sharded_wrappers_are_refused_by_name(name: str) -> None:
    text = refused(type(name, (Model,), {})())
    assert name in text
    assert "--use-megatron-fsdp" in text


def test_other_communicators_are_refused() -> None:
    class SeveralModels:
        pass

    text = refused(Model(), p2p_communicator=SeveralModels(), pg_collection=SimpleNamespace())
    assert "SeveralModels joins several models" in text
    assert "Drop --adaptra" in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": [Model(), Model()], "data_iterator": [None, None]}, "runs 1 model chunk per stage, got 2"),
        ({"pg_collection": SimpleNamespace()}, "pass p2p_communicator and pg_collection together"),
        ({"p2p_communicator": SimpleNamespace()}, "pass p2p_communicator and pg_collection together"),
    ],
)
def test_arguments_that_contradict_each_other(changes: dict[str, Any], said: str) -> None:
    arguments = {"model": Model(), "data_iterator": None, "num_microbatches": 1, "forward_step_func": None}
    with pytest.raises(ValueError, match=said):
        pipeline_call({**arguments, **changes}, interleaved=False)


@pytest.mark.parametrize(
    ("micro_batches", "error", "said"),
    [(3, RuntimeError, "3 modulo 2 = 1 with 2 stages"), (4, ValueError, "2 model chunks need as many data iterators")],
)
def test_the_number_of_micro_batches_is_looked_at_before_iterators_as_in_stock(
    monkeypatch: pytest.MonkeyPatch, micro_batches: int, error: type[Exception], said: str
) -> None:
    pipeline = SimpleNamespace(size=lambda: 2)
    monkeypatch.setattr(megatron_call, "_process_groups", lambda arguments: (pipeline, None))
    model = Model(microbatch_group_size_per_vp_stage=2)
    arguments = {"model": [model, model], "data_iterator": [None], "num_microbatches": micro_batches}
    with pytest.raises(error, match=said):
        pipeline_call(arguments, interleaved=True)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_distributed_optimizer_has_no_sums_to_make_around_a_straggler(stages: int) -> None:
    parsed = SimpleNamespace(
        **dict.fromkeys(ARGUMENTS, False),
        pipeline_model_parallel_size=stages,
        adaptra_gradient_sync="stragglar",
        use_distributed_optimizer=False,
    )
    refuse_arguments(parsed)
    parsed.use_distributed_optimizer = True
    with pytest.raises(UnsupportedFeatureError, match="--use-distributed-optimizer.*Drop one of the two"):
        refuse_arguments(parsed)
    parsed.num_distributed_optimizer_instances = 2  # whose sums are
    refuse_arguments(parsed)
    parsed.num_distributed_optimizer_instances = 1
    parsed.adaptra_gradient_sync = "stock"
    refuse_arguments(parsed)


NOT_STAGGERED: dict[str, Any] = {
    "fp16": True,
    "loss_scale": 1024.0,
    "rerun_mode": "validate_results",
    "untie_embeddings_and_output_weights": False,
    "calculate_per_token_loss": True,
    "num_experts": 2,
    "num_moe_experts": 2,
    "fp8": "e4m3",
    "optimizer": "sgd",
    "log_num_zeros_in_grad": True,
    "use_precision_aware_optimizer": True,
    "optimizer_cpu_offload": True,
    "optimizer_cuda_graph": True,
    "cuda_graph_impl": "transformer_engine",
}
STAGGERED = {"rerun_mode": "disabled", "untie_embeddings_and_output_weights": True, "optimizer": "adam", "bf16": True}


@pytest.mark.parametrize("name", NOT_STAGGERED)
def test_optimizer_steps_are_staggered_where_they_can_be_taken_back_and_something_is_gained(name: str) -> None:
    refuse_for_staggering(SimpleNamespace(**STAGGERED))
    with pytest.raises(UnsupportedFeatureError, match="--adaptra-staggered-optimizer does not run with"):
        refuse_for_staggering(SimpleNamespace(**{**STAGGERED, name: NOT_STAGGERED[name]}))


def test_every_refusal_of_staggering_is_tried() -> None:
    fired = {
        one.feature
        for one in STAGGERING
        for name, value in NOT_STAGGERED.items()
        if one.is_on(SimpleNamespace(**{name: value}))
    }
    assert fired == {one.feature for one in STAGGERING}


@pytest.mark.parametrize("reroute", ["off", "stragglers", "failures", "all"])
@pytest.mark.parametrize(
    "optimizer",
    [
        {"optimizer": "dist_muon"},
        {"optimizer": "dist_made_up"},
        {"optimizer": "soap", "use_distributed_optimizer": True},
        {"optimizer": "muon", "use_layer_wise_distributed_optimizer": True},
    ],
    ids=lambda optimizer: "-".join(map(str, optimizer.values())),
)
def test_shards_without_a_copy_are_refused_by_jobs_that_survive_failures(
    optimizer: dict[str, Any], reroute: str
) -> None:
    for accepted in ({"optimizer": "muon"}, {"optimizer": "adam", "use_distributed_optimizer": True}):
        refuse_arguments(SimpleNamespace(adaptra_reroute=reroute, pipeline_model_parallel_size=2, **accepted))
    parsed = SimpleNamespace(adaptra_reroute=reroute, pipeline_model_parallel_size=2, **optimizer)
    if reroute in ("off", "stragglers"):
        refuse_arguments(parsed)
        return
    with pytest.raises(UnsupportedFeatureError, match=r"layer-wise .*--optimizer dist_muon.*Drop one of the two"):
        refuse_arguments(parsed)


@pytest.mark.skipif(layer_wise is None, reason="this release has no layer-wise optimizer")
def test_a_layer_wise_optimizer_is_refused_as_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no arguments have shown it: a trainer makes its optimizer itself."""

    class OfAnotherName(layer_wise.LayerWiseDistributedOptimizer):  # type: ignore[misc, name-defined]
        pass

    def make() -> Any:
        groups = SimpleNamespace(dp_cp=SimpleNamespace(size=lambda: 1))
        return OfAnotherName([], SimpleNamespace(bf16=False), groups)

    (patch,) = (each for each in FAULT_TOLERANCE_PATCHES if each.identity == "chained-optimizer")
    assert make().chained_optimizers == []
    owner, attribute = patch.owner()
    monkeypatch.setattr(owner, attribute, patch.replace(getattr(owner, attribute), cast("Any", None)))
    with pytest.raises(UnsupportedFeatureError, match="layer-wise"):
        make()
    assert ChainedOptimizer([]).chained_optimizers == []


LOST: dict[str, tuple[dict[str, Any], str]] = {
    "layer-wise": ({"optimizer": "dist_muon"}, "--optimizer dist_muon"),
    "cpu": ({"optimizer_cpu_offload": True}, "--optimizer-cpu-offload"),
    "graph": ({"optimizer_cuda_graph": True}, "--optimizer-cuda-graph"),
    "accumulation": ({"ddp_reduce_scatter_with_fp32_accumulation": True}, "--ddp-reduce-scatter-with-fp32"),
    "config's accumulation": ({"reduce_scatter_with_fp32_accumulation": True}, "--ddp-reduce-scatter-with-fp32"),
    "fsdp": ({"use_megatron_fsdp": True}, "--use-megatron-fsdp"),
    "parameters": ({"fp8_param_gather": True}, "--fp8-param-gather"),
    "config's parameters": ({"fp8_param": True}, "--fp8-param-gather"),
    "parameters of 4 bits": ({"fp4_param": True}, "--fp4-param-gather"),
    "overflows": ({"fp16": True, "overlap_param_gather": True}, "--overlap-param-gather with --fp16"),
    "scaled": ({"loss_scale": 1024.0, "overlap_param_gather": True}, "--overlap-param-gather with --fp16"),
    "hashes": (
        {"check_weight_hash_across_dp_replicas_interval": 10},
        "--check-weight-hash-across-dp-replicas-interval",
    ),
    "times of all": ({"log_straggler": True}, "--log-straggler"),
    "statistics": ({"rerun_mode": "report_determinism_stats"}, "--rerun-mode report_determinism_stats"),
    "losses per replica": ({"sft": True, "eval_iters": 100}, "--sft with --eval-iters"),
    "rings": ({"context_parallel_size": 2}, "--context-parallel-size with --cp-comm-type p2p"),
    "some rings": ({"context_parallel_size": 2, "cp_comm_type": ["a2a", "a2a+p2p"]}, "--context-parallel-size with"),
    "predicted parts": (
        {"context_parallel_size": 2, "cp_comm_type": "all_gather", "mtp_num_layers": 1},
        "or with --mtp-num-layers",
    ),
    "blocks": ({"fp8": "e4m3", "fp8_recipe": "mxfp8", "tensor_model_parallel_size": 2}, "--fp8-recipe mxfp8"),
    "4 bits": ({"fp4": "e2m1", "tensor_model_parallel_size": 2}, "or --fp4-format, with tensor parallelism"),
    "registered": ({"nccl_ub": True}, "--use-nccl-ub"),
    "captured at once": (
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_warmup_steps": 0},
        "--cuda-graph-warmup-steps 0",
    ),
    "gathered files": (
        {"ckpt_format": "torch", "save": "/saved", "use_distributed_optimizer": True},
        "--ckpt-format torch or",
    ),
    "local files": ({"non_persistent_ckpt_type": "local"}, "--non-persistent-ckpt-type local"),
    "evaluations of all": ({"full_validation": True}, "--full-validation"),
}
"""Settings with which an attempt cannot be redone, or something fails with a rank."""


@pytest.mark.parametrize("name", LOST)
def test_what_cannot_be_recovered_is_refused_where_failures_are(name: str) -> None:
    settings, flag = LOST[name]
    for reroute in ("failures", "all"):
        with pytest.raises(UnsupportedFeatureError, match=f"^--adaptra-reroute {reroute} does not run with .*{flag}"):
            refuse_arguments(SimpleNamespace(**settings, adaptra_reroute=reroute, pipeline_model_parallel_size=1))
    with pytest.raises(UnsupportedFeatureError, match="Drop one of the two"):
        refuse_for_recovery("failures", SimpleNamespace(), SimpleNamespace(**settings))
    refuse_arguments(SimpleNamespace(**settings, adaptra_reroute="stragglers", pipeline_model_parallel_size=1))


@pytest.mark.parametrize("settings", [{"fp16": True}, {"bf16": True, "overlap_param_gather": True}])
def test_either_of_a_loss_scale_and_gathers_in_forwards_is_recovered(settings: dict[str, Any]) -> None:
    refuse_for_recovery("failures", SimpleNamespace(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"context_parallel_size": 2, "cp_comm_type": ["allgather", "a2a"]},
        {"context_parallel_size": 1, "cp_comm_type": ["p2p"], "mtp_num_layers": 1},
        {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
        {"fp8": "e4m3", "fp8_recipe": "tensorwise", "tensor_model_parallel_size": 2},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_warmup_steps": 3},
        {"ckpt_format": "torch", "save": "/saved"},
        {"ckpt_format": "torch_dist", "save": "/saved", "use_distributed_optimizer": True},
    ],
)
def test_what_needs_no_sends_and_gathers_no_shards_is_recovered(settings: dict[str, Any]) -> None:
    refuse_for_recovery("failures", SimpleNamespace(**settings))


MEETING = (
    {"expert_model_parallel_size": 8, "world_size": 16},
    {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 2, "world_size": 16},
    {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1}
    | {"world_size": 16},
    {"context_parallel_size": 2, "expert_model_parallel_size": 4, "world_size": 8},
    {"moe_router_load_balancing_type": "global_aux_loss"},
    {"moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"]},
)
APART_IN_FORWARDS = (
    {"expert_model_parallel_size": 8},
    {"expert_model_parallel_size": 8, "world_size": 32},
    {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1}
    | {"world_size": 32},
    {"context_parallel_size": 4, "expert_model_parallel_size": 4, "world_size": 16},
    {"num_experts": None, "expert_model_parallel_size": 8, "world_size": 16},
    {"moe_router_load_balancing_type": "aux_loss"},
)


@pytest.mark.parametrize("reroute", ["stragglers", "failures", "all"])
def test_experts_that_span_all_replicas_are_not_rerouted(reroute: str) -> None:
    common = {"num_experts": 8, "adaptra_reroute": reroute, "pipeline_model_parallel_size": 2, "cp_comm_type": "a2a"}
    for each in MEETING:
        with pytest.raises(UnsupportedFeatureError, match=f"^--adaptra-reroute {reroute} .*experts that span all"):
            refuse_arguments(SimpleNamespace(**common | each))
        refuse_arguments(SimpleNamespace(**common | each | {"adaptra_reroute": "off"}))
    for each in APART_IN_FORWARDS:
        refuse_arguments(SimpleNamespace(**common | each))


NOT_ROUTED: dict[str, tuple[dict[str, Any], str]] = {
    "scales of all": ({"fp8": "hybrid"}, "--fp8-recipe delayed"),
    "scales of a stage": ({"fp8": "hybrid", "tp_only_amax_red": True}, "--fp8-recipe delayed"),
    "largest logit": ({"qk_clip": True}, "--qk-clip"),
    "logged logit": ({"log_max_attention_logit": True}, "--qk-clip, --log-max-attention-logit"),
    "activations by order": ({"defer_embedding_wgrad_compute": True}, "--defer-embedding-wgrad-compute"),
    "teachers by order": ({"logits_load_dir": "/logits"}, "--logits-load-dir"),
    "logged by some": ({"dsa_indexer_loss_coeff": 0.01}, "--dsa-indexer-loss-coeff"),
    "experts by order": ({"moe_enable_routing_replay": True}, "--moe-enable-routing-replay"),
}
"""Settings with which no cell computes another's micro-batches."""


@pytest.mark.parametrize("reroute", ["stragglers", "failures", "all"])
@pytest.mark.parametrize("name", NOT_ROUTED)
def test_what_meets_or_goes_by_the_order_of_forwards_is_not_rerouted(reroute: str, name: str) -> None:
    settings, flag = NOT_ROUTED[name]
    with pytest.raises(UnsupportedFeatureError, match=f"^--adaptra-reroute {reroute} .*{flag}"):
        refuse_arguments(SimpleNamespace(**settings, adaptra_reroute=reroute, pipeline_model_parallel_size=2))
    with pytest.raises(UnsupportedFeatureError, match=f"^--adaptra-reroute does not run with .*{flag}"):
        refuse_for_rerouting(SimpleNamespace(**settings))


def test_other_recipes_and_data_are_rerouted() -> None:
    refuse_for_rerouting(SimpleNamespace(fp8="hybrid", fp8_recipe="tensorwise"))
    given = SimpleNamespace(adaptra_reroute="all", pipeline_model_parallel_size=2, fim_data=False)
    refuse_arguments(given)
    given.fim_data = True
    with pytest.raises(UnsupportedFeatureError, match="--fim-data"):
        refuse_arguments(given)


@pytest.mark.parametrize("reroute", ["stragglers", "failures", "all"])
@pytest.mark.parametrize("skips", [{"iterations_to_skip": [5]}, {"result_rejected_tracker_filename": "rejected"}])
def test_iterations_that_megatron_skips_are_not_rerouted(reroute: str, skips: dict[str, Any]) -> None:
    job = SimpleNamespace(adaptra_reroute=reroute, pipeline_model_parallel_size=2, **skips)
    with pytest.raises(UnsupportedFeatureError, match=f"^--adaptra-reroute {reroute} .*--iterations-to-skip"):
        refuse_arguments(job)
    refuse_arguments(SimpleNamespace(**vars(job) | {"adaptra_reroute": "off"}))
    refuse_arguments(SimpleNamespace(**vars(job) | dict.fromkeys(skips)))


def test_all_that_recovery_does_not_run_with_is_said_at_once() -> None:
    asked = {"num_experts": 8, "optimizer_cpu_offload": True, "adaptra_reroute": "failures"}
    settings = SimpleNamespace(**MEETING[0], **asked, pipeline_model_parallel_size=2)
    features = prospects_of(settings).features
    assert [each.name.rpartition(" with ")[2] for each in features if each.effect == "refused"] == [
        "experts that span all data-parallel replicas, or a global auxiliary loss",
        "--optimizer-cpu-offload",
    ]


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ({}, 4),
        ({"expert_model_parallel_size": 8}, 32),
        ({"num_experts": None, "expert_model_parallel_size": 8}, 4),
        ({"tensor_model_parallel_size": 4, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, 16),
        ({"context_parallel_size": 3, "expert_model_parallel_size": 2, "cp_comm_type": "a2a"}, 24),
    ],
)
def test_what_recovery_takes_at_least_is_said(sizes: dict[str, Any], ranks: int) -> None:
    """Three data-parallel ranks of two parts of a sequence each, and experts at two ranks, are joined as one."""
    asked = {"num_experts": 8, "adaptra_reroute": "failures", "pipeline_model_parallel_size": 2}
    (found,) = [each for each in prospects_of(SimpleNamespace(**asked | sizes)).features if "reroute" in each.name]
    assert (found.effect, f"two replicas, {ranks} ranks or more" in found.reason) == ("runs", True)


def test_every_refusal_of_recovery_is_tried() -> None:
    for each in RECOVERY:
        assert any(each.is_on(SimpleNamespace(**settings)) for settings, _ in LOST.values()), each.feature
    recovered: dict[str, Any]
    for recovered in (
        {},
        {"moe_router_enable_expert_bias": True, "use_precision_aware_optimizer": True},
        {"fp8": "e4m3", "fp8_recipe": "tensorwise"},
    ):
        refuse_for_recovery("failures", SimpleNamespace(**recovered))


APART: dict[str, tuple[Any, str]] = {
    "use_distributed_optimizer": (True, "--use-distributed-optimizer"),
    "num_experts": (4, "--num-experts"),
    "num_moe_experts": (4, "--num-experts"),
    "context_parallel_size": (2, "--context-parallel-size"),
    "overlap_grad_reduce": (True, "--overlap-grad-reduce"),
    "calculate_per_token_loss": (True, "--calculate-per-token-loss"),
    "fp16": (True, "--fp16"),
    "loss_scale": (128.0, "--fp16"),
    "rerun_mode": ("validate_results", "--rerun-mode disabled"),
    "exit_duration_in_mins": (5, "--exit-duration-in-mins"),
    "exit_signal_handler": (True, "--exit-signal-handler"),
    "rampup_batch_size": ([1, 1, 8], "--rampup-batch-size"),
    "check_weight_hash_across_dp_replicas_interval": (10, "--check-weight-hash-across-dp-replicas-interval"),
    "log_straggler": (True, "--log-straggler"),
    "optimizer": ("dist_muon", "--optimizer dist_muon"),
    "param_name_patterns_for_fp32_local_accumulation": (["all"], "--param-name-patterns-for-fp32-local-accumulation"),
    "optimizer_cuda_graph": (True, "--optimizer-cuda-graph"),
}
"""Settings with which replicas cannot make updates without each other."""


@pytest.mark.parametrize("name", APART)
def test_what_keeps_replicas_together_is_refused(name: str) -> None:
    value, flag = APART[name]
    settings = SimpleNamespace(**{name: value}, adaptra_sync_mode="auto", pipeline_model_parallel_size=1)
    with pytest.raises(UnsupportedFeatureError, match=f"^--adaptra-sync-mode auto does not run with .*{flag}"):
        refuse_arguments(settings)
    with pytest.raises(UnsupportedFeatureError, match="Or drop --adaptra-sync-mode$"):
        refuse_for_sync_mode("auto", SimpleNamespace(), settings)
    settings.adaptra_sync_mode = "ssgd"
    refuse_arguments(settings)


def test_every_refusal_of_replicas_apart_is_tried() -> None:
    refused = {
        name
        for name, (value, _) in APART.items()
        for each in SYNC_MODES
        if each.is_on(SimpleNamespace(**{name: value}))
    }
    assert refused == set(APART)
    assert all(
        any(each.is_on(SimpleNamespace(**{name: value})) for name, (value, _) in APART.items()) for each in SYNC_MODES
    )
    refuse_for_sync_mode("auto", SimpleNamespace())


def test_one_replica_is_refused() -> None:
    with pytest.raises(UnsupportedFeatureError, match="--adaptra-sync-mode auto is for replicas .* the job has 1 "):
        refuse_to_split("auto", 1)


LAYERS = 3


@pytest.mark.parametrize(
    ("settings", "spans"),
    [
        ({}, 0),
        ({"recompute_granularity": "selective"}, 0),
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, 3),
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}, 2),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 0}, 0),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}, 2),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 9}, 3),
        ({"recompute_granularity": "full", "recompute_layer_ids": [0, 7]}, 2),
    ],
)
def test_spans_of_layers_that_are_recomputed(settings: dict[str, Any], spans: int) -> None:
    class Layer(torch.nn.Module, BaseTransformerLayer):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

    chunks = [torch.nn.Sequential(Layer()), torch.nn.Sequential(*(Layer() for _ in range(LAYERS)))]
    assert recomputed_spans(Model(**settings).config, chunks) == spans


def test_a_config_of_parallelism_alone_is_enough() -> None:
    """As in Megatron's own tests of schedules; what it does not have is not asked for."""
    config = ModelParallelConfig(pipeline_model_parallel_size=4, pipeline_dtype=torch.float)
    assert recomputed_spans(config, [torch.nn.Linear(4, 1)]) == 0


@pytest.mark.parametrize(("interleaved", "length"), [(False, 16), (True, 32)])
def test_stock_ignores_the_decoders_length_where_chunks_are_interleaved(interleaved: bool, length: int) -> None:
    alone = SimpleNamespace(size=lambda: 1)
    config = SimpleNamespace(variable_seq_lengths=False, hidden_size=8, sequence_parallel=False)
    arguments = {"seq_length": 32, "micro_batch_size": 2, "decoder_seq_length": 16}
    groups = SimpleNamespace(tp=alone, cp=alone)
    assert message_shape(arguments, config, groups, interleaved=interleaved) == (length, 2, 8)


def test_chunks_are_alike_by_their_layers() -> None:
    class Layer(torch.nn.Module, BaseTransformerLayer):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

    one, two, predicting = (torch.nn.Sequential(*(Layer() for _ in range(count))) for count in (1, 2, 2))
    predicting.mtp = torch.nn.Linear(1, 1)
    wrapped = torch.nn.Sequential(predicting)
    assert work_of([one, two, wrapped]) == ("1 layers", "2 layers", "2 layers, mtp")
    first, last = (torch.nn.Sequential(Layer()) for _ in range(2))
    first.pre_process, first.post_process = True, False
    last.pre_process, last.post_process = False, True
    assert work_of([first, last]) == ("1 layers, embedding", "1 layers, loss")
