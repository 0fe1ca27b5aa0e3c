# SPDX-License-Identifier: Apache-2.0
"""What ranks do in test_stage_lockstep.py: `stage_team_ranks.py SCENARIO`, over gloo; all are a team, rank 1 leads."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.layout import Cell, JobLayout, Worker
from adaptra_megatron.engine import dispatch as stage_lockstep
from adaptra_megatron.engine.dispatch import StageTeam, StageTeamError

LEADER, FOLLOWERS = 1, (0, 2)
NUMBERS = 200
TIMEOUT_S = 5.0


def follow(team: StageTeam) -> None:
    """Followers get every number in order, however late they ask; the leader waits for none of them."""
    store = _get_default_store()
    for iteration in range(3):
        if team.leads:
            for number in range(NUMBERS):
                team.publish(number * iteration)
            store.set(f"published {iteration}", "")
            dist.barrier()
            team.settle()
        else:
            if iteration == 0:
                store.wait(["published 0"])  # until then the leader has not waited for those that ask later
            assert [team.follow() for _ in range(NUMBERS)] == [number * iteration for number in range(NUMBERS)]
            dist.barrier()


def lose_the_leader(team: StageTeam) -> None:
    """Followers get an error that names which rank of which stage is gone, at once."""
    if team.leads:
        team.publish(7)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    assert team.follow() == 7
    dist.barrier()
    began_s = time.monotonic()
    with pytest.raises(StageTeamError) as caught:
        team.follow()
    assert time.monotonic() - began_s < 5.0
    for part in (f"rank {dist.get_rank()}, stage 3", f"rank {LEADER}, which decides", "--adaptra-dispatch planned"):
        assert part in str(caught.value), caught.value
    leave("survived")


def silent_leader(team: StageTeam) -> None:
    """A leader that lives but says nothing is an error at the deadline."""
    stage_lockstep._PATIENCE_S = 0.5
    if not team.leads:
        with pytest.raises(StageTeamError, match=f"nothing from rank {LEADER}"):
            team.follow()
    dist.barrier()


def give_up(team: StageTeam) -> None:
    """A rank that learns in another thread that the epoch has ended does not wait for the leader any more."""
    dist.barrier()  # the others may still connect the team when one has
    if not team.leads:
        threading.Timer(0.3, team.abort).start()
        began_s = time.monotonic()
        with pytest.raises(StageTeamError):
            team.follow()
        assert time.monotonic() - began_s < TIMEOUT_S
        team.abort()
    dist.barrier()


def lose_a_follower(team: StageTeam) -> None:
    """The leader gets an error that names which one, at the latest when it drops its decision."""
    dist.barrier()  # the others may still connect the team when one has
    if dist.get_rank() == FOLLOWERS[1]:
        os.kill(os.getpid(), signal.SIGKILL)
    if team.leads:
        with pytest.raises(StageTeamError) as caught:
            say_all(team)
        assert f"rank {FOLLOWERS[1]} " in str(caught.value), caught.value
        assert f"rank {LEADER}, stage 3" in str(caught.value)
    else:
        with contextlib.suppress(StageTeamError):  # the leader leaves when it has the answers
            for _ in range(NUMBERS):
                team.follow()
    leave("survived")


def say_all(team: StageTeam) -> None:
    for number in range(NUMBERS):
        team.publish(number)
    team.settle()


def leave(word: str) -> None:
    sys.stdout.write(word)
    sys.stdout.flush()
    os._exit(0)


SCENARIOS = {
    scenario.__name__: scenario for scenario in (follow, lose_the_leader, silent_leader, give_up, lose_a_follower)
}


def main(name: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    workers = {rank: Worker(Cell(0, 3), lane, "", "") for lane, rank in enumerate((LEADER, *FOLLOWERS))}
    team = StageTeam(ControlStore.of_job("job"), JobLayout(dist.get_rank(), workers), TIMEOUT_S)
    assert team.leads == (dist.get_rank() == LEADER)
    SCENARIOS[name](team)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
