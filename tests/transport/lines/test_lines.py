# SPDX-License-Identifier: Apache-2.0
"""Lines between stages in one process: notes through breaks, stopped peers, news of who is lost, farewells."""

from __future__ import annotations

import errno
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from line_ends import JOB, SECRET, End
from transport_checks import retransmit_queue, slow_to_end

from adaptra_megatron.common.typed_messages import packed
from adaptra_megatron.transport.gpu.cuda_device import DeviceThread
from adaptra_megatron.transport.host_link.message_queues import OVERDUE_S, ReceiveQueue
from adaptra_megatron.transport.lines.connection_loop import ConnectionLoop, in_thread
from adaptra_megatron.transport.lines.lines import (
    BEAT_S,
    Beat,
    ConnectionPlace,
    ControlConnections,
    Fin,
    LinkNote,
    LinkNoteAck,
    RankFailed,
    decode_line,
)
from adaptra_megatron.transport.setup.host_placement import listen_shm, listen_tcp
from testing.waiting import until

Chain = list[tuple[ControlConnections, dict[int, End]]]


@pytest.fixture(params=["shm", "tcp"])
def chain(request: pytest.FixtureRequest) -> Iterator[Chain]:
    """Lines of three stages in a row, and their ends by peer."""
    listening = [listen_shm() if request.param == "shm" else listen_tcp("127.0.0.1") for _ in range(3)]
    made: Chain = []
    for stage, (listener, _) in enumerate(listening):
        peers = [peer for peer in (stage - 1, stage + 1) if 0 <= peer < 3]
        lines = ControlConnections(stage, lambda stage: f"rank {stage}", JOB, SECRET, [listener])
        made.append((lines, {peer: End(lines) for peer in peers}))
        for peer, end in made[-1][1].items():
            lines.add(peer, ConnectionPlace(listening[peer][1], ""), end)
    for lines, _ in made:
        lines.begin()
    until(lambda: all(end.ups for _, ends in made for end in ends.values()), "a line does not come up")
    yield made
    for lines, _ in made:
        lines.close()


def break_line(lines: ControlConnections, peer: int) -> None:
    """As a firewall that forgets a connection."""
    line = lines._lines[peer]
    lines._loop.call(lambda: line.writer.transport.abort() if line.writer is not None else None)


def all_ends(chain: Chain) -> Sequence[End]:
    return [end for _, ends in chain for end in ends.values()]


def test_notes_arrive_once_and_in_order_however_often_the_line_breaks(chain: Chain) -> None:
    one, other = chain[0][1][1], chain[1][1][0]
    texts = [f"note {number}" for number in range(200)]
    for number, text in enumerate(texts):
        one.send(text)
        other.send(text)
        one.keep()
        other.keep()
        if number % 50 == 25:
            break_line(*((chain[0][0], 1), (chain[1][0], 0))[number % 100 > 50])
        time.sleep(0.001)

    def over() -> bool:
        one.keep()
        other.keep()
        return len(one.read) == len(other.read) == len(texts)

    until(over, "notes are lost")
    assert [note.decode() for note in one.read] == [note.decode() for note in other.read] == texts
    assert one.ups > 1, "nothing was broken"
    until(
        lambda: one.outgoing.overdue_from_s == other.outgoing.overdue_from_s == float("inf"),
        "notes are not acknowledged",
    )
    assert not [loss for end in all_ends(chain) for loss in end.failures], "a broken line is no lost stage"


def test_a_stage_that_fails_is_named_to_all(chain: Chain) -> None:
    chain[2][0].fail("ArithmeticError: as a model's own code would")
    until(lambda: bool(chain[1][1][0].failures), "its neighbour does not know")
    chain[1][0].fail("TransportError: what it led to")
    until(lambda: all(end.failures for end in all_ends(chain)), "a stage does not know")
    said = "rank 2 ended with an error: ArithmeticError: as a model's own code would"
    assert [end.failures for end in all_ends(chain)] == [[(2, said)]] * 4


