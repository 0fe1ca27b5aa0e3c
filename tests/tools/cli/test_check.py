# SPDX-License-Identifier: Apache-2.0
"""`adaptra check`: verdicts by the tables that the run applies, exit statuses, and what is no input."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adaptra_megatron.megatron.feature_refusals import refuse_arguments
from adaptra_megatron.megatron.job_settings import settings_of_command_line, settings_of_objects
from adaptra_megatron.megatron.prospects import prospects_of
from adaptra_megatron.megatron.refusals import UnsupportedFeatureError
from adaptra_megatron.tools.cli import check_command as check
from adaptra_megatron.tools.cli.main import main

_RECIPES = Path(__file__).parents[4] / "shared" / "data" / "recipes" / "recipes.json"
RECIPES = Path(os.environ.get("ADAPTRA_RECIPES", _RECIPES))
PP = {"pipeline_model_parallel_size": 4, "num_layers": 8, "add_bias_linear": False}
LINE = ("pretrain_gpt.py", "--pipeline-model-parallel-size", "4", "--disable-bias-linear")


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    """Exit status, and the JSON on stdout."""
    status = main(["check", *arguments])
    return status, json.loads(capsys.readouterr().out)


def judged(tmp_path: Path, capsys: pytest.CaptureFixture[str], document: Any) -> tuple[int, Any]:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(document))
    return answer(capsys, "--settings", str(path), "--json")


JOBS: dict[str, tuple[dict[str, Any], str, str, int]] = {
    "plain": ({}, "starts", "all", 33),
    "local layers": ({"transformer_impl": "local", "add_bias_linear": True}, "starts", "all", 33),
    "CUDA graphs": ({"cuda_graph_impl": "local"}, "refused", "none", 0),
    "graphs of attention": (
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn", "moe_router", "moe_preprocess"]},
        *("starts with less", "some", 17),
    ),
    "graphs of layers": (
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "full"},
        *("starts with less", "some", 1),
    ),
    "graphs of generation alone": ({"cuda_graph_impl": "local", "perform_rl_step": True}, "starts", "all", 33),
    "a script that generates": (
        {"enable_cuda_graph": True, "num_tokens_to_generate": 30},
        "starts with less",
        "none",
        0,
    ),
    "no CUDA graphs": ({"cuda_graph_impl": None}, "starts", "all", 33),
    "combined 1F1B": (
        {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True},
        *("starts", "all", 33),
    ),
    "combined 1F1B, captured": (
        {
            "overlap_moe_expert_parallel_comm": True,
            "delay_wgrad_compute": True,
            "cuda_graph_impl": "transformer_engine",
            "cuda_graph_scope": ["moe_router", "moe_preprocess"],
        },
        *("starts with less", "some", 17),
    ),
    "FSDP": ({"use_megatron_fsdp": True}, "refused", "none", 0),
    "weight shards": ({"tensor_parallel_num_weight_shards": 4}, "refused", "none", 0),
    "MTP, untied": (
        {"mtp_num_layers": 1, "share_embeddings_and_output_weights": False},
        *("starts", "all", 38),
    ),
    "MTP, tied": ({"mtp_num_layers": 1}, "starts with less", "some", 37),
    "full recompute": ({"recompute_granularity": "full", "recompute_method": "uniform"}, "starts", "all", 33),
    "biases": ({"add_bias_linear": True}, "starts with less", "some", 9),
    "bulk overlap": ({"tp_comm_overlap": True, "tensor_model_parallel_size": 8}, "starts with less", "some", 17),
    "overlap of one rank": ({"tp_comm_overlap": True, "tensor_model_parallel_size": 1}, "starts", "all", 33),
    "overlap without bulk": (
        {"tp_comm_overlap": True, "tensor_model_parallel_size": 8, "tp_comm_bulk_wgrad": False},
        *("starts", "all", 33),
    ),
    "quantized overlap": (
        {"tp_comm_overlap": True, "tensor_model_parallel_size": 8, "fp8": "hybrid"},
        *("starts with less", "some", 1),
    ),
    "fused operations": ({"use_transformer_engine_op_fuser": True}, "starts with less", "some", 17),
    "experts": ({"num_moe_experts": 8, "moe_grouped_gemm": True}, "starts", "all", 33),
    "one stage": ({"pipeline_model_parallel_size": 1, "cuda_graph_impl": "local"}, "starts with less", "none", 0),
    "nothing left": (
        {
            "tp_comm_overlap": True,
            "tensor_model_parallel_size": 2,
            "fp8": "e4m3",
            "defer_embedding_wgrad_compute": True,
        },
        *("starts with less", "none", 0),
    ),
}


@pytest.mark.parametrize("job", JOBS)
def test_verdict_and_split(job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, verdict, split, layers = JOBS[job]
    status, found = judged(tmp_path, capsys, {**PP, **changes})
    assert (found["verdict"], found["split"], found["split_layers"]) == (verdict, split, layers)
    assert status == (1 if verdict == "refused" else 0)
    effects = {"refused": {"refused"}, "starts with less": {"less"}, "starts": set()}[verdict]
    assert effects <= {feature["effect"] for feature in found["features"]}
    assert all(feature["name"] and feature["reason"] and feature["remedy"] for feature in found["features"])


@pytest.mark.parametrize("job", JOBS)
def test_what_is_refused_is_what_the_run_refuses(job: str) -> None:
    settings = settings_of_objects({**PP, **JOBS[job][0]})
    if prospects_of(settings).verdict == "refused":
        with pytest.raises(UnsupportedFeatureError):
            refuse_arguments(settings)
    else:
        refuse_arguments(settings)


def test_a_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = answer(capsys, "--json", "--", *LINE, "--mtp-num-layers", "1", "--adaptra")
    assert (status, found["verdict"]) == (0, "starts with less")
    assert found["version"]["verdict"] == "supported"
    status, found = answer(capsys, "--json", "--", *LINE, "--cuda-graph-impl", "local", "--adaptra")
    assert (status, found["verdict"]) == (1, "refused")
    observed = ("--adaptra", "--adaptra-policy", "observe")
    whole = ("--cuda-graph-impl", "local", "--cuda-graph-scope", "full_iteration")
    status, found = answer(capsys, "--json", "--", *LINE, *whole, *observed)
    assert (status, found["verdict"], found["split"]) == (0, "starts with less", "none")
    assert "not timed" in found["features"][0]["reason"]


def test_flags_of_command_lines_become_settings() -> None:
    words = "x.py --lr=1e-3 --num-experts 8 --disable-bias-linear --min -1 --recompute-modules a b --bf16 --x 2.5"
    found = vars(settings_of_command_line(words.split()))
    expected = {"lr": 1e-3, "num_moe_experts": 8, "add_bias_linear": False, "min": -1, "bf16": True, "x": 2.5}
    assert expected.items() <= found.items()
    assert found["recompute_modules"] == ["a", "b"]
    assert found["pipeline_model_parallel_size"] == 1


@dataclasses.dataclass
class Model:
    pipeline_model_parallel_size: int = 4
    cuda_graph_impl: str = "local"
    add_bias_linear: bool = False


@dataclasses.dataclass
class Container:
    model: Any
    ddp: Any = None
    cuda_graph_impl: str | None = None


def recipe() -> Container:
    """What --recipe builds."""
    return Container(SimpleNamespace(__arguments__={"config": Model()}), cuda_graph_impl="none")


def no_recipe() -> None:
    """What --recipe may name, too."""


def test_a_recipe_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    """Objects within objects, fiddle's among them; an outer setting counts more than an inner one."""
    status, found = answer(capsys, "--json", "--recipe", f"{__name__}:recipe")
    assert (status, found["verdict"]) == (0, "starts")
    assert settings_of_objects(Container(Model(), ddp=Model, cuda_graph_impl="none")).cuda_graph_impl is None
    assert settings_of_objects(Model()).cuda_graph_impl == "local"
    assert settings_of_objects(Container(Model())).cuda_graph_impl == "local"


