# SPDX-License-Identifier: Apache-2.0
"""A rank of a training in which something else fails while ranks go on after a death: `struck_ranks.py FAULTS
TRAINING_ARGUMENTS...`, with "delegate:RANK", "path:RANK", "rank:RANK", "idle:RANK", "flip:RANK", "zero:RANK",
"lose:RANK", "lose-back:RANK", "miscount:RANK", "device:RANK", "late-device:RANK" or "stuck:RANK" as a fault; commas lie
between.

Decorators around what a rank does in a new generation: the delegate of RANK is killed as it opens links, each first
message that RANK sends or receives by a device path of these fails, RANK dies as it makes the first group of those that
live, one bit of RANK's parameters changes, or RANK plans as if the first stage of replica 2 were dead, too, so that
this cell lives and has no work. Or, without a death, RANK's gradients are set to 0 between the first micro-batch and
the second, in each attempt, or with "lose" in the attempt LOST alone, or with "lose-back" in the first one after ranks
have come back. With "miscount", RANK adds one to the number of tokens by which gradients are divided, in the attempt
MISCOUNTED. With "device" an error of RANK's accelerator is raised in a forward, with "late-device" after an optimizer's
step, where nothing is undone, as in Megatron's pretrain. With "stuck" an operation of RANK does not end though its
connections are shut down. With "back:RANK", RANK dies as it makes the first group of
those that live once ranks have come back.
Or something is no fault: with "pause:RANK", RANK stands still for PAUSED_S; "cap:RANK" has RANK say what it held most.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from testing.megatron.megatron_on_cpu import install

logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
install(with_fused_weight_gradient=True)

from adaptra_megatron.patches.application import AppliedPatches  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402

from adaptra_megatron.common.layout import Cell  # noqa: E402
from adaptra_megatron.elastic.fence import Fence  # noqa: E402
from adaptra_megatron.elastic.generation import FIRST, Generation  # noqa: E402
from adaptra_megatron.elastic.process_group_manager import FaultTolerantGroups  # noqa: E402
from adaptra_megatron.engine import fault_tolerance, iteration_work  # noqa: E402
from adaptra_megatron.engine import rerouting as degraded  # noqa: E402
from adaptra_megatron.engine.execution.executor import ActivationAccount  # noqa: E402
from adaptra_megatron.engine.fault_tolerance import Recovery  # noqa: E402
from adaptra_megatron.engine.rerouting import Rerouting  # noqa: E402
from adaptra_megatron.megatron.computation import MegatronComputation  # noqa: E402
from adaptra_megatron.megatron.megatron_call import PipelineCall  # noqa: E402
from adaptra_megatron.schedule.ir import Action, Kind  # noqa: E402
from adaptra_megatron.schedule.routing.routed_costs import RoutedCosts  # noqa: E402
from testing.faults.network.path_faults import Mode, PathFaults  # noqa: E402
from testing.replacing import Replaced, Replacement  # noqa: E402
from testing.training.process_groups import leave_job  # noqa: E402
from testing.training.train import train  # noqa: E402
from testing.training.training_arguments import parse_arguments  # noqa: E402

STRUCK = "struck: "
LASTS_S = 0.2
PAUSED_S, PAUSED_IN = 2, 3
LOST, MISCOUNTED = 2, 5
"""Numbers of attempts, from 0; iteration LOST has two."""
ECC = "CUDA error: uncorrectable ECC error encountered"


def say(what: str) -> None:
    """For the test: the fault has fired."""
    sys.stdout.write(f"{STRUCK}{what}\n")
    sys.stdout.flush()


def kill_delegate(enter: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(enter)
    def struck(rerouting: Rerouting, *arguments: Any) -> None:
        enter(rerouting, *arguments)
        transport: Any = rerouting._two_paths
        os.kill(transport.delegate_process_id, signal.SIGKILL)
        say("delegate")

    return struck


def break_paths(enter: Callable[..., None], faults: PathFaults, rank: int) -> Callable[..., None]:
    @functools.wraps(enter)
    def struck(rerouting: Rerouting, *arguments: Any) -> None:
        enter(rerouting, *arguments)
        for peer in rerouting._job.layout.workers:
            faults.arm((rank, peer), Mode.ERROR, LASTS_S)
            faults.arm((peer, rank), Mode.ERROR, LASTS_S)

    return struck


def die(make: Callable[..., Any], *, back: bool = False) -> Callable[..., Any]:
    @functools.wraps(make)
    def struck(groups: FaultTolerantGroups, *arguments: Any) -> Any:
        if groups._generation.admission if back else groups._generation != FIRST:
            say("rank")
            os.kill(os.getpid(), signal.SIGKILL)
        return make(groups, *arguments)

    return struck


def relieve(plan: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plan)
    def struck(costs: RoutedCosts, **keywords: Any) -> Any:
        say("idle")
        return plan(replace(costs, dead=costs.dead | {Cell(2, 0)}), **keywords)

    return struck


def pause(begin: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(begin)
    def struck(rerouting: Rerouting, *given: Any) -> Any:
        if rerouting.pipeline.iterations == PAUSED_IN:
            program = f"kill -STOP {os.getpid()}; sleep {PAUSED_S}; kill -CONT {os.getpid()}"
            longest_s, seen_s = 0.0, time.monotonic()
            with subprocess.Popen(["sh", "-c", program]) as process:
                while process.poll() is None:
                    longest_s, seen_s = max(longest_s, time.monotonic() - seen_s), time.monotonic()
                    time.sleep(0.01)
            say(f"stood still for {max(longest_s, time.monotonic() - seen_s):.1f} s")
        return begin(rerouting, *given)

    return struck


def flip(digest: Callable[..., bytes]) -> Callable[..., bytes]:
    @functools.wraps(digest)
    def struck(model_chunks: Sequence[Any], *counters: int) -> bytes:
        # Now, as a gather of parameters would give a change in this rank's own shard to all replicas.
        words: Any = next(model_chunks[0].parameters()).data.view(torch.int32)
        words.view(-1)[0] ^= 1
        say("flip")
        return digest(model_chunks, *counters)

    return struck


def zero(backward: Callable[..., Any], attempt: int | None = None) -> Callable[..., Any]:
    attempts = itertools.count()

    @functools.wraps(backward)
    def struck(computation: Any, chunk: int, micro_batch: int, *given: Any, **keywords: Any) -> Any:
        if micro_batch == 1 and attempt in (None, next(attempts)):
            for buffer in computation._call.model_chunks[chunk].buffers:
                buffer.reset()
            say("zero")
        return backward(computation, chunk, micro_batch, *given, **keywords)

    return struck


def zero_once_back(run: Callable[..., Any]) -> Callable[..., Any]:
    left = ["first"]

    @functools.wraps(run)
    def struck(recovery: Recovery, attempt: Any, call: PipelineCall, generation: Generation, number: int) -> Any:
        if not generation.id.admission or not left:
            return run(recovery, attempt, call, generation, number)
        left.clear()
        with Replaced([Replacement(MegatronComputation, "backward", zero(MegatronComputation.backward), "as above")]):
            return run(recovery, attempt, call, generation, number)

    return struck


def miscount(finish: Callable[..., None]) -> Callable[..., None]:
    attempts = itertools.count()

    @functools.wraps(finish)
    def struck(recovery: Recovery, reduce: Callable[[], None], call: PipelineCall, tokens: torch.Tensor) -> None:
        def reduce_one_more() -> None:
            tokens.add_(1)
            say("miscount")
            reduce()

        finish(recovery, reduce_one_more if next(attempts) == MISCOUNTED else reduce, call, tokens)

    return struck


def fail_device(run: Callable[..., Any], number: int) -> Callable[..., Any]:
    """Raise what torch raises of a GPU that has failed, in the call of `run` with this number."""
    calls = itertools.count(1)

    @functools.wraps(run)
    def struck(*given: Any, **keywords: Any) -> Any:
        if next(calls) == number:
            say("device")
            raise torch.AcceleratorError(ECC)
        return run(*given, **keywords)

    return struck


class StuckWork:
    """Handle of an operation that does not end."""

    def is_completed(self) -> bool:
        return False


def stick(wait: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(wait)
    def waits(fence: Fence, timeout_s: float) -> None:
        fence._note(StuckWork(), "an all-reduce over a GPU that hangs")
        say("an operation does not end")
        wait(fence, timeout_s)

    return waits


class CountedAccount(ActivationAccount):
    """Says what any of them has held most in training, at the end."""

    most, caps = 0.0, set[float | None]()

    def after(self, action: Action, *, alone: bool = True) -> None:
        super().after(action, alone=alone)
        if action.kind is not Kind.FORWARD:  # evaluation, which has no cap, has nothing else
            self.caps.add(self._cap)
            CountedAccount.most = max(self.most, self.peak)


def main(struck: list[str], arguments: list[str]) -> None:
    rank, faults = int(os.environ["RANK"]), PathFaults()
    backward = MegatronComputation.backward
    decorated = {
        "delegate": Replacement(Rerouting, "enter", kill_delegate(Rerouting.enter), "a delegate is killed"),
        "path": Replacement(Rerouting, "enter", break_paths(Rerouting.enter, faults, rank), "device paths break"),
        "idle": Replacement(degraded, "plan_routed", relieve(degraded.plan_routed), "a cell has no work"),
        "pause": Replacement(Rerouting, "wrap_inputs", pause(Rerouting.wrap_inputs), "a rank stands still"),
        "cap": Replacement(iteration_work, "ActivationAccount", CountedAccount, "activations are counted"),
        "flip": Replacement(fault_tolerance, "digest_of", flip(fault_tolerance.digest_of), "a parameter changes"),
        "zero": Replacement(MegatronComputation, "backward", zero(backward), "gradients are lost"),
        "lose": Replacement(MegatronComputation, "backward", zero(backward, LOST), "gradients are lost once"),
        "lose-back": Replacement(Recovery, "_attempt", zero_once_back(Recovery._attempt), "gradients are lost once"),
        "miscount": Replacement(Recovery, "finish", miscount(Recovery.finish), "a token is counted that is not there"),
        "device": Replacement(
            MegatronComputation, "forward", fail_device(MegatronComputation.forward, 10), "a device fails in a call"
        ),
        "late-device": Replacement(
            OptimizerParamScheduler, "step", fail_device(OptimizerParamScheduler.step, 3), "a device fails after a call"
        ),
        "stuck": Replacement(Fence, "wait", stick(Fence.wait), "an operation does not end"),
        "rank": Replacement(FaultTolerantGroups, "_make_native", die(FaultTolerantGroups._make_native), "a rank dies"),
    }
    decorated["back"] = replace(decorated["rank"], value=die(FaultTolerantGroups._make_native, back=True))
    args = parse_arguments(arguments)
    args.distributed_backend = "gloo"
    mine = [decorated[kind] for kind, _, number in (each.partition(":") for each in struck) if int(number) == rank]
    if decorated["late-device"] in mine:
        mine.append(Replacement(AppliedPatches, "undo", lambda _: None, "Megatron's pretrain undoes nothing"))
    with Replaced(mine), faults:
        train(args)
        leave_job()
    if CountedAccount.most:
        say(f"held {CountedAccount.most:g} at most, of {CountedAccount.caps}")
    if faults.begun:
        say(f"{len(faults.begun)} paths")


if __name__ == "__main__":
    main(sys.argv[1].split(","), sys.argv[2:])
