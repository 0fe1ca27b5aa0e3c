# SPDX-License-Identifier: Apache-2.0
"""Run one host's launcher, its link to the coordinator through the job's store and, on node rank 0, the coordinator.

The link has a thread of its own, which also runs the coordinator: a store that hangs does not delay the ranks.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException

from adaptra_megatron.common.backoff import Backoff
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.common.membership import Membership, MembershipRecords, launch_store
from adaptra_megatron.common.open_files import allow_connections
from adaptra_megatron.common.sealed_store import SealedStore
from adaptra_megatron.elastic.launch.endpoint import NO_REJOINING, Endpoint, take_seat
from adaptra_megatron.elastic.launch.launch_arguments import LaunchSettings
from adaptra_megatron.elastic.launch.launch_messages import (
    BEAT_S,
    JOB_KEY,
    START_KEY,
    HostReport,
    JobState,
    RankEnding,
    Silence,
    Start,
    beat_s,
    host_key,
    read,
    write,
)
from adaptra_megatron.elastic.launch.roster import Policy, Roster
from adaptra_megatron.elastic.launch.workers import POLL_S, Workers

logger = logger_of(__name__)

_CONNECTIONS = 16
"""Connections of a rank to the job's store: its own ones, and one for each process group."""


class Coordinator:
    """Makes the decisions of the whole job, in a thread of the launcher of node rank 0."""

    def __init__(self, store: SealedStore, nodes: int, policy: Policy) -> None:
        """`store`: a client as `launch_store` returns, for this object alone."""
        self._store, self._nodes, self._beat = store, nodes, 0
        self._records = MembershipRecords(store)
        self._roster = Roster(nodes, policy, time.monotonic())
        self._admits_restarted = False

    @property
    def has_ended(self) -> bool:
        """True once the job's outcome is decided."""
        return self._roster.outcome is not None

    @property
    def all_left(self) -> bool:
        """True once all live hosts have read the outcome and ended their ranks."""
        return self._roster.all_left

    @property
    def stalled(self) -> dict[int, int]:
        """Stalled ranks that are to be killed, and how often each had been started before."""
        return {rank: self._roster.starts.get(rank, 0) for rank in self._roster.stalled}

    def tick(self) -> None:
        """Read all reports, decide, and publish. Raises RuntimeError if the store does, and as
        `launch_messages.read`.
        """
        roster = self._roster
        # Before the reports, which are read under the turn of the host that has each node rank now.
        self._look_for_replacements()
        for node_rank in range(self._nodes):
            report = read(self._store, host_key(node_rank, roster.turns.get(node_rank, 0)), HostReport)
            if report is not None:
                roster.observe(node_rank, report, time.monotonic())
        # Read until it is there: the layout is published once, and stays.
        self._admits_restarted = self._admits_restarted or self._records.layout() is not None
        if (stalled := self._records.stalled()) is not None:
            roster.stall(stalled)
        if roster.membership is not None and roster.membership.arrived:
            roster.admitted = self._records.admitted()  # after the reports: who has ended had written it before
        for departure in roster.away:
            if (ready := self._records.readiness(departure.rank)) is not None:
                roster.ready(departure, ready)
        before = roster.membership
        roster.decide(time.monotonic(), time.time())
        if roster.membership is not None and roster.membership != before:
            self._records.publish(roster.membership)
            _log(roster.membership)
            if roster.start is not None and before is None:
                allow_connections(roster.start.world_size, "job's store", _CONNECTIONS)
                # After epoch 0 of the membership, which every rank reads when it starts.
                write(self._store, START_KEY, roster.start)
        # Also without news: launchers measure this coordinator's silence by its beat.
        self._beat += 1
        state = JobState(
            self._beat,
            roster.outcome,
            tuple(roster.lost),
            self.stalled,
            roster.vacant,
            roster.turns,
            self._admits_restarted,
            {rank: start for rank, start in roster.starts.items() if roster.trains(rank)},
        )
        write(self._store, JOB_KEY, state)

    def _look_for_replacements(self) -> None:
        roster = self._roster
        for node_rank in roster.vacant:
            turn, before = roster.turns.get(node_rank, 0) + 1, roster.hosts[node_rank]
            if (report := read(self._store, host_key(node_rank, turn), HostReport)) is not None:
                roster.replace(node_rank, report, time.monotonic())
                logger.warning("host %s takes the place of host %s (node rank %d)", report.host, before.host, node_rank)


