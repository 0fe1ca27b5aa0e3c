# SPDX-License-Identifier: Apache-2.0
"""What crosses processes: of its declared types and from who knows the secret, or refused before anything is made."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
import torch.distributed as dist
from support.made_up.job import ControlOver, layout
from support.made_up.measured_job import MeasuredJob

from adaptra_megatron.common import control_store
from adaptra_megatron.common.sealed_store import SealedStore, TamperedError
from adaptra_megatron.common.typed_messages import encoded, packed, unpacked
from adaptra_megatron.control.decisions import Decision, Forecast, LinkName, Order, Paths, decision_of
from adaptra_megatron.control.exchange import DecisionReader, decision_key
from adaptra_megatron.schedule.classic import interleaved_combined, one_f_one_b
from adaptra_megatron.schedule.costs import uniform_costs
from adaptra_megatron.transport.delegate import delegate_control as control
from adaptra_megatron.transport.failover.control_messages import MOST_PROBES, CreateSession, Measure, decode_note
from adaptra_megatron.transport.failover.path_sender import Sender
from adaptra_megatron.transport.gpu.host_copies import HostPayload
from adaptra_megatron.transport.host_link.message_queues import RetransmitQueue
from adaptra_megatron.transport.link_paths import PathSettings

SECRET = b"s" * 32
COSTS = uniform_costs(2, 3, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0, max_in_flight=1.5)
executed: list[str] = []


def peer() -> None:
    executed.append("code of a peer")


class Bomb:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return peer, ()


@pytest.mark.parametrize("sealed", [False, True])
def test_what_is_no_decision_is_an_error_at_once_and_never_code(sealed: bool) -> None:
    pickle.loads(pickle.dumps(Bomb()))
    assert executed == ["code of a peer"], "it would be seen"
    executed.clear()
    store = dist.HashStore()
    job = ControlOver(store)
    (job.client("here") if sealed else store).set(decision_key(2), pickle.dumps(Bomb()))
    reader, began_s = DecisionReader(job, "here", layout([[0, 1]], 1), 30.0), time.monotonic()
    reader.post(0, MeasuredJob().measure(1.0)[1])
    with pytest.raises(RuntimeError, match="cannot be read" if sealed else "knows the job's secret"):
        reader.needed(2)
    assert time.monotonic() - began_s < 15.0, "the timeout was waited for"
    assert not executed
    reader.close()


def test_a_decision_comes_as_it_was_written() -> None:
    job = ControlOver(dist.HashStore())
    decision = Decision(7, Order.of(one_f_one_b(2, 3), COSTS), Forecast(1.0, None), Paths((LinkName(0, 1, 2),)))
    job.client("here").set(decision_key(2), encoded(decision))
    reader = DecisionReader(job, "here", layout([[0, 1]], 1), 10.0)
    reader.post(0, MeasuredJob().measure(1.0)[1])
    assert reader.needed(2) == decision
    assert decision.order is not None
    assert decision.order.schedule() == one_f_one_b(2, 3)
    reader.close()


def test_combined_actions_of_an_order_travel_with_it() -> None:
    schedule = interleaved_combined(2, 4, 2)
    costs = uniform_costs(2, 4, chunks=2, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    travelled = decision_of(encoded(Decision(1, Order.of(schedule, costs))))
    assert travelled.order is not None
    assert schedule.combines
    assert travelled.order.schedule() == schedule


@pytest.mark.parametrize("codes", [((0,),), ((0,), (24,)), ((-1,), (0,))])
def test_actions_that_the_costs_do_not_have_are_no_order(codes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="is none for costs of 2 stages, 3 micro-batches and 1 chunks"):
        Order(codes, COSTS)
    packet = encoded(Decision(1, Order(((0,), (1,)), COSTS)))
    spoilt = msgspec.msgpack.decode(packet)
    spoilt["order"]["codes"] = codes
    with pytest.raises(ValueError, match="is none for costs"):
        decision_of(encoded(spoilt))


def test_numbers_of_numpy_travel_as_numbers() -> None:
    sent: Any = Decision(
        numpy.int64(7), None, Forecast(numpy.float32(1.5), None), Paths((LinkName(numpy.int16(1), 2, 3),))
    )
    come = Decision(7, None, Forecast(1.5, None), Paths((LinkName(1, 2, 3),)))
    assert unpacked(packed(sent), Decision, 1 << 16) == decision_of(encoded(sent)) == come


def test_a_value_is_good_for_its_place_alone() -> None:
    store = dist.HashStore()
    ours = SealedStore(store, SECRET, "here")
    ours.set("a", b"content")
    assert ours.get("a") == ours.peek("a") == b"content"
    intruders = [SealedStore(store, b"t" * 32, "here"), SealedStore(store, SECRET, "there")]
    store.set("b", store.get("a"))
    for reader, key in ((ours, "b"), *((peer, "a") for peer in intruders)):
        with pytest.raises(TamperedError, match="ADAPTRA_SECRET_FILE"):
            reader.get(key)
    store.set("a", store.get("a") + b"!")
    with pytest.raises(TamperedError):
        ours.peek("a")


def test_another_client_of_a_sealed_store_is_sealed_too() -> None:
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours = SealedStore(dist.PrefixStore("here", served), SECRET, "here")
    ours.set("a", b"content")
    other = ours.over(ours.clone())
    assert other.get("a") == b"content"
    served.set("here/a", b"of a peer")
    assert served.get("here/a") == b"of a peer"  # once it is there: what is set is not answered
    with pytest.raises(TamperedError):
        other.get("a")


@pytest.mark.parametrize(
    "said",
    [
        {"is": "measure", "session": 1, "count": 1 << 40, "nbytes": 1},
        {"is": "measure", "session": 1, "count": 1, "nbytes": 1 << 40},
        {"is": "measure", "session": 1, "count": "1", "nbytes": 1},
        {"is": "measure", "session": 1, "count": 1, "nbytes": 1, "more": 1},
        {"is": "measure", "session": -1, "count": 1, "nbytes": 1},
        {"is": "open", "session": 1, "number": 1, "skipped": [[]]},
        {"is": "open", "session": 1, "number": True, "skipped": []},
        {"is": "failed", "session": 1, "cause": None},
        {"is": "probed", "session": 1, "index": 1, "arrived_s": 10**400},
        {"is": ["measure"]},
        ["measure"],
        None,
    ],
)
def test_what_no_peer_says_is_no_note(said: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        decode_note(json.dumps(said).encode())
    assert decode_note(packed(Measure(1, MOST_PROBES, 1))) == Measure(1, MOST_PROBES, 1)


@pytest.mark.parametrize("packet", [b"[" * 60_000, b"\xff", b"", b"{" + b" " * (1 << 17) + b"}"])
def test_nor_is_junk(packet: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        decode_note(packet)


def test_a_confirmation_of_what_was_never_sent_takes_no_time() -> None:
    queue = RetransmitQueue(1, 1, lambda message: HostPayload(message.tensor), lambda number, packet: None)
    sender = Sender(PathSettings(), queue)
    sender.tick(0.0, 0.0)
    (meet,) = sender.effects.notes
    assert isinstance(meet, CreateSession)
    sender.made(meet.session, 0.0)
    sender.confirmed(meet.session, 1 << 62)


def test_a_control_message_that_cannot_be_ends_the_channel() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        for packet in (b"junk", b"[]", b'{"is": "ping"}', b'{"is": "ping", "number": "1"}'):
            descriptor = os.memfd_create("handed over")
            socket.send_fds(theirs, [packet], [descriptor])
            with pytest.raises(control.ControlEndedError, match="invalid message"):
                control.receive(ours)
            assert descriptors_of(descriptor) == [descriptor], "what came with it is still open"
            os.close(descriptor)


def descriptors_of(descriptor: int) -> list[int]:
    """Return this process's descriptors of the file behind `descriptor`, whatever else is closed meanwhile."""
    file, found = os.fstat(descriptor), []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            if os.path.samestat(os.fstat(int(name)), file):
                found.append(int(name))
    return found


class TestSecretFile:
    @staticmethod
    def secret_of(path: Path) -> bytes:
        return control_store.job_secret(dist.HashStore(), {control_store.SECRET_VARIABLE: str(path)})

    def test_all_who_read_the_file_have_one_secret(self, tmp_path: Path) -> None:
        files = [tmp_path / name for name in ("one", "same", "other")]
        for file, content in zip(files, (b"k" * 40, b"k" * 40 + b"\n", b"l" * 40), strict=True):
            file.write_bytes(content)
            file.chmod(0o600)
        one, same, other = map(self.secret_of, files)
        assert one == same != other
        assert len(one) == 32

    @pytest.mark.parametrize(
        ("content", "mode", "said"),
        [(b"k" * 40, 0o644, "chmod 600"), (b"k" * 31, 0o600, "fewer than 32"), (None, 0, "No such file")],
    )
    def test_what_is_no_secret_is_an_error(self, content: bytes | None, mode: int, said: str, tmp_path: Path) -> None:
        file = tmp_path / "secret"
        if content is not None:
            file.write_bytes(content)
            file.chmod(mode)
        with pytest.raises(control_store.SecretError, match=said) as caught:
            self.secret_of(file)
        assert "kkkk" not in str(caught.value)