@dataclasses.dataclass
class CommOverlapConfig:
    """As in Megatron-Bridge, which applies it to the model when training begins."""

    overlap_moe_expert_parallel_comm: bool | None = None
    tp_comm_overlap: bool = False


@dataclasses.dataclass
class MoeModel(Model):
    cuda_graph_impl: str = "none"
    overlap_moe_expert_parallel_comm: bool = False
    tp_comm_overlap: bool = True
    tensor_model_parallel_size: int = 2


@dataclasses.dataclass
class BridgeRecipe:
    model: MoeModel
    comm_overlap: Any = None
    mixed_precision: Any = "bf16_mixed"


def test_what_is_applied_to_the_model_later_counts() -> None:
    found = settings_of_objects(BridgeRecipe(MoeModel(), CommOverlapConfig(), "bf16_with_mxfp8_mixed"))
    assert (found.overlap_moe_expert_parallel_comm, found.tp_comm_overlap) == (False, False)
    assert (bool(found.fp8), hasattr(found, "fp4")) == (True, False)
    overlapped = BridgeRecipe(MoeModel(), CommOverlapConfig(overlap_moe_expert_parallel_comm=True))
    assert "combined 1F1B" in prospects_of(settings_of_objects(overlapped)).features[0].name
    callback = SimpleNamespace(__fn_or_cls__=CommOverlapConfig, __arguments__={"tp_comm_overlap": False})
    strategy = SimpleNamespace(__arguments__={"pipeline_model_parallel_size": 4, "fsdp": "megatron"})
    trainer = SimpleNamespace(__arguments__={"strategy": strategy, "callbacks": [callback]})
    nemo = settings_of_objects(SimpleNamespace(__arguments__={"model": MoeModel(), "trainer": trainer}))
    assert (nemo.tp_comm_overlap, prospects_of(nemo).verdict) == (False, "refused")
    document = {"model": vars(MoeModel()), "comm_overlap": {"overlap_moe_expert_parallel_comm": True}}
    assert "combined 1F1B" in prospects_of(settings_of_objects(document)).features[0].name