def _log(membership: Membership) -> None:
    """Log the departures and arrivals of a new epoch."""
    for left in membership.left:
        if left.epoch == membership.epoch:
            logger.warning("epoch %d: rank %d of host %s has left: %s", left.epoch, left.rank, left.host, left.why)
    for each in membership.arrived:
        if each.epoch == membership.epoch:
            logger.warning(
                "epoch %d: rank %d stands ready again on host %s; it takes part from the next iteration on in which "
                "its whole cell is ready",
                *(each.epoch, each.rank, each.ready.host),
            )


@dataclass(frozen=True)
class View:
    """Latest state of the job that the link has read."""

    node_rank: int | None = None
    """Node rank of this launcher; None until the link is up."""
    turn: int = 0
    """Number of earlier launchers with this node rank."""
    port: int = 0
    """TCP port of the store."""
    start: Start | None = None
    state: JobState | None = None
    error: str = ""
    """Why the link has ended; empty while it works."""


class LauncherLink:
    """Link of one launcher to the coordinator. Use `view` and `say` in the thread that created it."""

    def __init__(
        self, endpoint: Endpoint, run_id: str, nodes: int, node_rank: int | None, policy: Policy, report: HostReport
    ) -> None:
        """Start the link in a thread of its own. `report`: the first one."""
        self.view = View()
        """Latest view; replaced as a whole."""
        self.changed = threading.Event()
        """Set with each new view."""
        self._endpoint, self._run_id, self._nodes, self._node_rank = endpoint, run_id, nodes, node_rank
        self._policy, self._report = policy, report
        self._said, self._given_up = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="adaptra-launch-link", daemon=True)
        self._thread.start()

    def say(self, report: HostReport) -> None:
        """Send a report at once; the link numbers it."""
        self._report = report
        self._said.set()

    def finish(self, timeout_s: float) -> bool:
        """Wait until the last report (`left`) is in the store; on node rank 0, until the last reports of all hosts are.

        Returns whether the link has ended within `timeout_s`.
        """
        self._given_up = True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            policy = self._policy
            seat = take_seat(
                self._endpoint,
                self._run_id,
                self._nodes,
                self._node_rank,
                self._report.nproc,
                join_timeout_s=policy.join_timeout_s,
                heartbeat_timeout_s=policy.heartbeat_timeout_s,
                given_up=lambda: self._given_up,
            )
            mine = launch_store(seat.store, self._run_id)
            coordinator = None if seat.node_rank else Coordinator(mine, self._nodes, policy)
            self._show(replace(self.view, node_rank=seat.node_rank, turn=seat.turn, port=seat.store.port))
            self._keep(mine, host_key(seat.node_rank, seat.turn), coordinator)
        except Exception as cause:
            # Any error: this thread must not end unseen, as the main thread ends the ranks by the view's error.
            self._show(replace(self.view, error=str(cause).partition("\n")[0]))

    def _keep(self, store: SealedStore, key: str, coordinator: Coordinator | None) -> None:
        beat = 0
        while True:
            # Before the report is taken: one that is given meanwhile then ends the wait below, and is written at once.
            self._said.clear()
            report, beat = self._report, beat + 1
            write(store, key, replace(report, beat=beat))
            if coordinator is not None:
                coordinator.tick()
            start = self.view.start or read(store, START_KEY, Start)
            self._show(replace(self.view, start=start, state=read(store, JOB_KEY, JobState)))
            if report.left and (coordinator is None or coordinator.all_left):
                return
            self._said.wait(beat_s(self._nodes) if coordinator is None else BEAT_S)

    def _show(self, view: View) -> None:
        self.view = view
        self.changed.set()


FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
HEALTHY_S = 3600.0
"""Running time after which the earlier failures of a rank that trained are forgotten, in seconds."""


class Restarts:
    """Restarts of one rank on one host. Times are arguments (seconds of the monotonic clock)."""

    def __init__(self, most: int, now_s: float) -> None:
        """`most`: maximum number of restarts (--max-restarts)."""
        self.count = 0
        """Number of restarts, made or pending, that are not forgotten."""
        self._most, self._started_s = most, now_s
        self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._due_s: float | None = None

    def fail(self, now_s: float, *, trained: bool) -> float | None:
        """Record that the rank's process failed or could not be started; return the pause before the next start.

        Returns None if it is not started again. `trained`: whether the process had been admitted to the job.
        """
        # Only after training: on a broken host each process fails at once, and the pauses must grow.
        if trained:
            self._backoff.reset()
            if now_s - self._started_s >= HEALTHY_S:
                self.count = 0
        if self.count >= self._most:
            return None
        self.count += 1
        pause_s = self._backoff.next_s()
        self._due_s = now_s + pause_s
        return pause_s

    def start(self, now_s: float) -> bool:
        """Return whether the next process is due, and record its start."""
        if self._due_s is None or now_s < self._due_s:
            return False
        self._due_s, self._started_s = None, now_s
        return True


_NEWS = 4
"""States after a failure that may be older than what ranks had published before it: one on its way to this host, one
that waits in the store, one that is being made, and one for reserve."""
_SAID_S = 3.0
"""Time limit for the last report to a store that answers."""
_SIGNALLED = 128
"""Offset of a launcher's exit status after a signal, to which the signal's number is added, as in a shell."""


@dataclass(frozen=True)
class LauncherVerdict:
    """Result of a launcher."""

    exit_code: int
    """0 on success; 1 for a job that failed, as torchrun's; 128 + N for a launcher that signal N ended."""
    text: str
    number: signal.Signals = signal.SIGTERM
    """Signal that running ranks are sent."""
    leaving: str = ""
    """Why this host leaves, for the coordinator: see `HostReport`."""


