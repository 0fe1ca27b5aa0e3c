# SPDX-License-Identifier: Apache-2.0
"""The end of an attempt: all live ranks come to it, and the last to come knows that, and what they have come with.

Each rank puts a sealed word under a key of its own and rings a bell, a counter of the store, which no seal covers: it
only wakes the rank that then reads the words. Beyond GROUP_SIZE ranks, the last of each group puts a word for all of
it. So an attempt costs each rank two requests, and the last ones GROUP_SIZE words; keys do not grow with iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from adaptra_megatron.common.authentication.sealed_store import SealedStore
from adaptra_megatron.common.typed_messages import packed, unpacked
from adaptra_megatron.elastic.awaiting import awaited

GROUP_SIZE = 128
_MOST_NBYTES = 1 << 20
_KEPT_CALLS = 2
"""Of whose attempts words stay: a rank may still look for the fate of the call before."""


class ReplicasDifferError(RuntimeError):
    """Replicas of a stage have other parameters, or have taken other steps: the job must not go on."""

    def __init__(self, place: str, attempt: str) -> None:
        self.place, self.attempt = place, attempt
        super().__init__(
            f"replicas of {place} do not hold the same state after ranks have failed or come back (attempt {attempt}): "
            "the job ends rather than to train on; restart from the last checkpoint and report this with the logs"
        )


@dataclass(frozen=True)
class Word:
    """Word that ranks have brought to the end of an attempt: of one, or of several together."""

    attempt: str
    tokens: int = 0
    """Of the micro-batches that they computed the loss of, where the loss is per token."""
    divisors: tuple[int, ...] = ()
    """By which they have divided gradients, where the loss is per token: each should be the tokens of all."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """By stage and lane: of parameters and steps as the attempt began, the first of a generation."""

    def sound(self) -> bool:
        """Return whether tokens are conserved."""
        return all(each == self.tokens for each in self.divisors)


def together(words: Sequence[Word]) -> Word:
    """Return one word for several. Raises ReplicasDifferError where their digests differ."""
    digests: dict[str, str] = {}
    for word in words:
        for place, digest in word.digests.items():
            if digests.setdefault(place, digest) != digest:
                raise ReplicasDifferError(place, word.attempt)
    divisors = tuple(sorted({each for word in words for each in word.divisors}))
    return Word(words[0].attempt, sum(word.tokens for word in words), divisors, digests)


class CommitDesk:
    """One rank's way to the end of attempts. For the training thread."""

    def __init__(self, store: SealedStore, rank: int, timeout_s: float) -> None:
        """`timeout_s`: longest wait for the word of a rank that has rung."""
        self._store, self._rank, self._timeout_s = store, rank, timeout_s
        self._attempts: list[tuple[int, str]] = []
        """Calls, and the attempts at them that this rank has come to the end of."""
        self._live: frozenset[int] = frozenset()
        self._seat: tuple[int, int, Sequence[str]] = 0, 0, ()
        """See `_seat_of`, for these live ranks: they are the same for many calls, and may be thousands."""

    def arrive(self, call: int, live: frozenset[int], word: Word, check: Callable[[], None]) -> Word | None:
        """Come to the end of an attempt at `call` with the `live` ranks. `check`: raises what ends a wait.

        Returns what all have come with, to the last one; None to the others. Raises RuntimeError where the store does,
        TimeoutError where a word is not there though its rank has rung, and as `together`.
        """
        store, attempt = self._store, word.attempt
        if live is not self._live:
            self._live, self._seat = live, _seat_of(self._rank, live)
        groups, mine, members = self._seat
        over = self._over(call)
        self._attempts.append((call, attempt))
        store.set(f"came/{self._rank}", packed(word))
        if store.add(f"bell/{attempt}/{mine}", 1) != len(members):
            return None
        known = self._words(members, attempt, check)
        if groups > 1:
            store.set(f"came/of-group/{mine}", packed(known))
            if store.add(f"bell/{attempt}", 1) != groups:
                return None
            known = self._words([f"came/of-group/{each}" for each in range(groups)], attempt, check)
        for each in over:
            for key in (f"fate/{each}", f"bell/{each}", *(f"bell/{each}/{group}" for group in range(groups))):
                store.delete_key(key)
        return known

    def _words(self, keys: Sequence[str], attempt: str, check: Callable[[], None]) -> Word:
        def look() -> list[Word] | None:
            words: list[Word] = [unpacked(each, Word, _MOST_NBYTES) for each in self._store.get_all(keys)]
            return words if all(word.attempt == attempt for word in words) else None

        try:
            return together(awaited(look, self._timeout_s, check))  # at once, unless an unauthenticated peer has rung
        except TimeoutError as cause:
            raise TimeoutError(f"attempt {attempt}: a rank has rung whose word is not there") from cause

    def _over(self, call: int) -> list[str]:
        """Return attempts at calls that all ranks have long left."""
        over = [attempt for number, attempt in self._attempts if number <= call - _KEPT_CALLS]
        self._attempts = [each for each in self._attempts if each[0] > call - _KEPT_CALLS]
        return over


def _seat_of(rank: int, live: frozenset[int]) -> tuple[int, int, Sequence[str]]:
    """Return the number of groups of the `live` ranks, that of the group of `rank`, and the keys of its words."""
    ranks = sorted(live)
    mine = ranks.index(rank) // GROUP_SIZE
    members = [f"came/{each}" for each in ranks[mine * GROUP_SIZE : (mine + 1) * GROUP_SIZE]]
    return -(-len(ranks) // GROUP_SIZE), mine, members
