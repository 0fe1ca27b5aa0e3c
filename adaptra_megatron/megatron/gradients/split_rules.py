# SPDX-License-Identifier: Apache-2.0
"""Decide which linear layers have their backward split, by one table.

The table applies to the layers of a job, and to the layers that the job's settings will create. Imports neither torch
nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from packaging.version import Version

SPLIT = ("Linear", "LayerNormLinear", "GroupedLinear")
"""Classes of Transformer Engine that delay weight gradients."""
GROUPED_SINCE = Version("2.8")
NATIVE = "native"


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """Facts that decide whether the backward of a layer is split. The defaults describe a layer that is split."""

    kind: str
    """Class of Transformer Engine, or NATIVE for Megatron's own layers."""
    version: Version | None = None
    """Version of Transformer Engine; None: one that supports everything."""
    frozen: bool = False
    """True if its weight is not trained."""
    delays: bool = True
    """True if Transformer Engine has delayed weight gradients for its class."""
    built_delayed: bool = False
    reduces_within_weight_gradient: bool = False
    in_userbuffers: bool = False
    """True if the inputs of its weight gradient are gathered into a buffer that other layers share."""
    quantized: bool = False
    offloaded: bool = False
    fused: bool = True
    """True if a kernel adds its weight gradient to the main gradient."""
    parts: bool = False
    """True if its weight consists of several parameters."""
    sharded: bool = False
    """True if its weight is gathered for each use."""
    one_of_experts: bool = False
    """True if all experts' weights are one parameter."""
    bias: bool = False
    bias_elsewhere: bool = False
    """True if another operation adds its bias."""
    deferred: bool = False
    """True if Megatron computes its weight gradients in its own queue (--defer-embedding-wgrad-compute)."""
    captured: bool = False
    """True if it is part of a CUDA graph."""
    looked_up: bool = False
    """True if its weight is also an embedding's in the same chunk."""

    @property
    def grouped(self) -> bool:
        return self.kind == "GroupedLinear"


class SplitRule(NamedTuple):
    """One reason to run a layer's backward whole."""

    applies: Callable[[LayerFacts], bool]
    reason: str
    remedy: str


RULES = (
    SplitRule(
        lambda f: f.frozen,
        "frozen, so that there is no weight gradient; those of adapters, which are small, are split by the same rules",
        "none",
    ),
    SplitRule(
        lambda f: f.deferred, "Megatron delays its weight gradients itself", "drop --defer-embedding-wgrad-compute"
    ),
    SplitRule(
        lambda f: f.captured,
        "captured as a CUDA graph, whose backward has its weight gradient",
        "--cuda-graph-impl none, or a --cuda-graph-scope without it",
    ),
    SplitRule(
        lambda f: f.looked_up,
        "an embedding looks its weight up, too, and autograd adds up both gradients",
        "--untie-embeddings-and-output-weights",
    ),
    SplitRule(
        lambda f: f.kind not in (*SPLIT, NATIVE),
        "not a single linear layer",
        "the default layer specifications, without fused operations (--use-transformer-engine-op-fuser)",
    ),
    SplitRule(
        lambda f: not f.delays,
        "this Transformer Engine has no delayed weight gradients; they came with 2.3",
        "Transformer Engine 2.3 or later",
    ),
    SplitRule(
        lambda f: f.built_delayed,
        "built with delay_wgrad_compute, so Transformer Engine computes its weight gradients",
        "drop --delay-wgrad-compute",
    ),
    SplitRule(
        lambda f: f.reduces_within_weight_gradient,
        "--tp-comm-overlap reduces its input gradient while its weight gradient is computed",
        "--disable-tp-comm-bulk-wgrad",
    ),
    SplitRule(
        lambda f: f.quantized and f.in_userbuffers,
        "--tp-comm-overlap, quantized: a buffer of other layers, too, has what the weight gradient is made of",
        "drop --tp-comm-overlap",
    ),
    SplitRule(
        lambda f: f.offloaded and f.kind != NATIVE,
        "activations are offloaded to the CPU",
        "drop --cpu-offloading-num-layers, or --fine-grained-activation-offloading",
    ),
    SplitRule(
        lambda f: f.grouped and f.version is not None and f.version < GROUPED_SINCE,
        "before Transformer Engine 2.8 delaying leaves hooks of DistributedDataParallel without a gradient",
        "Transformer Engine 2.8 or later",
    ),
    SplitRule(
        lambda f: f.grouped and not f.fused,
        "without gradient accumulation fusion autograd gets weight gradients before they are computed",
        "drop --no-gradient-accumulation-fusion",
    ),
    SplitRule(lambda f: f.parts, "its weight is split into several parameters", "none"),
    SplitRule(lambda f: f.sharded, "its weight is sharded and gathered for each use", "none"),
    SplitRule(lambda f: f.one_of_experts, "its experts share one parameter, which is experimental", "none"),
    SplitRule(
        lambda f: f.bias_elsewhere and f.kind != NATIVE,
        "its bias is added elsewhere, whose gradient backward_dw would look for",
        "--disable-bias-linear",
    ),
    SplitRule(
        lambda f: f.kind != NATIVE and f.bias and (f.grouped or f.quantized),
        "quantized or grouped, and with a bias, whose gradient then comes at B",
        "--disable-bias-linear",
    ),
)