class Launcher:
    """Launcher of one host. Runs once, in the main thread."""

    def __init__(self, settings: LaunchSettings) -> None:
        self._settings = settings
        self._signals: list[signal.Signals] = []
        self._workers: Workers | None = None
        self._restarts: list[Restarts] = []
        """Restarts by local rank, once ranks run."""
        self._failed: list[tuple[RankEnding, int, int]] = []
        """Failures after which no restart is decided yet, each with the coordinator's latest beat, and the number of
        states that came after the failure."""
        self._report = HostReport(socket.gethostname(), settings.config.nproc_per_node)
        self._begun_s = time.monotonic()
        self._silence = Silence(self._begun_s)
        self._link: LauncherLink

    def run(self) -> LauncherVerdict:
        """Start the ranks, watch them, and end them."""
        settings = self._settings
        names = (each.name for each in settings.signals)
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(names)  # for torch, and ranks inherit it
        with self._handled_signals():
            self._link = LauncherLink(
                settings.endpoint,
                settings.config.run_id,
                settings.nodes,
                settings.node_rank,
                settings.policy,
                self._report,
            )
            try:
                return self._leave(self._watch())
            finally:
                if self._workers is not None:
                    # `_leave` has left none running; some run only if this launcher has raised an error.
                    self._workers.end(signal.SIGKILL, 0.0, lambda: True)
                    self._workers.close()

    def _watch(self) -> LauncherVerdict:
        while True:
            # Before the view is taken: one that comes meanwhile then ends the wait below.
            self._link.changed.clear()
            view = self._link.view
            # Before the verdict, which sends this report as the last one of the host.
            if self._workers is not None and (endings := self._workers.poll()):
                self._report = self._report.with_endings(endings)
                self._link.say(self._report)
                if self._settings.policy.no_kill and self._settings.config.max_restarts:
                    beat = 0 if view.state is None else view.state.beat
                    self._failed += [(ending, beat, 0) for ending in endings if ending.failed]
            verdict = self._signalled() or self._judged(view)
            self._plan_restarts(view, last=verdict is not None)
            if verdict is not None:
                return verdict
            if self._workers is None and view.start is not None and (verdict := self._start(view)) is not None:
                return verdict
            if self._workers is not None:
                self._start_again()
            if self._workers is not None and view.state is not None:
                first = _first_rank(view)
                self._workers.kill({rank - first: start for rank, start in view.state.stalled.items()})
            self._link.changed.wait(POLL_S)

    def _plan_restarts(self, view: View, *, last: bool) -> None:
        """Schedule restarts of failed ranks, if the job can admit them. `last`: no later state is waited for."""
        state, failed = view.state, self._failed
        self._failed = []
        for ending, beat, news in failed:
            if state is not None and state.admits_restarted:
                # `admitted` has only ranks that were started again. A first process (start 0) needed no admission.
                trained = state.admitted.get(_first_rank(view) + ending.local_rank, 0) == ending.start
                self._plan_restart(ending.local_rank, ending.why, trained=trained)
            elif news < _NEWS and not last:
                newest = beat if state is None else state.beat
                self._failed.append((ending, newest, news + (newest > beat)))
            else:
                logger.error(
                    "local rank %d %s and is not started again (--max-restarts %d): %s",
                    *(ending.local_rank, ending.why, self._settings.config.max_restarts, NO_REJOINING),
                )

    def _plan_restart(self, local_rank: int, why: str, *, trained: bool) -> None:
        restarts, most = self._restarts[local_rank], self._settings.config.max_restarts
        pause_s = restarts.fail(time.monotonic(), trained=trained)
        if pause_s is None:
            text = "local rank %d %s and is not started again: it has been %d times (--max-restarts)"
            logger.error(text, local_rank, why, most)
            return
        logger.warning(
            "local rank %d %s and is started again in %g s (%d of %d times, --max-restarts)",
            *(local_rank, why, pause_s, restarts.count, most),
        )

    def _start_again(self) -> None:
        """Start ranks whose pauses have elapsed."""
        assert self._workers is not None
        for local_rank, restarts in enumerate(self._restarts):
            if restarts.start(time.monotonic()):
                try:
                    self._workers.start_again(local_rank)
                except OSError as cause:
                    self._plan_restart(local_rank, f"cannot be started: {cause}", trained=False)

    def _start(self, view: View) -> LauncherVerdict | None:
        assert view.start is not None
        assert view.node_rank is not None
        settings = self._settings
        endpoint = settings.endpoint._replace(port=view.port)
        try:
            self._workers = Workers(
                settings.config,
                settings.command,
                settings.arguments,
                view.start,
                view.node_rank,
                endpoint,
                # Other numbers than those of the hosts before, whatever those were.
                first_start=view.turn << 16,
            )
        except SignalException as cause:
            self._signals.append(cause.sigval)
        except OSError as cause:
            text = f"cannot start its ranks: {cause}"
            return LauncherVerdict(1, text, leaving=text)
        finally:
            self._handle_signals()  # in place of torch's, which raise
        most, now_s = settings.config.max_restarts, time.monotonic()
        self._restarts = [Restarts(most, now_s) for _ in range(settings.config.nproc_per_node)]
        return None

    def _signalled(self) -> LauncherVerdict | None:
        if not self._signals:
            return None
        number = self._signals[0]
        text = f"received {number.name}"
        return LauncherVerdict(_SIGNALLED + number, text, number, text)

    def _judged(self, view: View) -> LauncherVerdict | None:
        """Return the verdict of the coordinator, or the verdict on a silent coordinator; None to continue."""
        if view.error:
            return LauncherVerdict(
                1, self._without_coordinator(view.error) if view.node_rank and view.state else view.error
            )
        policy = self._settings.policy
        if view.node_rank is None:
            # `take_seat` gives up before, but for a store that does not answer: torch's client then waits for ever.
            waited_s = time.monotonic() - self._begun_s
            if waited_s <= 2 * (policy.join_timeout_s + policy.heartbeat_timeout_s):
                return None
            return LauncherVerdict(
                1,
                f"the job's store at {self._settings.endpoint} accepts connections, but has not answered for "
                f"{waited_s:.0f} s: see whether the launcher of node rank 0 or its host stalled, and that no other "
                "program listens there",
            )
        # Also before the first state: a coordinator that never writes one is as silent.
        silent_s = self._silence.observe(view.state and view.state.beat, time.monotonic())
        timeout_s = policy.heartbeat_timeout_s
        if silent_s > timeout_s:
            return LauncherVerdict(1, self._without_coordinator(f"it has been silent for {silent_s:.1f} s"))
        if view.state is None:
            return None
        # This host lives, but the others continue without it: two processes of one rank must not both train.
        if view.node_rank in view.state.lost and view.turn == view.state.turns.get(view.node_rank, 0):
            return LauncherVerdict(
                1,
                f"the coordinator has had no report of this host (node rank {view.node_rank}) for more than "
                f"{timeout_s:g} s and counts its ranks as dead, so they have been ended; see whether this host, its "
                "launcher or the network between them stalled",
            )
        if view.state.turns.get(view.node_rank, 0) > view.turn:
            return LauncherVerdict(
                1,
                f"this host (node rank {view.node_rank}) counted as dead, and another has taken its place meanwhile, "
                "so its ranks have been ended; see why this host, its launcher or the network between them stalled",
            )
        outcome = view.state.outcome
        return None if outcome is None else LauncherVerdict(int(outcome.failed), outcome.text)

    def _without_coordinator(self, why: str) -> str:
        return (
            f"the coordinator at {self._settings.endpoint} (launcher of node rank 0) is gone: {why}; without it and "
            f"the job's store the ranks of this host ({self._report.host}) cannot go on and have been ended; see that "
            "host and the output of its launcher, then start the job again from its last checkpoint"
        )

    def _leave(self, verdict: LauncherVerdict) -> LauncherVerdict:
        """End the ranks, and report that to the coordinator."""
        patience_s = self._settings.shutdown_timeout_s
        report = replace(self._report, leaving=verdict.leaving)
        self._link.say(report)
        if self._workers is not None:
            ended = self._workers.end(verdict.number, patience_s, lambda: len(self._signals) > 1)
            report = report.with_endings(replace(each, asked=True) for each in ended)
        # Only now: as soon as this is seen, another host may take the node rank.
        self._link.say(replace(report, left=True))
        # The store ends with node rank 0, so that launcher waits until the others have read the outcome.
        others_s = patience_s + self._settings.policy.heartbeat_timeout_s if self._link.view.node_rank == 0 else 0.0
        deadline_s = time.monotonic() + _SAID_S + others_s
        # One more signal ends this wait, as a second Ctrl-C is meant to.
        pressed = len(self._signals)
        while not self._link.finish(POLL_S) and time.monotonic() < deadline_s and len(self._signals) == pressed:
            continue
        return verdict

    @contextmanager
    def _handled_signals(self) -> Iterator[None]:
        before = {number: signal.getsignal(number) for number in self._settings.signals}
        self._handle_signals()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle_signals(self) -> None:
        for number in self._settings.signals:
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        # Noted only: the handler interrupts the main thread anywhere, and `_watch` acts within POLL_S.
        self._signals.append(signal.Signals(number))


def _first_rank(view: View) -> int:
    """Return the global rank of local rank 0."""
    assert view.start is not None
    assert view.node_rank is not None
    return view.start.first_ranks[view.node_rank]
