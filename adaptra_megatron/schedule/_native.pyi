# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence
from typing import TypedDict

from adaptra_megatron.schedule.actions import Action, Kind

class Problem:
    def __init__(
        self,
        *,
        stages: int,
        chunks: int,
        micro_batches: int,
        forward_s: Sequence[float],
        backward_input_s: Sequence[float],
        backward_weight_s: Sequence[float],
        backward_s: Sequence[float],
        to_next: Sequence[tuple[float, float, bool]],
        to_previous: Sequence[tuple[float, float, bool]],
        cap: Sequence[float],
        released: Sequence[float],
        shared_queue: bool,
    ) -> None: ...

class EncodedOrders:
    def __init__(self, orders: Sequence[Sequence[int]]) -> None: ...

class Replayed(TypedDict):
    makespan_s: float
    start_s: list[list[float]]
    end_s: list[list[float]]
    position: list[int]

class ReplayedBlocking(TypedDict):
    makespan_s: float
    start_s: list[list[float]]
    end_s: list[list[float]]

class Dispatched(TypedDict):
    makespan_s: float
    start_s: list[list[float]]
    end_s: list[list[float]]
    orders: list[list[int]]

class Planned(TypedDict):
    makespan_s: float
    orders: list[list[int]]
    simulated_actions: int
    bound_s: float
    bound_kind: str
    bound_place: int

def actions(
    problem: Problem, stage: int, codes: Sequence[int], action: type[Action], kinds: tuple[Kind, ...]
) -> tuple[Action, ...]: ...
def peak_in_flight(orders: Sequence[Sequence[int]], released: Sequence[float]) -> list[float]: ...
def replay_finish(problem: Problem, orders: EncodedOrders) -> list[float]: ...
def replay_blocking(problem: Problem, programs: EncodedOrders) -> ReplayedBlocking: ...
def blocking_finish(problem: Problem, programs: EncodedOrders) -> list[float]: ...
def dispatch_finish(problem: Problem) -> tuple[list[float], list[float]]: ...
def replay(problem: Problem, orders: Sequence[Sequence[int]]) -> Replayed: ...
def launch_ranks(problem: Problem, orders: Sequence[Sequence[int]]) -> list[list[int]]: ...
def dispatch(problem: Problem) -> Dispatched: ...
def plan(problem: Problem, split: bool, budget: int) -> Planned: ...
def lower_bound(problem: Problem) -> tuple[float, str, int]: ...