def test_a_host_that_does_not_answer_is_named_once_it_is_what_a_stage_fails_for(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reach(self: ControlConnections, place: ConnectionPlace) -> socket.socket:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    end = chain[0][1][1]
    monkeypatch.setattr(ControlConnections, "_reach", reach)
    break_line(chain[0][0], 1)
    until(lambda: "No route to host" in end.down, "the link is not reported")
    assert not end.failures, "it may have another path"
    chain[0][0].fail("TransportError: it has none")
    until(lambda: bool(end.failures), "no lost rank is named")
    assert end.failures == [(1, "rank 1 is gone, or cut off: its host does not answer")]


def test_a_process_that_ends_while_it_is_connected_to_is_no_host_that_does_not_answer(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    causes: list[OSError] = [ConnectionRefusedError(), ConnectionResetError()]

    async def reach(place: ConnectionPlace) -> socket.socket:
        raise causes.pop()

    end = chain[0][1][1]
    monkeypatch.setattr(chain[0][0], "_reach", reach)
    break_line(chain[0][0], 1)
    until(lambda: bool(end.failures), "its end is not reported")
    assert (end.failures, end.down) == ([(1, "rank 1 is gone: its process has ended")], "")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("leaves", [0, 1])
def test_a_process_that_closes_before_its_line_is_up_has_not_died(leaves: int, transport: str) -> None:
    for after_s in (0.0, 0.001, 0.003, 0.005):
        listening = [listen_shm() if transport == "shm" else listen_tcp("127.0.0.1") for _ in range(2)]
        both = [ControlConnections(rank, "rank {}".format, JOB, SECRET, [listening[rank][0]]) for rank in range(2)]
        ends = [End(lines) for lines in both]
        for rank, lines in enumerate(both):
            lines.add(1 - rank, ConnectionPlace(listening[1 - rank][1], ""), ends[rank])
            lines.begin()
        time.sleep(after_s)
        both[leaves].close()
        stays = both[1 - leaves]
        until(lambda stays=stays: stays._lines[leaves].over, "the good-bye does not arrive")
        stays.close()
        assert not ends[1 - leaves].failures


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("fails", [0, 1])
def test_a_stage_that_fails_before_its_line_is_up_is_named(fails: int, transport: str) -> None:
    listening = [listen_shm() if transport == "shm" else listen_tcp("127.0.0.1") for _ in range(2)]
    both = [ControlConnections(rank, "rank {}".format, JOB, SECRET, [listening[rank][0]]) for rank in range(2)]
    ends = [End(lines) for lines in both]
    for rank, lines in enumerate(both):
        lines.add(1 - rank, ConnectionPlace(listening[1 - rank][1], ""), ends[rank])
    both[fails].begin()
    both[fails].fail("ArithmeticError: in its first action")
    until(lambda: bool(ends[fails].failures), "it does not fail")
    both[1 - fails].begin()
    both[fails].close()
    until(lambda: bool(ends[1 - fails].failures), "the peer does not know")
    both[1 - fails].close()
    said = f"rank {fails} ended with an error: ArithmeticError: in its first action"
    assert ends[1 - fails].failures == [(fails, said)]


@pytest.mark.parametrize("ends_it", [0, 1])
def test_the_cause_of_an_ended_link_arrives_though_its_line_is_down(
    chain: Chain, ends_it: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reach(self: ControlConnections, place: ConnectionPlace) -> socket.socket:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    (lines, ends), (theirs, their_ends) = chain[ends_it], chain[1 - ends_it]
    end, peer = ends[1 - ends_it], their_ends[ends_it]
    places = [each._lines[rank].place for each, rank in ((lines, 1 - ends_it), (theirs, ends_it))]
    with monkeypatch.context() as cut:
        cut.setattr(ControlConnections, "_reach", reach)
        break_line(lines, 1 - ends_it)
        until(lambda: "No route to host" in end.down and "No route to host" in peer.down, "the line is not down")
        lines.remove(end, "try 3 has failed")
    until(lambda: "try 3 has failed" in peer.down, "the peer does not learn why")
    until(lambda: not lines._finishing, "what was to be said has been, and the line is still there")
    theirs.remove(peer)
    renewed = [End(lines), End(theirs)]
    lines.add(1 - ends_it, places[0], renewed[0], opening=2)
    theirs.add(ends_it, places[1], renewed[1], opening=2)
    until(lambda: all(each.ups for each in renewed), "another opening does not come up")
    assert not [loss for end in all_ends(chain) for loss in end.failures]


def test_a_stage_that_says_good_bye_is_not_lost(chain: Chain) -> None:
    chain[1][0].close()
    chain[1][0].close()
    time.sleep(2 * BEAT_S)
    assert not [loss for end in all_ends(chain) for loss in end.failures]


def test_a_stage_that_does_not_run_is_seen(chain: Chain) -> None:
    end = chain[0][1][1]
    noticed = threading.Event()
    chain[1][0]._loop.call(lambda: noticed.wait(30.0))
    until(lambda: end.runs == [False], "nothing was noticed")
    noticed.set()
    until(lambda: end.runs == [False, True], "its return was not noticed")
    assert chain[1][1][0].runs in ([], [False, True]), "the one that did not run holds it against the others"
    assert not [loss for end in all_ends(chain) for loss in end.failures]


def test_a_forked_process_does_not_keep_lines_up(chain: Chain) -> None:
    gc.collect()
    read, says = os.pipe()
    child = os.fork()
    if child == 0:
        lines = chain[1][0]
        held = [each.fileno() for each in (*lines._listeners, *lines._connections)]
        os.write(says, str(max(held)).encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(read, 100) == b"-1"
    os.close(read)
    os.close(says)
    chain[0][1][1].send("still here")
    chain[0][1][1].keep()
    until(lambda: chain[1][1][0].read == [b"still here"], "the child has ended its parent's line")


@given(
    st.one_of(
        st.builds(Beat),
        st.builds(Fin),
        st.builds(LinkNote, st.integers(0, 2**40), st.text()),
        st.builds(LinkNoteAck, st.integers(0, 2**40)),
        st.builds(RankFailed, st.integers(0, 100), st.text()),
    )
)
def test_messages_are_read_as_they_were_said(message: Beat | Fin | LinkNote | LinkNoteAck | RankFailed) -> None:
    assert b"\n" not in packed(message)
    assert decode_line(packed(message)) == message


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"\xff",
        b"[]",
        b"[" * 60_000,
        b'{"is":"other"}',
        b'{"is":"note","number":1}',
        b'{"is":"note","number":true,"text":""}',
        b'{"is":"note","number":"1","text":""}',
        b'{"is":"noted","below":-1}',
        b'{"is":"lost","stage":1.0,"cause":""}',
        b'{"is":"bye","extra":1}',
    ],
)
def test_what_no_peer_says_is_refused(packet: bytes) -> None:
    with pytest.raises(ValueError, match="a message of a line|no message of a line"):
        decode_line(packet)


def test_work_that_blocks_leaves_no_thread_behind() -> None:
    async def serve() -> None:
        thread = await in_thread(threading.current_thread)
        assert not thread.is_alive()
        with pytest.raises(ZeroDivisionError):
            await in_thread(lambda: 1 // 0)

    loop, before = ConnectionLoop(), threading.enumerate()
    with slow_to_end() as slow:
        served = loop.begin(serve())
        loop.end(served, 10.0)
        assert set(threading.enumerate()) <= set(before)
    served.result()
    assert slow == {"adaptra-blocking", "adaptra-connections"}


def test_a_thread_that_goes_on_is_named(caplog: pytest.LogCaptureFixture) -> None:
    loop, over = ConnectionLoop(), threading.Event()

    async def serve() -> None:
        await in_thread(over.wait)

    served = loop.begin(serve())
    loop.end(served, 0.1)
    assert "thread adaptra-connections did not finish within 0.1 s" in caplog.text
    blocking = DeviceThread(over.wait, "adaptra-test")
    blocking.start()
    blocking.join(0.1)
    assert "thread adaptra-test did not end within 0.1 s" in caplog.text
    over.set()
    loop.end(served, 10.0)
    assert loop.loop.is_closed()


Step = tuple[int, int]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 10)), max_size=60))
def test_mail_survives_whatever_paths_and_lines_lose(steps: list[Step]) -> None:
    """Notes by two ways that lose, double and delay them; in the end the line holds, and all have been read once."""
    line: list[tuple[int, bytes]] = []
    sender, receiver = retransmit_queue(send_note=lambda *note: line.append(note)), ReceiveQueue()
    host: list[tuple[int, bytes]] = []
    read: list[bytes] = []
    now_s, posted = 0.0, 0
    actions: list[Callable[[int], object]] = [
        lambda which: (sender.post_note(b"%d" % posted, now_s), host.append((posted, b"%d" % posted))),
        lambda which: read.extend(receiver.take_note(*host[which % len(host)])) if host else None,
        lambda which: read.extend(receiver.take_note(*line[which % len(line)])) if line else None,
        lambda which: (line.clear(), sender.on_reconnected()),
        lambda which: sender.noted(receiver.noted_below),
        lambda which: sender.send_overdue(now_s),
    ]
    for action, which in steps:
        now_s += 0.1
        actions[action](which)
        posted += action == 0
    sender.on_reconnected()
    sender.send_overdue(now_s + OVERDUE_S)
    for note in line:
        read += receiver.take_note(*note)
    assert read == [b"%d" % number for number in range(posted)]
    sender.noted(receiver.noted_below)
    assert sender.overdue_from_s == float("inf")
