# SPDX-License-Identifier: Apache-2.0
"""Iterations that wait for a file."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from testing.faults import holds
from testing.faults.emulated_compute import EmulationError
from testing.faults.holds import Hold, Holds, parse_hold


def test_an_iteration_begins_once_its_file_is_there(tmp_path: Path) -> None:
    file, begun = tmp_path / "seen", threading.Event()
    held = Holds([parse_hold(f"3:{file}")])
    held.set_iteration(2)

    def begin() -> None:
        held.set_iteration(3)
        begun.set()

    training = threading.Thread(target=begin)
    training.start()
    assert not begun.wait(0.1)
    file.touch()
    training.join()
    assert begun.is_set()


def test_a_file_that_nobody_makes_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds, "HELD_S", 0.1)
    with pytest.raises(EmulationError, match="iteration 3: nobody has made .*seen for 0.1 s"):
        Holds([Hold(3, tmp_path / "seen")]).set_iteration(3)


@pytest.mark.parametrize("text", ["3", "3:", "x:seen", ":seen"])
def test_what_is_no_hold_is_refused(text: str) -> None:
    with pytest.raises(EmulationError, match="is not ITERATION:FILE, as 34:/tmp/seen"):
        parse_hold(text)
