# SPDX-License-Identifier: Apache-2.0
"""Search for the tables in adaptra_megatron/gradsync/tables.csv, with CP-SAT: a few minutes for all.

    search_all_reduce_tables.py FIRST LAST [--limit-s=60]

Prints one line per number of ranks that is no power of two; adaptra_megatron/gradsync/stragglar.py says what
its columns mean, and why so small a table is enough.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from ortools.sat.python import cp_model

from adaptra_megatron.gradsync.stragglar import held_after_cycles, least_rounds


def ages(ranks: int, limit_s: float, extra: int) -> list[int] | None:
    """For the ranks at distance 1, 2, ... from a chunk's owner, how many rounds after it they receive the chunk.

    As many rounds as a chunk needs are too few for all numbers but powers of two; `extra` are allowed beyond.
    """
    if ranks == 3:
        return [3]  # never within the two exchanges: all is left to the tail
    fast, most = ranks - 1, (ranks - 1).bit_length() + extra
    model = cp_model.CpModel()
    received = {(at, age): model.new_bool_var("") for at in range(1, fast) for age in range(1, most + 1)}
    sent = {(at, age): model.new_bool_var("") for at in range(fast) for age in range(1, most + 1)}
    for at in range(1, fast):
        model.add_exactly_one(received[at, age] for age in range(1, most + 1))
    for position in range(fast):
        coming = [received[(position + age) % fast, age] for age in range(1, most + 1) if (position + age) % fast != 0]
        going = [sent[(position + age) % fast, age] for age in range(1, most + 1)]
        if position == 0:  # exchanges with the straggler
            model.add(sum(coming) + sum(going) == 0)
        else:
            model.add_exactly_one(coming)
            model.add_at_most_one(going)
    for age in range(1, most + 1):
        model.add(sum(sent[at, age] for at in range(fast)) == sum(received[at, age] for at in range(1, fast)))
        for at in range(1, fast):
            model.add(sent[at, age] <= sum(received[at, earlier] for earlier in range(1, age)))
    solver = solved(model, limit_s)
    if solver is None:
        return None
    return [next(age for age in range(1, most + 1) if solver.value(received[at, age])) for at in range(1, fast)]


def tail(ranks: int, found: list[int], limit_s: float, extra: int) -> list[list[int]] | None:
    """For each round after the last exchange, what each fast rank receives: the chunk's distance from the last one.

    -1: nothing.
    """
    fast = ranks - 1
    rounds = least_rounds(ranks) + extra - fast
    held = held_after_cycles(ranks, found)
    open_chunks = [chunk for chunk in range(fast) if any(chunk not in held[rank] for rank in range(fast))]
    model = cp_model.CpModel()
    received = {
        (rank, chunk, step): model.new_bool_var("")
        for rank in range(fast)
        for chunk in open_chunks
        if chunk not in held[rank]
        for step in range(rounds)
    }
    sent = {
        (rank, chunk, step): model.new_bool_var("")
        for rank in range(ranks)
        for chunk in open_chunks
        for step in range(rounds)
    }
    for (rank, chunk, step), variable in sent.items():
        if chunk not in held[rank]:
            model.add(variable <= sum(received[rank, chunk, earlier] for earlier in range(step)))
    for rank in range(fast):
        for chunk in open_chunks:
            if chunk not in held[rank]:
                model.add_exactly_one(received[rank, chunk, step] for step in range(rounds))
    for step in range(rounds):
        for rank in range(ranks):
            model.add_at_most_one(sent[rank, chunk, step] for chunk in open_chunks)
            model.add_at_most_one(
                received[rank, chunk, step] for chunk in open_chunks if (rank, chunk, step) in received
            )
        for chunk in open_chunks:
            model.add(
                sum(sent[rank, chunk, step] for rank in range(ranks))
                == sum(received[rank, chunk, step] for rank in range(fast) if (rank, chunk, step) in received)
            )
    solver = solved(model, limit_s)
    if solver is None:
        return None
    return [
        [
            next(
                (
                    fast - 1 - chunk
                    for chunk in open_chunks
                    if (rank, chunk, step) in received and solver.value(received[rank, chunk, step])
                ),
                -1,
            )
            for rank in range(fast)
        ]
        for step in range(rounds)
    ]


def both(ranks: int, limit_s: float, extra: int) -> tuple[list[int], list[list[int]]] | None:
    """Ages and tail; a tail that cannot be found in the fewest rounds gets one more."""
    found = ages(ranks, limit_s, extra)
    if found is None:
        return None
    rounds = tail(ranks, found, limit_s, 0) or tail(ranks, found, limit_s, 1)
    return None if rounds is None else (found, rounds)


def solved(model: cp_model.CpModel, limit_s: float) -> cp_model.CpSolver | None:
    """The solver with a solution; None if it found none in time."""
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = 2
    return solver if solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None


def entries(first: int, last: int, limit_s: float) -> Iterator[str]:
    """Lines of the table."""
    for ranks in range(max(3, first), last + 1):
        if ranks & (ranks - 1) == 0:
            continue
        table = next(filter(None, (both(ranks, limit_s, extra) for extra in (1, 2))), None)
        if table is None:
            print(f"{ranks}: none in {limit_s:g} s", file=sys.stderr)
            continue
        found, rounds = table
        digits = " ".join("".join("-" if each < 0 else f"{each:x}" for each in step) for step in rounds)
        yield f"{ranks},{''.join(map(str, found))},{digits}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("--limit-s", type=float, default=60.0)
    options = parser.parse_args()
    for line in entries(options.first, options.last, options.limit_s):
        print(line, flush=True)
