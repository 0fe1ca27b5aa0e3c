# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence
from typing import TypedDict

from adaptra_megatron.schedule.ir import Action, Kind

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
        stage_of: Sequence[int],
        links: Sequence[tuple[int, int, float, float, bool]],
        cap: Sequence[float],
        released: Sequence[float],
        shared_queue: bool,
        serial_queue: bool = False,
        combined_saving: Sequence[float] = (),
        combined_sends_at: float = 1.0,
    ) -> None: ...

class EncodedOrders:
    def __init__(self, orders: Sequence[Sequence[int]]) -> None: ...

class Run:
    makespan_s: float
    start_s: list[list[float]]
    end_s: list[list[float]]
    finish_s: list[float]
    peaks: list[float]
    orders: list[list[int]]
    position: list[int]

class Planned(TypedDict):
    makespan_s: float
    orders: list[list[int]]
    simulated_actions: int
    bound_s: float
    bound_kind: str
    bound_place: int

class RoutedProblem:
    def __init__(
        self,
        *,
        replicas: int,
        stages: int,
        micro_batches: int,
        per_cell: Sequence[float],
        factor: Sequence[float],
        whole_given: bool,
        live: Sequence[bool],
        cap: Sequence[float],
        released: Sequence[float],
        own_latency: Sequence[float],
        own_occupancy: Sequence[float],
        given: Sequence[tuple[int, int, float, float]],
        sync: Sequence[float],
        staggered: bool,
        pinned: Sequence[bool],
    ) -> None: ...

class RoutedTimes(TypedDict):
    makespan_s: float
    period_s: float
    start_s: list[list[float]]
    end_s: list[list[float]]

class RoutedReplayed(RoutedTimes):
    position: list[int]

class RoutedPlanned(RoutedTimes):
    hosts: list[int]
    orders: list[list[int]]
    present_s: float
    kept: bool
    simulated_actions: int
    bound_s: float
    bound_stage: int

def actions(
    problem: Problem, stage: int, codes: Sequence[int], action: type[Action], kinds: tuple[Kind, ...]
) -> tuple[Action, ...]: ...
def peak_in_flight(orders: Sequence[Sequence[int]], released: Sequence[float]) -> list[float]: ...
def replay(problem: Problem, orders: EncodedOrders) -> Run: ...
def dispatch(problem: Problem) -> Run: ...
def launch_ranks(problem: Problem, orders: Sequence[Sequence[int]]) -> list[list[int]]: ...
def plan(
    problem: Problem, split: bool, budget: int, known: Sequence[Sequence[Sequence[int]]] = ..., gap: float = ...
) -> Planned: ...
def lower_bound(problem: Problem) -> tuple[float, str, int]: ...
def replay_routed(problem: RoutedProblem, hosts: Sequence[int], orders: Sequence[Sequence[int]]) -> RoutedReplayed: ...
def plan_routed(
    problem: RoutedProblem, split: bool, present: Sequence[int], least_gain: float, budget: int
) -> RoutedPlanned: ...
def routed_bound(problem: RoutedProblem, split: bool) -> tuple[float, int]: ...