def rule_for(facts: LayerFacts) -> SplitRule | None:
    """Return the first rule that keeps the layer's backward whole; None if it is split."""
    return next((rule for rule in RULES if rule.applies(facts)), None)


class Expected(NamedTuple):
    """A kind of linear layer that a job will have."""

    name: str
    number: int
    """Number of such layers in the whole model; per layer if the number of layers is unknown."""
    facts: LayerFacts


def expected_layers(settings: Any) -> list[Expected]:
    """Return the linear layers of a GPT with these settings. Missing settings default as on Megatron-LM's
    command line.
    """

    def setting(name: str, default: Any = None) -> Any:
        value = getattr(settings, name, None)
        return default if value is None else value

    predicting = int(setting("mtp_num_layers", 0))
    layers = int(setting("num_layers", 1)) + predicting
    experts = bool(setting("num_moe_experts", setting("num_experts", 0)))
    found = [*_attention(setting), *(_experts(setting) if experts else _dense(setting))]
    numbered = [Expected(name, layers, facts) for name, facts in found]
    if predicting:
        joining = LayerFacts(kind="Linear", **_common(setting, bias=False))
        numbered.append(Expected("MTP's joining layer", predicting, joining))
    if setting("transformer_impl", "transformer_engine") == "local":
        numbered = [each._replace(facts=LayerFacts(kind=NATIVE)) for each in numbered]
    numbered.append(Expected("output layer", 1, _output(setting)))
    graphed = _captured(setting)
    numbered = [each._replace(facts=replace(each.facts, captured=graphed(each.name))) for each in numbered]
    if setting("frozen_layers", False):
        return [each._replace(facts=replace(each.facts, frozen=True)) for each in numbered]
    return numbered


_Setting = Callable[..., Any]


def _attention(setting: _Setting) -> Iterator[tuple[str, LayerFacts]]:
    column, row = _parallel(setting)
    if setting("multi_latent_attention", False):
        for name in ("q_down", "q_up", "kv_down", "kv_up"):
            yield name, LayerFacts(kind="Linear", **_common(setting, bias=False))
    else:
        qkv_bias = bool(setting("add_qkv_bias", False)) or bool(setting("add_bias_linear", True))
        yield "qkv", LayerFacts(kind="LayerNormLinear", **_common(setting, bias=qkv_bias), **column)
    yield "proj", LayerFacts(kind="Linear", **_common(setting, elsewhere=True), **row)


def _dense(setting: _Setting) -> Iterator[tuple[str, LayerFacts]]:
    column, row = _parallel(setting)
    fused = bool(setting("use_transformer_engine_op_fuser", False))
    common = _common(setting, elsewhere=True)
    yield "fc1", LayerFacts(kind="fused operations" if fused else "LayerNormLinear", **common, **column)
    yield "fc2", LayerFacts(kind="fused operations" if fused else "Linear", **common, **row)


