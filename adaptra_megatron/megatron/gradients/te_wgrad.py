# SPDX-License-Identifier: Apache-2.0
"""Split the backward of Transformer Engine's linear layers by their own delayed weight gradients.

Source: transformer_engine/pytorch/module, releases 2.3 to 2.18. A layer asks its `wgrad_store` in each backward whether
the weight gradient is delayed, puts it there if so, and computes it in `backward_dw()`. Megatron sets this when layers
are created (`delay_wgrad_compute`), for every backward alike and only together with combined 1F1B. Here the store of
each layer is replaced by one that delays only while a split backward runs. So whole and split backwards mix, and models
may be created before --adaptra takes effect.

Nothing here imports Transformer Engine: its layers exist only if another import has created them.
"""

from __future__ import annotations

import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from packaging.version import Version

from adaptra_megatron.common.log import is_first_rank, logger_of
from adaptra_megatron.megatron.gradients.linear_wgrad import Gradients, WeightGradientQueue, current_graph_task
from adaptra_megatron.megatron.gradients.split_rules import SPLIT, LayerFacts, rule_for
from adaptra_megatron.megatron.refusals import offloads

logger = logger_of(__name__)

_PACKAGE = "transformer_engine"
_IN_USERBUFFERS = ("ub_bulk_dgrad", "ub_overlap_ag_dgrad")
"""Attributes of layers: their input, or their output's gradient, is gathered into a buffer that layers share."""
_DELAYED_PARAMETER = re.compile(r"(weight|bias)\d*")
"""Names of parameters whose gradients `backward_dw` computes. Norms and split parameters have other names."""


@dataclass
class EngineWeightGradient:
    """Gradients of one layer's weights (and biases) for one micro-batch, as the layer left them."""

    store: CollectingStore
    tensors: list[Any]
    function: Callable[..., Any]
    graph_task: int = field(default_factory=current_graph_task)

    @property
    def owner(self) -> object:
        return self.store

    def compute(self) -> Gradients:
        return self.store.compute(self.tensors, self.function)


class CollectingStore:
    """Replacement of one layer's `wgrad_store`, with the methods of Transformer Engine's WeightGradStore that layers
    use.
    """

    def __init__(self, layer: Any, base: Any, queue: WeightGradientQueue) -> None:
        """`base`: Transformer Engine's class of `layer`."""
        self.replaced = layer.wgrad_store
        self._layer = layer
        self._base = base
        self._queue = queue
        self._own = type(layer.wgrad_store)(delay_wgrad_compute=True)
        self._computes = False

    @property
    def context(self) -> Any:
        """Return the gradients that wait for `backward_dw`: only set within `compute`."""
        return self._own.context

    def delay_wgrad_compute(self) -> bool:
        """Return whether weight gradients of the present backward are delayed.

        In forwards that will have a backward it is always True: newer releases pass the store to the backward only if
        it is.
        """
        return self._computes or self._queue.collects or torch.is_grad_enabled()

    def put(self, tensor_list: list[Any], func: Callable[..., Any]) -> None:
        """Queue `func(*tensor_list)`, which computes the weight gradient. Called by the layer's backward instead of
        computing it.

        The tensors are the gathered input and the gathered gradient of the output. With --tp-comm-overlap one of them
        may be in a buffer that the next layer gathers into: it is copied.
        """
        for index, switch in enumerate(_IN_USERBUFFERS):
            if getattr(self._layer, switch, False):
                tensor_list[index] = tensor_list[index].clone()
        tensor_list[:] = [self._queue.owned(each) for each in tensor_list]
        self._queue.add(EngineWeightGradient(self, tensor_list, func))
        for name, parameter in self._parameters():
            # With fusion, weights get a stand-in from Transformer Engine itself.
            if not self._layer.fuse_wgrad_accumulation or name.startswith("bias"):
                self._queue.expect_none(parameter)

    def pop(self) -> Any:
        """Run the queued computation. Called by the layer's `backward_dw`."""
        return self._own.pop()

    def compute(self, tensor_list: list[Any], func: Callable[..., Any]) -> Gradients:
        """Run one `backward_dw` of the layer; return the gradients that it leaves to a hook of
        DistributedDataParallel.
        """
        before = [(parameter, parameter.grad) for _name, parameter in self._parameters()]
        for parameter, _gradient in before:
            parameter.grad = None  # releases differ in whether one that is there is kept or overwritten
        self._own.put(tensor_list, func)
        self._computes = True
        try:
            # Not the layer's own: Megatron's does nothing unless its configuration says that all backwards delay.
            self._base.backward_dw(self._layer)
        finally:
            self._computes = False
        gradients = [(parameter, parameter.grad) for parameter, _gradient in before if parameter.grad is not None]
        for parameter, gradient in before:
            parameter.grad = gradient
        return gradients

    def _parameters(self) -> list[tuple[str, Any]]:
        return [
            (name, parameter)
            for name, parameter in self._layer.named_parameters(recurse=False)
            if parameter.requires_grad and _DELAYED_PARAMETER.fullmatch(name)
        ]


