# SPDX-License-Identifier: Apache-2.0
"""Carry out the protocol's requests on the job's store, and let all live ranks commit an attempt there.

Each rank writes a sealed word under a key of its own and then increments a counter of the store, the bell. The rank
whose increment completes the count reads all words. The bell is not sealed and decides nothing else. With more than
GROUP_SIZE ranks, the last rank of each group writes one word for the whole group. So an attempt costs each rank two
requests, and each last rank GROUP_SIZE words. The number of keys does not grow with iterations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from adaptra_megatron.common.backoff import Backoff
from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.sealed_store import MOST_NBYTES, SealedStore
from adaptra_megatron.common.typed_messages import packed, unpacked
from adaptra_megatron.elastic.generation import GenerationId
from adaptra_megatron.elastic.protocol import Agreement, Answer, Await, AwaitAll, Done, Found, HandedIn, Put, PutOnce

_LOOKS_S, _SELDOM_S = 0.002, 0.1
Seen = TypeVar("Seen")


def said_by_one(store: SealedStore, key: str, mine: bytes | None, timeout_s: float, check: Callable[[], None]) -> bytes:
    """Return the value that one rank writes under `key` for all to read; this rank does if it has `mine`.

    `check`: see `awaited`. Raises TimeoutError after `timeout_s`, and RuntimeError if the store cannot be reached.
    """
    if mine is not None:
        store.set_parts(key, mine)
    # Ever more seldom: it may take that rank seconds, in which thousands wait.
    return awaited(lambda: store.peek(key), timeout_s, check, longest_pause_s=_SELDOM_S)


def awaited(
    look: Callable[[], Seen | None],
    timeout_s: float,
    check: Callable[[], None],
    first_pause_s: float = _LOOKS_S,
    longest_pause_s: float = _LOOKS_S,
) -> Seen:
    """Call `look` until it returns a value, and return that value. `check` is called between two calls and may raise to
    end the wait.

    Pauses grow by half each, from the first to the longest. Raises TimeoutError after `timeout_s`, and the errors of
    `look`.
    """
    deadline_s, backoff = time.monotonic() + timeout_s, Backoff(first_pause_s, longest_pause_s, 1.5)
    while (found := look()) is None:
        check()
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"nothing within {timeout_s:g} s")
        time.sleep(backoff.next_s())
    return found


ALL_GENERATIONS = "survival"
"""Prefix of keys that all generations share."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0003, 0.01
"""First and longest pause between two polls: the last rank to finish an attempt writes its fate at once."""
POLLS_PER_S = 20_000
"""Most polls of the store per second by all ranks together: those of large jobs pause for longer."""


class ProtocolStore:
    """The protocol's requests of one rank. For the training thread."""

    def __init__(self, control: ControlStore, store: SealedStore, timeout_s: float, ranks: int) -> None:
        """`store`: for keys of the whole job. `timeout_s`: longest wait for another rank, and limit of each request.
        `ranks`: number of the job's ranks.
        """
        self._control, self._store, self._timeout_s = control, store, timeout_s
        self._longest_pause_s = max(_LONGEST_PAUSE_S, ranks / POLLS_PER_S)
        self._lent = ExitStack()
        self._of: tuple[GenerationId, SealedStore] | None = None

    def carry_out(self, request: Put | PutOnce | Await | AwaitAll, check: Callable[[], None]) -> Answer:
        """Carry out one request. `check` is called between two polls and may raise to end a wait.

        Raises TimeoutError if another rank does not write within the timeout, RuntimeError if the store cannot be
        reached.
        """
        store = self._store if request.generation is None else self._store_of(request.generation)
        match request:
            case Put():
                value = request.value
                store.set(request.key, value.encode() if isinstance(value, str) else packed(value))
                return Done()
            case PutOnce():
                return Found(store.put_once(request.key, request.word.encode()).decode())
            case Await():
                return Found(self._awaited(store, (request.key,), check)[0])
        return Found(self._awaited(store, request.keys, check))

    def look(self, generation: GenerationId, key: str) -> bool:
        """Return whether a key of a generation has a value."""
        return self._store_of(generation).peek(key) is not None

    def release(self) -> None:
        """Return the client of a generation, once its ranks have met."""
        self._of = None
        self._lent.close()

    def _store_of(self, generation: GenerationId) -> SealedStore:
        if self._of is None or self._of[0] != generation:
            self.release()
            lent = self._control.in_generation(generation).lent("protocol", self._timeout_s)
            self._of = generation, self._lent.enter_context(lent)
        return self._of[1]

    def _awaited(self, store: SealedStore, keys: tuple[str, ...], check: Callable[[], None]) -> tuple[Any, ...]:
        found = list[Any]()

        def look() -> tuple[Any, ...] | None:
            while len(found) < len(keys) and (value := store.peek(keys[len(found)])) is not None:
                found.append(_read(keys[len(found)], value))
            # Keys are looked up in order, and each only until it is there: a wait for many ranks costs one request per
            # look.
            return tuple(found) if len(found) == len(keys) else None

        try:
            return awaited(look, self._timeout_s, check, _FIRST_PAUSE_S, self._longest_pause_s)
        except TimeoutError as cause:
            raise TimeoutError(f"{keys[len(found)]} has been waited for {self._timeout_s:g} s") from cause


