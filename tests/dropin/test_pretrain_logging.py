# SPDX-License-Identifier: Apache-2.0
"""What Megatron-LM logs of a run, in pretrain_gpt.py: the same with the flag, but for what there is no more of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.pretrain import MOCK_DATA, NO_DROPOUT, compare_with_stock, needs_megatron_lm, pretrain

pytestmark = needs_megatron_lm

PP2 = ("--pipeline-model-parallel-size", "2")
ITERATIONS = 4
TIMERS = ("--timing-log-level", "2", "--timing-log-option", "minmax")
COMPUTED = {"forward-compute", "backward-compute", "forward-backward"}
WAITED = {"forward-recv", "backward-recv"}
LOGGED = re.compile(r"^    ([a-z-]+) \.+: \(", re.MULTILINE)


@pytest.mark.parametrize("chunks", [(), ("--num-layers-per-virtual-pipeline-stage", "1")], ids=["1f1b", "interleaved"])
def test_timers_of_actions_are_logged(chunks: tuple[str, ...], tmp_path: Path) -> None:
    """Stock also times its sends, and sends and receives at once; here sends are not waited for."""
    compare_with_stock(2, tmp_path, *PP2, *MOCK_DATA, *TIMERS, *chunks, *NO_DROPOUT)
    stock, ours = (logged_timers(tmp_path / f"{name}-logs") for name in ("stock", "ours"))
    assert stock >= COMPUTED
    assert ours >= COMPUTED | WAITED
    assert all("send" in name for name in stock - ours), stock - ours
    assert ours - stock <= WAITED


def logged_timers(logs: Path) -> set[str]:
    return {name for path in logs.iterdir() for name in LOGGED.findall(path.read_text(errors="replace"))}


def test_tensorboard_has_the_scalars_of_stock_and_ours(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="make megatron installs it")
    found = {}
    for name, flags in (("stock", ()), ("ours", ("--adaptra",))):
        board = ("--tensorboard-dir", str(tmp_path / f"board-{name}"), "--tensorboard-log-interval", "1")
        logging = (*TIMERS, "--log-timers-to-tensorboard", "--log-validation-ppl-to-tensorboard", *board)
        found[name] = run_and_read(tmp_path, name, *logging, *flags)
    stock, ours = found["stock"], found["ours"]
    assert {f"{name}-time" for name in COMPUTED} <= stock.keys()
    assert {f"{name}-time" for name in COMPUTED | WAITED} <= ours.keys()
    assert all("send" in tag for tag in stock.keys() - ours.keys()), stock.keys() - ours.keys()
    added = {tag for tag in ours.keys() - stock.keys() if tag not in {f"{name}-time" for name in WAITED}}
    assert added
    assert all(tag.startswith("adaptra/") for tag in added), added
    for tag in ("lm loss", "grad-norm", "lm loss validation"):
        # Megatron never closes its writer: the end of a process may cut off its latest scalars.
        both = min(len(ours[tag]), len(stock[tag]))
        assert both >= (1 if tag == "lm loss validation" else 2)
        assert ours[tag][:both] == stock[tag][:both], tag
    for name in COMPUTED | WAITED:
        assert [step for step, _value in ours[f"{name}-time"]] == list(range(1, ITERATIONS + 1))
        assert all(value > 0 for _step, value in ours[f"{name}-time"])


def run_and_read(directory: Path, name: str, *arguments: str) -> dict[str, list[tuple[int, float]]]:
    """Scalars of a run: steps and values by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    pretrain(2, directory / name, *PP2, *MOCK_DATA, *arguments)
    events = EventAccumulator(str(directory / f"board-{name}"), size_guidance={"scalars": 0}).Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
