# SPDX-License-Identifier: Apache-2.0
"""Some cases of each fuzzer on the ordinary build, and that a campaign sees what fails.

More cases, on native code built with sanitizers: make test-native-sanitized.
"""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest

from fuzz import (
    campaign,
    control_talk,
    inboxes,
    live_rings,
    recordings,
    reference_inbox,
    routing,
    schedules,
    streams,
    verbs_talk,
    worker,
)
from fuzz.campaign import watch

CASES = {
    "headers": (inboxes.case_of_headers, 40),
    "parts": (inboxes.case_of_parts, 20),
    "streams": (streams.case, 30),
    "live_rings": (live_rings.case, 3),
    "verbs_talk": (verbs_talk.case, 60),
    "control_talk": (control_talk.case, 60),
    "schedules": (schedules.case, 60),
    "routing": (routing.case, 60),
}


@pytest.mark.parametrize("name", CASES)
def test_some_cases(name: str) -> None:
    case, count = CASES[name]
    for number in range(1, count + 1):
        assert case(worker.random_of(name, number), time.monotonic() + worker.HANG_S) > 0


def test_spoilt_recordings_get_an_answer_or_one_line() -> None:
    for number in range(1, 61):
        recordings.case(worker.random_of("recordings", number))


def test_every_fuzzer_is_run() -> None:
    assert {*CASES, campaign.SELF_CHECK} == set(worker.FUZZERS)
    assert set(campaign.SHARES) == set(CASES)


def test_a_wrong_answer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that does as the fuzzer's reference does not, in one message out of many."""
    right = reference_inbox.Header.is_possible
    monkeypatch.setattr(
        reference_inbox.Header, "is_possible", lambda header, *sizes: right(header, *sizes) and header.dtype != 3
    )

    def try_some() -> None:
        for number in range(1, 41):
            inboxes.case_of_headers(worker.random_of("headers", number), time.monotonic() + worker.HANG_S)

    with pytest.raises(AssertionError, match="and not"):
        try_some()


def test_a_case_is_made_again_by_its_number() -> None:
    once, again, other = (worker.random_of("parts", number).random() for number in (7, 7, 8))
    assert once == again != other
    result = watch("verbs_talk", 7, 9, 20.0, None)
    assert (result.failure, result.number, result.tried) == ("", 9, 3 * 8)


# Stand-ins for a fuzzer, by what becomes of them.
FAILING = {
    "crash": ("import os; os.kill(os.getpid(), 11)", "exit status -11"),
    "wrong": ("assert number < 0, 'a wrong answer'", "a wrong answer"),
    "hang": ("import time; time.sleep(60)", "nothing for 1 s"),
    "growth": ("time.sleep(0.03); kept.append(bytearray(b'x' * (8 << 20)))", "MiB more in use"),
}


@pytest.mark.parametrize("what", FAILING)
def test_what_fails_is_seen_and_named(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, seen = FAILING[what]
    program = tmp_path / "failing.py"
    program.write_text(
        "import sys, time\nfrom fuzz import worker\nkept = []\n"
        f"def case(random, deadline_s, number=1):\n    {code}\n    return 1\n"
        "sys.modules['fuzz.failing'] = sys.modules[__name__]\n"
        "worker.FUZZERS['failing'] = 'fuzz.failing:case'\nworker.WARM_UP_S = 0.01\n"
        "import faulthandler; faulthandler.enable()\nworker.main('failing', 1, 10**9, 30.0)\n"
    )
    monkeypatch.setattr(campaign, "HANG_S", 1.0 if what == "hang" else 30.0)
    monkeypatch.setattr(campaign, "WORKER", [str(program)])
    result = watch("failing", 1, 10**9, 30.0, None)
    assert seen in result.failure
    assert result.number >= 1


def test_a_campaign_without_a_sanitizer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "watch", lambda *arguments: campaign.Result("self_check", 1, 1, 0.0, ""))
    out = io.StringIO()
    assert campaign.campaign(Path("nowhere"), 1.0, 1, None, out) == 1
    assert "does not see" in out.getvalue()