def test_scales_that_depend_on_how_chunks_alternate_are_told_of() -> None:
    delayed = {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_compute_algo": "max", "fp8_amax_history_len": 1024}
    job = {**PP, "virtual_pipeline_model_parallel_size": 2, "mixed_precision": delayed}
    names = [feature.name for feature in prospects_of(settings_of_objects(job)).features]
    assert "--fp8-amax-compute-algo max" in names
    delayed["fp8_amax_compute_algo"] = "most_recent"
    assert not any("amax" in feature.name for feature in prospects_of(settings_of_objects(job)).features)


SPELLINGS: dict[str, tuple[dict[str, Any], str]] = {
    "flags as keys": ({"--cuda-graph-impl": "local"}, "refused"),
    "flags under a name": ({"MODEL_ARGS": {"--use-torch-fsdp2": True}}, "refused"),
    "words": ({"cuda_graph_impl": "None", "delay_wgrad_compute": "false"}, "starts"),
    "nothing": ({"cuda_graph_impl": False, "overlap_moe_expert_parallel_comm": None}, "starts"),
    "a section that is on": ({"inprocess_restart": {"enabled": True}}, "refused"),
    "sharded in one of two sections": (
        {"dist": {"use_megatron_fsdp": False}, "ddp": {"use_megatron_fsdp": True}},
        "refused",
    ),
    "a section that is off": ({"inprocess_restart": {"enabled": False}}, "starts"),
    "settings of a section that is off": ({"fp8_cfg": {"enabled": False, "cuda_graph_impl": "local"}}, "starts"),
    "settings of a section that is on": ({"fp8_cfg": {"enabled": True, "cuda_graph_impl": "local"}}, "refused"),
    "defaults of variables": (
        {"modules": {"pre_trainer": {"overrides": {"tensor_model_parallel_size": "${UNSET_BY_ALL:1}"}}}},
        "starts",
    ),
    "Primus's defaults": ({"overrides": {"patch_zero_bubble": False, "enable_zero_bubble": True}}, "starts"),
    "Primus's own schedule": ({"overrides": {"patch_primus_pipeline": True, "pp_algorithm": "v-half"}}, "refused"),
    "the size of a group that is computed": ({"model_parallel_size": "${multiply:${.a}, ${.b}}"}, "starts"),
    "a reference to what is not said": ({"cuda_graph_impl": "${model.graphs}"}, "starts"),
    "NeMo 1's names": ({"mcore_gpt": True, "num_micro_batches_with_partial_activation_checkpoints": 1}, "refused"),
    "NeMo-RL's checkpointing": ({"activation_checkpointing": False, "recompute_granularity": "full"}, "starts"),
    "MindSpeed's own schedule": ({"schedules_method": "dualpipev"}, "refused"),
    "numbers as words": ({"num_layers": "8", "gtp_weight_remat_size": "2"}, "refused"),
    "turned off": ({"tp_comm_overlap": True, "tensor_model_parallel_size": 8, "no_tp_comm_bulk_wgrad": True}, "starts"),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(spelling: str, tmp_path: Path) -> None:
    """YAML has the verdict of JSON."""
    changes, verdict = SPELLINGS[spelling]
    path = tmp_path / "settings.yaml"
    path.write_text(json.dumps({**PP, **changes}))
    assert prospects_of(settings_of_objects({**PP, **changes})).verdict == verdict
    assert main(["check", "--settings", str(path)]) == (verdict == "refused")


FROZEN: dict[str, tuple[dict[str, Any], bool]] = {
    "NeMo 1": ({"model": {"peft": {"peft_scheme": "lora", "lora_tuning": {"adapter_dim": 32}}}}, True),
    "NeMo 1, ptuning": ({"model": {"peft": {"peft_scheme": "ptuning"}}}, True),
    "NeMo 1, none": ({"model": {"peft": {"peft_scheme": "none", "lora_tuning": {"adapter_dim": 32}}}}, False),
    "NeMo-RL": ({"megatron_cfg": {"peft": {"enabled": True, "dim": 8}}}, True),
    "NeMo-RL, off": ({"megatron_cfg": {"peft": {"enabled": False, "dim": 8}}}, False),
    "verl": ({"model": {"lora": {"type": "lora", "rank": 256}}}, True),
    "verl, off": ({"model": {"lora": {"type": "lora", "rank": 0}}}, False),
    "Megatron-Bridge": ({"peft": {"_target_": "megatron.bridge.peft.lora.LoRA", "dim": 32}}, True),
    "Primus": ({"overrides": {"peft": "lora"}}, True),
    "Primus, none": ({"overrides": {"peft": "none"}}, False),
    "ms-swift": ({"--tuner_type": "lora", "--lora_rank": 8}, True),
    "ms-swift, full": ({"--tuner_type": "full", "--lora_rank": 8}, False),
    "MindSpeed": ({"--lora-r": 16}, True),
    "text and images": ({"--freeze-LM": True}, True),
    "latent attention": ({"multi_latent_attention": True, "q_lora_rank": 32, "kv_lora_rank": 16}, False),
}


@pytest.mark.parametrize("recipe", FROZEN)
def test_frozen_layers_have_nothing_to_split(recipe: str) -> None:
    changes, frozen = FROZEN[recipe]
    found = prospects_of(settings_of_objects({**PP, **changes}))
    assert (found.split_layers == 0) == frozen
    assert any("frozen" in feature.reason for feature in found.features) == frozen
    assert found.verdict == ("starts with less" if frozen else "starts")


@dataclasses.dataclass
class LoRA:
    """As in Megatron-Bridge."""

    dim: int = 32


def test_adapters_of_a_recipe_that_is_built() -> None:
    assert prospects_of(settings_of_objects(Container(Model(cuda_graph_impl="none"), ddp=LoRA()))).split == "none"


def test_layers_of_nemo_1() -> None:
    """Native where Transformer Engine is not asked for; biases by its own name."""
    model = {"megatron_amp_O2": True, "pipeline_model_parallel_size": 4, "activations_checkpoint_granularity": "full"}
    assert settings_of_objects({"model": model}).recompute_granularity == "full"
    for engine, bias, split in ((False, True, "all"), (True, True, "some"), (True, False, "all")):
        document = {"model": {**model, "transformer_engine": engine, "bias": bias}}
        assert prospects_of(settings_of_objects(document)).split == split


ROLES = {
    "actor_rollout_ref": {
        "actor": {"megatron": {"pipeline_model_parallel_size": 4, "override_transformer_config": {}}},
        "ref": {"megatron": {"pipeline_model_parallel_size": "${oc.select:actor_rollout_ref.actor.megatron.pp,2}"}},
        "rollout": {"tensor_model_parallel_size": 8, "cuda_graph_impl": "local"},
    },
    "critic": {"megatron": {"pipeline_model_parallel_size": 2, "cuda_graph_impl": "local"}},
}


def test_each_role_is_judged_by_its_own_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = judged(tmp_path, capsys, ROLES)
    assert status == 1
    assert [(each["id"], each["verdict"]) for each in found] == [
        ("actor_rollout_ref.actor", "starts with less"),
        ("actor_rollout_ref.ref", "starts with less"),
        ("critic", "refused"),
    ]
    assert "one hardware queue" not in found[0]["device"], "sizes of engines of inference are not the actor's"
    assert found[1]["features"][0]["name"].startswith("forwards alone (forward_only")
    assert main(["check", "--settings", str(tmp_path / "settings.json")]) == 1
    assert "\ncritic: refused\n" in capsys.readouterr().out
    path = tmp_path / "settings.json"
    words = ("critic.megatron.cuda_graph_impl=none", "actor_rollout_ref.actor.megatron.use_torch_fsdp2=true")
    status, found = answer(capsys, "--settings", str(path), "--json", "--", *words)
    assert [each["verdict"] for each in found] == ["refused", "starts with less", "starts with less"]
    path.write_text(json.dumps([{"id": "a", **ROLES}, PP]))
    _, found = answer(capsys, "--settings", str(path), "--json")
    assert [each["id"] for each in found][2:] == ["a: critic", "job 1"]


def test_words_that_set_one_setting_each(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("+policy.megatron_cfg.pipeline_model_parallel_size=4", "policy.megatron_cfg.cuda_graph_impl=local")
    status, found = answer(capsys, "--json", "--", "run.py", "--config", "x.yaml", *words)
    assert (status, found["id"], found["verdict"]) == (1, "run.py", "refused")
    _, found = answer(capsys, "--json", "--", "run.py", *words, "teacher.megatron_cfg.pipeline_model_parallel_size=2")
    assert [(each["id"], each["verdict"]) for each in found] == [("policy", "refused"), ("teacher", "starts with less")]
    assert main(["check", "--settings", "x.json", "--", "run.py"]) == 2


def test_a_command_line_that_names_a_file_or_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({"defaults": "base.yaml", "policy": {"megatron_cfg": PP}}))
    word = "policy.megatron_cfg.cuda_graph_impl=local"
    config = str(path)
    cases = (
        (["--config", config], "starts"),
        ([f"--config={config}", word], "refused"),
        (["--yaml-cfg", config], "starts"),
    )
    for words, verdict in cases:
        main(["check", "--json", "--", "run_grpo.py", *words])
        captured = capsys.readouterr()
        assert json.loads(captured.out)["verdict"] == verdict
        assert "inherits from missing files, and is judged without them: base.yaml" in captured.err
    main(
        ["check", "--json", "--", "run_recipe.py", "--recipe", "x_peft_config", "model.pipeline_model_parallel_size=4"]
    )
    captured = capsys.readouterr()
    assert json.loads(captured.out)["split"] == "none"
    assert "--recipe x_peft_config is not read" in captured.err


def test_variables_of_the_environment_count_more_than_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    document = {**PP, "cuda_graph_impl": "${GRAPHS_OF_A_RECIPE:none}"}
    assert settings_of_objects(document).cuda_graph_impl is None
    monkeypatch.setenv("GRAPHS_OF_A_RECIPE", "local")
    assert prospects_of(settings_of_objects(document)).verdict == "refused"


def test_lists_give_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [{"id": "a", "settings": PP}, {"id": "a", "argv": [*LINE, "--use-torch-fsdp2"]}, PP]
    status, found = judged(tmp_path, capsys, jobs)
    assert status == 1
    assert [each["verdict"] for each in found] == ["starts", "refused", "starts"]
    assert main(["check", "--settings", str(tmp_path / "settings.json")]) == 1
    assert "2 of 3 start (67%), 1 are refused; 2 of those that start split backwards" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "an empty list"),
        ("[1]", "0 is neither an object of settings"),
        ('{"argv": "x"}', "is neither an object of settings"),
        ('{"settings": 5}', "is neither an object of settings"),
        ('{"pipeline_model_parallel_size": "four"}', "pipeline_model_parallel_size must be a whole number above 0"),
        ('{"pipeline_model_parallel_size": true}', "pipeline_model_parallel_size must be a whole number above 0"),
        ('{"num_layers": Infinity}', "num_layers must be a whole number, 0 or above"),
        ('{"mtp_num_layers": ["a"]}', "mtp_num_layers must be a whole number, 0 or above"),
        ('{"tensor_parallel_num_weight_shards": "local"}', "tensor_parallel_num_weight_shards must be a whole number"),
        ('{"hidden_dropout": "some"}', "hidden_dropout must be a number"),
        ('{"adaptra_policy": "maybe"}', "adaptra-policy"),
        ('{"adaptra_path": []}', "adaptra-path"),
        ('{"argv": ["--num-layers", "1e3"]}', "num_layers must be a whole number, 0 or above"),
        ('{"argv": ["--adaptra", "--adaptra-policy", "maybe"]}', "adaptra-policy"),
    ],
)
def test_what_is_no_input(content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "settings.json"
    path.write_text(content)
    assert main(["check", "--settings", str(path)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        *([], ["--recipe", "x"], ["--recipe", "no_such_module:f"], ["--recipe", f"{__name__}:no_recipe"]),
        *(["--settings", "/none"], ["--settings", "/none.yaml"], ["--", "x", "--num-layers", "few"]),
    ],
)
def test_what_cannot_be_asked(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *arguments]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_releases_that_are_not_supported_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check.metadata, "version", lambda _name: "0.99.0")
    status, found = answer(capsys, "--json", "--", *LINE, "--adaptra")
    assert (status, found["verdict"], found["features"][0]["name"]) == (1, "refused", "megatron-core 0.99.0")


@pytest.mark.skipif(not RECIPES.is_file(), reason="no collection of published recipes here")
def test_published_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = answer(capsys, "--settings", str(RECIPES), "--json")
    start = [each for each in found if each["verdict"] != "refused"]
    assert len(start) >= 0.76 * len(found)
    assert sum(each["split"] != "none" for each in start) >= 0.95 * len(start)
