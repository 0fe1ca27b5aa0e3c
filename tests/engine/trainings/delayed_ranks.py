# SPDX-License-Identifier: Apache-2.0
"""One rank of trainings whose linear layers are Megatron's wrappers of those of a stand-in of Transformer Engine: of
variants, or of a script.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from support import stand_in_te

stand_in_te.install()  # before Megatron is imported

from testing.megatron.megatron_on_cpu import install  # noqa: E402

install(with_fused_weight_gradient=True)

import torch  # noqa: E402
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # noqa: E402

from adaptra_megatron.tools.local_ranks.launch_ranks import run_script  # noqa: E402
from testing.jobs import variants  # noqa: E402
from testing.replacing import Replaced, Replacement  # noqa: E402
from testing.training import model  # noqa: E402

ENGINES = {ColumnParallelLinear: TEColumnParallelLinear, RowParallelLinear: TERowParallelLinear}
SMALL = 0.1
"""Of the weights that the stand-in makes, so that losses stay finite."""


def with_engine(specification: Any) -> Any:
    """Put Transformer Engine's linear layers in place of Megatron's own."""
    for owner in (specification, getattr(specification, "submodules", None)):
        for name, value in vars(owner).items() if owner is not None else ():
            if isinstance(value, type) and value in ENGINES:
                setattr(owner, name, ENGINES[value])
            elif hasattr(value, "__dict__") and not isinstance(value, type):
                with_engine(value)
    return specification


def main() -> None:
    local_spec, build = model.get_gpt_layer_local_spec, model._build_chunk

    def spec(**keywords: Any) -> Any:
        return with_engine(local_spec(**keywords))

    def chunk(*given: Any) -> torch.nn.Module:
        made = build(*given)
        for layer in made.modules():
            if isinstance(layer, stand_in_te.TransformerEngineBaseModule):
                for weight in layer.parameters(recurse=False):
                    weight.data.mul_(SMALL)
        return made

    reason = "layers of Transformer Engine"
    with Replaced(
        [
            Replacement(model, "get_gpt_layer_local_spec", spec, reason),
            Replacement(model, "_build_chunk", chunk, reason),
        ]
    ):
        given = sys.argv[1:]
        run_script(given) if given[0].endswith(".py") else variants._main(given)


if __name__ == "__main__":
    main()
