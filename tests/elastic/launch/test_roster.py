# SPDX-License-Identifier: Apache-2.0
"""What the coordinator makes of reports, without processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adaptra_megatron.common.membership import Readiness, Stalled
from adaptra_megatron.common.typed_messages import packed
from adaptra_megatron.elastic.launch.launch_messages import DETAILS_NCHARS, HostReport, RankEnding, Start
from adaptra_megatron.elastic.launch.roster import Policy, Roster

POLICY = Policy(no_kill=True, min_ranks=1, heartbeat_timeout_s=5.0, join_timeout_s=60.0)


def ending(local_rank: int, exit_code: int, at_s: float = 0.0) -> RankEnding:
    return RankEnding(local_rank, 100 + local_rank, exit_code, at_s, "  log: there")


class Job:
    """Hosts that report every second while they live, and the roster."""

    def __init__(self, policy: Policy, *nprocs: int) -> None:
        self.roster = Roster(len(nprocs), policy, 0.0)
        self.reports = {node: HostReport(f"host{node}", nproc) for node, nproc in enumerate(nprocs)}
        self.silent: set[int] = set()
        self.now_s = 0.0

    def second(self) -> None:
        """In steps that a running coordinator takes."""
        for _ in range(2):
            self.now_s += 0.5
            for node, report in self.reports.items():
                if node not in self.silent:
                    self.reports[node] = replace(report, beat=report.beat + 1)
                self.roster.observe(node, self.reports[node], self.now_s)
            self.roster.decide(self.now_s, 1000.0 + self.now_s)

    def ends(self, node: int, *endings: RankEnding) -> None:
        self.reports[node] = replace(self.reports[node], endings=self.reports[node].endings + endings)
        self.second()

    @property
    def epoch(self) -> int:
        assert self.roster.membership is not None
        return self.roster.membership.epoch

    @property
    def live(self) -> tuple[int, ...]:
        assert self.roster.membership is not None
        return self.roster.membership.live

    @property
    def outcome(self) -> tuple[bool, str]:
        assert self.roster.outcome is not None
        return self.roster.outcome.failed, self.roster.outcome.text


def test_ranks_are_numbered_by_node_rank_once_all_hosts_have_come() -> None:
    roster = Roster(2, POLICY, 0.0)
    roster.observe(1, HostReport("b", 3), 0.0)
    roster.decide(0.0, 0.0)
    assert roster.start is None
    roster.observe(0, HostReport("a", 2), 0.1)
    roster.decide(0.1, 0.1)
    assert roster.start == Start((0, 2), 5)


def test_deaths_of_one_moment_are_one_epoch_and_none_is_counted_twice() -> None:
    job = Job(POLICY, 4, 4)
    job.second()
    job.ends(1, ending(0, -9), ending(3, 1))
    assert (job.epoch, job.live) == (1, (0, 1, 2, 3, 5, 6))
    job.second()
    job.ends(0, ending(2, -11))
    assert (job.epoch, job.live) == (2, (0, 1, 3, 5, 6))
    assert job.roster.membership is not None
    assert [(each.rank, each.epoch, each.why) for each in job.roster.membership.left] == [
        (4, 1, "was killed by SIGKILL"),
        (7, 1, "ended with exit status 1"),
        (2, 2, "was killed by SIGSEGV"),
    ]


def test_a_silent_host_is_lost_with_its_ranks_that_had_not_ended_and_stays_so() -> None:
    job = Job(POLICY, 2, 2)
    job.second()
    job.ends(1, ending(0, 0))
    job.silent.add(1)
    for _ in range(5):
        job.second()
        assert job.epoch == 0
    job.second()
    assert (job.epoch, job.live) == (1, (0, 1, 2))
    job.silent.clear()
    job.second()
    assert (job.epoch, list(job.roster.lost)) == (1, [1])
    job.ends(0, ending(0, 0, 2000.0), ending(1, 0, 2000.0))
    failed, text = job.outcome
    assert failed
    assert text.startswith("ranks 0, 1, 2 ended with status 0, but others failed after the first of them had")
    assert "host host1 (node rank 1) has been silent for 5" in text


def test_silence_is_not_counted_while_the_coordinator_itself_stood_still() -> None:
    job = Job(POLICY, 1, 1)
    job.second()
    job.silent |= {0, 1}
    job.now_s += 3600.0
    job.second()
    assert not job.roster.lost


def test_the_end_of_the_last_rank_is_a_success_only_if_enough_have_ended_well() -> None:
    job = Job(replace(POLICY, min_ranks=3), 4)
    job.second()
    job.ends(0, ending(0, 1))
    job.ends(0, ending(1, 0), ending(2, 0))
    assert job.roster.outcome is None
    job.ends(0, ending(3, 2))
    failed, text = job.outcome
    assert failed
    assert text.startswith("2 ranks are left, fewer than the 3")


def test_without_no_kill_the_first_failure_is_named_by_its_time() -> None:
    job = Job(replace(POLICY, no_kill=False), 2, 2)
    job.second()
    job.reports[0] = replace(job.reports[0], endings=(ending(1, -6, at_s=12.0),))
    job.ends(1, ending(0, 1, at_s=11.0))
    failed, text = job.outcome
    assert failed
    assert text.startswith("rank 2 on host host1 was the first to end: it ended with exit status 1; then ranks 1")
    assert job.epoch == 0


def test_a_launcher_that_is_sent_away_ends_the_job_unless_the_others_go_on() -> None:
    for no_kill, node in ((False, 1), (True, 0)):
        job = Job(replace(POLICY, no_kill=no_kill), 1, 1)
        job.second()
        job.reports[node] = replace(job.reports[node], leaving="received SIGTERM")
        job.second()
        assert job.outcome[0]
        assert f"the launcher of host host{node} (node rank {node}) received SIGTERM" in job.outcome[1]
    job = Job(POLICY, 1, 1)
    job.second()
    gone = (replace(ending(0, 0), asked=True),)
    job.reports[1] = replace(job.reports[1], leaving="received SIGTERM", left=True, endings=gone)
    job.second()
    assert (job.epoch, job.live, job.roster.outcome) == (1, (0,), None)


def test_a_host_that_dies_before_all_have_come_ends_the_wait() -> None:
    roster = Roster(2, POLICY, 0.0)
    for step in range(12):
        roster.observe(1, HostReport("b", 1), step * 0.5)
        roster.decide(step * 0.5, 0.0)
    assert roster.outcome is not None
    assert "before all hosts had come" in roster.outcome.text


def test_a_rank_that_stood_still_is_lost_for_that() -> None:
    job = Job(POLICY, 2)
    job.second()
    job.roster.stall(Stalled((1,), "stalled: 1 other ranks waited for 10.0 s", {}))
    job.ends(0, ending(1, -9))
    assert job.live == (0,)
    assert job.roster.membership is not None
    assert job.roster.membership.left[0].why == ("stalled: 1 other ranks waited for 10.0 s, and was killed by SIGKILL")


def test_a_stalled_rank_that_does_not_end_when_it_is_killed_has_left_before_the_others_give_up() -> None:
    job = Job(POLICY, 2)
    job.second()
    job.roster.stall(Stalled((1,), "stalled: 1 other ranks waited for 10.0 s", {}))
    for _ in range(10):
        job.second()
        assert job.live == (0, 1)
    job.second()
    assert job.live == (0,)
    assert job.roster.membership is not None
    assert "waited for 10.0 s, was killed, and has not ended yet" in job.roster.membership.left[0].why
    job.ends(0, ending(1, -9))
    assert job.epoch == 1, "it is known"
    comes_back(job, start=1)
    assert (job.live, job.roster.stalled) == ((0, 1), {})


def test_a_stall_of_a_host_that_is_lost_is_forgotten_with_it() -> None:
    job = Job(POLICY, 1, 2)
    job.second()
    job.silent.add(1)
    job.roster.stall(Stalled((2,), "stalled", {}))
    for _ in range(6):
        job.second()
    assert (job.live, job.roster.stalled) == ((0,), {}), "or the first process of the next host would be killed"


def ready(left: int, start: int) -> Readiness:
    return Readiness(left, start, "host1", "boot/net")


def test_a_rank_that_is_started_again_lives_once_it_stands_ready_and_may_leave_again() -> None:
    job = Job(POLICY, 2, 2)
    job.second()
    job.ends(1, ending(0, -9))
    (departure,) = job.roster.away
    job.ends(1, replace(ending(0, 1), start=1))
    assert (job.epoch, job.live) == (1, (0, 1, 3)), "a process that fails before it stands ready had no place"
    job.roster.ready(departure, ready(left=7, start=1))
    job.second()
    assert job.epoch == 1, "that was of an earlier departure"
    job.roster.ready(departure, ready(left=1, start=2))
    job.second()
    assert (job.epoch, job.live, job.roster.away) == (2, (0, 1, 2, 3), [])
    job.second()
    assert job.epoch == 2, "the ends of the processes before are known"
    job.ends(1, replace(ending(0, -11), start=2))
    assert (job.epoch, job.live) == (3, (0, 1, 3))
    assert [each.epoch for each in job.roster.away] == [3]


def test_a_job_that_ends_with_all_ranks_back_has_ended_well() -> None:
    job = Job(POLICY, 2, 2)
    job.second()
    job.ends(1, ending(0, -9))
    comes_back(job, start=1)
    job.roster.admitted = {2: 2}
    job.ends(0, ending(0, 0), ending(1, 0))
    job.ends(1, replace(ending(0, 0), start=1), ending(1, 0))
    assert job.outcome == (False, "")


def comes_back(job: Job, start: int) -> None:
    (departure,) = job.roster.away
    job.roster.ready(departure, ready(departure.epoch, start))
    job.second()


def test_ranks_that_fail_after_others_have_ended_with_0_make_the_job_fail() -> None:
    job = Job(POLICY, 4)
    job.second()
    job.ends(0, ending(1, 0, at_s=10.0))
    job.ends(0, ending(0, 1, at_s=35.0), ending(2, 1, at_s=36.0))
    assert job.roster.outcome is None, "one may still write its checkpoint"
    job.ends(0, ending(3, 0, at_s=37.0))
    failed, text = job.outcome
    assert failed
    assert text.startswith("ranks 1, 3 ended with status 0, but others failed after the first of them had: rank 0 on")
    assert "then ranks 2\n" in text


def test_ranks_that_failed_before_others_ended_with_0_do_not_even_if_seen_at_once() -> None:
    job = Job(POLICY, 4)
    job.second()
    job.ends(0, ending(0, -9, at_s=10.0))
    job.ends(0, ending(1, -9, at_s=34.0), ending(2, 0, at_s=35.0), ending(3, 0, at_s=35.0))
    failed, text = job.outcome
    assert not failed
    assert text.startswith("ended well, but without 2 ranks: rank 0 ")


@pytest.mark.parametrize("well", [True, False])
def test_a_job_ends_with_the_last_rank_that_trained_and_does_not_wait_for_restarted_ones(well: bool) -> None:
    job = Job(POLICY, 3)
    job.second()
    job.ends(0, ending(1, -9))
    comes_back(job, start=1)
    assert job.live == (0, 1, 2)
    job.ends(0, ending(0, 0 if well else 1))
    assert job.roster.outcome is None
    job.ends(0, ending(2, 0 if well else 1))
    failed, text = job.outcome
    assert failed != well
    start = "ended well, but without 1 ranks: " if well else "no rank is left that trained, so ranks 1, started again, "
    assert text.startswith(start)
    assert "rank 1 on host host0 was the first to end: it was killed by SIGKILL" in text


def test_a_rank_that_was_let_in_trains_on_without_those_that_it_joined() -> None:
    job = Job(POLICY, 2)
    job.second()
    job.ends(0, ending(1, -9))
    comes_back(job, start=1)
    job.roster.admitted = {1: 2}
    job.ends(0, ending(0, -9))
    assert (job.roster.outcome, job.live) == (None, (1,))
    job.ends(0, replace(ending(1, 0), start=1))
    assert not job.outcome[0]


def test_a_report_of_a_rank_that_stands_still_is_about_one_process() -> None:
    job = Job(POLICY, 2)
    job.second()
    first, second = Stalled((1,), "stalled", {}), Stalled((1,), "stalled", {1: 2})
    job.roster.stall(second)
    assert job.roster.stalled == {}, "that one is not there yet"
    job.ends(0, ending(1, -9))
    job.roster.stall(first)
    assert job.roster.stalled == {}
    comes_back(job, start=1)
    job.roster.stall(first)
    assert job.roster.stalled == {}
    job.roster.stall(second)
    assert (job.roster.stalled, job.roster.starts) == ({1: "stalled"}, {1: 1})
    job.ends(0, replace(ending(1, -9), start=1))
    assert job.roster.membership is not None
    assert job.roster.membership.left[-1].why == "stalled, and was killed by SIGKILL"


def test_a_rank_that_others_wait_for_though_it_ended_with_0_has_left() -> None:
    job = Job(POLICY, 3)
    job.second()
    job.ends(0, ending(1, 0))
    assert job.live == (0, 1, 2)
    job.roster.stall(Stalled((1,), "stalled: 2 other ranks waited for 20.0 s", {}))
    job.second()
    assert job.live == (0, 2)
    job.ends(0, ending(0, 0), ending(2, 0))
    failed, text = job.outcome
    assert not failed
    assert "it stalled: 2 other ranks waited for 20.0 s, and ended with exit status 0" in text


def test_a_report_stays_small_however_often_ranks_are_started_again_and_tells_of_all_that_have_ended() -> None:
    report = HostReport("host0", 8)
    for start in range(500):
        details = f"{start}\n".ljust(DETAILS_NCHARS, "\U0001f525")
        report = report.with_endings(
            replace(ending(rank, 1), details=details, start=start) for rank in range(8) if (start, rank) != (0, 7)
        )
    assert len(packed(report)) < 1 << 20
    assert all(each.details for each in report.endings[-16:])
    job = Job(POLICY, 8)
    job.second()
    job.reports[0] = report
    job.second()
    assert job.outcome[0]
    assert job.outcome[1].startswith("0 ranks are left")


def replaced(job: Job, **report: object) -> None:
    job.silent.discard(1)
    job.reports[1] = replace(HostReport("spare", 2), **report)  # type: ignore[arg-type]
    job.roster.replace(1, job.reports[1], job.now_s)
    job.second()


def test_another_host_takes_the_place_of_one_that_is_lost_and_its_ranks_come_back() -> None:
    job = Job(POLICY, 2, 2)
    job.second()
    job.ends(1, ending(0, 0))
    assert job.roster.vacant == ()
    job.silent.add(1)
    for _ in range(6):
        job.second()
    assert (job.roster.vacant, job.live) == ((1,), (0, 1, 2))
    replaced(job)
    assert (job.roster.vacant, job.roster.turns, job.epoch, job.live) == ((), {1: 1}, 1, (0, 1, 2))
    job.roster.ready(job.roster.away[0], ready(left=1, start=65536))
    job.second()
    assert (job.epoch, job.live) == (2, (0, 1, 2, 3))
    job.ends(1, replace(ending(1, -9), start=65536))
    assert (job.epoch, job.live) == (3, (0, 1, 2))
    job.ends(0, ending(0, 0), ending(1, 0))
    failed, text = job.outcome
    assert failed
    assert text.startswith("ranks 0, 1, 2 ended with status 0, but others failed after"), "rank 2 on the host before"


def test_the_host_in_the_place_of_another_may_be_lost_and_replaced_itself() -> None:
    job = Job(POLICY, 2, 2)
    for turn in (1, 2):
        job.silent.add(1)
        for _ in range(7):
            job.second()
        assert job.live == (0, 1)
        replaced(job)
        assert job.roster.turns == {1: turn}
        for departure in job.roster.away:
            job.roster.ready(departure, ready(left=departure.epoch, start=turn << 16))
        job.second()
        assert (job.roster.lost, job.live) == ({}, (0, 1, 2, 3))


def test_the_place_of_a_host_whose_launcher_was_sent_away_may_be_taken_and_the_coordinators_not() -> None:
    job = Job(POLICY, 2, 2)
    job.second()
    gone = tuple(replace(ending(local_rank, 0), asked=True) for local_rank in range(2))
    job.reports[1] = replace(job.reports[1], leaving="received SIGTERM", left=True, endings=gone)
    job.second()
    assert job.roster.vacant == (1,)
    replaced(job)
    assert (job.roster.vacant, job.roster.outcome) == ((), None)
    for departure in job.roster.away:
        job.roster.ready(departure, ready(left=1, start=65536))
    job.silent.add(0)
    for _ in range(7):
        job.second()
    assert (list(job.roster.lost), job.live, job.roster.vacant) == ([0], (2, 3), ())
