# SPDX-License-Identifier: Apache-2.0
"""Megatron's own wrappers of Transformer Engine's layers, made over a stand-in of it, and its native fused layers.

That they can be made at all shows that the stand-in has the signatures which Megatron calls.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from support import stand_in_te
from support.fresh_process import in_fresh_process

WIDTH, ROWS, MICRO_BATCHES = 8, 6, 3


@in_fresh_process
def test_wrappers_split_under_distributed_data_parallel_with_overlapped_reduction() -> None:
    stand_in_te.install()
    from testing.megatron.megatron_on_cpu import cpu_megatron

    with cpu_megatron(with_fused_weight_gradient=True):
        _check_signatures()
        _join_job_of_one()
        try:
            for fused, fp8 in ((False, None), (True, None), (True, "hybrid")):
                expected, actual = _train(fused, fp8, split=False), _train(fused, fp8, split=True)
                assert expected.keys() == actual.keys()
                assert all(torch.equal(expected[name], actual[name]) for name in expected)
                assert all(gradient.abs().sum() > 0 for gradient in actual.values())
        finally:
            torch.distributed.destroy_process_group()


def _check_signatures() -> None:
    """What Megatron passes when it delays weight gradients itself, and calls afterwards."""
    from megatron.core.extensions import transformer_engine as megatrons

    wrapped = {megatrons.TELinear: "Linear", megatrons.TELayerNormColumnParallelLinear: "LayerNormLinear"}
    for wrapper, name in {**wrapped, megatrons.TEGroupedLinear: "GroupedLinear"}.items():
        layer = getattr(stand_in_te, name)
        assert issubclass(wrapper, layer)
        assert 'extra_kwargs["delay_wgrad_compute"]' in inspect.getsource(wrapper.__init__)
        assert inspect.signature(layer).parameters["delay_wgrad_compute"].default is False
        assert "super().backward_dw()" in inspect.getsource(wrapper.backward_dw)
        assert list(inspect.signature(layer.backward_dw).parameters) == ["self"]


def _join_job_of_one() -> None:
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)


def _train(fused: bool, fp8: str | None, *, split: bool) -> dict[str, torch.Tensor]:
    """Main gradients by name, after all forwards, then backwards, then weight gradients where they are split."""
    from megatron.core.tensor_parallel import layers

    from adaptra_megatron.megatron.gradients.linear_wgrad import DelayedGradient, WeightGradientQueue
    from adaptra_megatron.megatron.gradients.te_wgrad import EngineLayers

    queue = WeightGradientQueue(layers)
    linear = layers.LinearWithGradAccumulationAndAsyncCommunication
    stock, linear.backward = linear.backward, staticmethod(queue.wrap(linear.backward, linear.forward))
    exchanged = EngineLayers(queue)
    try:
        model = _model(fused, fp8)
        if split:
            exchanged.split([model], model.config)
        losses = [_loss(model, micro_batch) for micro_batch in range(MICRO_BATCHES)]
        left: list[list[DelayedGradient]] = []
        with model.no_sync():
            for loss in losses:
                if not split:
                    loss.backward()
                    continue
                with queue.collect() as gradients:
                    loss.backward()
                left.append(gradients)
            for gradients in left:
                assert len(gradients) == 3
                queue.compute(gradients)
        assert queue.computed == 3 * len(left)
        model.start_grad_sync()
        model.finish_grad_sync()
        return {name: parameter.main_grad for name, parameter in model.named_parameters()}
    finally:
        exchanged.restore()
        linear.backward = staticmethod(stock)


def _model(fused: bool, fp8: str | None) -> Any:
    """A native layer, and one of Transformer Engine's of each kind that is in every layer of a model."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TERowParallelLinear
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=1,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=fused,
        fp8=fp8,
    )
    torch.manual_seed(1)
    init = torch.nn.init.normal_
    shared = {"config": config, "init_method": init, "bias": False, "skip_bias_add": False, "is_expert": False}
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(
        [
            TELayerNormColumnParallelLinear(WIDTH, WIDTH, gather_output=False, **shared),
            TERowParallelLinear(WIDTH, WIDTH, input_is_parallel=True, **shared),
            ColumnParallelLinear(WIDTH, WIDTH, gather_output=False, **shared),
        ]
    )
    for layer in model.layers:
        layer.fp8 = fp8 is not None  # as Transformer Engine sets it where fp8_autocast is on
    ddp = DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=False)
    return DistributedDataParallel(config, ddp, model)


def _loss(model: Any, micro_batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 + micro_batch)
    hidden = torch.randn(ROWS, 1, WIDTH, generator=generator, requires_grad=True)
    for layer in model.module.layers:
        hidden = layer(hidden.tanh())[0]
    return hidden.square().sum()