def _read(key: str, value: bytes) -> Any:
    kinds = {"state": HandedIn, "agreement": Agreement}
    kind = kinds.get(key.partition("/")[0])
    return value.decode() if kind is None else unpacked(value, kind, MOST_NBYTES)


GROUP_SIZE = 128
_KEPT_CALLS = 2
"""Number of calls whose attempts keep their words: a rank may still look for the fate of the call before."""


class ReplicasDifferError(RuntimeError):
    """Replicas of a stage hold different parameters or have taken different steps: the job must not continue."""

    def __init__(self, place: str, attempt: str) -> None:
        self.place, self.attempt = place, attempt
        super().__init__(
            f"replicas of {place} do not hold the same state after ranks have failed or come back (attempt {attempt}): "
            "the job ends instead of training on; restart from the last checkpoint and report this with the logs"
        )


@dataclass(frozen=True)
class Word:
    """Word at the end of an attempt, of one rank or of several together."""

    attempt: str
    tokens: int = 0
    """With a loss per token: number of tokens of the micro-batches whose loss they computed."""
    divisors: tuple[int, ...] = ()
    """With a loss per token: divisors applied to gradients. Each should equal the tokens of all ranks."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Digest of parameters and optimizer steps at the attempt's beginning, by stage and lane; first attempt of a
    generation.
    """

    def sound(self) -> bool:
        """Return whether gradients were divided by the number of tokens of all ranks."""
        return all(each == self.tokens for each in self.divisors)


def together(words: Sequence[Word]) -> Word:
    """Combine several words into one. Raises ReplicasDifferError if their digests differ."""
    digests: dict[str, str] = {}
    for word in words:
        for place, digest in word.digests.items():
            if digests.setdefault(place, digest) != digest:
                raise ReplicasDifferError(place, word.attempt)
    divisors = tuple(sorted({each for word in words for each in word.divisors}))
    return Word(words[0].attempt, sum(word.tokens for word in words), divisors, digests)


class CommitDesk:
    """Lets one rank commit attempts together with all live ranks. For the training thread."""

    def __init__(self, store: SealedStore, rank: int, timeout_s: float) -> None:
        """`timeout_s`: longest wait for a word after its rank has rung the bell."""
        self._store, self._rank, self._timeout_s = store, rank, timeout_s
        self._attempts: list[tuple[int, str]] = []
        """(call, attempt) of the attempts that this rank has finished."""
        self._live: frozenset[int] = frozenset()
        self._seat: tuple[int, int, Sequence[str]] = 0, 0, ()
        """Cached `_seat_of` of these live ranks: they stay the same for many calls, and may be thousands."""

    def arrive(self, call: int, live: frozenset[int], word: Word, check: Callable[[], None]) -> Word | None:
        """Finish an attempt at `call`; return the combined word on the last of the `live` ranks to arrive, None on the
        others.

        `check` may raise to end a wait. Raises RuntimeError if the store cannot be reached, TimeoutError if a rank has
        incremented the bell but its word is missing, and the errors of `together`.
        """
        store, attempt = self._store, word.attempt
        if live is not self._live:
            self._live, self._seat = live, _seat_of(self._rank, live)
        groups, mine, members = self._seat
        over = self._over(call)
        self._attempts.append((call, attempt))
        # The word before the bell: the last rank to ring reads the words of all.
        store.set(f"came/{self._rank}", packed(word))
        if store.add(f"bell/{attempt}/{mine}", 1) != len(members):
            return None
        known = self._words(members, attempt, check)
        if groups > 1:
            store.set(f"came/of-group/{mine}", packed(known))
            if store.add(f"bell/{attempt}", 1) != groups:
                return None
            known = self._words([f"came/of-group/{each}" for each in range(groups)], attempt, check)
        # One rank deletes, the last one; the keys would otherwise grow with iterations.
        for each in over:
            for key in (f"fate/{each}", f"bell/{each}", *(f"bell/{each}/{group}" for group in range(groups))):
                store.delete_key(key)
        return known

    def _words(self, keys: Sequence[str], attempt: str, check: Callable[[], None]) -> Word:
        def look() -> list[Word] | None:
            words: list[Word] = [unpacked(each, Word, MOST_NBYTES) for each in self._store.get_all(keys)]
            return words if all(word.attempt == attempt for word in words) else None

        try:
            return together(awaited(look, self._timeout_s, check))  # at once, unless an unauthenticated peer has rung
        except TimeoutError as cause:
            raise TimeoutError(f"attempt {attempt}: the word of a rank that has finished it is missing") from cause

    def _over(self, call: int) -> list[str]:
        """Return the attempts at calls that all ranks have finished, and forget them."""
        over = [attempt for number, attempt in self._attempts if number <= call - _KEPT_CALLS]
        self._attempts = [each for each in self._attempts if each[0] > call - _KEPT_CALLS]
        return over


def _seat_of(rank: int, live: frozenset[int]) -> tuple[int, int, Sequence[str]]:
    """Return the number of groups of the `live` ranks, the index of the group of `rank`, and the keys of its words."""
    ranks = sorted(live)
    mine = ranks.index(rank) // GROUP_SIZE
    members = [f"came/{each}" for each in ranks[mine * GROUP_SIZE : (mine + 1) * GROUP_SIZE]]
    return -(-len(ranks) // GROUP_SIZE), mine, members
