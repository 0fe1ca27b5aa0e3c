# SPDX-License-Identifier: Apache-2.0
"""Ranks of the training script that meet the other replicas inside of actions: `meeting_ranks.py WHERE ARGUMENTS...`.

WHERE: `loss`, as scripts do that average losses for the log; `forward` and `backward`, as layers do whose weights are
spread over replicas; `once`, as layers do that set something up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from testing.megatron.megatron_on_cpu import install


def meet(tensor: Any) -> None:
    """Gather a tensor from all replicas."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group()
    gathered = tensor.new_empty(group.size() * tensor.numel())
    dist.all_gather_into_tensor(gathered, tensor.detach().reshape(-1), group=group)
    assert torch.isfinite(gathered).all()


def average_loss(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    """A forward_step whose loss function meets the other replicas."""

    def step(*given: Any) -> tuple[Any, Callable[..., Any]]:
        output, loss_function = forward_step(*given)

        def averaged(losses: Any) -> Any:
            found = loss_function(losses)
            meet(found[0])
            return found

        return output, averaged

    return step


def main() -> None:
    install()
    from testing.training import train as training
    from testing.training.training_arguments import parse_arguments

    where = sys.argv.pop(1)
    build = training.build_model
    met: list[None] = []

    def built(*given: Any) -> Any:
        model = build(*given)
        layer = model[0].module.decoder.layers[0]
        if where == "backward":
            layer.register_forward_hook(lambda module, given, output: output[0].register_hook(meet) and None)
        elif where in ("forward", "once"):

            def gather(module: Any, given: Any) -> None:
                if where == "forward" or not met:
                    met.append(None)
                    meet(next(module.parameters()))

            layer.register_forward_pre_hook(gather)
        return model

    training.build_model = built
    args = parse_arguments(["--emulate-cpu", "--distributed-backend", "gloo", *sys.argv[1:]])
    if where == "loss":
        training.Trainer._forward_step = average_loss(training.Trainer._forward_step)
    sys.stdout.write(f"losses {training.train(args).losses}\n")


if __name__ == "__main__":
    main()
