# SPDX-License-Identifier: Apache-2.0
"""Functions with the parameters of each release are called as they ask for it. All else: docs/versions.md."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import enums, parallel_state
from megatron.core.pipeline_parallel import schedules

from adaptra_megatron.megatron import compat

SCHEDULE = "forward_backward_pipelining_without_interleaving"
GETTERS = {
    "tp": "get_tensor_model_parallel_group",
    "cp": "get_context_parallel_group",
    "pp": "get_pipeline_model_parallel_group",
    "embd": "get_embedding_group",
    "pos_embd": "get_position_embedding_group",
    "dp_cp": "get_data_parallel_group",
    "tp_dp_cp": "get_tensor_and_data_parallel_group",
}


def of_0_14(*, model: Any, p2p_communicator: Any = None, grad_finalize_pgs: Any = None) -> None:
    """A schedule's parameters, as far as they differ."""


def of_0_15(*, model: Any, p2p_communicator: Any = None, pg_collection: Any = None) -> None:
    """A schedule's parameters, as far as they differ."""


def of_0_16(*, model: Any, p2p_communicator: Any = None, pg_collection: Any = None, force_all_reduce: Any = 0) -> None:
    """A schedule's parameters, as far as they differ."""


@pytest.mark.parametrize(
    ("schedule", "keywords"),
    [
        (of_0_14, {"grad_finalize_pgs": "groups"}),
        (of_0_15, {"pg_collection": "groups"}),
        (of_0_16, {"pg_collection": "groups", "force_all_reduce": True}),
    ],
)
def test_gradients_are_finalized_with_the_keywords_of_the_schedule(
    monkeypatch: pytest.MonkeyPatch, schedule: Any, keywords: dict[str, Any]
) -> None:
    monkeypatch.setattr(schedules, SCHEDULE, schedule)
    calls: list[Any] = []
    config = SimpleNamespace(finalize_model_grads_func=lambda *given, **more: calls.append((given, more)))
    compat.finalize_gradients(config, ["chunk"], None, "groups", force=True)  # type: ignore[list-item]
    assert calls == [((["chunk"], None), keywords)]
    assert compat.groups_keyword() in keywords


@pytest.mark.parametrize("with_type", [True, False])
def test_backward_step_gets_the_model_type_where_it_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, with_type: bool
) -> None:
    def until_0_16(input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, model_type: Any, config: Any) -> Any:
        return input_tensor, output_tensor, output_tensor_grad, model_type, config

    def from_0_17(input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, config: Any) -> Any:
        return input_tensor, output_tensor, output_tensor_grad, config

    monkeypatch.setattr(schedules, "backward_step", until_0_16 if with_type else from_0_17)
    model = torch.nn.Linear(1, 1)
    model.model_type = enums.ModelType.encoder_or_decoder  # type: ignore[assignment]
    returned: Any = compat.backward_step(model, "in", "out", "gradient", "config")  # type: ignore[arg-type]
    kind = (enums.ModelType.encoder_or_decoder,) if with_type else ()
    assert returned == ("in", "out", "gradient", *kind, "config")


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, getter in GETTERS.items():
        monkeypatch.setattr(parallel_state, getter, lambda *_, name=name, **__: f"group {name}")


@pytest.mark.usefixtures("groups")
def test_default_groups_are_those_that_stock_takes() -> None:
    made = compat.default_groups()
    assert {name: getattr(made, name) for name in GETTERS} == {name: f"group {name}" for name in GETTERS}


def test_where_megatron_makes_the_default_groups_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "_build_default_pg_collection", lambda: "stock's own", raising=False)
    assert compat.default_groups() == "stock's own"


def test_releases_without_the_type_have_no_encoder_decoder_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat.enums, "ModelType", SimpleNamespace(encoder_or_decoder=1))
    assert not compat.is_encoder_decoder(torch.nn.Linear(1, 1))


def test_a_weight_is_sharded_only_where_the_layer_says_so() -> None:
    assert [compat.has_sharded_weight(SimpleNamespace(gtp_remat_size=size)) for size in (1, 2)] == [False, True]
    assert not compat.has_sharded_weight(SimpleNamespace())