class EngineLayers:
    """Layers of Transformer Engine in this process whose store was replaced."""

    def __init__(self, queue: WeightGradientQueue) -> None:
        self._queue = queue
        self._layers: list[Any] = []

    def split(self, model_chunks: Sequence[torch.nn.Module], config: Any) -> None:
        """Make the backwards of all eligible layers splittable; one log line lists the split and the whole ones.

        `config`: Megatron's TransformerConfig. Layers that are split already stay so.
        """
        split: Counter[str] = Counter()
        whole: Counter[str] = Counter()
        layers: list[Any] = [module for model in model_chunks for module in model.modules()]
        captured = set(captured_modules(layers, config))
        for layer in layers:
            base = _class_of_engine(layer)
            if base is None or isinstance(getattr(layer, "wgrad_store", None), CollectingStore):
                continue
            reason = why_whole(layer, base, config, captured=layer in captured)
            if reason is not None:
                whole[f"{base.__name__} ({reason})"] += 1
                continue
            layer.wgrad_store = CollectingStore(layer, base, self._queue)
            self._layers.append(layer)
            split[base.__name__] += 1
        if split or whole:
            level = logging.INFO if is_first_rank() else logging.DEBUG
            text = "backwards of Transformer Engine's layers: split %s; whole %s"
            logger.log(level, text, _listed(split), _listed(whole))

    def restore(self) -> None:
        """Restore the original store of every layer."""
        for layer in self._layers:
            layer.wgrad_store = layer.wgrad_store.replaced
        self._layers.clear()


def captured_modules(layers: Sequence[torch.nn.Module], config: Any) -> Iterator[torch.nn.Module]:
    """Iterate over the modules that Transformer Engine captures as parts of CUDA graphs."""
    if getattr(config, "cuda_graph_impl", None) == "transformer_engine":
        for layer in layers:
            parts = getattr(layer, "_get_submodules_under_cudagraphs", None)
            for part in () if parts is None else parts():
                yield from part.modules()


def why_whole(layer: Any, base: Any, config: Any, *, captured: bool = False) -> str | None:
    """Return why the backward of `layer` is not split; None if it is. `base`: Transformer Engine's class of
    the layer. `captured`: see LayerFacts.
    """
    rule = rule_for(replace(facts_of(layer, base, config), captured=captured))
    return None if rule is None else rule.reason


def facts_of(layer: Any, base: Any, config: Any) -> LayerFacts:
    """Return the facts that decide whether the backward of `layer` is split. `base`: Transformer Engine's class of the
    layer.
    """
    if base.__name__ not in SPLIT:
        return LayerFacts(kind=base.__name__)
    if getattr(layer, "wgrad_store", None) is None or not hasattr(base, "backward_dw"):
        return LayerFacts(kind=base.__name__, delays=False)
    weights = {name: parameter for name, parameter in layer.named_parameters(recurse=False) if parameter.dim() > 1}
    quantized = (getattr(config, "fp8", None), getattr(config, "fp4", None), getattr(layer, "te_quant_params", None))
    return LayerFacts(
        kind=base.__name__,
        version=Version(sys.modules[_PACKAGE].__version__),
        frozen=not any(weight.requires_grad for weight in weights.values()),
        built_delayed=layer.wgrad_store.delay_wgrad_compute(),
        reduces_within_weight_gradient=getattr(layer, "ub_bulk_wgrad", False),
        in_userbuffers=any(getattr(layer, switch, False) for switch in _IN_USERBUFFERS),
        quantized=any(quantized),
        offloaded=getattr(config, "cpu_offloading", False) or offloads(config),
        fused=layer.fuse_wgrad_accumulation,
        parts=not all(map(_DELAYED_PARAMETER.fullmatch, weights)),
        sharded=any(getattr(weight, "is_distributed_weight", False) for weight in weights.values()),
        one_of_experts=getattr(layer, "single_grouped_weight", False) or getattr(layer, "single_grouped_bias", False),
        bias=layer.use_bias,
        bias_elsewhere=layer.use_bias and (not layer.apply_bias or getattr(layer, "gemm_bias_unfused_add", False)),
    )


def _class_of_engine(layer: Any) -> Any:
    """Return Transformer Engine's class that `layer` derives from, if that has weight gradients; else None."""
    if _PACKAGE not in sys.modules or not any(p.dim() > 1 for p in layer.parameters(recurse=False)):
        return None
    for base in type(layer).__mro__:
        if base.__module__.split(".")[0] == _PACKAGE:
            return base
    return None


def _listed(layers: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in layers.items()) or "none"