def _experts(setting: _Setting) -> Iterator[tuple[str, LayerFacts]]:
    grouped = bool(setting("moe_grouped_gemm", False))
    kind = "GroupedLinear" if grouped else "Linear"
    if setting("use_transformer_engine_op_fuser", False):
        kind = "fused operations"
    one = bool(setting("moe_single_grouped_weight", False))
    for name in ("experts' fc1", "experts' fc2"):
        yield name, LayerFacts(kind=kind, one_of_experts=one, **_common(setting, elsewhere=not grouped))
    if setting("moe_shared_expert_intermediate_size"):
        for name in ("shared experts' fc1", "shared experts' fc2"):
            yield name, LayerFacts(kind="Linear", **_common(setting, elsewhere=True))


_SHARED = ("shared experts' fc1", "shared experts' fc2")


def _captured(setting: _Setting) -> Callable[[str], bool]:
    """Return a test of whether Transformer Engine captures a layer of some name as part of a CUDA graph. Attention that
    delays its weight gradients counts with any part: they are left whole, see `combined_computation`."""
    if setting("cuda_graph_impl", "none") != "transformer_engine" and not setting("external_cuda_graph", False):
        return lambda name: False
    given = setting("cuda_graph_modules") or setting("cuda_graph_scope") or []
    scope = {str(each).rpartition(".")[2] for each in (given.split(",") if isinstance(given, str) else given)} - {
        "full"
    }
    inside = {
        name
        for part, names in {
            "attn": ("qkv", "proj", "q_down", "q_up", "kv_down", "kv_up"),
            "mlp": ("fc1", "fc2"),
            "moe": ("experts' fc1", "experts' fc2", *_SHARED),
            "moe_router": () if setting("moe_shared_expert_overlap", False) else _SHARED,
        }.items()
        if part in scope or (part == "attn" and setting("delay_wgrad_compute", False))
        for name in names
    }
    return lambda name: name in inside if scope else name not in ("output layer", "MTP's joining layer")


def _output(setting: _Setting) -> LayerFacts:
    shared = setting("share_embeddings_and_output_weights")
    tied = not setting("untie_embeddings_and_output_weights", False) if shared is None else bool(shared)
    fused_loss = setting("cross_entropy_fusion_impl") == "linear" and setting("cross_entropy_loss_fusion", False)
    return LayerFacts(
        kind="output layer and loss in one operation" if fused_loss else NATIVE,
        deferred=bool(setting("defer_embedding_wgrad_compute", False)),
        looked_up=tied and bool(setting("mtp_num_layers", 0)),
    )


def _common(setting: _Setting, *, bias: bool | None = None, elsewhere: bool = False) -> dict[str, Any]:
    """Return the facts that all layers of Transformer Engine share. `elsewhere`: Megatron adds their biases itself."""
    has_bias = bool(setting("add_bias_linear", True)) if bias is None else bias
    return {
        "quantized": bool(setting("fp8") or setting("fp4")),
        "offloaded": any(
            setting(name)
            for name in ("cpu_offloading", "cpu_offloading_num_layers", "fine_grained_activation_offloading")
        ),
        "fused": bool(setting("gradient_accumulation_fusion", True)),
        "bias": has_bias,
        "bias_elsewhere": has_bias and elsewhere,
    }


def _parallel(setting: _Setting) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the facts by which --tp-comm-overlap changes column-parallel and row-parallel layers."""
    if not setting("tp_comm_overlap", False) or int(setting("tensor_model_parallel_size", 1)) < 2:
        return {}, {}
    scattered = bool(setting("tp_comm_overlap_rs_dgrad", False))
    column = {
        "reduces_within_weight_gradient": bool(setting("tp_comm_bulk_wgrad", True)) and not scattered,
        "in_userbuffers": bool(setting("tp_comm_bulk_dgrad", True)) and not scattered,
    }
    return column, {"in_userbuffers": bool(setting("tp_comm_overlap_ag", True))}
