# SPDX-License-Identifier: Apache-2.0
"""Two ends of a link that open and close it as they like, and read in the store what the other was at a while ago."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from adaptra_megatron.transport.dual_path.link_opener import LinkOpenings, Opening

ENDS = st.integers(0, 1)


class TwoEnds(RuleBasedStateMachine):
    """What each end has put into the store, and the openings that it has gone on with."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = [LinkOpenings(), LinkOpenings()]
        self.reported: list[Opening | None] = [None, None]
        self.agreed: list[list[int]] = [[], []]
        """By end, one number for each time that it went on."""
        self.gone_on = [False, False]

    @rule(end=ENDS)
    def open(self, end: int) -> None:
        if not self.ends[end].mine.open:
            self.ends[end].begin()
            self.gone_on[end] = False

    @rule(end=ENDS)
    def close(self, end: int) -> None:
        self.ends[end].end()

    @rule(end=ENDS)
    def tell(self, end: int) -> None:
        self.reported[end] = self.ends[end].mine

    @rule(end=ENDS)
    def look(self, end: int) -> None:
        """As `LinkOpener`: an end goes on with what it has reported itself, and then looks no more."""
        theirs, opening = self.reported[1 - end], self.ends[end]
        if theirs is None or not opening.mine.open or self.gone_on[end]:
            return
        if opening.agreed(theirs) and self.reported[end] == opening.mine:
            self.gone_on[end] = True
            self.agreed[end].append(opening.mine.number)

    @invariant()
    def no_end_comes_back_to_an_opening(self) -> None:
        for numbers in self.agreed:
            assert numbers == sorted(set(numbers))

    def teardown(self) -> None:
        """Whatever has happened: both open the link anew, after both have said that it is closed, and come together."""
        for step in (self.close, self.tell, self.open):
            for end in (0, 1):
                step(end)
        for _ in range(3):
            for end in (0, 1):
                self.tell(end)
                self.look(end)
        assert self.gone_on == [True, True]
        assert self.agreed[0][-1] == self.agreed[1][-1]


TestTwoEnds = TwoEnds.TestCase
TestTwoEnds.settings = settings(max_examples=50, stateful_step_count=30)


def test_a_link_that_is_made_at_the_start_is_open_at_both_ends() -> None:
    one, other = LinkOpenings(1), LinkOpenings(1)
    assert one.agreed(other.mine)
    one.end()
    assert not other.agreed(one.mine)
    one.begin()
    assert not one.agreed(other.mine), "the other end is still at the opening before"
    other.end()
    other.begin()
    assert one.agreed(other.mine)
    assert other.agreed(one.mine)
