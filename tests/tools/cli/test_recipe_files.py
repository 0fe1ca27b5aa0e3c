# SPDX-License-Identifier: Apache-2.0
"""Recipes as trainers keep them: inheritance, references, roles, words that set one setting each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adaptra_megatron.tools.cli.planning.inputs import InputError
from adaptra_megatron.tools.cli.recipe_files import jobs_of, merged, nested, read_document


def written(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_file_inherits_from_others_by_path(tmp_path: Path) -> None:
    """As NeMo-RL writes it; the file itself counts more, then the file that it names."""
    written(
        tmp_path,
        {
            "base.yaml": "policy: {megatron_cfg: {enabled: false, tensor_model_parallel_size: 1, sequence: 2}}",
            "between.yaml": "defaults: base.yaml\npolicy: {megatron_cfg: {enabled: true, sequence: 3}}",
            "recipes/own.yaml": "defaults: ../between.yaml\npolicy: {megatron_cfg: {sequence: 4}}",
        },
    )
    found = {"policy": {"megatron_cfg": {"enabled": True, "tensor_model_parallel_size": 1, "sequence": 4}}}
    assert read_document(tmp_path / "recipes/own.yaml") == (found, [])


def test_a_file_inherits_by_group_and_section(tmp_path: Path) -> None:
    """As Hydra has it: verl's recipes."""
    written(
        tmp_path,
        {
            "trainer.yaml": (
                "defaults:\n- _self_\n- actor@ppo.actor: megatron_actor\n- optional tp@model.overlap: x\n"
                "- hydra/launcher: slurm\nppo: {actor: {lr: 1, steps: 2}}\n"
            ),
            "actor/megatron_actor.yaml": "defaults:\n- ../engine@megatron: megatron\n- actor\nlr: 3",
            "actor/actor.yaml": "lr: 4\nbatch: 5",
            "engine/megatron.yaml": "pipeline_model_parallel_size: 2",
        },
    )
    found, missing = read_document(tmp_path / "trainer.yaml")
    megatron = {"pipeline_model_parallel_size": 2}
    assert found == {"ppo": {"actor": {"lr": 3, "steps": 2, "batch": 5, "megatron": megatron}}}
    assert missing == ["hydra/launcher/slurm"]


def test_files_that_inherit_from_each_other_end(tmp_path: Path) -> None:
    written(tmp_path, {"a.yaml": "defaults: b.yaml\na: 1", "b.yaml": "defaults: a.yaml\nb: 2"})
    assert read_document(tmp_path / "a.yaml")[0].items() >= {"a": 1, "b": 2}.items()


@pytest.mark.parametrize(
    ("reference", "value"),
    [
        *[("${sizes.pp}", 4), ("${.other}", 7), ("${..sizes.pp}", 4), ("${training.sizes.pp}", 4)],
        *[("${oc.select:sizes.pp,1}", 4), ("${oc.select:sizes.none,1}", "1"), ("${oc.env:NO_SUCH_VARIABLE,8}", "8")],
        *[("${chain}", 4), ("${sizes}", {"pp": 4})],
        *[
            (same, same)
            for same in ("${sizes.none}", "${multiply:${.a}, 2}", "${PRIMUS_PP:2}", "${mul:2,3}", "${loop}")
        ],
    ],
)
def test_references(reference: str, value: Any) -> None:
    document = {"model": {"it": reference, "other": 7}, "sizes": {"pp": 4}, "chain": "${sizes.pp}", "loop": "${loop}"}
    assert jobs_of(document)[""]["model"]["it"] == value


def test_roles() -> None:
    """What is in no role is every role's; the engines of inference are none's."""
    document = {
        "model": {"num_layers": 8},
        "policy": {"megatron_cfg": {"pipeline_model_parallel_size": 4}, "generation": {"context_parallel_size": 2}},
        "teachers": [{"megatron_cfg": {"pipeline_model_parallel_size": 2}}, {"megatron_cfg": {"lr": 1}}],
        "value": {"lr": 1},
    }
    jobs = jobs_of(document)
    assert list(jobs) == ["policy", "teachers.0"]
    assert jobs["policy"]["model"] == jobs["teachers.0"]["model"] == {"num_layers": 8}
    assert "generation" not in jobs["policy"]["policy"]
    assert len(jobs["policy"]["teachers"]) == 1
    assert "policy" not in jobs["teachers.0"]
    assert (jobs["teachers.0"]["forward_only"], "forward_only" in jobs["policy"]) == (True, False)
    assert list(jobs_of({"policy": document["policy"]})) == [""]


def test_a_teacher_within_a_job_is_no_part_of_it() -> None:
    model = {"pipeline_model_parallel_size": 4, "teacher": {"pipeline_model_parallel_size": 2}}
    assert jobs_of({"model": model}) == {"": {"model": {"pipeline_model_parallel_size": 4}}}


def test_words() -> None:
    assert nested([("a.b", "1"), ("a.c.d", "2"), ("a.b", "3")]) == {"a": {"b": "3", "c": {"d": "2"}}}
    assert merged({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}, "d": 4}) == {"a": {"b": 3, "c": 2}, "d": 4}


@pytest.mark.parametrize(("name", "text"), [("a.yaml", "a: ["), ("a.json", "{"), ("a.yaml", "defaults: b.yaml\n")])
def test_what_cannot_be_read(name: str, text: str, tmp_path: Path) -> None:
    written(tmp_path, {name: text, "b.yaml": "{"})
    with pytest.raises(InputError, match="cannot be read"):
        read_document(tmp_path / name)
