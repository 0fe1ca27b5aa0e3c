# SPDX-License-Identifier: Apache-2.0
"""The thread that sees ranks fail interrupts the generation in which they lived, and never the next one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.made_up.job import SECRET, layout
from torch.distributed import DistNetworkError, HashStore

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.foreign_errors import is_of_device
from adaptra_megatron.common.membership import Departure, Membership
from adaptra_megatron.common.sealed_store import TamperedError
from adaptra_megatron.elastic import failure_detection
from adaptra_megatron.elastic.failure_detection import FailureDetector
from adaptra_megatron.elastic.failure_errors import of_backend
from adaptra_megatron.elastic.fence import Fence
from adaptra_megatron.elastic.generation import after_failures, first_generation
from adaptra_megatron.elastic.process_group_manager import FaultTolerantGroups
from testing.waiting import until

JOB = layout(((0, 1), (2, 3)), 0)
EVERYBODY = Membership(0, 4, 0.0, ())
WITHOUT_3 = EVERYBODY.without([Departure(3, 1, "a host", "was killed", 0.0)], 0.0)
BEFORE = first_generation(JOB)
ECC = "CUDA error: uncorrectable ECC error encountered"
AFTER = after_failures(JOB, WITHOUT_3, BEFORE)


class Training:
    """The training thread's part, with the memberships that its detector reads."""

    def __init__(self) -> None:
        self.generation, self.membership = BEFORE, EVERYBODY
        self.ended, self.interrupted = threading.Event(), 0
        self.meanwhile: Callable[[], object] = lambda: None
        """Called between the check that finds a generation ended and the interruption."""
        self.control = ControlStore(HashStore(), SECRET, "job")
        self.detector = FailureDetector(
            JOB,
            self.control,
            self,  # type: ignore[arg-type]
            5.0,
            5.0,
            lambda: self.generation,
            self._interrupt,
            lambda: None,
        )

    def newest(self) -> Membership:
        return self.membership

    def enter_next(self) -> None:
        self.generation = AFTER
        self.detector.enter(self.ended.clear)

    def enter_meanwhile(self) -> threading.Thread:
        """Enter the next generation as soon as this can be, up to a while from now."""
        thread = threading.Thread(target=self.enter_next)
        thread.start()
        thread.join(0.2)
        return thread

    def _interrupt(self) -> None:
        self.meanwhile()
        self.interrupted += 1
        self.ended.set()


@pytest.fixture
def training() -> Iterator[Training]:
    made = Training()
    yield made
    made.detector.close()


def test_a_failure_ends_the_generation_at_hand_and_not_the_next(training: Training) -> None:
    threads: list[threading.Thread] = []
    training.meanwhile = lambda: threads.append(training.enter_meanwhile())
    training.membership = WITHOUT_3
    until(lambda: bool(threads) and not threads[0].is_alive())
    assert training.interrupted == 1
    assert not training.ended.is_set()


def test_a_failure_that_was_seen_before_a_generation_is_entered_ends_it(training: Training) -> None:
    training.membership = WITHOUT_3
    until(lambda: training.interrupted == 1)
    training.detector.enter(training.ended.clear)
    assert training.ended.is_set()


def test_a_connection_that_fails_once_does_not_end_the_detection(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, failures = ControlStore.client, list[str]()

    def fail(store: ControlStore, place: str, within_s: float | None = None) -> Any:
        if not failures:
            failures.append(place)
            raise DistNetworkError("No route to host")
        return client(store, place, within_s)

    monkeypatch.setattr(ControlStore, "client", fail)
    monkeypatch.setattr(failure_detection, "_LOOKED_S", 0.0)
    until(lambda: bool(failures))
    training.membership = WITHOUT_3
    until(lambda: training.interrupted == 1)
    assert failures == ["liveness check"]


@pytest.mark.parametrize("late", [False, True])
def test_a_request_for_a_liveness_check_ends_its_own_generation_alone(
    late: bool, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`late`: the next one has been entered by the time that the store has answered."""
    asked: list[object] = []

    def is_requested(store: object) -> bool:
        if late and not asked:
            training.enter_next()
        asked.append(store)
        return len(asked) == 1

    if late:
        training.membership = WITHOUT_3
        until(lambda: training.interrupted == 1)
    monkeypatch.setattr(failure_detection, "is_requested", is_requested)
    monkeypatch.setattr(failure_detection, "_LOOKED_S", 0.0)
    until(lambda: len(asked) > 1 if late else training.ended.is_set())
    assert training.interrupted == 1
    assert training.ended.is_set() is not late


def test_a_tampered_record_ends_the_job_in_the_training_thread(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_detection, "_LOOKED_S", 0.0)
    training.control.in_generation(BEFORE.id).unsealed("liveness check").set("called", "by another")
    until(training.ended.is_set)
    for wait in (lambda: training.detector.change(BEFORE.live), lambda: training.detector.newest):
        with pytest.raises(TamperedError, match="'called'"):
            wait()
    training.enter_next()
    assert training.ended.is_set(), "the next generation's waits end, too"


def test_a_device_that_fails_is_told_by_the_type_of_its_error() -> None:
    assert is_of_device(torch.AcceleratorError(ECC))
    assert not is_of_device(RuntimeError(ECC))


def test_an_assertion_on_a_device_is_the_scripts_unless_it_may_have_read_undefined_outputs() -> None:
    error = torch.AcceleratorError("CUDA error: device-side assert triggered")
    assert not is_of_device(error)
    assert is_of_device(error, ended=True)
    for kind in (torch.AcceleratorError, torch.OutOfMemoryError):
        assert not is_of_device(kind("CUDA error: out of memory"), ended=True)
    for refused in ("invalid argument", "operation not permitted when stream is capturing"):
        assert not is_of_device(torch.AcceleratorError(f"CUDA error: {refused}"))


def test_an_operation_between_calls_is_not_repeated_where_the_device_has_failed() -> None:
    groups, again = FaultTolerantGroups(), list[Exception]()
    groups.begin(JOB, ControlStore(HashStore(), SECRET, "job"), again.append)
    cause = torch.AcceleratorError(ECC)
    with pytest.raises(torch.AcceleratorError), of_backend():
        raise cause
    with pytest.raises(torch.AcceleratorError):
        groups._go_on_after(cause)
    assert not again


def test_an_interruption_that_a_device_has_caused_is_seen_as_operations_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a thread, or NCCL, has made of the device's error."""

    def synchronize(_: int) -> None:
        raise torch.AcceleratorError(ECC)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(torch.AcceleratorError, match="ECC"):
        Fence().wait(5.0)
